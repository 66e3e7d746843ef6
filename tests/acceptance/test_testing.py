"""`streamqd.testing` has the same outcomes as a real daemon, and users can use its fixtures."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

from streamqd.config import load
from streamqd.dead_letter import DeadLetter
from streamqd.examples import test_invoices
from streamqd.handlers import declared
from streamqd.producer import Outgoing, Producer
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.testing import run_to_end
from streamqd.testing.server import settle
from tests.support import users

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "test-a-handler.md"

HANDLERS = """
from __future__ import annotations

import os
from dataclasses import dataclass

from streamqd import Backoff, Dead, Message, Retry, handler

quick = Backoff(kind="fixed", base=0.001, jitter="none")


@dataclass
class Order:
    number: int


@handler(topic="plain", group="g", max_attempts=3, backoff=quick, dead_on=[KeyError])
def plain(msg: Message) -> None:
    word = msg.text()
    if word == "fail":
        raise OSError("the disk is full")
    if word == "again" and msg.attempt < 3:
        raise Retry(after=0.001)
    if word == "dead":
        raise Dead("no such customer")
    if word == "key":
        {}[word]


@handler(topic="typed", group="g", max_attempts=2, backoff=quick, dlq_error="message")
async def typed(order: Order, msg: Message) -> None:
    if msg.key != b"k":
        raise ValueError("a number needs a key")


# Its stack would end in our own code, which differs.
@handler(
    topic="kept", group="g", max_attempts=2, backoff=quick, on_error="block", timeout="50ms",
    dlq_error="message",
)
def kept(msg: Message) -> None:
    import threading

    threading.Event().wait(30)
"""

SENT = {
    "plain": [b"done", b"again", b"fail", b"dead", b"key"],
    "typed": [
        Outgoing({"number": 1}, key="k"),
        Outgoing({"number": "1"}, key="k"),
        {"number": 2},
    ],
    "kept": [b"x"],
}
SAME = ("group", "reason", "error_class", "error", "traceback", "attempts", "crashes", "handler")


@pytest.mark.skipif(users.are_enabled(), reason="the fixtures are the default user's")
def test_streamqd_testing_agrees_with_the_daemon(
    server, link: Connection, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    import ends  # type: ignore[import-not-found]

    expected = {}
    for topic, items in SENT.items():
        for item in items:
            last = run_to_end(getattr(ends, topic), item)[-1]
            payload = last.message.payload
            expected[topic, payload] = None if last.verdict == "ack" else last.dead_letter
    with Producer(server.url, settings=load(None, environ={})) as producer:
        for topic, items in SENT.items():
            producer.send_many(topic, items)

    settled = settle(server.url, tmp_path, ("ends",), None, timeout=60)

    found: dict[tuple[str, bytes], DeadLetter | None] = dict.fromkeys(expected)
    for topic in SENT:
        for _, flat in link.execute("XRANGE", keys.dlq(topic, 0), "-", "+"):
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            found[topic, fields[b"payload"]] = DeadLetter.read(fields)
    assert sum(each is not None for each in expected.values()) == 6
    for which, letter in found.items():
        ours = expected[which]
        # A time limit is raised in a frame of streamqd, which counts as user code if it runs from a
        # checkout.
        for name in SAME if which[0] == "kept" else (*SAME, "fingerprint"):
            assert getattr(letter, name, None) == getattr(ours, name, None), (which, name)
    assert settled.events[-1]["event"]
    declared[:] = [each for each in declared if not each["handler"].startswith("ends:")]


CONFIG = """
[redis]
url = "redis://production.example:6379"

[topics.plain]
partitions = 2

[[consumers]]
topic = "plain"
group = "two"
handler = "ends:plain"
timeout = "none"
"""


@pytest.mark.skipif(users.are_enabled(), reason="the fixtures are the default user's")
def test_settle_uses_the_server_of_the_test(
    server, link: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "production.toml"
    file.write_text(CONFIG.replace("ends:plain", "ends:kept"))
    with Producer(server.url, settings=load(None, environ={})) as producer:
        producer.send("plain", b"x")

    with pytest.raises(AssertionError, match="did not exit within 2 s:"):
        settle(server.url, tmp_path, (), file, timeout=2)

    file.write_text(CONFIG)
    settled = settle(server.url, tmp_path, (), file, timeout=60)
    assert link.execute("XPENDING", "stream:topic:{plain:p:0}", "two")[0] == 0
    assert [each["event"] for each in settled.events].count("daemon.ready") == 1


@pytest.mark.parametrize(
    "shown",
    [
        test_invoices.test_second_run_writes_the_same_invoice,
        test_invoices.test_daemon_writes_the_invoice,
    ],
)
def test_testing_page_shows_the_tested_example(shown: FunctionType) -> None:
    assert f"```python\n{inspect.getsource(shown)}```" in PAGE.read_text()


FAILING = """
def test_it(streamqd_daemon):
    streamqd_daemon("no_such_module")
"""


def test_settle_reports_why_the_daemon_did_not_start(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILING)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip

    assert ended.returncode == 1
    assert "the daemon exited with code 3" in ended.stdout
    assert "no module named no_such_module" in ended.stdout


def test_pytest_plugin_loads_only_requested_fixtures() -> None:
    program = "import sys, streamqd.pytest_plugin; print(sorted(sys.modules))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout

    assert "'streamqd.pytest_plugin'" in told
    assert "redis" not in told
    assert "streamqd.testing" not in told


def test_streamqd_testing_does_not_import_pytest() -> None:
    program = "import sys, streamqd.testing; print('pytest' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout

    assert told == "False\n"
