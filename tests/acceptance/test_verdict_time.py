"""A run lasts until its verdict is stored, both for blame and for its two time limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemon import Daemon

NewDaemon = Callable[..., Daemon]

FAST = {"kind": "fixed", "base": "10ms", "jitter": "none"}

# These handlers of every form raise errors that do harm when the daemon inspects them.
HARMFUL = """
import os, re, time

from streamqd import Message


class Deadly(Exception):
    def __str__(self):
        os._exit(9)


class Endless(Exception):
    def __str__(self):
        while True:
            time.sleep(0.01)


class Slow(Exception):
    pass


class Shy(Exception):
    @property
    def __class__(self):
        raise ValueError("nobody asks me")


def redact_error(text):
    if "aaaa" in text:
        re.match(r"(a+)+$", "a" * 60 + "b")  # does not end within a lifetime
    return text


def do(message):
    word = message.text()
    if word == "deadly":
        raise Deadly
    if word == "endless":
        raise Endless
    if word == "slow":
        raise Slow("aaaa")
    if word == "shy":
        raise Shy("no")
    if word == "spoil":
        spoil(message)
    if word == "spoil and fail":
        spoil(message)
        raise ValueError("spoilt")


def spoil(message):
    message.id_bytes = b"nothing"
    message.fields.clear()
    message.failures_in_place = 99


def plain(message: Message) -> None:
    do(message)


async def coroutine(message: Message) -> None:
    do(message)


def batch(messages: list[Message]) -> None:
    failed = {}
    for message in messages:
        try:
            do(message)
        except Exception as error:
            failed[message] = error
    if failed:
        from streamqd import Failures
        raise Failures(failed)
"""
SHAPES: dict[str, dict[str, Any]] = {
    "one by one": {"handler": "work:plain"},
    "coroutine": {"handler": "work:coroutine"},
    "threads": {"handler": "work:plain", "concurrency": 3},
    "coroutines": {"handler": "work:coroutine", "concurrency": 3},
    "batch": {"handler": "work:batch"},
    "in place": {"handler": "work:plain", "on_error": "block"},
    "by key": {"handler": "work:plain", "on_error": "hold-key"},
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def configure_daemon(new_daemon: NewDaemon, shape: str, **consumer: Any) -> Daemon:
    return new_daemon(code=HARMFUL, consumer={"backoff": FAST} | SHAPES[shape] | consumer)


@every_shape
def test_error_that_kills_the_process_when_printed_is_charged(new_daemon: NewDaemon, shape: str):
    """If `str(error)` ends the process, its message is charged with a crash, for every handler."""
    with configure_daemon(new_daemon, shape, max_crashes=1) as daemon:
        uids = daemon.send(["ok", "deadly", "ok"])
        daemon.wait_settled(60.0)

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[1]
        assert (letter["reason"], letter["crashes"]) == ("crashes", "1")
        assert {each.get("charged") for each in daemon.events("worker.crashed")} != {None}
        assert daemon.stop() == 0


@every_shape
@pytest.mark.parametrize("word", ["endless", "slow"])
def test_hard_limit_applies_while_an_error_is_inspected(
    new_daemon: NewDaemon, shape: str, word: str
):
    """An error text or `redact_error` that never ends exceeds `hard_timeout`, and is charged."""
    with configure_daemon(new_daemon, shape, max_crashes=1, hard_timeout="1s") as daemon:
        uids = daemon.send(["ok", word, "ok"])
        daemon.wait_settled(60.0)

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[1]
        assert (letter["reason"], letter["crashes"]) == ("crashes", "1")
        killed = [each["reason"] for each in daemon.events("worker.killed")]
        assert killed
        assert set(killed) == {"hard-limit"}
        assert daemon.stop() == 0


@every_shape
@pytest.mark.parametrize("word", ["endless", "slow"])
def test_soft_limit_interrupts_the_inspection_of_an_error(
    new_daemon: NewDaemon, shape: str, word: str
):
    """`timeout` interrupts `redact_error` or the text of an error, and the verdict is kept."""
    with configure_daemon(new_daemon, shape, max_attempts=1, timeout="500ms") as daemon:
        uids = daemon.send(["ok", word, "ok"])
        daemon.wait_settled(60.0)

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[1]
        assert (letter["reason"], letter["crashes"]) == ("attempts", "0")
        assert letter["errorClass"] == ("work.Slow" if word == "slow" else "work.Endless")
        assert "SoftTimeout" in letter["errorMessage"]
        assert daemon.events("worker.crashed") == []
        assert daemon.stop() == 0


@every_shape
def test_handler_cannot_change_the_settlement_of_its_message(new_daemon: NewDaemon, shape: str):
    """A handler that overwrites the attributes of its message does not change how it is settled."""
    with configure_daemon(new_daemon, shape, max_attempts=2) as daemon:
        uids = daemon.send(["ok", "spoil", "spoil and fail", "ok"])
        daemon.wait_settled(60.0)

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[2]
        assert (letter["reason"], letter["attempts"]) == ("attempts", "2")
        assert letter["payload"] == "spoil and fail"
        assert daemon.events("worker.crashed") == []
        assert daemon.pending() == 0
        assert daemon.stop() == 0


@every_shape
def test_uninspectable_exception_is_a_failure(new_daemon: NewDaemon, shape: str):
    """An exception that cannot be inspected is a failure.

    Its message is settled, because neither the worker nor the thread of its lane dies.
    """
    with configure_daemon(new_daemon, shape, max_attempts=2) as daemon:
        uids = daemon.send(["ok", "shy", "ok"])
        daemon.wait_settled(60.0)

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[1]
        assert (letter["reason"], letter["attempts"], letter["crashes"]) == ("attempts", "2", "0")
        assert daemon.events("worker.crashed") == []
        assert daemon.plain == []
        assert daemon.stop() == 0
