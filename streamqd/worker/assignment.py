"""What a worker is told at its birth, and how it tells itself to begin again."""

from __future__ import annotations

import json
from typing import NamedTuple

from streamqd.model import Unit

STOP = b"stop"  # said to a standby in place of its assignment


class Assignment(NamedTuple):
    """What the supervisor gives a worker: at its birth, or when it has booted and waits for them.

    Without a token it is a standby: it boots beside the worker that it will follow, touches
    neither messages nor the slot, and gets its true assignment when that one has let go.
    """

    unit: Unit
    token: str
    epoch: int
    cautious: bool  # one entry at a time at first: two processes died with nothing to blame
    suspects: frozenset[bytes] = frozenset()  # places of which one may have killed a process

    @property
    def title(self) -> str:
        """What the process is called in ps."""
        role = "worker" if self.token else "standby"
        return f"streamqd: {role} {self.unit.topic}/{self.unit.partition} {self.unit.group}"

    def packed(self) -> bytes:
        """Return what a standby must know beyond its unit, for its control socket."""
        suspects = [place.decode("latin-1") for place in self.suspects]
        return json.dumps([self.token, self.epoch, self.cautious, suspects]).encode()

    def unpacked(self, raw: bytes) -> Assignment:
        """Return this assignment with what `packed` has said."""
        token, epoch, cautious, suspects = json.loads(raw)
        places = frozenset(place.encode("latin-1") for place in suspects)
        return Assignment(self.unit, token, epoch, cautious, places)


class Reconnect(Exception):  # noqa: N818 - nothing is wrong
    """The connection was given up on purpose; begin again with another."""
