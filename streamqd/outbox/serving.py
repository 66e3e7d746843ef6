"""Build a relay and its connections, and run it as a child process of the daemon."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from streamqd import logs
from streamqd.config import OutboxSettings, Settings
from streamqd.outbox.database import Database
from streamqd.outbox.relay import Relay
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store

LINK_TIMEOUT = 5.0
ALIVE_SECONDS = 1.0  # seconds between two heartbeats to the supervisor


def build_relay(
    outbox: OutboxSettings, settings: Settings, *, stop_fd: int, stopping: Callable[[], bool]
) -> Relay:
    """Build a relay without connecting. `settings` must be the daemon's resolved settings.

    Raises ValueError if the URL or the password of the database is invalid.
    """
    daemon, keys = settings.daemon, settings.keys
    database = Database(
        outbox.url(), outbox.table, outbox.password(), daemon.max_message_bytes, create=False
    )
    name = f"streamqd:{daemon.instance}:outbox:{outbox.name}"
    link = connect(settings.redis, timeout=LINK_TIMEOUT, name=name)
    store = Store(link, Keys(keys.control, keys.streams))
    return Relay(outbox, settings, database, store, stop_fd=stop_fd, stopping=stopping)


def serve(outbox: OutboxSettings, settings: Settings, control: socket.socket) -> int:
    """Run a relay until the supervisor requests its exit. Return the exit code."""
    logs.set_role("outbox")
    alive_at = 0.0

    def stopping() -> bool:
        """Return True if the relay must stop.

        Each call also sends a heartbeat to the supervisor.
        """
        nonlocal alive_at
        if time.monotonic() >= alive_at:
            alive_at = time.monotonic() + ALIVE_SECONDS
            with contextlib.suppress(OSError):
                control.send(b"!", socket.MSG_DONTWAIT)
        return _must_quit(control)

    return build_relay(outbox, settings, stop_fd=control.fileno(), stopping=stopping).run()


def _must_quit(control: socket.socket) -> bool:
    """Return True if the supervisor has requested the exit, or has itself exited."""
    while True:
        try:
            message = control.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if message in (b"", b"quit"):
            return True
