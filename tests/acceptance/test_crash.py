"""When a process dies, nothing is lost, and only running messages are charged or repeated."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import psutil
import pytest

from streamqd.worker.prefetch import FIRST_COUNT
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]

TTL = 60.0  # seconds; so long that no test may wait for it
GREEDY = {"prefetch_bytes": "256MiB"}  # large, so that it does not limit the first reads
AT_ONCE = 5.0  # seconds; far below the TTL, but enough for a busy machine


def charged_uid(charged: str, partition: int) -> str:
    """Return the uid of a message in its first run, given its place as the log names it."""
    return f"{TOPIC}/{partition}/{charged.removeprefix('m:')}"


# --- a worker -------------------------------------------------------------------------------------


@pytest.mark.fault("F1")
def test_killed_worker_is_replaced_and_its_run_charged(
    new_daemon: NewDaemon,
):
    gate = "go"
    with new_daemon() as daemon:
        before = daemon.pids()[0]
        epoch = daemon.epochs()[0]
        payloads = ["ok"] * 20 + [f"await {gate}"] + ["ok"] * 99
        uids = daemon.send(payloads)
        victim = uids[20]
        daemon.wait_run(victim)
        mark = daemon.mark()

        os.kill(before, signal.SIGSTOP)  # so that the handler cannot return before the kill
        stopped = psutil.Process(before)
        daemon.wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, what="it stands still")
        (daemon.folder / gate).touch()  # lets the second run return
        os.kill(before, signal.SIGKILL)
        killed_at = time.monotonic()
        daemon.wait_run(victim, "end")
        took = daemon.ledger.records_for(victim, "start")[-1].at - killed_at

        print(f"takeover of a killed worker: {took * 1000:.0f} ms")
        assert took < AT_ONCE < TTL
        daemon.wait_settled()
        crashed = daemon.wait_event("worker.crashed", after=mark)
        charged = daemon.wait_event("worker.charged", after=crashed["number"])
        started = daemon.wait_event("worker.started", after=charged["number"])
        assert crashed["how"] == "signal SIGKILL"
        assert charged_uid(crashed["charged"], 0) == victim
        assert started["child"] == daemon.pids()[0] != before
        assert started["epoch"] == daemon.epochs()[0] > epoch
        assert daemon.ledger.audit(GROUP) == Audit(repeated={victim: 2})
        # A crash does not count as a failed attempt.
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.traces() == []
        assert daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.fault("F1", "F2")
def test_random_kills_repeat_only_charged_runs(new_daemon: NewDaemon, chance: random.Random):
    kills, partitions = 24, 2
    daemon = new_daemon(
        partitions=partitions,
        # After two kills while idle, a worker is restarted with a delay.
        daemon={"crash_backoff": {"kind": "fixed", "base": "1ms"}},
        consumer=GREEDY | {"max_crashes": 0},
    )
    with daemon:
        uids, takeovers = [], []
        for number in range(kills):
            if daemon.unsettled() < 1000:
                uids += daemon.send(f"sleep {chance.uniform(0, 0.004):.4f}" for _ in range(1500))
            partition = number % partitions
            daemon.wait_for(
                lambda partition=partition: daemon.pending(partition) >= 100,
                what="100 messages are in hand",
                every=0.002,
            )
            # The kill comes after 0 to 39 more starts, so it can hit the worker in any state.
            moment = daemon.ledger.count("start") + chance.randrange(40)
            daemon.wait_for(
                lambda moment=moment: daemon.ledger.count("start") >= moment,
                what="more messages run",
                every=0.0005,
            )
            victim = daemon.pids()[partition]
            assert daemon.pending(partition) > 0
            mark, killed_at = daemon.mark(), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            daemon.wait_event("worker.started", after=mark, partition=partition)
            takeovers.append(time.monotonic() - killed_at)
        daemon.wait_settled(40)

        takeovers.sort()
        middle, worst = takeovers[kills // 2], takeovers[-1]
        print(f"takeover: median {middle * 1000:.0f} ms, longest {worst * 1000:.0f} ms")
        assert worst < AT_ONCE
        crashes = daemon.events("worker.crashed")
        assert len(crashes) == kills
        charged = Counter(
            charged_uid(each["charged"], each["partition"]) for each in crashes if "charged" in each
        )
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        assert audit.repeated.keys() <= charged.keys()
        assert len(charged) > kills // 2, "hardly any kill hit a running message"
        assert all(count <= 1 + charged[uid] for uid, count in audit.repeated.items())
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.letters() == []
        assert daemon.traces() == []
        assert daemon.stop() == 0


@pytest.mark.fault("F1")
@pytest.mark.parametrize(
    ("payload", "cause", "name"),
    [
        ("exit 9", {"exitCode": "9"}, "exit code 9"),
        ("segv", {"signal": "SIGSEGV"}, "signal SIGSEGV"),
        ("kill", {"signal": "SIGKILL"}, "signal SIGKILL"),
    ],
)
def test_message_that_kills_its_process_is_dead_lettered(
    new_daemon: NewDaemon, payload: str, cause: dict[str, str], name: str
):
    with new_daemon(consumer=GREEDY | {"max_crashes": 3}) as daemon:
        # The size of the first read is fixed, but later sizes depend on how long the runs take.
        daemon.pause()
        before, behind = FIRST_COUNT // 2, 100 - FIRST_COUNT // 2
        payloads = ["await go"] + ["sleep 0.001"] * (before - 1) + [payload]
        uids = daemon.send(payloads + ["sleep 0.001"] * (behind - 1))
        killer = uids[before]
        daemon.signal(signal.SIGCONT)
        daemon.wait_run(uids[0])
        assert daemon.pending_uids() == set(uids[:FIRST_COUNT])
        (daemon.folder / "go").touch()
        daemon.wait_settled()

        (letter,) = daemon.letters()
        assert letter["uid"] == killer
        assert letter["reason"] == "crashes"
        assert letter["crashes"] == "3"
        assert letter["attempts"] == "0"
        assert {key: letter[key] for key in ("signal", "exitCode") if key in letter} == cause
        assert name in letter["errorMessage"]
        assert letter["payload"] == payload
        assert (letter["group"], letter["instance"]) == (GROUP, "one")
        assert (letter["originalTopic"], letter["originalPartition"]) == (TOPIC, "0")
        assert letter["handler"] == "work:obey"
        assert letter["timestamp"] == letter["originalId"].partition("-")[0]
        assert abs(int(letter["failedAt"]) / 1000 - time.time()) < 60
        assert letter["pid"] == str(daemon.ledger.records_for(killer, "start")[-1].pid)
        assert 1 << 20 < int(letter["rss"]) < 1 << 30
        assert daemon.ledger.audit(GROUP) == Audit(lost=[killer], repeated={killer: 3})
        assert daemon.ledger.finished_uids(GROUP) == set(uids) - {killer}
        assert len(daemon.events("worker.crashed")) == 3
        # One poison message is not a crash loop, so there is no delay and the breaker stays closed.
        assert daemon.events("worker.crash_looped") == []
        times = [each.at for each in daemon.ledger.records_for(killer, "start")]
        assert all(later - earlier < AT_ONCE for earlier, later in pairwise(times))
        assert daemon.traces() == []
        assert daemon.stop() == 0


@pytest.mark.fault("F37")
def test_child_processes_exit_with_their_killed_worker(new_daemon: NewDaemon):
    daemon = new_daemon(groups=["spawns"], consumer={"max_crashes": 1})
    with daemon:
        (spawned, forked) = daemon.send(["spawn never", "fork never"])
        for uid in (spawned, forked):
            daemon.wait_run(uid, "note")
            grandchild = int(daemon.ledger.records_for(uid, "note")[0].text)
            assert psutil.pid_exists(grandchild)

            os.kill(daemon.pids("spawns")[0], signal.SIGKILL)

            daemon.wait_for(
                lambda pid=grandchild: not _is_alive(pid), timeout=2, what="the grandchild is dead"
            )
        daemon.wait_settled()
        assert {each["uid"] for each in daemon.letters()} == {spawned, forked}
        assert daemon.stop() == 0


@pytest.mark.fault("F37")
def test_leftover_child_processes_exit_with_their_worker(new_daemon: NewDaemon):
    with new_daemon() as daemon:
        daemon.send(["spawn", "fork", "ok"])
        daemon.wait_settled()
        left = [int(each.text) for each in daemon.ledger.records("note")]
        assert [_is_alive(pid) for pid in left] == [True, True]
        assert daemon.ledger.audit(GROUP) == Audit()

        assert daemon.stop() == 0

        assert [_is_alive(pid) for pid in left] == [False, False]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- the supervisor -------------------------------------------------------------------------------


@pytest.mark.fault("F6")
def test_successor_of_a_killed_supervisor_resumes_immediately(
    new_daemon: NewDaemon, chance: random.Random
):
    daemon = new_daemon(partitions=4)
    with daemon:
        uids = daemon.send(f"sleep {chance.uniform(0, 0.01):.4f}" for _ in range(1200))
        daemon.wait_for(lambda: daemon.ledger.count("end") >= 200, what="200 have ended")
        mark = daemon.mark()

        daemon.kill()
        killed_at = time.monotonic()
        daemon.wait_gone(1.0)

        pending = daemon.pending_uids()
        begun = {each.uid for each in daemon.ledger.records("start")} & pending
        first = daemon.ledger.count("start")
        daemon.start()
        daemon.wait_for(lambda: daemon.ledger.count("start") > first, what="a message runs again")
        took = daemon.ledger.records("start")[first].at - killed_at
        print(f"takeover after a killed supervisor: {took * 1000:.0f} ms with its start")
        assert took < AT_ONCE < TTL
        resumed = [
            daemon.wait_event("lease.resumed", after=mark, partition=number) for number in range(4)
        ]
        ran = {
            f"{TOPIC}/{each['partition']}/{place[2:]}"
            for each in resumed
            for place in each.get("running", [])
        }
        daemon.wait_settled()
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        # Only messages that were running are repeated. Messages that finished but were not
        # acknowledged do not run again. A worker notes a message as running before its handler
        # writes the first line.
        assert audit.repeated == dict.fromkeys(ran & begun, 2)
        assert ran <= pending
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.letters() == []
        assert daemon.stop() == 0


@pytest.mark.fault("F6")
def test_killed_supervisor_stops_its_embedded_server(new_daemon: NewDaemon, chance: random.Random):
    daemon = new_daemon(partitions=2, redis_url="embedded:")
    with daemon:
        uids = daemon.send(f"sleep {chance.uniform(0, 0.01):.4f}" for _ in range(600))
        daemon.wait_for(lambda: daemon.ledger.count("end") >= 100, what="100 have ended")
        server = psutil.Process(daemon.titles()["streamqd: redis"])
        mark = daemon.mark()

        daemon.kill()
        killed_at = time.monotonic()
        daemon.wait_gone(1.0)
        daemon.wait_for(lambda: not server.is_running(), timeout=5, what="the server has ended")

        daemon.start()
        daemon.wait_event("daemon.ready", after=mark)
        daemon.wait_settled()
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        ends = {each.uid: each.at for each in daemon.ledger.records("end") if each.at < killed_at}
        assert all(killed_at - ends.get(uid, killed_at) < 0.5 for uid in audit.repeated)
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.stop() == 0


@pytest.mark.fault("F6", "F37")
def test_supervisor_kill_kills_stuck_workers_and_children(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(partitions=3)
    with daemon:
        uids = [
            daemon.send([payload], partition=number)[0]
            for number, payload in enumerate(["hold", "spawn never", "fork never"])
        ]
        for uid in uids:
            daemon.wait_run(uid)
        for uid in uids[1:]:
            daemon.wait_run(uid, "note")
        assert len(daemon.session()) == 1 + 1 + 3 + 2

        daemon.kill()

        daemon.wait_gone(1.0)


@pytest.mark.fault("F6")
def test_workers_of_a_killed_supervisor_exit_without_housekeeper(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(partitions=3)
    with daemon:
        for number, payload in enumerate(["hold", "await never"]):  # the third worker is idle
            (uid,) = daemon.send([payload], partition=number)
            daemon.wait_run(uid)
        os.kill(daemon.titles()["streamqd: housekeeper"], signal.SIGKILL)
        daemon.wait_event("housekeeper.exited")

        daemon.kill()  # before the next housekeeper starts

        daemon.wait_gone(1.0)


# --- the housekeeper ------------------------------------------------------------------------------


def test_killed_housekeeper_is_replaced_without_a_lost_lease(new_daemon: NewDaemon):
    daemon = new_daemon(partitions=2, http="unix:./http.sock", daemon={"lease_ttl": "1s"})
    with daemon:
        address = daemon.folder / "http.sock"
        daemon.wait_for(lambda: _metrics(address), what="metrics are served")
        before, workers = daemon.epochs(), daemon.pids()
        old = daemon.titles()["streamqd: housekeeper"]
        mark = daemon.mark()

        os.kill(old, signal.SIGKILL)

        exited = daemon.wait_event("housekeeper.exited", after=mark)
        daemon.wait_event("housekeeper.started", after=exited["number"])
        (uid,) = daemon.send(["fail"])  # its retry needs a running housekeeper
        daemon.wait_run(uid, "raise", count=2)
        text = daemon.wait_for(lambda: _metrics(address), what="metrics are served again")
        assert "streamqd_housekeeper_restarts_total" in text
        assert daemon.titles()["streamqd: housekeeper"] != old
        assert (daemon.epochs(), daemon.pids()) == (before, workers)
        assert daemon.events("lease.lost") == []
        assert daemon.stop() == 0


def _metrics(address: os.PathLike[str]) -> str:
    connection = http.client.HTTPConnection("streamqd", timeout=2)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(address))
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    except OSError:
        return ""
    finally:
        connection.close()
