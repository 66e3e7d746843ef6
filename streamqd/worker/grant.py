"""The grant of a worker: its lease, and the state left by the processes before it."""

from __future__ import annotations

import json
import zlib
from types import MappingProxyType
from typing import NamedTuple

from streamqd.model import Lease
from streamqd.policy.rounds import Suspects

STOP = b"stop"  # sent to a standby in place of its grant


class Grant(NamedTuple):
    """The data that the supervisor passes to a new worker, or to a standby that takes over.

    Without a token, the worker is a standby. It boots next to the worker that it will replace,
    handles no messages and does not write to its batch. It gets a grant with a token when the old
    worker has stopped.
    """

    lease: Lease
    cautious: bool  # start with single entries: processes crashed while no message ran
    suspects: Suspects = MappingProxyType({})  # entries that may have killed a process
    # True if `suspects` are all entries that ran when the last owner exited. Its scoreboard shows
    # these entries.
    complete: bool = False

    @property
    def title(self) -> str:
        """The process title in ps."""
        assignment, role = self.lease.assignment, "worker" if self.lease.token else "standby"
        return f"streamqd: {role} {assignment.topic}/{assignment.partition} {assignment.group}"

    def pack(self) -> bytes:
        """Return the data that the supervisor sends to a standby through its control socket."""
        suspects = {place.decode("latin-1"): most for place, most in self.suspects.items()}
        token, epoch = self.lease.token, self.lease.epoch
        raw = json.dumps([token, epoch, self.cautious, suspects, self.complete]).encode()
        return zlib.compress(raw, 1)  # thousands of suspects would not fit into one socket message

    def unpack(self, raw: bytes) -> Grant:
        """Return this grant with the lease and suspects that `pack` wrote."""
        token, epoch, cautious, suspects, complete = json.loads(zlib.decompress(raw))
        places = {place.encode("latin-1"): most for place, most in suspects.items()}
        return Grant(Lease(self.lease.assignment, token, epoch), cautious, places, complete)
