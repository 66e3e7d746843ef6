"""The worker: the process that handles one unit's messages. The data plane.

`worker` is its life: boot, recover what is pending, serve, leave. `runs` runs the handler for one
message, `verdicts` notes how that ended, `settler` tells Redis, `gate` is where it listens to the
supervisor between two messages. `hooks` holds the user's code, `eventloop` what runs its
coroutines. A worker never acquires or renews a lease. `standby` is a worker that has booted and
waits for its turn.

What a handler forks is kept from being a worker by `forks`.

`batches` runs the handler for many messages at once. `concurrent` is the worker that handles
several of them at a time: `ordering` says which may begin, `lanes` run them, `several` keeps them.

What fails is set aside. Where the order is kept it stays: `blocking` runs it again in its place,
`holding` with all of its key, by `holds`, in the worker of `holder`, and `several_holding` among
several. `guards` stop a worker whose messages would all fail, and by `outage` those of its group.
"""

from __future__ import annotations

import socket

from streamqd.config import Consumer, Settings
from streamqd.model import HOLD_KEY
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from streamqd.worker import forks
from streamqd.worker.assignment import STOP, Assignment
from streamqd.worker.concurrent import ConcurrentWorker
from streamqd.worker.control_channel import ExitCode
from streamqd.worker.holder import HoldingWorker
from streamqd.worker.hooks import Hooks
from streamqd.worker.standby import prepare
from streamqd.worker.worker import WorkerProcess

__all__ = ["STOP", "Assignment", "ExitCode", "WorkerProcess", "live", "new_worker"]


def live(
    orders: Assignment,
    settings: Settings,
    consumer: Consumer,
    slot: WorkerSlot,
    control: socket.socket,
) -> int:
    """Be the worker that a consumer needs, or first its standby. Returns the exit code."""
    mine = forks.ForkingWorker(orders.unit, slot, control)
    forks.family.enter(mine)
    try:
        booted = None
        if not orders.token:
            turn = prepare(orders, settings, consumer, slot, control)
            if isinstance(turn, ExitCode):
                return turn
            orders, booted = turn.orders, turn.booted
        worker = new_worker(orders, settings, consumer, slot, control, booted)
        mine.links = lambda: (worker.link, worker.settler.link)
        return worker.run()
    finally:
        # However a child of a handler, or of a hook, has come here: it is not the worker.
        forks.family.end_child()


def new_worker(
    orders: Assignment,
    settings: Settings,
    consumer: Consumer,
    slot: WorkerSlot,
    control: socket.socket,
    booted: tuple[Hooks, Connection] | None = None,
) -> WorkerProcess:
    """Make the worker that a consumer needs. `run` is its life."""
    holding = HoldingWorker if consumer.on_error == HOLD_KEY else WorkerProcess
    kind = ConcurrentWorker if consumer.lanes > 1 else holding
    return kind(orders, settings, consumer, slot, control, booted)
