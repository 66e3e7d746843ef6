"""A single worker on a real server, with the tests acting as its supervisor."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config, process
from streamqd.model import Lease
from streamqd.process import Child, Exit
from streamqd.scoreboard import DELAY_BUCKETS, Scoreboard, WorkerCommand, WorkerState, now_ns
from streamqd.store import leases, messages
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.worker import ExitCode, Grant, run_worker
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support import users
from tests.support.daemon import toml
from tests.support.servers import Server
from tests.support.waiting import wait_until

TTL = 60.0

# The handler executes its payload and records its events in a Redis list.
HANDLER = """
import os, threading, time
from pathlib import Path
import redis
from streamqd import Dead, Message, Retry

HERE = Path(__file__).parent
told = None

def on_start(context):
    global told
    told = redis.Redis.from_url((HERE / "url").read_text())
    if (HERE / "refuse").exists():
        raise RuntimeError("no database today")
    told.rpush("told", f"on_start {context.assignment} {context.instance}")

def on_stop():
    told.rpush("told", "on_stop")
    if (HERE / "refuse-stop").exists():
        raise RuntimeError("cannot say goodbye")

def go(message):
    word = message.text()
    told.rpush("told", f"{word} {message.id} {message.attempt}")
    if word == "gate":
        while not (HERE / "open").exists():
            time.sleep(0.001)
    elif word == "fail":
        raise ValueError("no")
    elif word == "dead":
        raise Dead("never")
    elif word == "exit":
        os._exit(0)
    elif word == "crawl":
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.001)
    told.rpush("told", f"done {message.id}")

def go_many(messages: list[Message]):
    for message in messages:
        go(message)
