"""The answers of the lease scripts, by their contracts."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.store.scripts import Reply


class Refenced(NamedTuple):
    """The epoch of the new token, and the crashes of the charged entry so far."""

    epoch: int
    crashes: int

    @classmethod
    def parse(cls, reply: Reply) -> Refenced:
        """Parse OK."""
        return cls(int(reply.values[0]), reply.values[1])


class Holder(NamedTuple):
    """The owner of an assignment, as a refusal names it."""

    epoch: int
    owner: str

    @classmethod
    def parse(cls, reply: Reply) -> Holder:
        """Parse HELD, MOVED or FENCED of any script."""
        match reply.word:
            case "HELD":
                _, epoch, owner = reply.values
            case "MOVED":
                epoch, owner = reply.values[0], b""
            case _:
                epoch, owner = reply.values
        return cls(int(epoch), owner.decode())
