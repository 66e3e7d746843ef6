"""Logins, roles, and requests from other sites, tested without a browser."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.support import optional
from tests.support.console import ConsoleProcess
from tests.support.daemon import ROOT

pytestmark = optional.need("starlette")

from streamqd.admin import dead_letters  # noqa: E402
from streamqd.console.access import Role  # noqa: E402
from streamqd.console.views import ACTS, VIEWS  # noqa: E402
from tests.console.conftest import PASSWORD  # noqa: E402

PAUSE = "/groups/orders/bill/pause"
OWN = {"Sec-Fetch-Site": "same-origin"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Client:
    """A client that sends requests and keeps cookies."""

    port: int
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, None, headers)

    def post(self, path: str, fields: dict[str, str], headers: dict[str, str]) -> Answer:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.send("POST", path, urlencode(fields), form | headers)

    def send(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        link.request(method, path, body, headers | ({"Cookie": cookie} if cookie else {}))
        reply = link.getresponse()
        answer = Answer(reply.status, {}, reply.read().decode())
        for name, value in reply.getheaders():
            answer.headers[name.lower()] = value
            if name.lower() == "set-cookie":
                key, _, rest = value.partition("=")
                self.cookies[key] = rest.partition(";")[0]
        link.close()
        return answer


def logged_in(console: ConsoleProcess, name: str) -> Client:
    client = Client(console.port)
    answer = client.post("/login", {"name": name, "password": PASSWORD}, OWN)
    assert answer.status == 303
    return client


def test_every_route_has_a_role():
    """Every route has a role, and test_every_view checks that a viewer gets 403 for all others."""
    assert {each.role for each in ACTS} <= {Role.OPERATOR, Role.ADMIN}
    names = [each.name for each in (*VIEWS, *ACTS)]
    assert len(names) == len(set(names))


def test_login_link_token_works_once(fleet, new_console):
    console = new_console(fleet)
    token = console.link.partition("token=")[2]
    client, other = Client(console.port), Client(console.port)

    first = client.get(f"/?token={token}")
    again = other.get(f"/?token={token}")
    following = other.get(f"/?{console.next_link().partition('?')[2]}")

    assert (first.status, first.headers["location"]) == (303, "/")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert client.get("/").status == 200
    assert again.status == 401
    assert "You are not logged in" in again.text
    assert token not in again.text
    assert "Go to the overview" not in again.text, "it leads nowhere without a session"
    assert following.status == 303
    assert Client(console.port).get("/").status == 401


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_console_with_exit_code_0(fleet, new_console, number):
    """The console stops even if an open stream would last for hours."""
    console = new_console(fleet)
    client = Client(console.port)
    client.get(f"/?{console.link.partition('?')[2]}")
    stream = socket.create_connection(("127.0.0.1", console.port), 30)
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    stream.sendall(f"GET /live?page=/ HTTP/1.1\r\nHost: x\r\nCookie: {cookie}\r\n\r\n".encode())
    assert stream.recv(100).startswith(b"HTTP/1.1 200")

    assert console.stop(number) == 0
    stream.close()


def test_bind_listens_only_on_the_given_address(fleet, new_console):
    console = new_console(fleet, "--bind", "127.0.0.2:9466")  # the helper adds `--port 0`

    found = re.fullmatch(
        r"console: http://127\.0\.0\.2:(\d+)/\?token=[\w-]{32}", console.first_line
    )
    assert found, console.first_line
    assert int(found[1]) not in (0, 9466)
    there = socket.create_connection(("127.0.0.2", console.port), 30)
    there.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", console.port), 30)
    assert console.stop() == 0


def test_sigterm_after_the_first_line_stops_the_console(fleet, new_console):
    """A signal is not lost if it arrives after the first line and before the server starts."""
    assert new_console(fleet).stop(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 303),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "http://127.0.0.1:{port}"}, 303),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:{port}"}, 403),
        ({}, 403),
    ],
)
def test_change_requires_the_origin_of_the_console(console, headers, status):
    client = logged_in(console, "otto")
    headers = {name: value.format(port=console.port) for name, value in headers.items()}

    answer = client.post("/groups/orders/ship/resume", {"request-id": str(headers)}, headers)

    assert answer.status == status


POLICY = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "img-src": ["'self'", "data:"],
    "connect-src": ["'self'"],
    "form-action": ["'self'"],
    "frame-ancestors": ["'none'"],
    "base-uri": ["'none'"],
}


def test_every_response_has_security_headers(console, fleet):
    """Every kind of page and each entry of the registry is sent with the security headers."""
    client = logged_in(console, "anna")
    letter = dead_letters.messages(fleet.store, "orders").page(limit=1).rows[0]
    entries = [each.example or each.path for each in (*VIEWS, *ACTS)]
    entries += ["/topics/orders/dead/DEAD_LETTER/payload", "/topics/orders/dead-export"]
    others = ("/nothing", "/login", "/static/nothing", "/livez", "/?limit=x", "/jobs/0")
    kept = ("/static/console.css", "/static/htmx.min.js")
    for path in (*entries, *others, *kept):
        answer = client.get(path.replace("DEAD_LETTER", letter.id).replace("UID", letter.uid))
        headers = answer.headers
        policy = [each.split() for each in headers["content-security-policy"].split(";")]
        assert {name: sources for name, *sources in policy} == POLICY, path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["referrer-policy"] == "no-referrer", path
        assert headers["cross-origin-opener-policy"] == "same-origin", path
        assert (headers["cache-control"] == "no-store") == (path not in kept), path
        assert answer.status == 200 or path in others or "JOB" in path, (path, answer.text)
    refused = client.post(PAUSE, {}, {"Sec-Fetch-Site": "cross-site"})
    assert refused.headers["content-security-policy"].startswith("default-src 'none';")


def test_live_stream_must_not_be_cached(console):
    client = logged_in(console, "vera")
    link = http.client.HTTPConnection("127.0.0.1", console.port, timeout=30)
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    link.request("GET", "/live?page=/", headers={"Cookie": cookie})
    answer = link.getresponse()

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    link.close()


def test_wrong_password_is_refused_and_rate_limited(fleet, users_file, new_console):
    console = new_console(fleet, "--users", str(users_file))
    client = Client(console.port)
    wrong = [
        client.post("/login", {"name": name, "password": "wrong"}, OWN)
        for name in ["anna", "nobody"] * 5
    ]

    assert {each.status for each in wrong} == {401}
    assert {each.text for each in wrong} == {wrong[0].text}
    late = client.post("/login", {"name": "anna", "password": PASSWORD}, OWN)
    assert late.status == 409
    assert "try again in a minute" in late.text


def test_request_without_a_session_redirects_to_the_login(console):
    answer = Client(console.port).get("/?q=bill")

    assert answer.status == 303
    assert answer.headers["location"] == "/login?next=%2F%3Fq%3Dbill"
    assert Client(console.port).post(PAUSE, {}, OWN).status == 401


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example", "/\\evil.example"])
def test_login_does_not_redirect_to_another_site(console, target):
    client = Client(console.port)

    answer = client.post("/login", {"name": "vera", "password": PASSWORD, "next": target}, OWN)

    assert answer.headers["location"] == "/"


def test_read_only_makes_every_user_a_viewer(fleet, users_file, new_console):
    console = new_console(fleet, "--users", str(users_file), "--read-only")
    client = logged_in(console, "anna")

    answer = client.post(PAUSE, {"request-id": "1"}, OWN)

    assert answer.status == 403
    assert "This console is read-only" in answer.text
    assert "default, read only" in client.get("/").text


def test_proxy_user_header_requires_a_trusted_proxy(fleet, new_console):
    trusted = new_console(
        fleet, "--proxy-header", "X-Forwarded-User", "--proxy-from", "127.0.0.0/8"
    )
    strict = new_console(fleet, "--proxy-header", "X-Forwarded-User", "--proxy-from", "10.9.8.7")
    assert "token" not in trusted.first_line

    found = Client(trusted.port).get("/", **{"X-Forwarded-User": "petra"})

    assert found.status == 200
    assert "petra" in found.text
    assert Client(trusted.port).get("/").status == 401
    assert Client(strict.port).get("/", **{"X-Forwarded-User": "petra"}).status == 401
    # A name that is not listed gets the role of console.proxy_role.
    answer = Client(trusted.port).post(PAUSE, {}, OWN | {"X-Forwarded-User": "petra"})
    assert answer.status == 403


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.9.8.7"])
def test_cookie_is_secure_over_https_to_a_named_proxy(fleet, users_file, new_console, peer):
    """The console ignores the header if it comes from a peer that is not the named proxy."""
    console = new_console(
        fleet, "--users", str(users_file),
        "--proxy-header", "X-Forwarded-User", "--proxy-from", peer,
    )  # fmt: skip
    https = {"X-Forwarded-Proto": "https"}
    client = Client(console.port)

    answer = client.post("/login", {"name": "vera", "password": PASSWORD}, OWN | https)

    name, value = next(iter(client.cookies.items()))
    rest = answer.headers["set-cookie"].removeprefix(f"{name}={value}")
    if peer == "127.0.0.1":
        assert name == f"__Host-streamqd-{console.port}"
        assert rest == "; Path=/; HttpOnly; SameSite=Strict; Secure"  # no Domain is set
    else:
        assert name == f"streamqd-{console.port}"
        assert rest == "; Path=/; HttpOnly; SameSite=Strict"
    assert len(value) >= 43, "256 bits"
    assert client.get("/", **https).status == 200
    left = client.post("/logout", {}, OWN | https)
    assert left.headers["set-cookie"] == f"{name}={rest}; Max-Age=0"
    client.cookies = {name: value}
    assert client.get("/", **https).status == 303, "the session itself has ended"


def run(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streamqd", "console", *arguments],
        cwd=folder,
        input=text,
        text=True,
        capture_output=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


def test_public_address_without_a_login_is_refused(tmp_path):
    done = run(tmp_path, "--bind", "0.0.0.0:0")

    assert done.returncode == 8
    assert "console.bind 0.0.0.0:0 can be reached by other hosts without a login" in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use_error_is_one_sentence(tmp_path, console):
    done = run(tmp_path, "--port", str(console.port))

    assert done.returncode == 8
    assert "is in use by another process" in done.stderr


def test_add_user_writes_a_private_file(tmp_path):
    path = tmp_path / "users.txt"

    done = run(tmp_path, "--users", "users.txt", "--add-user", "anna", "--role", "admin",
               text="correct horse\n")  # fmt: skip
    short = run(tmp_path, "--users", "users.txt", "--add-user", "otto", text="short\n")

    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().startswith("anna:admin:")
    assert "correct horse" not in path.read_text()
    assert short.returncode == 8
    assert "at least 8 characters" in short.stderr
    path.chmod(0o644)
    assert "chmod 600" in run(tmp_path, "--users", "users.txt", "--port", "0").stderr


def test_double_click_acts_once_and_is_audited(fleet, console):
    client = logged_in(console, "otto")
    form = {"request-id": "double", "why": "a test"}

    first = client.post(PAUSE, form, OWN)
    second = client.post(PAUSE, form, OWN)
    orders = fleet.link.execute("HGETALL", fleet.keys.directives("default"))
    client.post("/groups/orders/bill/resume", {"request-id": "back"}, OWN)

    assert first.status == second.status == 303
    assert first.headers["location"] == second.headers["location"]
    assert first.headers["location"] == "/topics/orders?group=bill&done=double"
    text = b" ".join(orders).decode()
    assert "otto (console)" in text
    assert "a test" in text
    assert "paused" in client.get("/?done=double").text
    # The result belongs to the person who requested it.
    assert (
        "All partitions of orders/bill: paused"
        not in logged_in(console, "anna").get("/?done=double").text
    )


def test_form_without_a_request_id_changes_nothing(console):
    client = logged_in(console, "otto")

    answer = client.post(PAUSE, {"why": "x"}, OWN)

    assert answer.status == 409
    assert "The form has no request ID" in answer.text


def test_unknown_group_page_has_a_message_and_status(console):
    client = logged_in(console, "otto")

    shown = client.get("/groups/orders/nothing/pause")
    done = client.post("/groups/orders/nothing/pause", {"request-id": "n"}, OWN)

    assert shown.status == 200
    assert "nothing" in shown.text
    assert "Pause</button>" not in shown.text
    assert done.status == 409
    assert client.get("/nowhere").status == 404
