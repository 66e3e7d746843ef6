"""What the service manager is told: sd_notify(3) without a library.

Called by the supervisor. Nothing here raises or blocks: a daemon must not fail because systemd is
slow or absent. No descriptor is kept between calls, so nothing has to be closed in children.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Speaks to the socket named by $NOTIFY_SOCKET; silent when there is none."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_interval = _watchdog_interval(environ)
        """Seconds within which `watchdog` must be called, or None. Call it thrice as often."""

    @property
    def enabled(self) -> bool:
        """Whether a service manager listens."""
        return self._address is not None

    def ready(self, status: str = "") -> bool:
        """Say that the daemon is up, or that a reload is over."""
        return self._send("READY=1", *_status(status))

    def status(self, text: str) -> bool:
        """Show one line in `systemctl status`."""
        return self._send(*_status(text))

    def stopping(self, status: str = "") -> bool:
        """Say that the daemon drains and ends."""
        return self._send("STOPPING=1", *_status(status))

    def reloading(self, status: str = "") -> bool:
        """Say that a reload begins; `ready` ends it. Fit for Type=notify and notify-reload."""
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._send("RELOADING=1", f"MONOTONIC_USEC={usec}", *_status(status))

    def watchdog(self) -> bool:
        """Say that the daemon makes progress."""
        return self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> bool:
        """Ask for this much time from now before the service manager gives up on us."""
        return self._send(f"EXTEND_TIMEOUT_USEC={max(1, round(seconds * 1_000_000))}")

    def _send(self, *assignments: str) -> bool:
        """Send one datagram; return whether it was taken."""
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
    """Remove the variables: children must not speak to the service manager in our name."""
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        environ.pop(name, None)


def _status(text: str) -> tuple[str, ...]:
    # A line break would begin another assignment.
    return (f"STATUS={' '.join(text.split())}",) if text else ()


def _address(value: str) -> str | bytes | None:
    if value.startswith("@"):
        return b"\0" + os.fsencode(value[1:])  # the abstract namespace
    return value if value.startswith("/") else None  # vsock and the like are for virtual machines


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    try:
        interval = int(environ["WATCHDOG_USEC"]) / 1_000_000
        pid = int(environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return interval if interval > 0 and pid == os.getpid() else None
