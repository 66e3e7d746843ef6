"""A server for Sentry's events on loopback, which receives envelopes and keeps them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.receiver import receiving
from tests.support.waiting import wait_until


class SentryServer:
    """The items that were received at `address`."""

    def __init__(self) -> None:
        self.address = ""
        self._lock = threading.Lock()
        self._items: list[dict[str, Any]] = []

    @property
    def dsn(self) -> str:
        """The value for SENTRY_DSN."""
        return f"http://key@{self.address}/1"

    def errors(self) -> list[dict[str, Any]]:
        """Return the received error events."""
        with self._lock:
            return [each for each in self._items if "exception" in each]

    def transactions(self) -> list[dict[str, Any]]:
        """Return the received transactions."""
        with self._lock:
            return [each for each in self._items if each.get("type") == "transaction"]

    def wait_errors(self, count: int) -> list[dict[str, Any]]:
        """Wait until `count` errors have arrived, and return all errors."""
        wait_until(lambda: len(self.errors()) >= count, timeout=20.0, what=f"{count} errors")
        return self.errors()

    def _take(self, body: bytes) -> int:
        """Take an envelope: a header line, then a header line and a payload line for each item."""
        _, *lines = body.split(b"\n")
        payloads = [json.loads(line) for line in lines[1::2] if line]
        with self._lock:
            self._items += [each for each in payloads if isinstance(each, dict)]
        return 200


@contextmanager
def reporting() -> Iterator[SentryServer]:
    """Run a server for events while the block runs."""
    server = SentryServer()
    with receiving(server._take) as server.address:
        yield server
