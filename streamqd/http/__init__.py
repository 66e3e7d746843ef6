"""A small HTTP server for metrics, health and the status page. It supports only GET and HEAD.

The server runs an event loop in one thread of the housekeeper. All sizes and times are limited. A
slow or silent client uses a file descriptor for up to 15 seconds, and delays no other client. If
the server cannot listen on its address, it keeps trying. The other work of the daemon does not
depend on it, and the server does not depend on the pages that its routes return.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from streamqd import logs

CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 8 * 1024
REQUEST_SECONDS = 5.0  # time limit from accepting a client to the end of its request header
RESPONSE_SECONDS = 10.0  # time limit for sending the response
_CHALLENGE = 'WWW-Authenticate: Bearer realm="streamqd"\r\n'
BIND_RETRY_SECONDS = (1.0, 30.0)  # first and longest pause between attempts to listen

Address = tuple[str, int] | Path


class HttpRequest(NamedTuple):
    """The path of a request without its query, and its headers by lowercase name."""

    path: str
    headers: Mapping[str, str]


class HttpResponse(NamedTuple):
    """A response to a request. The connection is closed after it."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[HttpRequest], HttpResponse]


class HttpServer:
    """An HTTP server for one address. It serves its routes until it is stopped."""

    def __init__(self, address: Address, routes: Mapping[str, Route]) -> None:
        self._address = address
        self._routes = routes
        self._clients: dict[asyncio.Task[None], float] = {}  # deadline of each client (monotonic)
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.bound: Address | None = None
        """The address on which the server listens, with the actual port, or None before that."""
        self.listening = threading.Event()
        """Set as soon as the server listens."""

    def start(self) -> None:
        """Start the thread of the server."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._serving = self._loop.create_task(self._serve())
        self._thread.start()

    def stop(self) -> None:
        """Stop the server and close its connections. Wait up to 5 seconds for its thread."""
        with contextlib.suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(5.0)

    @property
    def alive(self) -> bool:
        """True while the thread is running, which means that it listens or is trying to."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        listener = await self._listening()
        server = await asyncio.start_server(
            self._meet, sock=listener, limit=REQUEST_BYTES_MAX, backlog=CONNECTIONS_MAX
        )
        try:
            # Wait until this task is canceled. `serve_forever` is not used, because it would then
            # wait for all clients.
            await self._loop.create_future()
        finally:
            server.close()
            for client in self._clients:
                client.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            if isinstance(self._address, Path):
                with contextlib.suppress(OSError):
                    self._address.unlink()

    async def _listening(self) -> socket.socket:
        """Try to listen on the address until this succeeds. Return the listening socket."""
        first, longest = BIND_RETRY_SECONDS
        while True:
            try:
                listener = _listen(self._address)
                break
            except (OSError, OverflowError) as error:
                if not self._failures:
                    address = format_address(self._address)
                    logs.event(
                        "http.unavailable", logging.WARNING, address=address, error=str(error)
                    )
                wait = min(longest, first * 2 ** min(self._failures, 16))
                self._failures += 1
            await asyncio.sleep(wait)
        unix = isinstance(self._address, Path)
        self.bound = self._address if unix else listener.getsockname()[:2]
        logs.event("http.listening", address=format_address(self.bound))
        self.listening.set()
        return listener

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client. If there are too many, disconnect the one whose deadline is next."""
        client = asyncio.current_task()
        assert client is not None
        if len(self._clients) >= CONNECTIONS_MAX:
            soonest = min(self._clients, key=self._clients.__getitem__)
            del self._clients[soonest]
            soonest.cancel()
        try:
            async with asyncio.timeout(self._allow(client, REQUEST_SECONDS)):
                try:
                    request = await reader.readuntil(b"\r\n\r\n")
                    answer = self._respond(request.removesuffix(b"\r\n\r\n"))
                except asyncio.LimitOverrunError:
                    answer = _encode(_plain_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
            async with asyncio.timeout(self._allow(client, RESPONSE_SECONDS)):
                writer.write(answer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, EOFError, OSError):
            pass
        finally:
            self._clients.pop(client, None)
            # After `close`, a transport that has sent its last buffer no longer has a loop.
            with contextlib.suppress(AttributeError):
                writer.transport.abort()

    def _allow(self, client: asyncio.Task[None], seconds: float) -> float:
        self._clients[client] = time.monotonic() + seconds
        return seconds

    def _respond(self, raw: bytes) -> bytes:
        """Return the encoded response to a request header."""
        head, *lines = raw.decode("latin-1").split("\r\n")
        parts = head.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
            return _encode(_plain_response(HTTPStatus.BAD_REQUEST))
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return _encode(_plain_response(HTTPStatus.METHOD_NOT_ALLOWED))
        path = target.partition("?")[0]
        headers = {
            name.strip().lower(): value.strip()
            for name, colon, value in (line.partition(":") for line in lines)
            if colon
        }
        try:
            route = self._routes.get(path, _answer_missing)
            response = route(HttpRequest(path, headers))
        except Exception as error:  # noqa: BLE001 - a page that fails must not stop the server
            logs.event("http.failed", logging.ERROR, path=target, exc=error)
            response = _plain_response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _encode(response, with_body=method == "GET")


def _report(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log unhandled errors of the event loop, except for OSError.

    An OSError comes from a client, or means that there are no free file descriptors. In the latter
    case, asyncio accepts connections again after one second.
    """
    error = context.get("exception")
    if not isinstance(error, OSError):
        logs.event("http.failed", logging.ERROR, error=context["message"], exc=error)


def _answer_missing(_request: HttpRequest) -> HttpResponse:
    return _plain_response(HTTPStatus.NOT_FOUND)


def _encode(response: HttpResponse, *, with_body: bool = True) -> bytes:
    """Return a response with its header in the form in which it is sent."""
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
    return head.encode() + (response.body if with_body else b"")


def _plain_response(status: HTTPStatus) -> HttpResponse:
    return HttpResponse(status, f"{status.value} {status.phrase}\n".encode())


def _listen(address: Address) -> socket.socket:
    place: Any
    if isinstance(address, Path):
        if _is_stale(address):
            address.unlink(missing_ok=True)
        family, place = socket.AF_UNIX, os.fspath(address)
    else:
        # Check the port here, because getaddrinfo does not reject larger numbers.
        if not 0 <= address[1] <= 65_535:
            raise OverflowError(f"port {address[1]} is not valid; use 0 to 65535")
        family, _, _, _, place = socket.getaddrinfo(
            address[0] or None, address[1], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        if isinstance(address, Path):
            address.chmod(0o660)
        listener.listen(CONNECTIONS_MAX)
    except BaseException:
        listener.close()
        raise
    return listener


def find_fault(address: Address) -> str | None:
    """Return the reason why no server could listen on an address now, or None if one could.

    No socket is left open.
    """
    try:
        if isinstance(address, Path):
            _try_unix(address)
        else:
            _listen(address).close()
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return f"{format_address(address)} is in use by another process"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"cannot listen on {format_address(address)}: {reason}"
    return None


def _try_unix(path: Path) -> None:
    """Raise OSError if a socket could not be created at `path`. The socket is not created."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"this user cannot write to {path.parent}")
    if path.exists() and not _is_stale(path):
        raise OSError(errno.EADDRINUSE, "in use")


def _is_stale(path: Path) -> bool:
    """Return True if `path` is a socket that a killed process left, so it refuses connections."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
    return False


def format_address(address: Address) -> str:
    """Return the address as a string, such as `http://127.0.0.1:9464`."""
    if isinstance(address, Path):
        return f"unix:{address}"
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
