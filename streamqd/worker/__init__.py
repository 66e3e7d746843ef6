"""The worker: the process that handles the messages of one assignment.

`worker` contains the lifecycle and the serving loop: boot, recover pending entries (`recovery`),
serve, leave. `turns` contains one turn of these loops, and their waits for events. `reader` reads
entries and waits in a long poll. A worker never acquires or renews a lease. `standby` is a worker
that has booted and waits to take over. Between two messages, the worker checks `control_channel`
for commands of the supervisor.

An *executor* has the fetched entries (`entry`) and runs them: `serial` one message after the other,
through `runs` or in `batches`, `concurrent` several at a time, in the `lanes`. `ordering` selects
the messages that may start. `blocking` and `held_keys` retry a failed message ahead of later ones.

`verdicts` turns the outcome of a run into a settlement, and `settler` sends it to Redis. `gates`
(with `guards` and `throttle`) delays the start of runs. `quarantine` runs the entries of a lost
owner in rounds, `reclaim` takes over the entries of other clients. `hooks` holds the user's code,
and `eventloop` runs its coroutines. `forks` keeps the children of a handler from acting as workers,
and `soft_limit` interrupts the handler.

`context` contains the objects that the parts share. No part depends on the worker itself.
"""

from __future__ import annotations

import logging
import socket

from streamqd import logs
from streamqd.config import Consumer, Settings
from streamqd.errors import HandlerLoadError
from streamqd.scoreboard import WorkerSlot
from streamqd.worker import forks
from streamqd.worker.assembly import assemble
from streamqd.worker.control_channel import ControlChannel, ExitCode
from streamqd.worker.grant import STOP, Grant
from streamqd.worker.standby import prepare
from streamqd.worker.worker import WorkerLoop

__all__ = ["STOP", "ExitCode", "Grant", "WorkerLoop", "assemble", "run_worker"]


def run_worker(
    grant: Grant,
    settings: Settings,
    consumer: Consumer,
    slot: WorkerSlot,
    control: socket.socket,
) -> int:
    """Run as the worker of a consumer, or first as its standby. Return the exit code."""
    forking_worker = forks.ForkingWorker(grant.lease.assignment, slot, control)
    forks.fork_role.enter_worker(forking_worker)
    try:
        booted = None
        if not grant.lease.token:
            ready = prepare(grant, settings, consumer, slot, control)
            if isinstance(ready, ExitCode):
                return ready
            grant, booted = ready.grant, ready.booted
        worker = assemble(grant, settings, consumer, slot, control, booted)
        forks.fork_role.end_child()  # `on_start` may fork too
        forking_worker.links = lambda: (worker.link, worker.settler.link)
        return worker.run()
    except HandlerLoadError as error:
        assignment = grant.lease.assignment
        logs.event("worker.boot_failed", logging.ERROR, assignment=assignment, error=str(error))
        ControlChannel(slot, control, lambda: None).fail(str(error))
        return ExitCode.BOOT_FAILED
    finally:
        # A child that a handler or a hook forked may get here too, and must not act as the worker.
        forks.fork_role.end_child()
