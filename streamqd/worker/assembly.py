"""Build a worker: import the user's code, create the connections, and create all its parts."""

from __future__ import annotations

import socket

from streamqd.config import Consumer, Settings
from streamqd.message import Delivery
from streamqd.model import Assignment
from streamqd.scoreboard import WorkerSlot, WorkerState
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.worker.batches import batch_size
from streamqd.worker.context import RunCounts, WorkerContext
from streamqd.worker.control_channel import ControlChannel
from streamqd.worker.executor import check_signature, executor_for
from streamqd.worker.gates import Gates
from streamqd.worker.grant import Grant
from streamqd.worker.guards import make_guards
from streamqd.worker.hooks import Hooks, boot
from streamqd.worker.prefetch import PrefetchController
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.reader import REPLY_SECONDS, Reader
from streamqd.worker.recovery import Recovery
from streamqd.worker.runs import ACK_DELAY_NS
from streamqd.worker.server_clock import ServerClock
from streamqd.worker.settler import Settler
from streamqd.worker.soft_limit import SoftLimit
from streamqd.worker.throttle import make_rate_limiter
from streamqd.worker.turns import Turns
from streamqd.worker.verdicts import Verdicts
from streamqd.worker.worker import WorkerLoop

PROBE_AFTER_SECONDS = 1.0  # silence after which a connection is probed, see `store/idle_probe.py`


def new_link(settings: Settings, assignment: Assignment, suffix: str = "") -> Connection:
    """Return a new connection for a worker, which is not open yet.

    `suffix` is appended to the name of the connection.
    """
    fence = Keys(settings.keys.control, settings.keys.streams).fence(*assignment)
    name = f"streamqd:{assignment}{suffix}"
    return connect(
        settings.redis, timeout=REPLY_SECONDS, name=name, key=fence, probe_after=PROBE_AFTER_SECONDS
    )


def assemble(
    grant: Grant,
    settings: Settings,
    consumer: Consumer,
    slot: WorkerSlot,
    control: socket.socket,
    booted: tuple[Hooks, Connection] | None = None,
) -> WorkerLoop:
    """Import the handler and build its worker.

    `booted` holds the loaded handler and the connection if this process was a standby that has
    already prepared them. Raises HandlerLoadError if the handler cannot be loaded or does not fit
    the consumer's settings.
    """
    slot.state = WorkerState.BOOTING
    lease = grant.lease
    hooks, link = booted or (
        boot(settings, consumer, lease.assignment),
        new_link(settings, lease.assignment),
    )
    check_signature(consumer, hooks)
    hooks.show_loop(slot)
    keys = Keys(settings.keys.control, settings.keys.streams)
    # If several messages run at a time, a message can finish while a read is waiting. Use a second
    # connection to settle, so that the read does not delay the settlement.
    apart = consumer.lanes > 1
    settling = new_link(settings, lease.assignment, ":settle") if apart else link
    settler = Settler(settling, keys, lease, slot, ACK_DELAY_NS if apart else 0)
    clock = ServerClock()
    context = WorkerContext(
        settings,
        consumer,
        Delivery(lease.assignment, settings.daemon.instance, lease.epoch, slot.heartbeat),
        slot,
        ControlChannel(slot, control, settler.try_to_flush),
        settler,
        clock,
        RunCounts(clock),
        SoftLimit(slot, consumer.timeout),
    )
    reader = Reader(link, keys, lease, slot)
    batches = hooks.loaded.signature.batch
    rate = make_rate_limiter(context, batch_size(consumer) if batches else 1)
    guards = make_guards(context)
    gates = Gates(context, guards, rate)
    verdicts = Verdicts(context, guards, hooks.loaded.redact, hooks.observer)
    width = batch_size(consumer) if batches else consumer.lanes
    if batches and rate is not None:
        width = min(width, rate.burst)
    quarantine = Quarantine(context, reader.calls, gates, width=width, batches=batches)
    prefetch = PrefetchController(
        consumer,
        settings.daemon.max_message_bytes,
        1 if grant.cautious else consumer.prefetch_max,
        consumer.prefetch_max,
        consumer.rate_per_second(slot.partitions),
    )
    executor = executor_for(context, hooks, verdicts, gates, quarantine, prefetch)
    turns = Turns(context, reader, executor, verdicts, guards, prefetch)
    recovery = Recovery(turns, quarantine, grant.suspects, complete=grant.complete)
    return WorkerLoop(hooks, turns, recovery)
