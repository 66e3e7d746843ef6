"""Scenarios of a worker: all the calls to Redis in one life, with a ledger of the runs."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from streamqd.handlers import Dead
from streamqd.message import Message
from streamqd.model import Backoff, Lease
from streamqd.scoreboard import Scoreboard
from streamqd.store import leases
from streamqd.worker import turns, worker
from streamqd.worker.control_channel import ExitCode
from tests.contract.harness import ASSIGNMENT, OWNER, TTL, Harness
from tests.faults.scenario_runner import ScenarioContext
from tests.support.ledger import Audit, Ledger
from tests.support.life import open_lives
from tests.support.waiting import wait_until

LAST = "999-0"
FAILING, DYING, BURIED, MISSING_ENTRY = "2-0", "12-0", "3-0", "0-5"


def _uid(entry_id: str) -> str:
    return f"{ASSIGNMENT.topic}/{ASSIGNMENT.partition}/{entry_id}"


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Return a ledger in memory, where syncing takes no time."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="sqf-", dir=memory if memory.is_dir() else None))
    opened = Ledger(folder / "ledger")
    yield opened
    opened.close()
    shutil.rmtree(folder)


def seed(harness: Harness, book: Ledger) -> None:
    """Create an assignment with new entries and with all kinds of entries left by a lost owner."""
    harness.groups()
    harness.own("lost")
    sort = {FAILING: "fail", DYING: "dead", "15-0": "fail"}
    inherited = [MISSING_ENTRY, "1-0", FAILING, BURIED, "4-0"]
    for entry_id in inherited:
        harness.add(entry_id, "payload", sort.get(entry_id, "ok"))
    harness.add(
        "1-0", "payload", "ok", "originalId", "500-0", "retryCount", "1", stream=harness.retry
    )
    harness.fetch(len(inherited))
    harness.fetch(1, stream=harness.retry)
    harness.do("XTRIM", harness.stream, "MINID", "1-0")
    harness.do("HSET", harness.attempts, f"m:{BURIED}:c", "9", "m:4-0:c", "1")
    for entry_id in ("6-0", "7-0"):
        harness.add(entry_id, "payload", "ok")
    harness.fetch(2, consumer="legacy")
    fresh = [f"{number}-0" for number in range(10, 20)]
    for entry_id in fresh:
        harness.add(entry_id, "payload", sort.get(entry_id, "ok"))
    harness.add(
        "2-0", "payload", "ok", "originalId", "501-0", "retryCount", "1", stream=harness.retry
    )
    for entry_id in [*inherited[1:], "6-0", "7-0", *fresh, "500-0", "501-0", LAST]:
        book.record_sent(_uid(entry_id), "")
    # The assignment was never released, so each pending entry runs alone, under its own mark.
    epoch = int(harness.do("HGET", harness.fence, "epoch"))
    harness.do("DEL", harness.lease)
    assert (
        harness.link.run(
            leases.acquire(harness.keys, Lease(ASSIGNMENT, "t1", epoch), TTL, OWNER)
        ).word
        == "OK"
    )


def play(context: ScenarioContext, **consumer: Any) -> None:
    """Play one life of a worker, followed by the supervisor's part."""
    harness = context.harness
    slot = Scoreboard(1).allot(ASSIGNMENT)
    slot.reclaim_requested = 1
    with ledger() as book, open_lives(slot) as make, _short_waits():
        seed(harness, book)
        life = make(context.proxy.url)

        def work(message: Message) -> None:
            with book.run(message):
                word = message.text()
                if word == "fail":
                    raise ValueError("no")
                if word == "dead":
                    raise Dead("never")
                if word == "stop":
                    life.stop()

        def send_the_last() -> None:
            # This entry arrives while the worker is idle, after it has compared the number of
            # pending entries.
            wait_until(lambda: context.sent("XPENDING"), what="the worker is idle")
            link_again.execute("XADD", harness.stream, LAST, "payload", "stop")

        link_again = context.server_link()
        sender = threading.Thread(target=send_the_last)
        sender.start()
        life.run(life.worker("t1", reclaim_idle=0.0, **consumer), work)
        sender.join()
        link_again.close()
        # The worker's slot holds the entries that it could no longer acknowledge.
        done = slot.batch().done
        harness.link.run(
            leases.refence(harness.keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, None, b"", done)
        )
        judge(harness, book)


def judge(harness: Harness, book: Ledger) -> None:
    """Check that every message ran once and ended up in its place."""
    unhandled = sorted(_uid(each) for each in (FAILING, "15-0", DYING, BURIED))
    assert book.audit(ASSIGNMENT.group) == Audit(lost=unhandled)
    state = harness.state()
    assert sorted(state["items"]) == ["m:15-0", f"m:{FAILING}"]
    letters = sorted(letter["originalId"].decode() for letter in state["dlq"].entries.values())
    assert letters == sorted([DYING, BURIED])
    assert "attempts" not in state
    for stream in ("stream", "retry"):
        assert state[stream].groups["hits"][1] == {}, "pending"


@contextmanager
def _short_waits() -> Iterator[None]:
    """Shorten the waits of a worker."""
    waits = mock.patch.multiple(turns, BLOCK_SECONDS=0.02, DEFER_SECONDS=0.02)
    pauses = {"RECONNECT_SECONDS": (0.001, 0.01), "IDLE_CHECK_SECONDS": 0.0}
    with waits, mock.patch.multiple(worker, **pauses):
        yield


