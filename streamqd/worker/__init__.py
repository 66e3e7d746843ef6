"""The worker: the process that handles one unit's messages. The data plane.

`worker` is its life: boot, recover what is pending, serve, leave. `runs` runs the handler for one
message and notes the verdict, `settler` tells Redis, `gate` is where it listens to the supervisor
between two messages. `hooks` holds the user's code, `eventloop` what runs its coroutines. A worker
never acquires or renews a lease.

`batches` runs the handler for many messages at once. `concurrent` is the worker that handles
several of them at a time: `ordering` says which may begin, `lanes` run them, `several` keeps them.
"""

from __future__ import annotations

import socket

from streamqd.config import Consumer, Settings
from streamqd.scoreboard import Slot
from streamqd.worker.concurrent import ConcurrentWorker
from streamqd.worker.gate import ExitCode
from streamqd.worker.orders import Orders
from streamqd.worker.worker import Worker

__all__ = ["ExitCode", "Orders", "Worker", "new_worker"]


def new_worker(
    orders: Orders, settings: Settings, consumer: Consumer, slot: Slot, control: socket.socket
) -> Worker:
    """Make the worker that a consumer needs. `run` is its life."""
    kind = ConcurrentWorker if consumer.lanes > 1 else Worker
    return kind(orders, settings, consumer, slot, control)
