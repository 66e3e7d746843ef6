"""A server for Sentry's events on loopback: it receives envelopes and keeps them."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import wait_until


class SentryServer:
    """The server and the items that it has received. Use it as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                outer._take(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def dsn(self) -> str:
        """The address for SENTRY_DSN."""
        return f"http://key@127.0.0.1:{self._server.server_port}/1"

    def errors(self) -> list[dict[str, Any]]:
        """Return the events of errors."""
        with self._lock:
            return [each for each in self._items if "exception" in each]

    def transactions(self) -> list[dict[str, Any]]:
        """Return the transactions."""
        with self._lock:
            return [each for each in self._items if each.get("type") == "transaction"]

    def wait_errors(self, count: int) -> list[dict[str, Any]]:
        """Wait until this many errors are there, and return all."""
        wait_until(lambda: len(self.errors()) >= count, timeout=20.0, what=f"{count} errors")
        return self.errors()

    def _take(self, body: bytes) -> None:
        """Take an envelope: a header line, then a header line and a payload line for each item."""
        _, *lines = body.split(b"\n")
        payloads = [json.loads(line) for line in lines[1::2] if line]
        with self._lock:
            self._items += [each for each in payloads if isinstance(each, dict)]