"""


class Bench:
    """An assignment with a group, a lease, a slot, and at most one worker."""

    def __init__(self, harness: Harness, server: Server, folder: Path) -> None:
        self.harness = harness
        self.server = server
        self.folder = folder
        self.board = Scoreboard(slots=2)
        self.slot = self.board.allot(ASSIGNMENT)
        self.link = connect(server.settings, timeout=10.0, name="test:bench")
        self.child: Child | None = None
        self.token = "t1"
        self.epoch = 0
        (folder / "work.py").write_text(textwrap.dedent(HANDLER))
        (folder / "url").write_text(server.url)

    def own(self, token: str = "t1") -> None:
        self.token = token
        seen = int(self.harness.do("HGET", self.harness.fence, "epoch") or 0)
        self.epoch = self.harness.own(token, seen_epoch=seen)

    def start(self, *, cautious: bool = False, trusted: bool = True, **consumer: Any) -> None:
        """Fork a worker, as the supervisor does."""
        path = self.folder / "streamq.toml"
        tables = {
            "redis": {"url": self.server.url, **users.redis_section("daemon")},
            "daemon": {"instance": "west-1", "state_dir": str(self.folder)},
            "topics": {ASSIGNMENT.topic: {"partitions": 1}},
            "consumers": [
                {
                    "topic": ASSIGNMENT.topic,
                    "group": ASSIGNMENT.group,
                    "handler": "work:go",
                    **consumer,
                }
            ],
        }
        path.write_text(toml(tables))
        settings = config.load(path)
        orders = Grant(Lease(ASSIGNMENT, self.token, self.epoch), cautious)
        self.trust(TTL if trusted else -1.0)

        def run(control: Any) -> int:
            return run_worker(orders, settings, settings.consumers[0], self.slot, control)

        forget = [self.link.detach, self.harness.link.detach]
        self.child = process.spawn(run, title="test: worker", forget=forget)
        self.slot.pid = self.child.pid

    def trust(self, seconds: float) -> None:
        self.slot.trusted_until_ns = now_ns() + int(seconds * 1e9)

    def send_command(self, command: WorkerCommand) -> None:
        assert self.child is not None
        self.slot.command = command
        self.child.send(b"look")

    def wait_exit(self, timeout: float = 10.0) -> Exit:
        assert self.child is not None
        assert process.wait_readable([self.child.pidfd], timeout), "it does not end"
        exit_ = self.child.reap()
        assert exit_ is not None
        self.child = None
        return exit_

    def stop(self) -> Exit:
        self.send_command(WorkerCommand.STOP)
        return self.wait_exit()

    def handler_lines(self) -> list[str]:
        return [line.decode() for line in self.harness.do("LRANGE", "told", 0, -1)]

    def runs(self, *words: str) -> list[str]:
        """Return the IDs of the runs that have started, in order."""
        known = ("ok", "gate", "fail", "dead", "exit", "crawl")
        return [
            line.split()[1] for line in self.handler_lines() if line.split()[0] in (words or known)
        ]

    def wait_handler_line(self, start: str) -> None:
        wait_until(
            lambda: any(line.startswith(start) for line in self.handler_lines()),
            what=f"the handler reports {start!r} in {self.handler_lines()}",
        )

    def wait_idle(self) -> None:
        """Wait until everything has been read and acknowledged."""

        def idle() -> bool:
            call = messages.snapshot(self.harness.keys, ASSIGNMENT)
            found = messages.Snapshot.parse(self.link.run(call))
            assert found is not None
            return not (found.unread or found.pending or found.retry_unread or found.retry_pending)

        wait_until(idle, what="everything is read and settled")

    def pending(self) -> list[str]:
        rows = [
            row
            for stream in (self.harness.stream, self.harness.retry)
            for row in self.harness.do("XPENDING", stream, ASSIGNMENT.group, "-", "+", 1000)
        ]
        return [row[0].decode() for row in rows]

    def close(self) -> None:
        if self.child is not None:
            self.child.kill_group()
            self.wait_exit()
        self.link.close()


@pytest.fixture
def bench(link: Connection, keys: Keys, server: Server, tmp_path: Path) -> Iterator[Bench]:
    harness = Harness(link, keys)
    harness.groups()
    made = Bench(harness, server, tmp_path)
    made.own()
    yield made
    made.close()


def add(bench: Bench, *words: str, first: int = 1, stream: str = "") -> list[str]:
    """Write messages with the IDs 1-1, 2-1 …, and return these IDs."""
    ids = [f"{number}-1" for number in range(first, first + len(words))]
    for entry_id, word in zip(ids, words, strict=True):
        bench.harness.add(entry_id, "payload", word, stream=stream)
    return ids


# --- ordinary operation ---------------------------------------------------------------------------


def test_worker_handles_messages_until_stopped(bench: Bench):
    ids = add(bench, *["ok"] * 40)
    bench.start()
    bench.wait_idle()
    more = add(bench, *["ok"] * 3, first=50)
    bench.wait_idle()
    assert bench.slot.state == WorkerState.READY
    assert bench.stop() == Exit(ExitCode.STOPPED, None)
    assert bench.runs() == ids + more
    assert bench.handler_lines()[0] == f"on_start {ASSIGNMENT} west-1"
    assert bench.handler_lines()[-1] == "on_stop"
    counts = {name: bench.slot.counter(name) for name in ("fetched", "acked", "failed", "fenced")}
    assert counts == {"fetched": 43, "acked": 43, "failed": 0, "fenced": 0}
    assert sum(bench.slot.histogram("handle")[0]) == 43
    assert sum(bench.slot.histogram("ack")[0]) == 43
    assert sum(bench.slot.histogram("delay")[0]) == 43
    assert bench.slot.state == WorkerState.QUIET


@pytest.mark.parametrize(
    "consumer", [{}, {"concurrency": 4}, {"handler": "work:go_many", "batch": 3}]
)
def test_delays_start_at_the_time_of_the_entry(bench: Bench, consumer: dict[str, Any]):
    """By the server's clock, five delays are 3 minutes and one is short. A retry is not counted."""
    seconds, micros = bench.harness.do("TIME")
    old = int(seconds) * 1_000 + int(micros) // 1_000 - 180_000
    for number in range(5):
        bench.harness.add(f"{old}-{number}", "payload", "ok")
    bench.start(**consumer)
    bench.wait_idle()
    bench.harness.add("*", "payload", "ok")
    bench.harness.add("*", "payload", "ok", "originalId", f"{old}-0", stream=bench.harness.retry)
    bench.wait_idle()
    bench.stop()
    counts, total = bench.slot.histogram("delay")
    slow = bisect_right(DELAY_BUCKETS, 180.0)
    assert counts[slow] == 5
    assert sum(counts[:12]) == sum(counts) - 5 == 1  # below 2.1 s
    assert 890 < total < 1_200


