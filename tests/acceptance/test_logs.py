"""The log of a real daemon is bounded, contains no payloads, and never blocks the daemon."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd import logs
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.waiting import wait_until

NewDaemon = Callable[..., Daemon]

SECRET = "correct-horse-battery"

# These are all ways in which a handler can fail, each with the payload in its error.
LEAKY = """
import ctypes, os, signal, time

from streamqd import Dead, Message, Retry


class Odd(Exception):
    def __str__(self):
        return "odd " + self.args[0]


def obey(message: Message) -> None:
    text = message.text()
    word = text.split()[0]
    if word == "raise":
        raise ValueError(text)
    if word == "odd":
        raise Odd(text)
    if word == "chained":
        try:
            raise KeyError(text)
        except KeyError as error:
            raise RuntimeError(message.key) from error
    if word == "dead":
        raise Dead(text)
    if word == "retry":
        raise Retry(text)
    if word == "json":
        message.json()
    if word == "exit":
        os._exit(3)
    if word == "segv":
        ctypes.string_at(0)
    if word == "slow":
        time.sleep(30)
    if word == "hang":
        while True:
            try:
                time.sleep(30)
            except BaseException:
                pass
"""
WORDS = ("raise", "odd", "chained", "dead", "retry", "json", "exit", "segv", "slow", "hang")


NOISY = """
import ctypes, multiprocessing, threading, warnings

from streamqd import Message


def crash():
    ctypes.string_at(0)


def raise_in_a_thread():
    raise ValueError("Zoë")


def obey(message: Message) -> None:
    text = message.text()
    if text == "segv":
        crash()
    if text == "fork":
        child = multiprocessing.get_context("fork").Process(target=crash)
        child.start()
        child.join()
    warnings.warn("old: Zoë", FutureWarning)
    thread = threading.Thread(target=raise_in_a_thread)
    thread.start()
    thread.join()
