"""A warm standby replaces a worker without a gap and without repeats, even if something fails.

Handlers record the start and end of their hooks in the ledger, so that the tests can compare the
real order of events.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import psutil
import pytest

from streamqd.scoreboard import WorkerState
from streamqd.supervisor.rolling_replacement import DISMISSED_MAX
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit, Record

NewDaemon = Callable[..., Daemon]

# `on_start` waits while the file `slow` exists, and fails while the file `sick` exists.
HOOKS = """
def on_start(context):
    ledger.record_event("boot", str(context.assignment.partition))
    while Path("slow").exists():
        time.sleep(0.002)
    if Path("sick").exists():
        raise RuntimeError("the database is away")
    ledger.record_event("warm", str(context.assignment.partition))

def on_stop():
    while Path("lingering").exists():
        time.sleep(0.002)
    ledger.record_event("stop", "")
"""
PROGRAM = """
import subprocess

without_program, plain_stop = on_start, on_stop

def on_start(context):
    subprocess.Popen(["tail", "-f", "/dev/null"])
    without_program(context)

def on_stop():
    ledger.record_event("stopping", "")
    plain_stop()
"""
FAST = {"kind": "fixed", "base": "10ms", "jitter": "none"}
LOOP = {"crash_loop": 3, "crash_cooldown": "1h", "crash_backoff": FAST}


@pytest.fixture
def new_hooked_daemon(new_daemon: NewDaemon) -> NewDaemon:
    """Configure daemons whose workers can be kept from becoming warm."""

    def make(**options: object) -> Daemon:
        daemon = new_daemon(**options)
        daemon.write_code(daemon.module_path.read_text() + HOOKS)
        return daemon

    return make


def create_file(daemon: Daemon, name: str) -> None:
    (daemon.folder / name).touch()


def delete_file(daemon: Daemon, name: str) -> None:
    (daemon.folder / name).unlink()


def standby_pids(daemon: Daemon) -> dict[int, int]:
    """Return the pid of the standby next to each worker, by partition."""
    titles = daemon.titles()
    found = {
        number: titles.get(f"streamqd: standby {TOPIC}/{number} {GROUP}")
        for number in range(daemon.partitions)
    }
    return {number: pid for number, pid in found.items() if pid is not None}


def wait_standby(daemon: Daemon) -> int:
    """Wait until partition 0 has a standby. Return the standby's pid."""
    pid: int = daemon.wait_for(lambda: standby_pids(daemon), what="a standby")[0]
    return pid


def wait_warm_standby(daemon: Daemon) -> int:
    """Wait until a standby is warm, so that the old worker hands over. Return the standby's pid."""
    pid: int = daemon.wait_event("standby.ready")["child"]
    return pid


def starts(daemon: Daemon) -> list[Record]:
    return daemon.ledger.records("start")


def handover_gaps(daemon: Daemon) -> list[float]:
    """Return the milliseconds from the last run of each process to the first run of the next."""
    runs = sorted(daemon.ledger.records("start", "end"), key=lambda each: each.at)
    return [round((b.at - a.at) * 1e3, 1) for a, b in pairwise(runs) if a.pid != b.pid]