def test_stop_finishes_the_message_and_releases_the_rest(bench: Bench):
    ids = add(bench, "gate", *["ok"] * 20)
    # One read fetches all of them, because the group has read them before.
    bench.harness.fetch(30)
    bench.start()
    bench.wait_handler_line("gate")
    in_flight = bench.slot.in_flight
    bench.send_command(WorkerCommand.STOP)
    (bench.folder / "open").touch()
    assert bench.wait_exit() == Exit(ExitCode.STOPPED, None)
    assert bench.runs() == ids[:1]
    assert bench.pending() == ids[1:], "and its acknowledgment is out"
    assert bench.slot.counter("released") == in_flight - 1 > 0


def test_pause_settles_finished_messages_and_starts_none(bench: Bench):
    ids = add(bench, "ok", "gate", "ok", "ok")
    bench.harness.fetch(10)
    bench.start()
    bench.wait_handler_line("gate")
    bench.send_command(WorkerCommand.PAUSE)
    (bench.folder / "open").touch()
    wait_until(lambda: bench.slot.state == WorkerState.PAUSED, what="it is paused")
    assert bench.pending() == ids[2:]
    add(bench, "ok", first=9)
    bench.send_command(WorkerCommand.NONE)
    bench.wait_idle()
    assert bench.runs() == [*ids, "9-1"]


@pytest.mark.fault("F11")
def test_untrusted_lease_starts_nothing(bench: Bench):
    (entry,) = add(bench, "ok")
    bench.start(trusted=False)
    wait_until(lambda: bench.pending() == [entry], what="it is fetched")
    # The worker checks the time every 50 ms, and has to see an untrusted lease several times.
    seen = now_ns()
    wait_until(lambda: now_ns() - seen > 200e6, what="some looks")
    assert bench.runs() == []
    bench.trust(TTL)
    bench.wait_idle()
    assert bench.runs() == [entry]


def test_stop_works_with_an_untrusted_lease(bench: Bench):
    (entry,) = add(bench, "ok")
    bench.start(trusted=False)
    wait_until(lambda: bench.pending() == [entry], what="it is fetched")
    assert bench.stop() == Exit(ExitCode.STOPPED, None)
    assert bench.runs() == []


def test_worker_exits_when_its_supervisor_disappears(bench: Bench):
    bench.start()
    wait_until(lambda: bench.slot.state == WorkerState.READY, what="it is ready")
    assert bench.child is not None
    bench.child.control.shutdown(2)
    assert bench.wait_exit() == Exit(1, None)


@pytest.mark.parametrize("limit", [1, 7])
def test_worker_is_replaced_after_max_messages(bench: Bench, limit: int):
    ids = add(bench, *["ok"] * 20)
    bench.start(max_messages=limit)
    assert bench.wait_exit() == Exit(ExitCode.RECYCLE, None)
    assert bench.runs() == ids[:limit]
    left = bench.harness.do("XPENDING", bench.harness.stream, ASSIGNMENT.group)[0]
    assert bench.slot.counter("acked") == limit
    assert bench.slot.counter("fetched") == limit + left


