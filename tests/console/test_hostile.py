"""Hostile data is harmless on every view: messages, keys, headers, errors, names, Redis values.

The tests open all entries of the registry at a width of 360 px.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from tests.support import optional, servers
from tests.support.console import NO_BROWSER, ConsoleProcess, Seen
from tests.support.daemon import TOPIC, daemons
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.admin import audit, dead_letters, delayed, directives, retries  # noqa: E402
from streamqd.admin.published import Fleet  # noqa: E402
from streamqd.console.views import ACTS, VIEWS  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from streamqd.store.directives import Scope  # noqa: E402
from tests.console.conftest import HOSTILE, log_in  # noqa: E402
from tests.console.test_every_view import replay_letter  # noqa: E402

BIDI = "\u202e\u2066\u200f"
EVIL = f"{HOSTILE}{BIDI}\"'&"
LONG = EVIL + "A" * 10_000
BYTES = b"\xff\xfe\xc0\x80" + EVIL.encode() + b"\xed\xa0\x80"
CODE = f'''"""A handler whose errors have hostile names and texts."""

HOSTILE = {EVIL!r}
Hostile = type(HOSTILE, (Exception,), {{}})


def obey(message):
    """Fail unless the message is harmless."""
    text = message.payload.decode("utf-8", "replace")
    if not text.startswith("ok"):
        raise Hostile(text)
'''
PATHS = {each.name: each.example or each.path for each in (*VIEWS, *ACTS)}
# The places where the hostile text is shown. Elsewhere, it must only be harmless.
SHOWN = {
    *("overview", "fleet", "handlers", "retries", "delayed", "schedule", "audit"),
    *("messages", "message", "dead", "dead_letter", "edit"),
}


@pytest.fixture(scope="module")
def hostile_console(request, tmp_path_factory, users_file):
    """A console, and a function that turns an example path into one with hostile messages.

    The daemon wrote retries and dead letters, and was then killed. Its summary and its heartbeat
    are still in Redis, and are replaced by hostile ones.
    """
    word = request.config.getoption("--server")
    if "://" in word or word == "testcontainers":
        pytest.skip("needs a server process of its own")
    server = servers.require(servers.start, word)
    try:
        with daemons(tmp_path_factory.mktemp("evil"), server.url) as make:
            daemon = make(partitions=2, daemon={"lease_ttl": "10m"}, code=CODE)
            configure(daemon)
            with daemon:
                uid = send(daemon)
                wait_until(lambda: len(letters(daemon)) == 3, timeout=30)
                wait_until(lambda: len(waiting(daemon)) == 3, timeout=30)
                daemon.kill_all()
                forge_records(daemon)
                with ConsoleProcess(daemon.config_path, "--users", str(users_file)) as console:
                    yield console, fill_path(daemon, console, uid)
    finally:
        server.close()


def configure(daemon: Any) -> None:
    hour = {"kind": "fixed", "base": "1h", "max": "1h", "jitter": "none"}
    one = {"topic": TOPIC, "handler": "work:obey", "backoff": hour}
    tick = {"name": "tick", "topic": TOPIC, "cron": "0 3 1 1 *", "partition": 0}
    daemon.write_config(
        consumers=[
            one | {"group": "bill", "max_attempts": 5},
            one | {"group": "ship", "max_attempts": 1},
        ],
        schedules=[tick | {"payload": LONG}],
    )


def send(daemon: Any) -> str:
    """Send three hostile messages and a delayed one, and return the uid of the first."""
    with Producer(settings=config.load(daemon.config_path)) as producer:
        uid = producer.send(TOPIC, LONG, key=EVIL, headers={EVIL: EVIL}, partition=0)
        producer.send(TOPIC, json.dumps({EVIL: EVIL}), key=LONG, partition=1)
        producer.send(TOPIC, LONG, key=EVIL, headers={EVIL: EVIL}, delay=3_600)
    stream = daemon.keys.stream(TOPIC, 0)
    daemon.link.execute("XADD", stream, "*", "payload", BYTES, "key", BYTES, "headers", BYTES)
    return str(uid)


def letters(daemon: Any) -> list[Any]:
    return dead_letters.messages(daemon.store, TOPIC).page(limit=100).rows


def waiting(daemon: Any) -> list[Any]:
    return retries.messages(daemon.store, TOPIC, "bill").page(limit=100).rows


def forge_records(daemon: Any) -> None:
    """Replace an instance's records, and write names that no client of streamqd writes."""
    link, keys, there = daemon.link, daemon.keys, Fleet(daemon.store, "default", 600.0)
    assert delayed.messages(daemon.store, TOPIC).page(limit=1).rows
    key = keys.instance("default", "one")
    summary = json.loads(link.execute("GET", key))
    summary |= dict.fromkeys(("host", "version"), EVIL)
    failure = {"error": EVIL, "count": 3, "seconds_ago": 1.0, "dependency": False}
    for each in summary["assignments"]:
        each |= {"handler": EVIL, "running": EVIL, "loop_blocker": EVIL, "failures": [failure]}
    link.execute("SET", key, json.dumps(summary))
    heartbeat = json.loads(link.execute("HGET", keys.info("default"), "one"))
    heartbeat |= dict.fromkeys(("host", "version"), EVIL)
    link.execute("HSET", keys.info("default"), "one", json.dumps(heartbeat))
    link.execute("HSET", keys.info("default"), EVIL, EVIL)
    link.execute("XGROUP", "CREATE", keys.stream(TOPIC, 0), EVIL, "0")
    with audit.acting_as(EVIL):
        directives.pause(there, Scope(TOPIC, 1, "ship"), EVIL)
        some = {EVIL: EVIL, "key": LONG}
        audit.record(daemon.store, TOPIC, EVIL, arguments=some, counts={EVIL: 1}, note=EVIL)


def fill_path(daemon: Any, console: ConsoleProcess, uid: str) -> Any:
    rows = letters(daemon)
    letter = next(each.id for each in rows if each.uid == uid)
    job = replay_letter(console, next(each.id for each in rows if each.uid != uid))

    def make(path: str) -> str:
        path = path.replace("DEAD_LETTER", letter).replace("UID", uid).replace("JOB", job)
        return path.lstrip("/")

    return make


@pytest.fixture(scope="module")
def page(browser, hostile_console):
    console, _ = hostile_console
    context = browser.new_context(viewport={"width": 360, "height": 800})
    log_in(context, console, "anna")
    yield context.new_page()
    context.close()


# Text outside of payloads, where order marks and similar characters are escaped.
PLAIN_TEXT = """[...document.querySelectorAll('pre, textarea, input')].forEach(e => e.remove());
    document.body.textContent"""


@pytest.mark.parametrize("name", PATHS)
def test_hostile_data_is_shown_as_text(page, hostile_console, name):
    console, path_with = hostile_console
    with contextlib.closing(Seen(page)) as seen:
        answer = page.goto(console.url + path_with(PATHS[name]))
        page.wait_for_load_state()

        assert answer.status == 200, page.inner_text("main")
        if name in {each.name for each in VIEWS if each.live}:
            page.wait_for_selector("#pulse[data-state=live]")
        assert seen.dialogs == []
        assert seen.errors == []
    assert page.locator("main img, main script, main iframe").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    content = page.content()
    assert "&lt;img src=x onerror=alert(1)&gt;" in content or name not in SHOWN
    text = page.evaluate(PLAIN_TEXT)
    assert [each for each in BIDI if each in text] == []
