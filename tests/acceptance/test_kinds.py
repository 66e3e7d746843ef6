"""A real daemon runs each kind of handler: coroutines, batches and typed payloads."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.daemon import GROUP, Daemon
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]

FAST = {"kind": "fixed", "base": "10ms", "jitter": "none"}

ASYNC = """
import asyncio, os
from pathlib import Path
from streamqd import Context, Message, Release, Result, SoftTimeout
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1")
ticks = 0
caught = 0

async def tick() -> None:
    global ticks
    while True:
        await asyncio.sleep(0.005)
        ticks += 1

async def on_start(context: Context) -> None:
    global ticking
    ticking = asyncio.create_task(tick())

async def on_stop() -> None:
    Path("stopped").write_text(str(asyncio.get_running_loop() is ticking.get_loop()))

async def obey(message: Message) -> object:
    global caught
    with ledger.run(message):
        word, *rest = message.text().split()
        if word == "await":
            while not Path(rest[0]).exists():
                await asyncio.sleep(0.002)
        elif word == "ticks":
            before = ticks
            while ticks == before:
                await asyncio.sleep(0)
        elif word == "catch":
            try:
                await asyncio.sleep(600)
            except SoftTimeout:
                await asyncio.sleep(0.01)  # it may still do what it must
                ledger.note(message, "caught")
        elif word == "nested":
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(600))
        elif word == "fail":
            raise ValueError("told to fail")
        elif word == "exit":
            os._exit(9)
        elif word == "release" and not Path("released").exists():
            Path("released").touch()
            raise Release
        elif word == "returns":
            return Result[rest[0].upper()]
"""


def test_coroutines_without_concurrency_run_one_at_a_time(new_daemon: NewDaemon):
    with new_daemon(code=ASYNC, consumer={"backoff": FAST}) as daemon:
        uids = daemon.send(["ok", "ticks", "returns ack"] * 20)
        daemon.wait_settled()
        found = [(each.kind, each.uid) for each in daemon.ledger.records("start", "end")]
        assert found == [(kind, uid) for uid in uids for kind in ("start", "end")]
        assert daemon.stop() == 0
        assert (daemon.folder / "stopped").read_text() == "True"


def test_coroutine_may_return_or_raise_every_verdict(new_daemon: NewDaemon):
    with new_daemon(code=ASYNC, consumer={"backoff": FAST, "max_attempts": 2}) as daemon:
        uids = daemon.send(["fail", "returns retry", "returns dead", "release", "ok"])
        daemon.wait_settled()
        letters = {each["uid"]: each["reason"] for each in daemon.letters()}
        assert letters == {uids[0]: "attempts", uids[1]: "attempts", uids[2]: "dead"}
        runs = {
            uid: [each.attempt for each in daemon.ledger.records_for(uid, "start")] for uid in uids
        }
        assert runs == dict(zip(uids, ([1, 2], [1, 2], [1], [1, 1], [1]), strict=True))
        (failed,) = (each for each in daemon.letters() if each["uid"] == uids[0])
        assert failed["traceback"].count("File ") == 1, "no frame of ours, nor of the loop"
        assert "in obey" in failed["traceback"]


def test_soft_limit_interrupts_a_waiting_coroutine(new_daemon: NewDaemon):
    settings = {"backoff": FAST, "max_attempts": 1, "timeout": "200ms"}
    with new_daemon(code=ASYNC, consumer=settings) as daemon:
        uids = daemon.send(["ok", "await never", "catch", "nested", "ok"])
        worker = daemon.pids()
        daemon.wait_settled()
        letters = {each["uid"]: each for each in daemon.letters()}
        assert set(letters) == {uids[1], uids[3]}
        assert letters[uids[1]]["errorClass"] == "streamqd.handlers.SoftTimeout"
        assert "0.2 s" in letters[uids[1]]["errorMessage"]
        assert [each.text for each in daemon.ledger.records_for(uids[2], "note")] == ["caught"]
        assert daemon.ledger.finished_uids(GROUP) == {uids[0], uids[2], uids[4]}
        assert daemon.pids() == worker


def test_coroutine_that_kills_its_process_is_charged(new_daemon: NewDaemon):
    with new_daemon(code=ASYNC, consumer={"max_crashes": 2}) as daemon:
        uids = daemon.send(["ok", "exit", "ok"])
        daemon.wait_settled()
        (letter,) = daemon.letters()
        assert (letter["uid"], letter["crashes"]) == (uids[1], "2")
        assert daemon.ledger.audit(GROUP) == Audit(lost=[uids[1]], repeated={uids[1]: 2})


# --- batches --------------------------------------------------------------------------------------

BATCH = """
import os
from pathlib import Path
from streamqd import Dead, Failures, Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1")

def obey(batch: list[Message]) -> None:
    words = [message.text() for message in batch]
    for message in batch:
        ledger.note(message, f"{len(batch)} {words.count('exit')}")
    if "exit" in words:
        os._exit(9)
    if "all" in words and batch[0].attempt == 1:
        raise ValueError("all have failed")
    failed = {}
    for message, word in zip(batch, words):
        if word == "fail":
            failed[message] = ValueError("told to fail")
        elif word == "dead":
            failed[message] = Dead("told to be dead")
    raise Failures(failed)