# --- without a gap --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "more"), [({}, 100), ({"concurrency": 4, "order": "none"}, 1000)], ids=["one", "four"]
)
def test_old_worker_continues_until_its_successor_is_warm(
    new_hooked_daemon: NewDaemon, kind: dict[str, object], more: int
):
    daemon = new_hooked_daemon(consumer=kind)
    with daemon:
        old = daemon.pids()[0]
        create_file(daemon, "slow")
        daemon.signal(signal.SIGHUP)
        new = wait_standby(daemon)
        first = daemon.send(["sleep 0.001"] * 200)
        daemon.wait_settled()
        assert {each.pid for each in starts(daemon)} == {old}, "it does not wait for the new one"
        assert daemon.pids() == {0: old}

        second = daemon.send(["sleep 0.002"] * 50 + ["await go"] + ["sleep 0.002"] * more)
        daemon.wait_run(second[50])
        delete_file(daemon, "slow")
        assert wait_warm_standby(daemon) == new
        assert daemon.pids() == {0: old}, "it ends its message first"
        create_file(daemon, "go")
        daemon.wait_event("reload.finished")
        assert daemon.pids() == {0: new}
        daemon.wait_settled()

        assert Counter(each.pid for each in starts(daemon)).keys() == {old, new}
        assert daemon.ledger.audit(GROUP) == Audit()
        assert {each.attempt for each in starts(daemon)} == {1}
        assert daemon.traces() == []
        (over,) = daemon.events("worker.handed_over")
        assert (over["child"], over["epoch"]) == (new, daemon.epochs()[0])
        print(f"nothing ran for {handover_gaps(daemon)} ms")
        assert len(first) + len(second) == daemon.ledger.count("end")
        assert daemon.stop() == 0
        assert sorted(each.pid for each in daemon.ledger.records("stop")) == sorted([old, new])