# --- pending entries come first -------------------------------------------------------------------


def test_inherited_entries_run_first_in_order(bench: Bench):
    for entry_id in ("1-1", "3-1", "5-1"):
        bench.harness.add(entry_id, "payload", "ok")
    for entry_id in ("2-1", "4-1"):
        bench.harness.add(entry_id, "payload", "ok", stream=bench.harness.retry)
    bench.harness.fetch(10)
    bench.harness.fetch(10, stream=bench.harness.retry)
    bench.harness.add("6-1", "payload", "ok")
    bench.start()
    bench.wait_idle()
    assert bench.runs() == ["1-1", "2-1", "3-1", "4-1", "5-1", "6-1"]


def test_inherited_entries_may_exceed_one_page(bench: Bench):
    ids = add(bench, *["ok"] * 300)
    assert len(bench.harness.fetch(300)) == 300
    bench.start()
    bench.wait_idle()
    assert bench.stop() == Exit(ExitCode.STOPPED, None), "it counts what the server has answered"
    assert bench.runs() == ids
    assert bench.slot.counter("acked") == 300


@pytest.mark.fault("F7")
def test_inherited_entries_are_marked_before_their_runs(bench: Bench):
    ids = add(bench, "gate", "ok")
    bench.harness.fetch(10)
    bench.harness.do("DEL", bench.harness.lease)
    bench.own("t2")  # t1 has not released the assignment
    bench.start()
    bench.wait_handler_line("gate")
    fence = dict(zip(*[iter(bench.harness.do("HGETALL", bench.harness.fence))] * 2, strict=True))
    assert fence[b"mark"] == b"m:" + ids[0].encode()
    assert fence[b"quarantine"] == b"1"
    (bench.folder / "open").touch()
    bench.wait_idle()
    fence = bench.harness.fence
    wait_until(
        lambda: not bench.harness.do("HEXISTS", fence, "quarantine"), what="quarantine is over"
    )
    assert not bench.harness.do("HEXISTS", bench.harness.fence, "mark")
    assert bench.runs() == ids


def test_entry_with_too_many_crashes_is_dead_lettered_unread(bench: Bench):
    ids = add(bench, "exit", "ok")
    bench.harness.fetch(10)
    context = {"what": "signal SIGKILL", "signal": "SIGKILL", "pid": 4711}
    for number in range(2):
        call = leases.refence(
            bench.harness.keys,
            Lease(ASSIGNMENT, bench.token),
            f"next-{number}",
            TTL,
            b"m:" + ids[0].encode(),
            json.dumps(context).encode(),
            [],
        )
        assert bench.link.run(call).word == "OK"
        bench.token = f"next-{number}"
    bench.start(max_crashes=2)
    bench.wait_idle()
    assert bench.runs() == ids[1:]
    ((_, flat),) = bench.harness.do("XRANGE", bench.harness.dlq, "-", "+")
    letter = {n.decode(): v.decode() for n, v in zip(flat[::2], flat[1::2], strict=True)}
    assert (letter["reason"], letter["crashes"], letter["attempts"]) == ("crashes", "2", "0")
    assert (letter["signal"], letter["pid"]) == ("SIGKILL", "4711")
    assert letter["payload"] == "exit"
    assert not bench.harness.do("EXISTS", bench.harness.attempts), "its counters went with it"


def test_successful_charged_entry_leaves_no_counters(bench: Bench):
    ids = add(bench, "ok")
    bench.harness.fetch(10)
    call = leases.refence(
        bench.harness.keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, b"m:" + ids[0].encode(), b"{}", []
    )
    bench.link.run(call)
    bench.token = "t2"
    assert bench.harness.do("EXISTS", bench.harness.attempts)
    bench.start()
    bench.wait_idle()
    assert not bench.harness.do("EXISTS", bench.harness.attempts)


