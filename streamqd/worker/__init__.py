"""The worker: the process that handles one unit's messages. The data plane.

`worker` is its life and its one loop: boot, recover what is pending, serve, leave. `reader` says
when to read and how much, and waits in a long poll. A worker never acquires or renews a lease.
`standby` is a worker that has booted and waits for its turn; `control_channel` is where it listens
to the supervisor between two messages.

An *executor* has the fetched entries (`entry`) and runs them: `serial` one message after the other,
by `runs` or in `batches`, `concurrent` several at once, in the `lanes`. `ordering` says which of
several may begin; `blocking` and `held_keys` let what has failed run again before what follows it.

`verdicts` makes of a run's end a settlement, and `settler` tells Redis. The `gates` (`guards`,
`throttle`) say when a run may start. `quarantine` runs what a lost owner left in rounds, `reclaim`
takes over what other clients left. `hooks` holds the user's code, `eventloop` what runs its
coroutines, `forks` keeps its children from being workers, and `soft_limit` interrupts it.

`context` has the objects of which a worker has one each. No part knows the worker itself.
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
from streamqd.worker.assignment import STOP, Assignment
from streamqd.worker.control_channel import ControlChannel, ExitCode
from streamqd.worker.standby import prepare
from streamqd.worker.worker import WorkerProcess

__all__ = ["STOP", "Assignment", "ExitCode", "WorkerProcess", "assemble", "live"]


def live(
    assignment: Assignment,
    settings: Settings,
    consumer: Consumer,
    slot: WorkerSlot,
    control: socket.socket,
) -> int:
    """Be the worker that a consumer needs, or first its standby. Returns the exit code."""
    mine = forks.ForkingWorker(assignment.lease.unit, slot, control)
    forks.family.enter(mine)
    try:
        booted = None
        if not assignment.lease.token:
            ready = prepare(assignment, settings, consumer, slot, control)
            if isinstance(ready, ExitCode):
                return ready
            assignment, booted = ready.assignment, ready.booted
        worker = assemble(assignment, settings, consumer, slot, control, booted)
        forks.family.end_child()  # `on_start` may fork too
        mine.links = lambda: (worker.link, worker.settler.link)
        return worker.run()
    except HandlerLoadError as error:
        unit = assignment.lease.unit
        logs.event("worker.boot_failed", logging.ERROR, unit=unit, error=str(error))
        ControlChannel(slot, control, lambda: None).fail(str(error))
        return ExitCode.BOOT_FAILED
    finally:
        # However a child of a handler, or of a hook, has come here: it is not the worker.
        forks.family.end_child()
