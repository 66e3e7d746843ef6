"""What a worker is told at its birth, and how it tells itself to begin again."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Unit


class Orders(NamedTuple):
    """What the supervisor gives a worker at its birth."""

    unit: Unit
    token: str
    epoch: int
    cautious: bool  # one entry at a time at first: two processes died with nothing to blame
    suspects: frozenset[bytes] = frozenset()  # places of which one may have killed a process


class Anew(Exception):  # noqa: N818 - nothing is wrong
    """The connection was given up on purpose; begin again with another."""
