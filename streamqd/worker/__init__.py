"""The worker: the process that handles the messages of one assignment.

`worker` contains the lifecycle and the serving loop. A worker boots, runs the pending entries
(`recovery`), serves new ones, and leaves. `turns` contains the steps and waits that serving and
recovery share. `reader` reads entries and waits in a long poll. A worker never acquires or renews a
lease. A `standby` is a worker that has booted and is waiting to take over from another one. Between
two messages, the worker checks `control_channel` for the supervisor's commands.

An *executor* holds the fetched entries (`entry`) and runs them. `serial` runs one message after
another, through `runs` or in `batches`, and `concurrent` runs several at a time in the `lanes`.
`ordering` selects the messages that may start. `blocking` and `held_keys` retry a failed message
before any later message that must not overtake it.

`verdicts` decides what happens to a message after its run, and `settler` sends this to Redis as an
acknowledgment, a retry or a dead letter. `gates` (with `guards` and `throttle`) delays the start of
runs. `quarantine` runs the entries of a lost owner in rounds, to find a message that kills its
host. `reclaim` takes over entries from other clients. `hooks` holds the user's code, and
`eventloop` runs its coroutines. `forks` prevents processes that a handler forks from acting as
workers, and `soft_limit` interrupts the handler.

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

    If the grant has no token, the process first waits as a standby until it gets one.
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
        # A process that a handler or hook has forked may also get here. It must not act as the
        # worker, so it exits.
        forks.fork_role.end_child()
