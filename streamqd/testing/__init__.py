"""Test handlers as the daemon runs them, but without a daemon and without Redis.

`run` runs a handler once, and returns the verdict on its message. `run_to_end` continues until the
message is acknowledged or dead-lettered, without waiting between runs. `assert_idempotent` runs a
message again, as happens after a crash. `Worker` does the same for many messages, with the hooks of
the module. `next_ticks` returns the ticks of a schedule. For tests with a server and the real
daemon, use the pytest plugin, which is described in docs/how-to/test-a-handler.md.

The following parts are the same as in the daemon: the producer's encoding, `Message`, the decoding
of typed payloads, all forms of handlers, the time limit, the policy and its delays, dead letters,
and crashes of processes.
"""

from __future__ import annotations

from streamqd.testing.idempotency import assert_idempotent
from streamqd.testing.result import Run, Verdict
from streamqd.testing.server import Settled
from streamqd.testing.shorthand import run, run_batch, run_to_end
from streamqd.testing.ticks import next_ticks
from streamqd.testing.worker import Worker

__all__ = [
    "Run",
    "Settled",
    "Verdict",
    "Worker",
    "assert_idempotent",
    "next_ticks",
    "run",
    "run_batch",
    "run_to_end",
]
