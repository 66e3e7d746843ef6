"""The worker: the process that handles the messages of one assignment.

`worker` contains the lifecycle and the serving loop: it boots, runs pending entries (`recovery`),
serves, and leaves. `turns` contains one turn of these loops and their waits for events. `reader`
reads entries and waits in a long poll. A worker never acquires or renews a lease. `standby` is a
worker that has booted and is waiting to take over. Between two messages, the worker checks
`control_channel` for the supervisor's commands.

An *executor* holds the fetched entries (`entry`) and runs them. `serial` runs one message after
another, through `runs` or in `batches`, and `concurrent` runs several at a time in the `lanes`.
`ordering` selects the messages that may start. `blocking` and `held_keys` retry a failed message
before any later message that must not overtake it.

`verdicts` turns the outcome of a run into a settlement, and `settler` sends it to Redis. `gates`
(with `guards` and `throttle`) delays the start of runs. `quarantine` lets the entries of a lost
owner run in rounds, and `reclaim` takes over entries from other clients. `hooks` holds the user's
code, and `eventloop` runs its coroutines. `forks` prevents processes that a handler forks from
acting as workers, and `soft_limit` interrupts the handler.

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
    """Run as the worker of a consumer, and return the exit code.

    If the grant has no token, the process first waits as a standby.
    """
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
        forks.fork_role.end_child()  # `on_start` may have forked this process
        forking_worker.links = lambda: (worker.link, worker.settler.link)
        return worker.run()
    except HandlerLoadError as error:
        assignment = grant.lease.assignment
        logs.event("worker.boot_failed", logging.ERROR, assignment=assignment, error=str(error))
        ControlChannel(slot, control, lambda: None).fail(str(error))
        return ExitCode.BOOT_FAILED
    finally:
        # A child that a handler or hook forked may also get here, and must not act as the worker.
        forks.fork_role.end_child()
