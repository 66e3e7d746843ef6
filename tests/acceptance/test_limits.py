"""A worker has limits on time, memory, age and number of messages, and may fail to start."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from tests.support.daemon import GROUP, Daemon
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]

FAST = {"kind": "fixed", "base": "10ms", "jitter": "none"}
CRASH_LOOP = 7

# --- time -----------------------------------------------------------------------------------------


def test_soft_limit_counts_as_a_failed_attempt(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(
        consumer={"timeout": "200ms", "max_attempts": 2, "backoff": FAST}, http="unix:./http.sock"
    )
    with daemon:
        uids = daemon.send(["ok"] * 5 + ["sleep 60"] + ["ok"] * 5)
        worker = daemon.pids()[0]
        daemon.wait_settled()

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[5]
        assert (letter["reason"], letter["attempts"], letter["crashes"]) == ("attempts", "2", "0")
        assert letter["errorClass"] == "streamqd.handlers.SoftTimeout"
        assert "0.2 s" in letter["errorMessage"]
        assert "time.sleep" in letter["traceback"]
        runs = daemon.ledger.records_for(uids[5], "start", "raise")
        assert [(each.kind, each.attempt) for each in runs] == [
            ("start", 1),
            ("raise", 1),
            ("start", 2),
            ("raise", 2),
        ]
        assert all(0.2 <= runs[k + 1].at - runs[k].at < 1.0 for k in (0, 2))
        assert daemon.ledger.audit(GROUP) == Audit(lost=[uids[5]], repeated={uids[5]: 2})
        assert daemon.pids()[0] == worker

        # The same signal may also reach the worker between two messages, when it is too late for
        # the run.
        for _ in range(20):
            os.kill(worker, signal.SIGUSR1)
        more = daemon.send(["sleep 0.01"] * 40)
        for number in range(1, 41):
            daemon.wait_for(
                lambda number=number: len(set(more) & daemon.ledger.finished_uids(GROUP)) >= number,
                what=f"{number} more have ended",
                every=0.001,
            )
            os.kill(worker, signal.SIGUSR1)
        daemon.wait_settled()
        assert set(more) <= daemon.ledger.finished_uids(GROUP)
        assert daemon.ledger.count("raise") == 2
        assert daemon.pids()[0] == worker
        assert daemon.events("worker.crashed") == []
        assert daemon.stop() == 0


@pytest.mark.fault("F4")
def test_hard_limit_kills_and_charges_only_a_stuck_handler(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(
        partitions=2, consumer={"timeout": "1s", "hard_timeout": "1500ms", "max_crashes": 2}
    )
    with daemon:
        others = daemon.send(["sleep 0.005"] * 300, partition=1)
        worker = daemon.pids()[1]
        uids = daemon.send(["ok"] * 10 + ["hold"] + ["ok"] * 89, partition=0)
        daemon.wait_settled()

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[10]
        assert (letter["reason"], letter["crashes"], letter["attempts"]) == ("crashes", "2", "0")
        assert letter["signal"] == "SIGKILL"
        assert "a hard time limit" in letter["errorMessage"]
        killed = daemon.events("worker.killed")
        assert [each["reason"] for each in killed] == ["hard-limit"] * 2
        starts = [each.at for each in daemon.ledger.records_for(uids[10], "start")]
        assert starts[1] - starts[0] >= 1.5
        audit = daemon.ledger.audit(GROUP)
        assert audit == Audit(lost=[uids[10]], repeated={uids[10]: 2})
        assert set(others) <= daemon.ledger.finished_uids(GROUP)
        assert daemon.pids()[1] == worker
        assert daemon.traces() == []
        assert daemon.stop() == 0


def test_handler_within_its_limits_is_not_interrupted(new_daemon: NewDaemon):
    """A short run is not interrupted, although all runs together exceed the limit."""
    daemon = new_daemon(consumer={"timeout": "1s", "hard_timeout": "2s"})
    with daemon:
        daemon.send(["sleep 0.02"] * 110)  # a limit of 1 s leaves enough time on a busy machine
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.events("worker.killed") == daemon.ledger.records("raise") == []
        assert daemon.stop() == 0


# --- replacing a worker ---------------------------------------------------------------------------


def runs_of_each_process(daemon: Daemon) -> list[int]:
    """Return the number of runs in each worker process, in the order of their starts."""
    return list(Counter(each.pid for each in daemon.ledger.records("start")).values())


def test_max_messages_replaces_workers_and_repeats_nothing(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(consumer={"max_messages": 10})
    with daemon:
        daemon.send(["ok"] * 105)
        daemon.wait_settled()

        assert runs_of_each_process(daemon) == [10] * 10 + [5]
        assert daemon.ledger.audit(GROUP) == Audit()
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.traces() == []
        assert daemon.events("worker.crashed") == daemon.events("worker.crash_looped") == []
        exits = daemon.events("worker.exited")
        assert len(exits) == 10
        assert daemon.stop() == 0


FAT = """
ballast = bytearray(os.urandom(4096) * 16384)  # 64 MiB that every worker has from its birth
"""


def test_max_rss_limits_the_growth_of_a_worker_since_its_start(new_daemon: NewDaemon):
    daemon = new_daemon(consumer={"max_rss": "32MiB"})
    daemon.write_code(daemon.module_path.read_text() + FAT)
    with daemon:
        first = daemon.pids()[0]
        assert psutil.Process(first).memory_info().rss > 64 << 20
        # The handler adds about 10 MB/s and memory is checked every 2 s, so the first check finds
        # too little.
        daemon.send(["leak 200000"] * 260)
        daemon.wait_event("worker.handed_over")
        daemon.send(["ok"])
        daemon.wait_settled()

        # A fresh process is below the limit again and is not replaced, so there is no loop.
        (recycled,) = daemon.events("worker.recycled")
        assert recycled["reason"] == "max_rss"
        assert recycled["child"] == first
        assert recycled["rss"] > (64 + 32) << 20
        assert len(runs_of_each_process(daemon)) == 2
        assert runs_of_each_process(daemon)[0] > (32 << 20) / 200_000
        assert daemon.ledger.audit(GROUP) == Audit()
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.traces() == []
        assert daemon.events("worker.crashed") == []
        assert daemon.stop() == 0


SLOW_BIRTH = """
def on_start(context):
    time.sleep(0.3)
