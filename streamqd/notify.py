"""Notifications to the service manager, as in sd_notify(3), but without a library.

The supervisor uses this module. No function raises or blocks, because a daemon must not fail if
systemd is slow or missing. No file descriptor stays open between calls, so children have nothing to
close.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """A client for the socket in $NOTIFY_SOCKET. Without this variable, it sends nothing.

    Its methods return True if the notification was sent to the service manager.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_interval = _watchdog_interval(environ)
        """The maximum seconds between two `watchdog` calls, or None.

        Call it at a third of this interval.
        """

    @property
    def enabled(self) -> bool:
        """True if $NOTIFY_SOCKET names a socket of a service manager."""
        return self._address is not None

    def ready(self, status: str = "") -> bool:
        """Report that the daemon is up and running, or that a reload has finished."""
        return self._send("READY=1", *_status(status))

    def status(self, text: str) -> bool:
        """Set the line that `systemctl status` shows."""
        return self._send(*_status(text))

    def stopping(self, status: str = "") -> bool:
        """Report that the daemon is draining and will then exit."""
        return self._send("STOPPING=1", *_status(status))

    def reloading(self, status: str = "") -> bool:
        """Report the start of a reload. Call `ready` when it has finished.

        This works for Type=notify and Type=notify-reload.
        """
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._send("RELOADING=1", f"MONOTONIC_USEC={usec}", *_status(status))

    def watchdog(self) -> bool:
        """Report that the daemon is making progress."""
        return self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> bool:
        """Extend the service manager's timeout to `seconds` from now."""
        return self._send(f"EXTEND_TIMEOUT_USEC={max(1, round(seconds * 1_000_000))}")

    def _send(self, *assignments: str) -> bool:
        """Send one datagram, and return True if it was sent."""
        if self._address is None or not assignments:
            return False
        data = "\n".join(assignments).encode("utf-8", "replace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                manager.sendto(data, flags, self._address)
        except OSError:
            return False
        return True


def forget(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Remove the variables, so that children cannot send notifications in the daemon's name."""
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        environ.pop(name, None)


def _status(text: str) -> tuple[str, ...]:
    # The status is put on one line, because a line break would start another variable.
    return (f"STATUS={' '.join(text.split())}",) if text else ()


def _address(value: str) -> str | bytes | None:
    if value.startswith("@"):
        return b"\0" + os.fsencode(value[1:])  # a socket in the abstract namespace
    # Other kinds of addresses, such as vsock, are for virtual machines and are ignored.
    return value if value.startswith("/") else None


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    try:
        interval = int(environ["WATCHDOG_USEC"]) / 1_000_000
        pid = int(environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return interval if interval > 0 and pid == os.getpid() else None