@pytest.mark.fault("F25")
def test_missing_entries_are_settled_and_counted(bench: Bench):
    add(bench, *["ok"] * 4)
    bench.harness.fetch(10)
    bench.harness.do("XTRIM", bench.harness.stream, "MAXLEN", 1)
    bench.start()
    bench.wait_idle()
    assert bench.stop() == Exit(ExitCode.STOPPED, None)
    assert bench.runs() == ["4-1"]
    assert bench.slot.counter("missing_entries") == 3


def test_acknowledgment_by_another_client_is_tolerated(bench: Bench):
    """The message still runs, and its own acknowledgment has no effect."""
    (entry,) = add(bench, "gate")
    bench.start()
    bench.wait_handler_line("gate")
    assert bench.harness.do("XACK", bench.harness.stream, ASSIGNMENT.group, entry) == 1
    (bench.folder / "open").touch()
    bench.wait_handler_line("done")
    add(bench, "ok", first=5)
    bench.wait_idle()
    assert bench.runs() == [entry, "5-1"]


def test_reclaim_flag_makes_the_worker_claim_idle_entries(bench: Bench):
    ids = add(bench, *["ok"] * 3)
    bench.harness.fetch(10, consumer="legacy")
    bench.slot.reclaim_requested = 1
    bench.start(reclaim_idle="1h")
    wait_until(lambda: bench.slot.reclaim_done == 1, what="it has looked")
    assert bench.runs() == [], "not idle for long enough"
    # Make the entries look idle for an hour, because a short time may pass before the worker
    # checks.
    aged = ("XCLAIM", bench.harness.stream, ASSIGNMENT.group, "legacy", 0, *ids, "IDLE", 3_600_000)
    bench.harness.do(*aged, "JUSTID")
    bench.slot.reclaim_requested = 2
    add(bench, "ok", first=9)  # wakes the worker
    bench.wait_idle()
    assert sorted(bench.runs()) == sorted([*ids, "9-1"])
    wait_until(lambda: bench.slot.reclaim_done == 2, what="the flag is down")
    assert bench.slot.counter("reclaimed") == 3


# --- losing the assignment ------------------------------------------------------------------------


@pytest.mark.fault("F8")
@pytest.mark.parametrize("word", ["gate", "fail", "dead"])
def test_superseded_worker_exits_without_changes(bench: Bench, word: str):
    ids = add(bench, word, *["ok"] * 3)
    bench.harness.fetch(10)
    bench.start(trusted=False)
    wait_until(lambda: bench.slot.in_flight == 4, what="it has listed them")
    # The worker holds the messages and waits. By the time it may continue, another instance owns
    # them.
    call = leases.refence(bench.harness.keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, None, b"", [])
    assert bench.link.run(call).word == "OK"
    before = {key: value for key, value in bench.harness.dump().items() if key != b"told"}
    (bench.folder / "open").touch()
    bench.trust(TTL)
    assert bench.wait_exit() == Exit(ExitCode.FENCED, None)
    assert bench.slot.counter("fenced") == 1
    assert bench.runs()[:1] == ids[:1]
    after = {key: value for key, value in bench.harness.dump().items() if key != b"told"}
    assert after == before


def test_idle_worker_detects_a_new_owner_at_the_next_message(bench: Bench):
    bench.start()
    wait_until(lambda: bench.slot.state == WorkerState.READY, what="it is ready")
    assert (
        bench.link.run(
            leases.refence(bench.harness.keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, None, b"", [])
        ).word
        == "OK"
    )
    (entry,) = add(bench, "ok")
    assert bench.wait_exit() == Exit(ExitCode.FENCED, None)
    assert bench.runs() == []
    assert bench.pending() == [], f"{entry} is unread"


@pytest.mark.parametrize("which", ["stream", "retry"])
def test_missing_group_exits_with_its_own_code(bench: Bench, which: str):
    bench.harness.do("XGROUP", "DESTROY", getattr(bench.harness, which), ASSIGNMENT.group)
    bench.start()
    assert bench.wait_exit() == Exit(ExitCode.NO_GROUP, None)