def one_at_a_time(context: ScenarioContext) -> None:
    """Play the life of a worker with the settings that most consumers use."""
    play(context)


def several_at_once(context: ScenarioContext) -> None:
    """Play the life of a worker with threads, which finish messages in any order."""
    play(context, concurrency=3, order="none")


def on_a_full_server(context: ScenarioContext) -> None:
    """Read and acknowledge through scripts, because the server's memory is full."""
    harness = context.harness
    slot = Scoreboard(1).allot(ASSIGNMENT)
    with ledger() as book, open_lives(slot) as make, _short_waits():
        harness.groups()
        harness.own("t1")
        ids = [f"{number}-0" for number in range(1, 8)]
        for entry_id in ids:
            harness.add(entry_id, "payload", "ok")
            book.record_sent(_uid(entry_id), "")
        life = make(context.proxy.url)
        seen: list[str] = []

        def work(message: Message) -> None:
            with book.run(message):
                seen.append(message.id)
                if len(seen) == len(ids):
                    life.stop()

        with harness.full_memory():
            life.run(life.worker("t1", prefetch_max=2), work)
            done = slot.batch().done
            harness.link.run(
                leases.refence(harness.keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, None, b"", done)
            )
        assert book.audit(ASSIGNMENT.group) == Audit()
        assert harness.state()["stream"].groups["hits"] == ("7-0", {})


def in_place(context: ScenarioContext) -> None:
    """Retry a message in place at the head of its partition. Each attempt counts once."""
    harness = context.harness
    slot = Scoreboard(1).allot(ASSIGNMENT)
    backoff = Backoff("fixed", 0.001, 0.001, "none")
    with ledger() as book, open_lives(slot) as make, _short_waits():
        harness.groups()
        harness.own("t1")
        for entry_id, word in (("1-0", "ok"), (FAILING, "fail"), ("3-0", "ok"), (LAST, "stop")):
            harness.add(entry_id, "payload", word)
            book.record_sent(_uid(entry_id), "")
        life = make(context.proxy.url)

        def work(message: Message) -> None:
            with book.run(message):
                if message.text() == "fail":
                    raise ValueError("no")
                if message.text() == "stop":
                    life.stop()

        held = {"on_error": "block", "max_attempts": 3, "backoff": backoff}
        life.run(life.worker("t1", **held), work)
        done = slot.batch().done
        harness.link.run(
            leases.refence(harness.keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, None, b"", done)
        )
        failing = _uid(FAILING)
        assert book.audit(ASSIGNMENT.group) == Audit(lost=[failing], repeated={failing: 3})
        assert [each.attempt for each in book.records_for(failing, "start")] == [1, 2, 3]
        assert [each.uid for each in book.records("end")] == [
            _uid(each) for each in ("1-0", "3-0", LAST)
        ]
        state = harness.state()
        assert "dlq" in state, "the message is not a dead letter"
        assert [each["originalId"] for each in state["dlq"].entries.values()] == [b"2-0"]
        assert "attempts" not in state


def a_group_that_is_destroyed(context: ScenarioContext) -> None:
    """Destroy the group while the worker runs. Its owner recreates the group at its position."""
    harness = context.harness
    slot = Scoreboard(1).allot(ASSIGNMENT)
    with ledger() as book, open_lives(slot) as make, _short_waits():
        harness.groups()
        harness.own("t1")
        words = {"3-0": "destroy", "4-0": "fail", LAST: "stop"}
        for entry_id in [*(f"{number}-0" for number in range(1, 9)), LAST]:
            harness.add(entry_id, "payload", words.get(entry_id, "ok"))
            book.record_sent(_uid(entry_id), "")
        harness.add(
            "1-0", "payload", "ok", "originalId", "500-0", "retryCount", "1", stream=harness.retry
        )
        book.record_sent(_uid("500-0"), "")
        life = make(context.proxy.url)
        destroyed = []

        def work(message: Message) -> None:
            with book.run(message):
                word = message.text()
                if word == "destroy" and not destroyed:
                    destroyed.append(message.id)
                    for stream in (harness.stream, harness.retry):
                        assert harness.do("XGROUP", "DESTROY", stream, ASSIGNMENT.group) == 1
                if word == "fail":
                    raise ValueError("no")
                if word == "stop":
                    life.stop()

        # There are few entries, because the worker reads the stop command only once the group
        # exists again.
        code = life.run(life.worker("t1", prefetch_max=2), work)
        unknown = code == ExitCode.NO_GROUP
        if unknown:
            # The connection was lost before the worker learned of the group, so its reads are in
            # doubt and it starts at its floor. Losses that come later do not lead here.
            assert context.struck
            assert context.lost is not None
            assert context.lost.kind not in ("group_restore", "message_recover")
            harness.groups()
            code = life.run(life.worker("t1", prefetch_max=2), work)
        assert code == ExitCode.STOPPED
        done = slot.batch().done
        harness.link.run(
            leases.refence(harness.keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, None, b"", done)
        )
        found = book.audit(ASSIGNMENT.group)
        assert found == Audit(lost=[_uid("4-0")], repeated=found.repeated if unknown else {})
        state = harness.state()
        assert [*state["items"]] == ["m:4-0"]
        assert state["stream"].groups == {"hits": (LAST, {})}
        assert state["retry"].groups["hits"][1] == {}