"""


def test_batch_may_fail_in_part(new_daemon: NewDaemon):
    settings = {"backoff": FAST, "max_attempts": 2, "batch": 10}
    with new_daemon(code=BATCH, consumer=settings) as daemon:
        daemon.pause()
        uids = daemon.send((["ok"] * 8 + ["fail", "dead"]) * 3)
        daemon.signal(signal.SIGCONT)
        daemon.wait_settled()
        letters = {each["uid"]: (each["reason"], each["attempts"]) for each in daemon.letters()}
        assert letters == {uids[8 + 10 * k]: ("attempts", "2") for k in range(3)} | {
            uids[9 + 10 * k]: ("dead", "1") for k in range(3)
        }
        runs = Counter(each.uid for each in daemon.ledger.records("note"))
        assert runs == {uid: 2 if uids.index(uid) % 10 == 8 else 1 for uid in uids}
        sizes = [each.text for each in daemon.ledger.records("note") if each.attempt == 1]
        assert "10 0" in sizes, "a batch was full"


def test_batch_that_raises_fails_as_a_whole(new_daemon: NewDaemon):
    with new_daemon(code=BATCH, consumer={"backoff": FAST}) as daemon:
        daemon.pause()
        uids = daemon.send(["all", "ok", "ok"])
        daemon.signal(signal.SIGCONT)
        daemon.wait_settled()
        attempts = {
            uid: [each.attempt for each in daemon.ledger.records_for(uid, "note")] for uid in uids
        }
        assert attempts == {uid: [1, 2] for uid in uids}
        assert daemon.letters() == []


def test_batch_that_kills_its_process_charges_one_message(new_daemon: NewDaemon):
    greedy = {"max_crashes": 2, "prefetch_bytes": "256MiB"}  # one read fetches all
    with new_daemon(code=BATCH, consumer=greedy) as daemon:
        daemon.pause()
        uids = daemon.send(["ok"] * 5 + ["exit"] + ["ok"] * 5)
        daemon.signal(signal.SIGCONT)
        daemon.wait_settled()
        (letter,) = daemon.letters()
        assert (letter["uid"], letter["reason"], letter["crashes"]) == (uids[5], "crashes", "2")
        assert letter["exitCode"] == "9"
        crashes = daemon.events("worker.crashed")
        charged = ["m:" + uids[5].rpartition("/")[2]] * 2
        assert [each["charged"] for each in crashes if "charged" in each] == charged
        assert "charged" not in crashes[0]
        # Each crash halves the suspects of the next round, until the guilty message runs alone.
        assert [each.text for each in daemon.ledger.records_for(uids[5], "note")] == [
            *("11 1", "5 1", "2 1"),
            *("1 1", "1 1"),
        ]
        beside = {
            uid: [
                each.text
                for each in daemon.ledger.records_for(uid, "note")
                if each.text.endswith(" 1")
            ]
            for uid in uids
            if uid != uids[5]
        }
        assert all(texts == ["11 1", "5 1", "2 1"][: len(texts)] for texts in beside.values())
        assert sorted(map(len, beside.values())) == [1] * 6 + [2] * 3 + [3]
        assert daemon.traces() == []
        assert daemon.stop() == 0


# --- typed payloads -------------------------------------------------------------------------------

TYPED = """
from __future__ import annotations
from dataclasses import dataclass
from streamqd import Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1")

@dataclass
class Order:
    id: int
    lines: list[str]

def obey(order: Order, msg: Message) -> None:
    assert isinstance(order, Order)
    with ledger.run(msg):
        ledger.note(msg, f"{order.id} {order.lines}")
"""


def test_undecodable_payload_is_dead_lettered_immediately(new_daemon: NewDaemon):
    with new_daemon(code=TYPED) as daemon:
        uids = daemon.send(['{"id": 7, "lines": ["a"]}', '{"id": "x", "lines": []}', "{"])
        daemon.wait_settled()
        letters = {each["uid"]: each for each in daemon.letters()}
        assert set(letters) == set(uids[1:])
        for letter in letters.values():
            assert (letter["reason"], letter["attempts"]) == ("undecodable", "1")
            assert letter["errorClass"] == "streamqd.handlers.Undecodable"
            assert letter["traceback"] == ""
        assert letters[uids[1]]["errorMessage"] == (
            "payload is not a valid Order: Expected `int`, got `str` - at `$.id`"
        )
        assert [each.text for each in daemon.ledger.records("note")] == ["7 ['a']"]


# --- handlers refused at the start ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "settings", "sentence"),
    [
        (
            "def obey(a, b): pass",
            {},
            "work:obey must take exactly one argument, the message, or a payload and the message",
        ),
        (
            "from streamqd import Message\ndef obey(m: Message): pass",
            {"batch": 10},
            "consumers[0].batch: work:obey takes one message; annotate its parameter with",
        ),
        (
            "from streamqd import Message\ndef obey(m: list[Message]): pass",
            {"concurrency": 4},
            "consumers[0].concurrency: work:obey is a batch handler, and batches run one at a time",
        ),
        (
            "def obey(m: 'Missing'): pass",
            {},
            "the annotation Missing of m cannot be resolved",
        ),
        (
            "import threading\ndef obey(m: threading.Lock): pass",
            {},
            "which cannot be decoded",
        ),
    ],
)
def test_unsuitable_handler_is_refused_at_the_start(
    new_daemon: NewDaemon, code: str, settings: dict[str, object], sentence: str
):
    daemon = new_daemon(code=code, consumer=settings)
    daemon.start()
    assert daemon.wait() == 3
    assert sentence in daemon.tail()
    assert "Traceback" not in daemon.tail()
