"""The HTTP endpoint requires its token, and gives only public replies without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from streamqd import config
from streamqd.http import HttpRequest, HttpResponse, HttpServer
from streamqd.http.access import Access

REASONS = ["the worker of access/1/hits makes no progress"]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("t0ken of the pages\n")
    return path


def serve(http: config.Http) -> HttpServer:
    access = Access(http)
    pages = {
        "/metrics": access.require_token(lambda _: HttpResponse(200, b"figures")),
        "/readyz": lambda asked: access.health(asked, REASONS),
        "/livez": lambda asked: access.health(asked, []),
    }
    made = HttpServer(("127.0.0.1", 0), pages)
    made.start()
    return made


@pytest.fixture
def guarded_server(token: Path) -> Iterator[HttpServer]:
    """A server on the loopback address, which `Access` takes for a public one here."""
    server = serve(config.Http(bind="0.0.0.0:9464", token_file=token))
    yield server
    server.stop()


def get(server: HttpServer, path: str, authorization: str | None = None) -> tuple[int, str, str]:
    """Return the status, the body and the WWW-Authenticate header."""
    while not isinstance(server.bound, tuple):
        assert server.alive
    connection = HTTPConnection(*server.bound, timeout=10)
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers.get("WWW-Authenticate", "")
    finally:
        connection.close()


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer t0ken",
        "Bearer t0ken of the pages, and more",
        "Basic t0ken of the pages",
        "t0ken of the pages",
        "Bearer \xe9",
    ],
)
def test_http_metrics_require_the_token(guarded_server: HttpServer, given: str | None) -> None:
    status, body, asked = get(guarded_server, "/metrics", given)
    assert (status, asked) == (401, 'Bearer realm="streamqd"')
    assert "figures" not in body


@pytest.mark.parametrize("given", ["Bearer t0ken of the pages", "bearer  t0ken of the pages "])
def test_http_metrics_are_returned_with_the_token(guarded_server: HttpServer, given: str) -> None:
    assert get(guarded_server, "/metrics", given) == (200, "figures", "")


def test_http_token_is_reloaded_and_required(guarded_server: HttpServer, token: Path) -> None:
    token.write_text("another")
    assert get(guarded_server, "/metrics", "Bearer t0ken of the pages")[0] == 401
    assert get(guarded_server, "/metrics", "Bearer another")[0] == 200
    token.write_text("\n")
    assert get(guarded_server, "/metrics", "Bearer ")[0] == 401
    empty = Access(config.Http(token_file=token))
    assert not empty.allows(HttpRequest("/", {"authorization": "Bearer "}))
    token.unlink()
    assert get(guarded_server, "/metrics", "Bearer another")[0] == 401


def test_http_health_needs_no_token_and_hides_names(guarded_server: HttpServer) -> None:
    assert get(guarded_server, "/livez")[:2] == (200, '{"ok": true}\n')
    status, body, _ = get(guarded_server, "/readyz")
    assert (status, json.loads(body)) == (503, {"ok": False})
    _, told, _ = get(guarded_server, "/readyz", "Bearer t0ken of the pages")
    assert json.loads(told) == {"ok": False, "reasons": REASONS}


@pytest.mark.parametrize(
    "bind", ["127.0.0.1:9464", "localhost:1", "[::1]:9464", "unix:/run/x.sock"]
)
def test_http_on_loopback_needs_no_token(bind: str) -> None:
    access = Access(config.Http(bind=bind))
    asked = HttpRequest("/readyz", {})
    assert json.loads(access.health(asked, REASONS).body)["reasons"] == REASONS
    assert access.require_token(lambda _: HttpResponse(200, b"figures"))(asked).status == 200


def test_http_public_health_endpoint_hides_reasons() -> None:
    access = Access(config.Http(bind="0.0.0.0:9464", allow_public=True))
    asked = HttpRequest("/readyz", {})
    assert json.loads(access.health(asked, REASONS).body) == {"ok": False}
    assert access.require_token(lambda _: HttpResponse(200, b"figures"))(asked).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("[::1]:9464", 200),
        ("10.0.0.7", 200),
        ("localhost:9464", 200),
        ("LOCALHOST.", 200),
        ("metrics.example.com", 200),
        ("", 200),
        ("evil.example:9464", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("[evil.example]:9464", 421),
    ],
)
def test_http_refuses_dns_rebinding(host: str, status: int) -> None:
    """Another site cannot use DNS rebinding to read our pages."""
    access = Access(config.Http(hosts=("Metrics.Example.com",)))
    page = access.require_host(lambda _: HttpResponse(200, b"figures"))
    answer = page(HttpRequest("/metrics", {"host": host} if host else {}))
    assert answer.status == status
    assert (b"figures" in answer.body) == (status == 200)


def test_http_public_address_accepts_every_host_name() -> None:
    access = Access(config.Http(bind="0.0.0.0:9464", allow_public=True))
    page = access.require_host(lambda _: HttpResponse(200, b"figures"))
    assert page(HttpRequest("/metrics", {"host": "streamqd.svc.cluster.local"})).status == 200
