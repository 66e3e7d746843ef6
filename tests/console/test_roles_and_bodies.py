"""Each view shows each role its messages in full, masked or hidden.

Each message has a secret in its key, its headers, its payload and its error text.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote

import pytest

from tests.support import optional, servers
from tests.support.console import ConsoleProcess
from tests.support.daemon import TOPIC, daemons
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette"), pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.admin import audit, dead_letters, retries  # noqa: E402
from streamqd.console.view import ConsoleView  # noqa: E402
from streamqd.console.views import ACTS, DOWNLOADS, VIEWS  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from tests.console.test_access import Client, logged_in  # noqa: E402
from tests.console.test_every_view import replay_letter  # noqa: E402

SECRET, OPEN = "s3cr3t", "v1s1ble"
PAYLOAD = json.dumps({"card": {"number": SECRET}, "open": OPEN})
HEADERS = {"authorization": SECRET, "other": OPEN}
# The entries that show keys, bodies or errors to people who may see them.
SHOWN = {
    *("message", "messages", "dead_letter", "dead", "retries", "delayed", "schedule", "audit"),
    "edit",
}
CODE = f'''"""A handler whose errors quote the message, as those of parsers do."""


def obey(message):
    """Fail."""
    raise ValueError("bad value {SECRET} in " + message.text())
'''


@pytest.fixture(scope="module")
def console_with_roles(request, tmp_path_factory, users_file):
    """A console that shows viewers no bodies, operators masked bodies, and admins all bodies."""
    word = request.config.getoption("--server")
    if "://" in word or word == "testcontainers":
        pytest.skip("needs a server process of its own")
    server = servers.require(servers.start, word)
    try:
        with daemons(tmp_path_factory.mktemp("secret"), server.url) as make:
            daemon = make(code=CODE)
            configure(daemon)
            with daemon, Producer(settings=config.load(daemon.config_path)) as producer:
                some = {"key": SECRET, "headers": HEADERS}
                uid = str(producer.send(TOPIC, PAYLOAD, **some))
                producer.send(TOPIC, PAYLOAD, **some)
                producer.send(TOPIC, PAYLOAD, delay=3_600, **some)
                wait_until(lambda: len(letters(daemon)) == 2, timeout=30)
                wait_until(lambda: len(waiting(daemon)) == 2, timeout=30)
                # This is how a replay with a filter writes it.
                chosen = {"key": SECRET, "headers": HEADERS}
                audit.record(daemon.store, TOPIC, "dlq replay", arguments=chosen)
                with ConsoleProcess(daemon.config_path, "--users", str(users_file)) as console:
                    yield console, paths(daemon, console, uid)
    finally:
        server.close()


def configure(daemon: Any) -> None:
    hour = {"kind": "fixed", "base": "1h", "max": "1h", "jitter": "none"}
    one = {"topic": TOPIC, "handler": "work:obey", "backoff": hour}
    tick = {"name": "tick", "topic": TOPIC, "cron": "0 3 1 1 *", "key": SECRET}
    daemon.write_config(
        consumers=[
            one | {"group": "bill", "max_attempts": 5},
            one | {"group": "ship", "max_attempts": 1},
        ],
        schedules=[tick | {"payload": PAYLOAD}],
        console={
            "viewer_bodies": "hidden",
            "operator_bodies": "masked",
            "masks": ["/card/number", "header:Authorization"],
        },
    )


def letters(daemon: Any) -> list[Any]:
    return dead_letters.messages(daemon.store, TOPIC).page(limit=100).rows


def waiting(daemon: Any) -> list[Any]:
    return retries.messages(daemon.store, TOPIC, "bill").page(limit=100).rows


def paths(daemon: Any, console: ConsoleProcess, uid: str) -> dict[str, str]:
    """Return the paths of all views, acts and downloads, by name."""
    rows = letters(daemon)
    letter = next(each.id for each in rows if each.uid == uid)
    job = replay_letter(console, next(each.id for each in rows if each.uid != uid))
    found = {each.name: each.example or each.path for each in (*VIEWS, *ACTS)}
    found |= {each.name: each.path for each in DOWNLOADS}
    parts = {
        "DEAD_LETTER": letter,
        "{dead_letter}": letter,
        "UID": uid,
        "JOB": job,
        "{topic}": TOPIC,
    }
    for part, value in parts.items():
        found = {name: path.replace(part, value) for name, path in found.items()}
    return found | {"message_payload": f"{found['message_payload']}?uid={uid}"}


def pages_of(secret: Any, name: str) -> dict[str, Any]:
    """Return the responses that a person gets, by the names of the entries."""
    console, known = secret
    client: Client = logged_in(console, name)
    return {entry: client.get(path) for entry, path in known.items()}


def live_part(console: ConsoleProcess, client: Client, path: str) -> str:
    """Return the first live part of a page."""
    link = http.client.HTTPConnection("127.0.0.1", console.port, timeout=30)
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    link.request("GET", f"/live?page={quote(path, '')}", headers={"Cookie": cookie})
    answer, text = link.getresponse(), ""
    while "event: part" not in text or not text.endswith("\n\n"):
        text += answer.readline().decode()
    link.close()
    return text


def test_admin_sees_everything(console_with_roles):
    """An admin sees every secret. If not, the tests below could not fail."""
    answers = pages_of(console_with_roles, "anna")

    assert {name for name, each in answers.items() if each.status != 200} == set()
    shown = {name for name, each in answers.items() if SECRET in each.text}
    assert SHOWN | {each.name for each in DOWNLOADS} <= shown


@pytest.mark.parametrize(("name", "bodies"), [("vera", "hidden"), ("otto", "masked")])
def test_secret_is_on_no_view_for_other_roles(console_with_roles, name, bodies):
    answers = pages_of(console_with_roles, name)

    assert {entry for entry, each in answers.items() if SECRET in each.text} == set()
    views = {each.name for each in VIEWS}
    assert {entry for entry in views if answers[entry].status != 200} == set()
    assert {answers[each.name].status for each in DOWNLOADS} <= {403, 404}
    # Masking a body keeps the rest of it, and hiding keeps nothing.
    open_parts = {entry for entry in ("message", "dead_letter") if OPEN in answers[entry].text}
    assert open_parts == ({"message", "dead_letter"} if bodies == "masked" else set())


@pytest.mark.parametrize("name", ["vera", "otto"])
@pytest.mark.parametrize("view", [each for each in VIEWS if each.live], ids=lambda each: each.name)
def test_secret_is_in_no_live_part_for_other_roles(console_with_roles, name, view: ConsoleView):
    console, known = console_with_roles

    assert SECRET not in live_part(console, logged_in(console, name), known[view.name])
