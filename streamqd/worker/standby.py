"""A standby is a worker that boots next to the worker that it will replace, and waits to take over.

It imports the handler, runs `on_start` and connects to Redis. It has no token yet, so it can
neither read nor settle messages. The slot still belongs to the active worker. So the standby writes
only its PID to the slot, to report that it has booted.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple

from streamqd import process
from streamqd.config import Consumer, Settings
from streamqd.errors import RedisUnavailableError
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from streamqd.worker.assembly import new_link
from streamqd.worker.control_channel import ControlChannel, ExitCode
from streamqd.worker.forks import fork_role
from streamqd.worker.grant import STOP, Grant
from streamqd.worker.hooks import Hooks, boot


class StandbyResult(NamedTuple):
    """The grant that a standby has received, and its loaded handler and connection."""

    grant: Grant
    booted: tuple[Hooks, Connection]


def prepare(
    grant: Grant,
    settings: Settings,
    consumer: Consumer,
    slot: WorkerSlot,
    control: socket.socket,
) -> StandbyResult | ExitCode:
    """Boot as a standby, report this to the supervisor, and wait for its answer.

    Return the grant with which to become the worker, or an exit code if the standby must stop
    instead. Raises HandlerLoadError if the handler cannot be loaded.
    """
    channel = ControlChannel(slot, control, lambda: None)
    hooks = boot(settings, consumer, grant.lease.assignment)
    fork_role.end_child()
    link = new_link(settings, grant.lease.assignment)
    with contextlib.suppress(RedisUnavailableError):
        link.open()  # if this fails, the worker's loop connects again later
    slot.warm_pid = os.getpid()
    channel.wake_supervisor()
    word = channel.await_assignment()
    if word == STOP:
        hooks.stop()
        return ExitCode.STOPPED
    given = grant.unpack(word)
    process.set_title(given.title)
    return StandbyResult(given, (hooks, link))
