"""Parsers for the answers of the lease scripts, as their contracts define them."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.store.scripts import Reply


class Refenced(NamedTuple):
    """The epoch of the new token, and how often the charged entry has crashed so far."""

    epoch: int
    crashes: int

    @classmethod
    def parse(cls, reply: Reply) -> Refenced:
        """Parse the answer OK."""
        return cls(int(reply.values[0]), reply.values[1])


class Holder(NamedTuple):
    """The owner of an assignment, as a refusal names it."""

    epoch: int
    owner: str

    @classmethod
    def parse(cls, reply: Reply) -> Holder:
        """Parse the answer HELD, MOVED or FENCED of any script."""
        match reply.word:
            case "HELD":
                _, epoch, owner = reply.values
            case "MOVED":
                epoch, owner = reply.values[0], b""
            case _:
                epoch, owner = reply.values
        return cls(int(epoch), owner.decode())