"""


def test_every_line_on_standard_error_is_json(new_daemon: NewDaemon) -> None:
    """Every line is JSON, even from warnings, threads and the fault handler (40 per SIGSEGV)."""
    daemon = new_daemon(code=NOISY, consumer={"handler": "work:obey", "max_crashes": 1})
    with daemon:
        daemon.send(["fork", "segv", "fine"])
        crashed = daemon.wait_event("worker.crashed")
        child = daemon.wait_event("stack.dumped", child=crashed["child"], topic=TOPIC)
        daemon.wait_settled()
        assert "Segmentation fault" in child["traceback"]
        assert "in crash" in child["traceback"]
        stacks = "".join(each["traceback"] for each in daemon.events("stack.dumped"))
        assert stacks.count("Segmentation fault") == 2  # one from the handler's fork
        assert daemon.events("process.failed")[0]["traceback"].endswith("ValueError: Zoë")
        assert daemon.stop() == 0
    raw = daemon.log_path.read_bytes()
    assert raw.count("FutureWarning: old: Zoë".encode()) >= 1
    assert raw.count(b"\n") == len([json.loads(line) for line in raw.splitlines()])
    if jq := shutil.which("jq"):
        subprocess.run([jq, "."], input=raw, stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize("how", ["dlq_error", "redact_error"])
def test_payloads_are_never_logged(new_daemon: NewDaemon, how: str) -> None:
    """If the consumer forbids it, errors are not logged, because an error may quote its payload."""
    hook = f"\n\ndef redact_error(text):\n    return text.replace({SECRET!r}, '#')\n"
    daemon = new_daemon(
        code=LEAKY + (hook if how == "redact_error" else ""),
        consumer={
            "dlq_error": "class" if how == "dlq_error" else "traceback",
            "max_attempts": 2,
            "max_crashes": 2,
            "backoff": {"kind": "fixed", "base": "10ms"},
            "timeout": "300ms",
            "hard_timeout": "900ms",
        },
    )
    daemon.write_config(log={"format": "json", "level": "debug"})
    with daemon:
        sent = [f"{word} {SECRET}" for word in WORDS]
        daemon.send(sent)
        daemon.wait_settled(60.0)
        letters = daemon.letters()
        assert {letter["payload"] for letter in letters} == set(sent)
        assert daemon.stop() == 0

    kinds = Counter(event["event"] for event in daemon.events())
    assert kinds["message.dead_lettered"] >= len(WORDS)
    assert kinds["message.retried"] >= 5
    assert kinds["worker.crashed"] >= 4
    assert SECRET not in daemon.log_path.read_text(errors="replace")


def test_dead_letters_do_not_flood_the_log(new_daemon: NewDaemon) -> None:
    count = 2000
    with new_daemon() as daemon:
        daemon.send(["dead"] * count)
        daemon.wait_settled(60.0)

        # One more dead letter, a second later, makes the daemon log the number of lines that it
        # suppressed.
        second_over = time.monotonic() + 1.1
        wait_until(lambda: time.monotonic() > second_over, timeout=5.0, what="a second is over")
        daemon.send(["dead"])
        daemon.wait_settled()
        assert daemon.stop() == 0
        assert len(daemon.letters()) == count + 1

    lines = daemon.events("message.dead_lettered")
    assert len({line["pid"] for line in lines}) == 1
    per_second = Counter(line["ts"].partition(".")[0] for line in lines)
    # The limit's seconds do not start with the clock's, so two of them may share a second of the
    # clock.
    assert max(per_second.values()) <= 2 * logs.LINES_PER_SECOND
    assert len(lines) < count / 2
    assert len(lines) + sum(line.get("suppressed", 0) for line in lines) >= count


class Deaf(Daemon):
    """A daemon whose standard error is a full pipe, which only `read` empties."""

    def start(self, *_arguments: str) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"." * 511 + b"\n")
        os.set_blocking(writer, True)
        with (self.folder / "stdout").open("wb") as stdout:
            self.launch(stdout, writer)
        os.close(writer)

    def read(self) -> str:
        """Return everything that the pipe contains at the moment."""
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.reader, 1 << 16):
                parts.append(part)
        return b"".join(parts).decode()


@pytest.fixture
def deaf(server: object, link: object, tmp_path: Path) -> Iterator[Deaf]:
    daemon = Deaf(
        tmp_path,
        server.url,
        partitions=2,
        daemon={"lease_ttl": "2s"},
        consumer={"max_attempts": 2, "backoff": {"kind": "fixed", "base": "10ms"}},
    )
    daemon.write_config(log={"format": "json", "level": "debug"})
    yield daemon
    daemon.close()
    os.close(daemon.reader)


@pytest.mark.fault("F34")
def test_daemon_with_an_unread_log_keeps_working(deaf: Deaf) -> None:
    deaf.start()
    deaf.wait_for(lambda: len(deaf.pids()) == 2, what="both workers are there")
    uids = deaf.send(["ok", "fail", "dead", "ok"] * 10)
    deaf.wait_settled()
    epochs = deaf.epochs()
    pids = deaf.pids()

    # Leases are renewed and messages are handled for more than two TTLs.
    until = time.monotonic() + 4.5
    while time.monotonic() < until:
        uids += deaf.send(["ok", "dead"])
        deaf.wait_settled(2.0)
        for number in range(2):
            lease = deaf.keys.lease(TOPIC, number, GROUP)
            assert deaf.link.execute("PTTL", lease) > 0
    assert (deaf.epochs(), deaf.pids()) == (epochs, pids)
    assert all(deaf.ledger.records_for(uid, "start") for uid in uids)

    # A reader that comes late gets the lines that were kept, and each is complete. An idle worker
    # tries to write once per read, which may block for 5 s, and the pipe takes only 4 KiB each
    # time.
    text = deaf.read()
    deaf.send(["dead"] * 2)

    def told() -> bool:
        nonlocal text
        text += deaf.read()
        return '"event":"daemon.ready"' in text and '"event":"message.dead_lettered"' in text

    wait_until(told, timeout=60.0, what="the lines that were kept are written")
    lines = [line for line in text.splitlines() if line.strip(".")]
    assert all("event" in json.loads(line) for line in lines[:-1])
    assert deaf.stop() == 0
