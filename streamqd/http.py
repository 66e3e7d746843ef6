"""A small HTTP server for metrics, health and the status page. GET and HEAD, nothing else.

One thread of the housekeeper, one selector loop, every socket non-blocking, every size and time
bounded: a slow or silent client costs a descriptor for some seconds and delays nobody. It knows
nothing of what it serves. An address that cannot be bound is tried again forever; the daemon's
work never depends on it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from streamqd import logs

CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 8 * 1024
REQUEST_SECONDS = 5.0  # from accept to the end of the request's header
RESPONSE_SECONDS = 10.0
_CHALLENGE = 'WWW-Authenticate: Bearer realm="streamqd"\r\n'
BIND_RETRY_SECONDS = (1.0, 30.0)  # first and longest wait

Address = tuple[str, int] | Path


class HttpRequest(NamedTuple):
    """A request's path, without query, and its headers by lower-case name."""

    path: str
    headers: Mapping[str, str]


class HttpResponse(NamedTuple):
    """What is sent back; the connection is closed after it."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[HttpRequest], HttpResponse]


class HttpServer:
    """Serves `routes` on `address` from `start` to `stop`."""

    def __init__(self, address: Address, routes: Mapping[str, Route]) -> None:
        self._address = address
        self._routes = routes
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._next_try = 0.0
        self._failures = 0
        self._stopping = False
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.bound: Address | None = None
        """Where it listens, with the port that was given for port 0; None while it does not."""

    def start(self) -> None:
        """Begin to serve, in a thread."""
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; open connections are cut."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(5.0)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; it listens, or tries to."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._listen_when_due()
                for key, _ in self._selector.select(self._wait()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._serve(key.data)
                self._expire()
        finally:
            self._close()

    # --- listening ---

    def _listen_when_due(self) -> None:
        if self._listener is not None or time.monotonic() < self._next_try:
            return
        try:
            self._listener = _listen(self._address)
        except (OSError, OverflowError) as error:
            if not self._failures:
                logs.event(
                    "http.unavailable",
                    logging.WARNING,
                    address=_shown(self._address),
                    error=str(error),
                )
            first, longest = BIND_RETRY_SECONDS
            self._next_try = time.monotonic() + min(longest, first * 2 ** min(self._failures, 16))
            self._failures += 1
            return
        self._failures = 0
        self._selector.register(self._listener, selectors.EVENT_READ)
        if isinstance(self._address, Path):
            self.bound = self._address
        else:
            self.bound = self._listener.getsockname()[:2]
        logs.event("http.listening", address=_shown(self.bound))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:
            # The client has left, or descriptors have run out: then accept would fail at once,
            # again and again, until one is free.
            time.sleep(0.02)
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            self._drop(min(self._connections.values(), key=lambda each: each.deadline))
        peer.setblocking(False)
        connection = _Connection(peer)
        self._connections[peer.fileno()] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)

    # --- one connection ---

    def _serve(self, connection: _Connection) -> None:
        try:
            if not connection.response and connection.receive():
                connection.answer(*self._respond(connection.request))
                self._selector.modify(connection.peer, selectors.EVENT_WRITE, connection)
            if connection.response and connection.send():
                self._drop(connection)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, EOFError):
            self._drop(connection)

    def _respond(self, raw: bytes) -> tuple[HttpResponse, bool]:
        """Return the answer, and whether its body is to be sent."""
        if len(raw) > REQUEST_BYTES_MAX:
            return _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), True
        head, *lines = raw.decode("latin-1").split("\r\n")
        parts = head.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
            return _plain(HTTPStatus.BAD_REQUEST), True
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED), True
        route = self._routes.get(target.partition("?")[0])
        if route is None:
            return _plain(HTTPStatus.NOT_FOUND), method == "GET"
        headers = {
            name.strip().lower(): value.strip()
            for name, colon, value in (line.partition(":") for line in lines)
            if colon
        }
        try:
            response = route(HttpRequest(target.partition("?")[0], headers))
        except Exception as error:  # noqa: BLE001 - a page that fails must not end the server
            logs.event("http.failed", logging.ERROR, path=target, exc=error)
            response = _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        return response, method == "GET"

    def _drop(self, connection: _Connection) -> None:
        # The number may be a newer client's by now.
        if self._connections.get(connection.number) is connection:
            del self._connections[connection.number]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.peer)
        connection.peer.close()

    # --- time ---

    def _wait(self) -> float | None:
        due = [connection.deadline for connection in self._connections.values()]
        if self._listener is None:
            due.append(self._next_try)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if c.deadline <= now]:
            self._drop(connection)

    def _close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        if self._listener is not None:
            self._listener.close()
            if isinstance(self._address, Path):
                with contextlib.suppress(OSError):
                    self._address.unlink()
        self._selector.close()
        self._waker.close()
        self._woken.close()


class _Connection:
    """One client: its request as far as it has come, its response as far as it must still go."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.number = peer.fileno()
        self.deadline = time.monotonic() + REQUEST_SECONDS
        self.request = b""
        self.response = memoryview(b"")

    def receive(self) -> bool:
        """Read what has come; return whether the header is complete, or is too long to be."""
        data = self.peer.recv(4096)
        if not data:
            raise EOFError
        self.request += data
        head, end, _ = self.request.partition(b"\r\n\r\n")
        if end:
            self.request = head
        return bool(end) or len(self.request) > REQUEST_BYTES_MAX

    def answer(self, response: HttpResponse, with_body: bool) -> None:
        """Prepare the response."""
        head = (
            f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
            f"Content-Type: {response.content_type}\r\n"
            f"Content-Length: {len(response.body)}\r\n"
            "Cache-Control: no-store\r\n"
            "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'\r\n"
            "X-Content-Type-Options: nosniff\r\n"
            "Allow: GET, HEAD\r\n"
            f"{_CHALLENGE if response.status == HTTPStatus.UNAUTHORIZED else ''}"
            "Connection: close\r\n\r\n"
        )
        self.response = memoryview(head.encode() + (response.body if with_body else b""))
        self.deadline = time.monotonic() + RESPONSE_SECONDS

    def send(self) -> bool:
        """Write what the client takes; return whether that was all."""
        self.response = self.response[self.peer.send(self.response) :]
        return not self.response


def _plain(status: HTTPStatus) -> HttpResponse:
    return HttpResponse(status, f"{status.value} {status.phrase}\n".encode())


def _listen(address: Address) -> socket.socket:
    if isinstance(address, Path):
        return _listen_unix(address)
    if not 0 <= address[1] <= 65_535:
        raise OverflowError(f"there is no port {address[1]}")  # getaddrinfo would take the rest
    family, kind, _, _, place = socket.getaddrinfo(
        address[0] or None, address[1], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(CONNECTIONS_MAX)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def fault_of(address: Address) -> str | None:
    """Why nobody could serve on an address now; None when one could. Leaves nothing behind."""
    try:
        if isinstance(address, Path):
            _try_unix(address)
        else:
            _listen(address).close()
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return f"{_shown(address)} is in use by another process"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"{_shown(address)} cannot be listened on: {reason}"
    return None


def _try_unix(path: Path) -> None:
    """Raise OSError when a socket could not be made there, without making it."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"this user cannot write to {path.parent}")
    if not path.exists():
        return
    if stat.S_ISSOCK(path.lstat().st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return  # left by one that was killed
    raise OSError(errno.EADDRINUSE, "in use")


def _listen_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o660)
        listener.listen(CONNECTIONS_MAX)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket that a killed predecessor left; one that answers is left alone."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _shown(address: Address) -> str:
    if isinstance(address, Path):
        return f"unix:{address}"
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
