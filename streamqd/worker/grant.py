"""The grant of a worker: its lease, and the messages that may have crashed earlier processes."""

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

    If the lease has no token, the process is a standby. A standby boots while the worker that it
    will replace is still running. It handles no messages and does not write to the batch in the
    slot. When the old worker handles no more messages, the standby gets a grant with a token.
    """

    lease: Lease
    # True if earlier processes have crashed while no message was running. The worker then fetches
    # single entries first.
    cautious: bool
    suspects: Suspects = MappingProxyType({})  # entries that may have killed a process
    # True if `suspects` contains every entry that was running when the last owner exited, as far as
    # its scoreboard shows.
    complete: bool = False

    @property
    def title(self) -> str:
        """The title of the process, as `ps` shows it."""
        assignment, role = self.lease.assignment, "worker" if self.lease.token else "standby"
        return f"streamqd: {role} {assignment.topic}/{assignment.partition} {assignment.group}"

    def pack(self) -> bytes:
        """Return the bytes that the supervisor sends to a standby through its control socket."""
        suspects = {place.decode("latin-1"): most for place, most in self.suspects.items()}
        token, epoch = self.lease.token, self.lease.epoch
        raw = json.dumps([token, epoch, self.cautious, suspects, self.complete]).encode()
        return zlib.compress(raw, 1)  # thousands of suspects would not fit into one socket message

    def unpack(self, raw: bytes) -> Grant:
        """Return the grant from bytes that `pack` has returned.

        They do not contain the assignment, so it is copied from this grant.
        """
        token, epoch, cautious, suspects, complete = json.loads(zlib.decompress(raw))
        places = {place.encode("latin-1"): most for place, most in suspects.items()}
        return Grant(Lease(self.lease.assignment, token, epoch), cautious, places, complete)