"""


@pytest.mark.parametrize(("age", "more"), [("1s", SLOW_BIRTH), (1.0, "")])
def test_short_max_age_replaces_workers_and_makes_progress(
    new_daemon: NewDaemon, age: str | float, more: str
):
    daemon = new_daemon(consumer={"max_age": age})
    daemon.write_code(daemon.module_path.read_text() + more)
    with daemon:
        daemon.send(["sleep 0.05"] * 60)
        daemon.wait_settled()

        assert len(runs_of_each_process(daemon)) >= 2
        assert daemon.ledger.audit(GROUP) == Audit()
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.events("worker.crashed") == daemon.events("worker.crash_looped") == []
        assert daemon.traces() == []
        assert daemon.stop() == 0


# --- workers that cannot start --------------------------------------------------------------------

UNBORN = """
def on_start(context):
    if (context.state_dir / f"sick-{context.assignment.partition}").exists():
        raise RuntimeError("the database is away")
"""
LOOP = {"lease_ttl": "5s", "crash_loop": 3, "crash_cooldown": "1s", "crash_backoff": FAST}


def break_starts(daemon: Daemon, *partitions: int) -> None:
    folder = daemon.folder / "var"
    folder.mkdir(exist_ok=True)
    for number in partitions:
        (folder / f"sick-{number}").touch()


@pytest.mark.fault("F3")
def test_daemon_exits_with_the_cause_if_no_worker_starts(new_daemon: NewDaemon):
    """If no worker starts, the daemon exits with the cause.

    Its last lines, which operators read first, name it as well.
    """
    daemon = new_daemon(
        partitions=2,
        daemon=LOOP | {"crash_backoff": {"kind": "fixed", "base": "200ms", "jitter": "none"}},
    )
    daemon.write_code(daemon.module_path.read_text() + UNBORN)
    break_starts(daemon, 0, 1)
    daemon.start()

    assert daemon.wait() == CRASH_LOOP

    assert len(daemon.events("worker.boot_failed")) >= 2 * 3
    assert "RuntimeError: the database is away" in daemon.events("worker.boot_failed")[0]["error"]
    opened = daemon.events("worker.crash_looped")
    assert sorted(each["partition"] for each in opened) == [0, 1]
    assert daemon.events("instance.crash_looped")[0]["assignments"] == 2
    away = "exit code 3: on_start of work:obey failed: RuntimeError: the database is away"
    assert all(each["last_exit"].startswith(f"{away} (") for each in opened)
    assert daemon.events("instance.crash_looped")[0]["error"].startswith(away), (
        "once, though both have it"
    )
    assert daemon.events("instance.crash_looped")[0]["level"] == "critical"
    # The second restart is delayed.
    _, second, third = [event["ts"] for event in daemon.events("worker.started", partition=0)]
    assert seconds_between(second, third) >= 0.2
    # The leases are released, so that other instances do not have to wait.
    assert not any(
        daemon.link.execute("EXISTS", daemon.keys.lease(*assignment))
        for assignment in daemon.assignments()
    )
    assert daemon.ledger.records() == []


def seconds_between(earlier: str, later: str) -> float:
    """Return the seconds between two log timestamps within one hour."""

    def seconds(stamp: str) -> float:
        _, minutes, rest = stamp.split(":")
        return int(minutes) * 60 + float(rest.removesuffix("Z"))

    return (seconds(later) - seconds(earlier)) % 3600


@pytest.mark.fault("F3")
def test_crash_loop_pauses_and_retries_only_its_partition(
    new_daemon: NewDaemon,
):
    # The worker is retried as soon as the cooldown ends, because the next heartbeat is minutes
    # away.
    daemon = new_daemon(partitions=2, daemon=LOOP | {"lease_ttl": "10m"})
    daemon.write_code(daemon.module_path.read_text() + UNBORN)
    break_starts(daemon, 1)
    daemon.start()
    opened = daemon.wait_event("worker.crash_looped")
    assert (opened["partition"], opened["seconds"]) == (1, 1.0)
    assert "exit code 3" in opened["last_exit"]
    daemon.wait_event("lease.released", partition=1)

    uids = daemon.send(["ok"] * 20)
    daemon.wait_for(lambda: len(daemon.ledger.finished_uids(GROUP)) == 10, what="partition 0 works")
    # There is one attempt after the cooldown, and then another cooldown.
    closed = daemon.wait_event("worker.retried", after=opened["number"])
    again = daemon.wait_event("worker.crash_looped", after=closed["number"])
    between = daemon.events("worker.started", after=closed["number"], partition=1)
    assert len([each for each in between if each["number"] < again["number"]]) == 1

    (daemon.folder / "var" / "sick-1").unlink()
    daemon.wait_settled()
    assert daemon.ledger.finished_uids(GROUP) == set(uids)
    assert daemon.ledger.audit(GROUP) == Audit()
    assert daemon.stop() == 0


DIES_AT_EVERY_MESSAGE = """
def obey(message):
    with ledger.run(message):
        os._exit(1)