def test_on_stop_of_the_old_worker_does_not_delay_the_new(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(partitions=2)
    with daemon:
        old = daemon.pids()
        create_file(daemon, "lingering")
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("worker.handed_over")
        uids = daemon.send(["ok"] * 20, partition=0)
        for uid in uids:
            daemon.wait_run(uid, "end")
        assert old[0] not in {each.pid for each in starts(daemon)}
        assert psutil.pid_exists(old[0]), "it still runs on_stop"
        daemon.wait_event("worker.handed_over", partition=1)
        assert all(map(psutil.pid_exists, old.values())), "the next partition waits neither"
        delete_file(daemon, "lingering")
        daemon.wait_event("reload.finished")
        daemon.wait_for(lambda: len(daemon.events("worker.exited")) == 2, what="the old ones end")
        assert not set(daemon.pids().values()) & set(old.values())
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


def test_lingering_workers_limit_further_replacements(new_hooked_daemon: NewDaemon):
    """A dismissed worker keeps its memory until it exits, so only `DISMISSED_MAX` may linger."""
    daemon = new_hooked_daemon(partitions=DISMISSED_MAX + 1)
    with daemon:
        old = daemon.pids()
        create_file(daemon, "lingering")
        daemon.signal(signal.SIGHUP)
        daemon.wait_for(
            lambda: len(daemon.events("worker.handed_over")) == DISMISSED_MAX,
            what="some are replaced",
        )
        for _ in range(4):
            daemon.worker_states()  # each dump makes the supervisor plan its replacements again
        assert len(daemon.events("standby.started")) == DISMISSED_MAX
        assert standby_pids(daemon) == {}
        delete_file(daemon, "lingering")
        daemon.wait_event("reload.finished")
        daemon.wait_for(lambda: len(daemon.events("worker.exited")) == len(old), what="their end")
        assert not set(daemon.pids().values()) & set(old.values())
        assert daemon.stop() == 0


def test_workers_recycled_together_leave_no_partition_waiting(new_hooked_daemon: NewDaemon):
    """Only one worker gets a warm successor.

    The others hold no messages while they linger in on_stop.
    """
    daemon = new_hooked_daemon(partitions=3, consumer={"max_messages": 20})
    with daemon:
        old = daemon.pids()
        create_file(daemon, "lingering")
        uids = [uid for number in old for uid in daemon.send(["ok"] * 30, partition=number)]
        daemon.wait_settled()
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert all(map(psutil.pid_exists, old.values())), "they still run on_stop"
        assert daemon.events("worker.crashed") == daemon.events("worker.killed") == []
        delete_file(daemon, "lingering")
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


def test_planning_twice_changes_no_supervisor_state(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(
        partitions=3,
        consumer={"max_messages": 20, "hard_timeout": "200ms", "max_crashes": 1},
        daemon=LOOP,
    )
    daemon.module = "tests.support.planned_twice"
    with daemon:
        poison = [daemon.send(["hold"], partition=number)[0] for number in range(2)]
        uids = [u for number in range(3) for u in daemon.send(["ok"] * 50, partition=number)]
        daemon.wait_settled()
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert {letter["uid"] for letter in daemon.letters()} == set(poison)
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        create_file(daemon, "sick")
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.stopped")
        os.kill(daemon.pids()[0], signal.SIGKILL)
        daemon.wait_event("worker.crash_looped")
        delete_file(daemon, "sick")
        assert daemon.stop() == 0


def test_workers_are_replaced_one_partition_at_a_time(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(partitions=3, consumer={"max_age": "1s"})
    with daemon:
        uids = daemon.send(["sleep 0.02"] * 300)
        daemon.wait_for(
            lambda: len({each["partition"] for each in daemon.events("worker.handed_over")}) == 3,
            what="each of them was too old",
        )
        daemon.wait_settled()
        steps = [
            (each["event"], each["partition"])
            for each in daemon.events()
            if each["event"] in ("standby.started", "worker.handed_over")
        ]
        for number, (event, partition) in enumerate(steps):
            if event == "worker.handed_over":
                assert steps[number - 1] == ("standby.started", partition)
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


def test_successor_of_a_paused_worker_is_paused(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon()
    with daemon:
        old = daemon.pids()[0]
        daemon.pause()
        uids = daemon.send(["ok"] * 5)
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("worker.handed_over")
        daemon.wait_for(
            lambda: daemon.worker_states() == {WorkerState.PAUSED}, what="the new one pauses"
        )
        assert daemon.pids()[0] != old
        assert starts(daemon) == []
        daemon.signal(signal.SIGCONT)
        daemon.wait_settled()
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.stop() == 0


# --- exclusive resources --------------------------------------------------------------------------

ALONE = """
def on_start(context):
    os.close(os.open("only-one", os.O_CREAT | os.O_EXCL))

def on_stop():
    os.unlink("only-one")
"""


def test_cold_handover_never_runs_two_processes_at_a_time(new_daemon: NewDaemon):
    daemon = new_daemon(consumer={"handover": "cold"})
    daemon.write_code(daemon.module_path.read_text() + ALONE)
    with daemon:
        old = daemon.pids()[0]
        daemon.send(["sleep 0.001"] * 200)
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        assert daemon.pids()[0] != old
        daemon.wait_settled()
        assert daemon.events("standby.started") == daemon.events("worker.boot_failed") == []
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


# --- failures -------------------------------------------------------------------------------------


def test_failed_standby_stops_the_reload(
    new_hooked_daemon: NewDaemon,
):
    daemon = new_hooked_daemon(partitions=2, daemon=LOOP)
    with daemon:
        old = daemon.pids()
        create_file(daemon, "sick")
        daemon.signal(signal.SIGHUP)
        stopped = daemon.wait_event("reload.stopped")
        assert (stopped["partition"], stopped["workers"]) == (0, 2)
        assert "does not start: it terminated with exit code 3; see its last" in stopped["problem"]
        assert len(daemon.events("standby.failed")) == 3, "crash_loop"
        given_up = daemon.events("standby.given_up")
        assert [each["partition"] for each in given_up] == [0]
        assert "the database is away" in daemon.events("worker.boot_failed")[0]["error"]
        assert daemon.pids() == old
        assert daemon.events("worker.crash_looped") == daemon.events("reload.finished") == []
        uids = daemon.send(["ok"] * 20)
        daemon.wait_settled()
        assert {each.pid for each in starts(daemon)} == set(old.values())

        # The next reload tries again, even if the cooldown has not passed.
        delete_file(daemon, "sick")
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        assert not set(daemon.pids().values()) & set(old.values())
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


def test_failed_standby_keeps_a_worker_over_max_age(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(daemon=LOOP, consumer={"max_age": "1s"})
    with daemon:
        old = daemon.pids()[0]
        create_file(daemon, "sick")
        daemon.send(["ok"])
        daemon.wait_event("standby.given_up")
        uids = daemon.send(["ok"] * 20)
        daemon.wait_settled()
        assert daemon.pids()[0] == old
        assert set(uids) <= daemon.ledger.finished_uids(GROUP)
        assert daemon.ledger.audit(GROUP) == Audit()
        assert len(daemon.events("standby.started")) == 3, "no loop: it rests"
        assert daemon.stop() == 0


def test_killed_standby_costs_nothing(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon()
    with daemon:
        (uid,) = daemon.send(["await go"])
        daemon.wait_run(uid)
        daemon.signal(signal.SIGHUP)
        os.kill(wait_warm_standby(daemon), signal.SIGKILL)
        failed = daemon.wait_event("standby.failed")
        assert failed["how"] == "signal SIGKILL"
        create_file(daemon, "go")
        daemon.wait_event("reload.finished")
        daemon.send(["ok"] * 5)
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.events("worker.crashed") == []
        assert daemon.traces() == []
        assert daemon.stop() == 0


@pytest.mark.parametrize("warm", [True, False])
def test_worker_killed_in_a_handover_is_replaced(new_hooked_daemon: NewDaemon, warm: bool):
    daemon = new_hooked_daemon()
    with daemon:
        old = daemon.pids()[0]
        uids = daemon.send(["await go"] + ["ok"] * 10)
        daemon.wait_run(uids[0])
        if not warm:
            create_file(daemon, "slow")
        daemon.signal(signal.SIGHUP)
        new = wait_warm_standby(daemon) if warm else wait_standby(daemon)
        os.kill(old, signal.SIGKILL)
        crashed = daemon.wait_event("worker.crashed")
        assert crashed["charged"] == f"m:{uids[0].rpartition('/')[2]}"
        create_file(daemon, "go")
        if not warm:
            assert daemon.pids() == {}
            delete_file(daemon, "slow")
        daemon.wait_event("reload.finished")
        assert daemon.pids() == {0: new}, "the standby took over, and no third process was needed"
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit(repeated={uids[0]: 2})
        assert len(daemon.events("worker.charged")) == 1
        assert daemon.stop() == 0


@pytest.mark.parametrize("warm", [True, False])
def test_drain_in_a_handover_runs_on_stop_of_a_warm_standby(
    new_hooked_daemon: NewDaemon, warm: bool
):
    daemon = new_hooked_daemon()
    with daemon:
        (uid,) = daemon.send(["await go"])
        daemon.wait_run(uid)
        if not warm:
            create_file(daemon, "slow")
        daemon.signal(signal.SIGHUP)
        new = wait_warm_standby(daemon) if warm else wait_standby(daemon)
        daemon.signal(signal.SIGTERM)
        daemon.wait_event("worker.exited", reason="unneeded")
        create_file(daemon, "go")
        assert daemon.wait() == 0
        stopped = {each.pid for each in daemon.ledger.records("stop")}
        assert (new in stopped) == warm
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.pending_uids() == set()
        assert not any(
            daemon.link.execute("EXISTS", daemon.keys.lease(*assignment))
            for assignment in daemon.assignments()
        )


def test_standby_does_not_take_over_a_lost_assignment(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(daemon={"lease_ttl": "5s"})
    with daemon:
        uids = daemon.send(["await go"] + ["ok"] * 3)
        daemon.wait_run(uids[0])
        create_file(daemon, "slow")
        daemon.signal(signal.SIGHUP)
        wait_standby(daemon)
        # Act as another owner that reads the current epoch and releases the lease immediately.
        (assignment,) = daemon.assignments()
        lease, fence = daemon.keys.lease(*assignment), daemon.keys.fence(*assignment)
        daemon.link.execute("HINCRBY", fence, "epoch", 1000)
        daemon.link.execute("HSET", fence, "token", "stranger")
        daemon.link.execute("DEL", lease)
        daemon.wait_event("lease.lost")
        daemon.wait_event("worker.exited", reason="unneeded")
        daemon.link.execute("HDEL", fence, "token", "owner")
        delete_file(daemon, "slow")
        create_file(daemon, "go")
        daemon.wait_settled()
        assert daemon.events("worker.handed_over") == []
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.stop() == 0


def test_lease_loss_found_by_the_worker_is_logged_once(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(
        daemon={"lease_ttl": "60s"}
    )  # the lease need not be renewed before the worker's next read
    with daemon:
        (assignment,) = daemon.assignments()
        lease, fence = daemon.keys.lease(*assignment), daemon.keys.fence(*assignment)
        daemon.link.execute("HINCRBY", fence, "epoch", 1000)
        daemon.link.execute("HSET", fence, "token", "stranger")
        daemon.link.execute("DEL", lease)
        daemon.send(["ok"])
        daemon.wait_event("request.fenced")
        daemon.wait_event("lease.lost")
        assert daemon.stop() == 0
        assert len(daemon.events("lease.lost")) == 1


def test_killed_supervisor_leaves_no_standby(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon()
    with daemon:
        (uid,) = daemon.send(["await go"])
        daemon.wait_run(uid)
        daemon.signal(signal.SIGHUP)
        wait_warm_standby(daemon)
        daemon.kill()
        daemon.wait_gone(5.0)


def test_killed_supervisor_leaves_no_program_of_a_standby(new_hooked_daemon: NewDaemon):
    """If a supervisor is killed, the program that a standby started exits too.

    The kernel kills only the standby itself.
    """
    daemon = new_hooked_daemon()
    daemon.write_code(daemon.module_path.read_text() + PROGRAM)
    with daemon:
        (uid,) = daemon.send(["await go"])
        daemon.wait_run(uid)
        create_file(daemon, "lingering")
        daemon.signal(signal.SIGHUP)
        new = wait_warm_standby(daemon)
        daemon.signal(signal.SIGTERM)
        daemon.wait_for(
            lambda: new in {each.pid for each in daemon.ledger.records("stopping")},
            what="the end of the standby",
        )
        daemon.kill()
        daemon.wait_gone(5.0)


def test_successor_runs_messages_of_a_lost_host_alone(
    new_hooked_daemon: NewDaemon,
):
    daemon = new_hooked_daemon(daemon={"lease_ttl": "5s"})
    with daemon:
        uids = daemon.send(["await go"] + ["await gone"] * 3)
        daemon.wait_run(uids[0])
        daemon.kill()
        daemon.wait_gone(5.0)
        daemon.lose_memory()
    daemon.start()
    (assignment,) = daemon.assignments()
    daemon.wait_run(uids[0], count=2)
    daemon.signal(signal.SIGHUP)
    wait_warm_standby(daemon)
    create_file(daemon, "go")
    daemon.wait_event("worker.handed_over")
    daemon.wait_run(uids[1])
    mark = daemon.link.execute("HMGET", daemon.keys.fence(*assignment), "quarantine", "mark")
    assert mark == [b"1", f"m:{uids[1].rpartition('/')[2]}".encode()]
    create_file(daemon, "gone")
    daemon.wait_settled()
    assert daemon.ledger.audit(GROUP) == Audit(repeated={uids[0]: 2})
    assert daemon.stop() == 0


# --- limits ---------------------------------------------------------------------------------------


def test_max_messages_of_1_runs_each_message_in_a_process(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(consumer={"max_messages": 1})
    with daemon:
        daemon.send(["ok"] * 12)
        daemon.wait_settled()
        runs = Counter(each.pid for each in starts(daemon))
        assert sorted(runs.values()) == [1] * 12
        assert daemon.ledger.audit(GROUP) == Audit()
        assert len(daemon.events("worker.handed_over")) >= 1
        assert daemon.events("worker.crashed") == daemon.events("worker.crash_looped") == []
        print(f"nothing ran for {handover_gaps(daemon)} ms")
        assert daemon.stop() == 0


def test_max_rss_below_one_message_never_stops_the_partition(new_hooked_daemon: NewDaemon):
    """Each worker handles at least one message, although the first one puts it over the limit."""
    daemon = new_hooked_daemon(consumer={"max_rss": "1MiB"})
    with daemon:
        daemon.send(["leak 8000000", "await second", "leak 8000000", "await fourth", "ok"])
        warm = daemon.wait_event("standby.ready")
        create_file(daemon, "second")
        daemon.wait_event("standby.ready", after=warm["number"] + 1)
        create_file(daemon, "fourth")
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        recycled = {each["child"] for each in daemon.events("worker.recycled")}
        assert recycled <= {each.pid for each in starts(daemon)}, "one was replaced for nothing"
        assert len(recycled) >= 2
        assert daemon.events("worker.crashed") == daemon.events("worker.crash_looped") == []
        assert daemon.stop() == 0


def test_first_message_over_max_rss_is_logged(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(consumer={"max_rss": "1MiB"})
    fat = (
        "\n\ndef _fat(_message, path):\n    _leak(_message, 8000000)\n    _await(_message, path)\n"
    )
    daemon.write_code(daemon.module_path.read_text() + fat + '\n_WORDS["fat"] = _fat\n')
    with daemon:
        daemon.send(["fat go"])
        tight = daemon.wait_event("worker.limit_exceeded")
        assert tight["max_rss"] == 1 << 20 < tight["rss"] - tight["baseline"]
        create_file(daemon, "go")
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


def test_idle_worker_over_max_age_is_replaced(new_hooked_daemon: NewDaemon):
    daemon = new_hooked_daemon(consumer={"max_age": "1s"})
    with daemon:
        first = daemon.pids()[0]
        # The new process sets its title only after this event, so `pids` may not find it yet.
        assert daemon.wait_event("worker.handed_over")["child"] != first
        uids = daemon.send(["ok"] * 3)
        daemon.wait_settled()
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.stop() == 0


SLEEPS_IN_C = """
import ctypes
_libc = ctypes.PyDLL(None)  # unlike CDLL it calls with the interpreter's lock held
_mutex = ctypes.create_string_buffer(64)


def _stuck(_message):
    # Locked twice: it waits in C for ever, and no signal brings it back.
    _libc.pthread_mutex_lock(_mutex)
    _libc.pthread_mutex_lock(_mutex)


_WORDS["stuck"] = _stuck
"""


@pytest.mark.fault("F4")
def test_c_call_holding_the_gil_is_killed_and_charged(
    new_hooked_daemon: NewDaemon,
):
    daemon = new_hooked_daemon(
        partitions=2,
        consumer={"timeout": "1s", "hard_timeout": "1500ms", "max_crashes": 2},
    )
    daemon.write_code(daemon.module_path.read_text() + SLEEPS_IN_C)
    with daemon:
        other = daemon.pids()[1]
        beside = daemon.send(["sleep 0.002"] * 200, partition=1)
        uids = daemon.send(["ok"] * 5 + ["stuck"] + ["ok"] * 20, partition=0)
        daemon.wait_settled()

        (letter,) = daemon.letters()
        assert letter["uid"] == uids[5]
        assert (letter["crashes"], letter["attempts"], letter["signal"]) == ("2", "0", "SIGKILL")
        assert "a hard time limit" in letter["errorMessage"]
        assert [each["reason"] for each in daemon.events("worker.killed")] == ["hard-limit"] * 2
        assert len(daemon.events("worker.charged")) == 2
        assert daemon.ledger.records("raise") == [], "the soft limit could not be heard"
        audit = daemon.ledger.audit(GROUP)
        assert audit == Audit(lost=[uids[5]], repeated={uids[5]: 2})
        assert set(beside) <= daemon.ledger.finished_uids(GROUP)
        assert daemon.pids()[1] == other
        assert daemon.traces() == []
        assert daemon.stop() == 0
