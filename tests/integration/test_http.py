"""The HTTP server over real sockets: its answers and bounds, slow clients, and a busy address."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from streamqd import http
from streamqd.http import Address, HttpRequest, HttpResponse, HttpServer
from tests.support.loglines import LogLines
from tests.support.waiting import wait_until

BIG = b"x" * 20_000_000  # more bytes than a loopback connection buffers
Started = Callable[..., HttpServer]


def fail(_request: HttpRequest) -> HttpResponse:
    raise ValueError("no page today")


ROUTES = {
    "/": lambda _: HttpResponse(200, b"front"),
    "/echo": lambda request: HttpResponse(200, json.dumps(request.headers).encode()),
    "/big": lambda _: HttpResponse(200, BIG),
    "/sick": lambda _: HttpResponse(503, b"sick"),
    "/fail": fail,
}


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with LogLines() as opened:
        yield opened


@pytest.fixture
def start() -> Iterator[Started]:
    servers = []

    def begin(address: Address = ("127.0.0.1", 0), *, wait: bool = True) -> HttpServer:
        server = HttpServer(address, ROUTES)
        servers.append(server)
        server.start()
        if wait:
            wait_until(lambda: server.bound)
        return server

    yield begin
    for server in servers:
        server.stop()


def dial(server: HttpServer) -> socket.socket:
    bound = server.bound
    if isinstance(bound, Path):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(str(bound))
        return peer
    assert bound is not None
    return socket.create_connection(bound, timeout=10)


def exchange(server: HttpServer, raw: bytes) -> tuple[str, bytes]:
    """Send raw bytes and read the whole reply. Return its status line and its body."""
    with dial(server) as peer:
        peer.settimeout(10)
        peer.sendall(raw)
        answer = b""
        while part := peer.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


def get(server: HttpServer, path: str) -> tuple[int, bytes]:
    assert isinstance(server.bound, tuple)
    connection = HTTPConnection(*server.bound, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_http_returns_page_bodies_and_status_codes(start: Started) -> None:
    server = start()
    assert get(server, "/") == (200, b"front")
    assert get(server, "/?refresh=1") == (200, b"front")
    assert get(server, "/sick") == (503, b"sick")
    assert get(server, "/nothing")[0] == 404
    assert get(server, "/big") == (200, BIG)


def test_http_passes_headers_to_the_page(start: Started) -> None:
    _, body = exchange(start(), b"GET /echo HTTP/1.1\r\nHost: x\r\nAccept:  text/plain \r\n\r\n")
    assert json.loads(body) == {"host": "x", "accept": "text/plain"}


def test_http_head_returns_no_body(start: Started) -> None:
    status, body = exchange(start(), b"HEAD / HTTP/1.1\r\n\r\n")
    assert (status, body) == ("HTTP/1.1 200 OK", b"")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"DELETE /nothing HTTP/1.1\r\n\r\n", 405),
        (b"GET\r\n\r\n", 400),
        (b"GET / SMTP\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"\xff\xfe\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * 9000, 431),
    ],
)
def test_http_rejects_invalid_requests(start: Started, raw: bytes, status: int) -> None:
    line, _ = exchange(start(), raw)
    assert line.split(" ")[1] == str(status)


def test_http_survives_a_failing_page(start: Started, lines: LogLines) -> None:
    server = start()
    assert get(server, "/fail")[0] == 500
    assert get(server, "/")[0] == 200
    (failed,) = lines.events("http.failed")
    assert "no page today" in failed["traceback"]


def test_http_ends_a_large_response_without_an_error(start: Started, lines: LogLines) -> None:
    server = start()
    assert get(server, "/big")[0] == 200
    wait_until(lambda: not server._clients)
    assert get(server, "/")[0] == 200
    assert lines.events("http.failed") == []


def test_http_drops_silent_clients(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    server = start()
    with dial(server) as silent:
        silent.sendall(b"GET / HT")
        began = time.monotonic()
        assert get(server, "/")[0] == 200
        assert time.monotonic() - began < 0.4
        silent.settimeout(10)
        assert silent.recv(100) == b""


def test_http_drops_a_client_that_does_not_read(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "RESPONSE_SECONDS", 0.5)
    server = start()
    with dial(server) as slow:
        slow.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        wait_until(lambda: server._clients)
        assert get(server, "/")[0] == 200
        wait_until(lambda: not server._clients)
        slow.settimeout(10)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := slow.recv(1 << 20):
                received += len(part)
        assert 0 < received < len(BIG)


def test_http_serves_others_despite_many_silent_clients(start: Started) -> None:
    server = start()
    crowd = [dial(server) for _ in range(http.CONNECTIONS_MAX + 30)]
    try:
        assert get(server, "/")[0] == 200
        assert len(server._clients) <= http.CONNECTIONS_MAX
    finally:
        for peer in crowd:
            peer.close()


def test_http_retries_a_busy_port_and_logs_once(
    start: Started,
    monkeypatch: pytest.MonkeyPatch,
    lines: LogLines,
) -> None:
    monkeypatch.setattr(http, "BIND_RETRY_SECONDS", (0.02, 0.05))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = other.getsockname()
        server = start(address, wait=False)
        wait_until(lambda: server._failures >= 3)
        assert server.alive
        assert server.bound is None
    wait_until(lambda: server.bound == address)
    assert get(server, "/") == (200, b"front")
    assert [line["event"] for line in lines.all()] == ["http.unavailable", "http.listening"]


def test_http_survives_an_impossible_address(start: Started, tmp_path: Path) -> None:
    for address in (("127.0.0.1", 99_999), ("no.such.host.invalid", 80), tmp_path / ("x" * 200)):
        server = start(address, wait=False)
        wait_until(lambda server=server: server._failures, what=f"{address} is refused")
        assert server.alive


def test_http_serves_on_a_unix_socket(start: Started, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # left behind by a killed predecessor
    server = start(path)
    assert exchange(server, b"GET / HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", b"front")
    assert path.stat().st_mode & 0o777 == 0o660
    second = start(path, wait=False)
    wait_until(lambda: second._failures, what="the socket of a living server is left alone")
    second.stop()
    assert exchange(server, b"GET / HTTP/1.1\r\n\r\n")[1] == b"front"
    server.stop()
    assert not path.exists()


def test_http_keeps_a_file_at_its_socket_path(start: Started, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    path.write_text("precious")
    server = start(path, wait=False)
    wait_until(lambda: server._failures)
    assert path.read_text() == "precious"