# --- boot, hooks, limits --------------------------------------------------------------------------


def test_failing_on_start_is_a_failed_boot(bench: Bench):
    """If `on_start` fails, the boot fails with an error that contains the file and the line."""
    (bench.folder / "refuse").touch()
    add(bench, "ok")
    bench.start()
    said = "on_start of work:go failed: RuntimeError: no database today"
    ended = bench.wait_exit()
    assert re.fullmatch(rf"{said} \(.*/work\.py:\d+\)", ended.problem)
    assert ended == Exit(ExitCode.BOOT_FAILED, None, problem=ended.problem)
    assert bench.pending() == []
    assert bench.slot.state == WorkerState.BOOTING


def test_on_stop_error_changes_no_outcome(bench: Bench):
    (bench.folder / "refuse-stop").touch()
    ids = add(bench, "ok")
    bench.start()
    bench.wait_idle()
    assert bench.stop() == Exit(ExitCode.STOPPED, None)
    assert bench.runs() == ids


def test_failed_import_is_a_failed_boot(bench: Bench):
    (bench.folder / "work.py").write_text("1/0")
    bench.start()
    ended = bench.wait_exit()
    assert (ended.code, ended.signal) == (ExitCode.BOOT_FAILED, None)
    assert ended.problem.startswith("cannot import work: ZeroDivisionError: division by zero (")


def test_soft_limit_raises_in_its_own_run(bench: Bench):
    ids = add(bench, "crawl", "ok")
    bench.start(timeout="1s", max_attempts=1)
    bench.wait_handler_line("crawl")
    assert bench.child is not None
    # The supervisor names the run, so that a signal for another run is ignored.
    bench.slot.soft_kill_seq = bench.slot.run_seq + 1
    bench.child.signal(signal.SIGUSR1)
    assert [entry.place for entry in bench.slot.running] == [b"m:" + ids[0].encode()]
    bench.slot.soft_kill_seq = bench.slot.run_seq
    bench.child.signal(signal.SIGUSR1)
    bench.wait_idle()
    assert bench.runs() == ids
    assert bench.slot.counter("timeouts") == 1
    ((_, flat),) = bench.harness.do("XRANGE", bench.harness.dlq, "-", "+")
    letter = dict(zip(flat[::2], flat[1::2], strict=True))
    assert letter[b"errorClass"] == b"streamqd.handlers.SoftTimeout"
    assert bench.stop() == Exit(ExitCode.STOPPED, None)


def test_cautious_worker_holds_one_entry_at_a_time(bench: Bench):
    ids = add(bench, *["ok"] * 6, "gate", "ok")
    bench.harness.fetch(3)
    bench.start(cautious=True)
    bench.wait_handler_line("gate")
    assert bench.slot.in_flight == 1
    assert bench.pending() == [ids[6]]
    (bench.folder / "open").touch()
    bench.wait_idle()
    assert bench.runs() == ids


def test_cautious_worker_later_fetches_batches(bench: Bench):
    add(bench, *["ok"] * 300)
    bench.start(cautious=True, prefetch_max=20)
    most = 0

    def all_done() -> bool:
        nonlocal most
        most = max(most, bench.slot.in_flight)
        return bench.slot.counter("acked") == 300

    wait_until(all_done, timeout=20.0, every=0.0005, what="300 are done")
    assert most > 1


def test_batch_grows_with_quick_runs_up_to_its_bound(bench: Bench):
    add(bench, *["ok"] * 600)
    bench.start(prefetch_max=20)
    most = 0

    def all_done() -> bool:
        nonlocal most
        most = max(most, bench.slot.in_flight)
        return bench.slot.counter("acked") == 600

    wait_until(all_done, timeout=20.0, every=0.0005, what="600 are done")
    assert most == 20
