"""What the lease scripts answer, as their contracts say it."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.store.scripts import Reply


class Refenced(NamedTuple):
    """What a replaced token is worth, and how often the charged entry has crashed so far."""

    epoch: int
    crashes: int

    @classmethod
    def parse(cls, reply: Reply) -> Refenced:
        """Read OK."""
        return cls(int(reply.rest[0]), reply.rest[1])


class Holder(NamedTuple):
    """Who holds a unit, as a refusal says it."""

    epoch: int
    owner: str

    @classmethod
    def parse(cls, reply: Reply) -> Holder:
        """Read HELD, MOVED or FENCED, whichever script answered it."""
        match reply.word:
            case "HELD":
                _, epoch, owner = reply.rest
            case "MOVED":
                epoch, owner = reply.rest[0], b""
            case _:
                epoch, owner = reply.rest
        return cls(int(epoch), owner.decode())