"""


def test_crash_at_every_message_dead_letters_only_a_few(new_daemon: NewDaemon):
    """The crash-loop breaker stops a bad deployment before it dead-letters many messages."""
    daemon = new_daemon(daemon=LOOP, consumer={"max_crashes": 3})
    daemon.write_code(daemon.module_path.read_text() + DIES_AT_EVERY_MESSAGE)
    with daemon:
        uids = daemon.send(["ok"] * 100)

        assert daemon.wait() == CRASH_LOOP

        assert len(daemon.events("worker.crash_looped")) == 1
        assert len(daemon.letters()) <= 4
        assert len(daemon.pending_uids()) + len(daemon.letters()) <= len(uids)
        started = time.monotonic()
        daemon.write_code(daemon.module_path.read_text().removesuffix(DIES_AT_EVERY_MESSAGE))
        daemon.start()
        daemon.wait_settled()
        print(f"working again after {time.monotonic() - started:.1f} s")
        dead = {each["uid"] for each in daemon.letters()}
        assert daemon.ledger.finished_uids(GROUP) | dead == set(uids)
        assert daemon.stop() == 0


@pytest.mark.fault("F3")
def test_worker_over_boot_timeout_is_a_failed_start(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(daemon=LOOP | {"boot_timeout": "1s", "crash_loop": 1})
    daemon.write_code(
        daemon.module_path.read_text() + "\n\ndef on_start(context):\n    time.sleep(600)\n"
    )
    daemon.start()

    assert daemon.wait() == CRASH_LOOP
    assert daemon.events("worker.killed")[0]["reason"] == "boot"
