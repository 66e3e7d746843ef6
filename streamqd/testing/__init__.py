"""Test handlers as the daemon would run them, without a daemon and without Redis.

`run` runs a handler once and says what would become of the message; `run_to_end` follows a message
from run to run, without waiting; `assert_idempotent` runs it again, as after a crash. `Worker` does
the same for many messages, with the hooks of the module. `next_ticks` returns ticks of a schedule.
The pytest plugin has a server and the real daemon: see docs/how-to/test-a-handler.md.

What is real: the codec of the producer, `Message`, the decoding of typed payloads, the kinds of
handlers, the time limit, the policy and its delays, the dead letter, the death of the process.
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
