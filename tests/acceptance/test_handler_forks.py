"""Processes that a handler forks never act as workers, for any kind of handler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemon import Daemon

NewDaemon = Callable[..., Daemon]

# `runs` gets one line per process and handled message, and `codes` the exit code of each child.
FORKING = """
import asyncio, multiprocessing, os, subprocess, sys, time

from streamqd import Message

own = 0


def note(name, text):
    with open(name, "a") as file:
        file.write(text + chr(10))


def calculate(number):
    note("sums", str(number * 2))


def do(message):
    word = message.text()
    note("runs", f"{os.getpid()} {message.uid}")
    if word in ("return", "raise", "exit"):
        child = os.fork()
        if child == 0 and word == "raise":
            raise ValueError("in the child")
        if child == 0 and word == "exit":
            sys.exit(3)
        if child:
            _, status = os.waitpid(child, 0)
            note("codes", f"{word} {os.waitstatus_to_exitcode(status)}")
    if word == "multiprocessing":
        context = multiprocessing.get_context("fork")
        child = context.Process(target=calculate, args=(21,))
        child.start()
        child.join()
        note("codes", f"{word} {child.exitcode}")
    if word == "subprocess":
        note("sums", subprocess.check_output(["echo", "42"], text=True).strip())


def plain(message: Message) -> None:
    do(message)


async def coroutine(message: Message) -> None:
    do(message)
    await asyncio.sleep(0)


def batch(messages: list[Message]) -> None:
    for message in messages:
        do(message)
"""
SHAPES: dict[str, dict[str, Any]] = {
    "one by one": {"handler": "work:plain"},
    "coroutine": {"handler": "work:coroutine"},
    "coroutine with a limit": {"handler": "work:coroutine", "timeout": "30s"},
    "threads": {"handler": "work:plain", "concurrency": 4},
    "coroutines": {"handler": "work:coroutine", "concurrency": 4},
    "coroutines with a limit": {
        "handler": "work:coroutine",
        "concurrency": 4,
        "timeout": "30s",
    },
    "batch": {"handler": "work:batch"},
    "by key": {"handler": "work:plain", "on_error": "hold-key"},
    "the last of its process": {"handler": "work:plain", "max_messages": 1},
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def lines(daemon: Daemon, name: str) -> list[str]:
    path = daemon.folder / name
    return path.read_text().splitlines() if path.exists() else []


@every_shape
def test_forked_child_exits_on_return_from_the_handler(new_daemon: NewDaemon, shape: str):
    """The forked child settles no message and logs why it exits, while the worker continues."""
    daemon = new_daemon(
        code=FORKING, consumer={"backoff": {"kind": "fixed", "base": "10ms"}} | SHAPES[shape]
    )
    with daemon:
        forks = ["return", "raise", "exit"]
        uids = daemon.send([*["ok"] * 10, "return", *["ok"] * 10, "raise", "exit", *["ok"] * 80])
        daemon.wait_settled(60.0)
        more = daemon.send(["ok"] * 50)
        daemon.wait_settled(60.0)

        # For a batch, the child handles the remaining messages of the list, because that loop
        # belongs to the handler.
        runs = Counter(line.split()[1] for line in lines(daemon, "runs"))
        if shape != "batch":
            assert runs == Counter(uids + more)
        assert set(runs) == {*uids, *more}
        codes = Counter(lines(daemon, "codes"))
        assert set(codes) == {f"{word} 70" for word in forks}
        told = daemon.events("worker.forked")
        assert len(told) == sum(codes.values()) >= 3
        assert all("os._exit" in each["error"] for each in told)
        assert {each["partition"] for each in told} == {0}
        assert daemon.letters() == []
        for trouble in ("worker.crashed", "worker.stalled", "request.fenced", "message.retried"):
            assert daemon.events(trouble) == [], trouble
        assert daemon.stop() == 0
        assert daemon.plain == []


@every_shape
def test_multiprocessing_and_subprocess_work_in_a_handler(new_daemon: NewDaemon, shape: str):
    """Both a `multiprocessing` process and a subprocess run to their end and exit in a handler."""
    daemon = new_daemon(code=FORKING, consumer=SHAPES[shape])
    with daemon:
        daemon.send(["ok", "multiprocessing", "subprocess", "multiprocessing", "ok"])
        daemon.wait_settled(60.0)
        assert lines(daemon, "sums") == ["42"] * 3
        assert lines(daemon, "codes") == ["multiprocessing 0"] * 2
        assert daemon.events("worker.forked") == daemon.events("worker.crashed") == []
        assert daemon.stop() == 0


def test_forked_child_of_on_start_never_acts_as_a_worker(new_daemon: NewDaemon):
    """A process that `on_start` forks never acts as a worker, so `on_start` may fork."""
    code = FORKING + "\n\ndef on_start(context):\n    os.fork()\n"
    with new_daemon(code=code, consumer={"handler": "work:plain"}) as daemon:
        uids = daemon.send(["ok"] * 40)
        daemon.wait_settled(60.0)
        assert Counter(line.split()[1] for line in lines(daemon, "runs")) == Counter(uids)
        assert len({line.split()[0] for line in lines(daemon, "runs")}) == 1
        daemon.wait_event("worker.forked")
        assert daemon.stop() == 0
