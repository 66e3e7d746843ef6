"""Signals reload, pause and dump a busy daemon. Each process has its role in its title."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import psutil
import pytest

from streamqd.scoreboard import WorkerState
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]


def versions(daemon: Daemon) -> list[str]:
    """Return the code version that each run used, in the order in which the runs started."""
    return [each.text for each in daemon.ledger.records("start")]


def code_with_version(daemon: Daemon, version: str) -> str:
    return daemon.module_path.read_text().replace('VERSION = "1"', f'VERSION = "{version}"')


# --- reload ---------------------------------------------------------------------------------------


def test_reload_replaces_one_worker_at_a_time(new_daemon: NewDaemon, chance: random.Random):
    daemon = new_daemon(partitions=3)
    with daemon:
        before = daemon.pids()
        housekeeper = daemon.titles()["streamqd: housekeeper"]

        def busy() -> bool:
            if daemon.unsettled() < 600:
                daemon.send(f"sleep {chance.uniform(0, 0.006):.4f}" for _ in range(600))
            return True

        daemon.wait_for(lambda: busy() and daemon.ledger.count("end") >= 200, what="200 have ended")

        daemon.write_code(code_with_version(daemon, "two"))
        mark = daemon.mark()
        daemon.signal(signal.SIGHUP)
        daemon.wait_for(
            lambda: busy() and daemon.events("reload.finished", mark), what="the reload is done"
        )
        (done,) = daemon.events("reload.finished", mark)

        # Each partition gets a warm worker, which takes over before the next partition is replaced.
        steps = [
            (each["event"], each["partition"])
            for each in daemon.events(after=mark)
            if each["event"] in ("standby.started", "worker.handed_over", "worker.ready")
            and each["number"] < done["number"]
        ]
        assert steps == [
            (name, number)
            for number in range(3)
            for name in ("standby.started", "worker.handed_over", "worker.ready")
        ]
        assert {each["reason"] for each in daemon.events("worker.exited", after=mark)} == {"reload"}
        after = daemon.pids()
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        assert daemon.titles()["streamqd: housekeeper"] != housekeeper
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert set(versions(daemon)) == {"1", "two"}
        old = set(before.values())
        assert {each.text for each in daemon.ledger.records("start") if each.pid in old} == {"1"}
        assert daemon.traces() == []
        assert daemon.events("worker.crashed") == daemon.events("lease.lost") == []
        assert daemon.stop() == 0


def test_reload_names_settings_that_need_a_restart(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(consumer={"max_attempts": 1})
    with daemon:
        (first,) = daemon.send(["fail"])
        daemon.wait_settled()
        assert [each["attempts"] for each in daemon.letters()] == ["1"]

        consumer = daemon.tables["consumers"][0]
        changed = consumer | {"max_attempts": 2, "backoff": {"base": "10ms", "max": "10ms"}}
        daemon.write_config(
            consumers=[changed, changed | {"group": "ship"}],
            daemon=daemon.tables["daemon"] | {"lease_ttl": "30s"},
        )
        mark = daemon.mark()
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished", after=mark)
        daemon.wait_event("worker.ready", after=mark, group="ship")

        warned = daemon.wait_event("reload.restart_required", after=mark)
        assert "daemon.lease_ttl" in warned["settings"]
        (second,) = daemon.send(["fail"])
        daemon.groups.append("ship")
        daemon.wait_settled()
        letters = {(each["uid"], each["group"]): each["attempts"] for each in daemon.letters()}
        assert letters == {
            (first, GROUP): "1",
            (second, GROUP): "2",
            (first, "ship"): "2",
            (second, "ship"): "2",
        }

        # The daemon releases the assignments of the removed consumer.
        daemon.write_config(consumers=[changed])
        mark = daemon.mark()
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished", after=mark)
        daemon.wait_event("lease.released", after=mark, group="ship")
        assert daemon.pids("ship") == {}
        assert daemon.pids().keys() == {0}
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def obey(message:\n", ["SyntaxError", "work.py"]),
        ("import no_such_library\n", ["No module named 'no_such_library'", "work.py:1"]),
        ("def other(message): ...\n", ["work", "no function obey"]),
        ("raise SystemExit(3)\n", ["SystemExit", "work.py:1"]),
        ("import os\nos._exit(9)\n", ["exit code 9"]),
    ],
)
def test_reload_of_broken_code_names_the_error(new_daemon: NewDaemon, code: str, words: list[str]):
    daemon = new_daemon(partitions=2)
    with daemon:
        before = daemon.titles()
        good = daemon.module_path.read_text()

        daemon.write_code(code)
        daemon.signal(signal.SIGHUP)
        refused = daemon.wait_event("reload.refused")

        assert all(word in refused["problem"] for word in words)
        daemon.send(["ok"] * 10)
        daemon.wait_settled()
        assert daemon.titles() == before
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.events("reload.validated") == []

        # The same daemon loads the code once it is fixed.
        daemon.write_code(good.replace('VERSION = "1"', 'VERSION = "mended"'))
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        daemon.send(["ok"] * 2)
        daemon.wait_settled()
        assert versions(daemon)[-2:] == ["mended"] * 2
        assert daemon.stop() == 0


def test_reload_of_a_bad_configuration_names_every_problem(
    new_daemon: NewDaemon,
):
    daemon = new_daemon()
    with daemon:
        before = daemon.titles()
        tables = dict(daemon.tables)

        daemon.write_config(
            daemon=tables["daemon"] | {"drain_timeuot": "3s"},
            consumers=[tables["consumers"][0] | {"max_attempts": "many"}],
        )
        mark = daemon.mark()
        daemon.signal(signal.SIGHUP)
        daemon.wait_for(lambda: len(daemon.events("reload.refused")) == 2, what="two problems")

        problems = sorted(each["problem"] for each in daemon.events("reload.refused", after=mark))
        assert "max_attempts" in problems[0]
        assert "daemon.drain_timeuot" in problems[1]
        assert "drain_timeout" in problems[1]
        assert daemon.titles() == before

        daemon.config_path.write_text("[daemon\n")
        daemon.signal(signal.SIGHUP)
        daemon.wait_for(lambda: len(daemon.events("reload.refused")) == 3, what="no TOML")
        assert daemon.titles() == before
        daemon.write_config(**tables)
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        assert daemon.stop() == 0


# --- dump -----------------------------------------------------------------------------------------


def test_sigusr1_dumps_state_and_stacks_without_side_effects(new_daemon: NewDaemon):
    daemon = new_daemon(partitions=2)
    with daemon:
        (uid,) = daemon.send(["await go"], partition=1)
        daemon.wait_run(uid)
        pids = daemon.pids()
        # A worker that is ready may not have checked its pending messages yet. Its stack does not
        # contain `gate.py` then.
        daemon.wait_for(
            lambda: daemon.long_poll(0), what="the worker of partition 0 waits for messages"
        )

        daemon.signal(signal.SIGUSR1)
        daemon.wait_for(lambda: len(daemon.events("state.dumped")) == 2, what="two lines of state")
        states = {each["partition"]: each for each in daemon.events("state.dumped")}
        assert {number: each["child"] for number, each in states.items()} == pids
        assert {each["phase"] for each in states.values()} == {"held"}
        assert (states[0]["in_flight"], states[1]["in_flight"]) == (0, 1)
        assert {number: each["epoch"] for number, each in states.items()} == daemon.epochs()

        def stacks() -> str:
            return "\n".join(each["traceback"] for each in daemon.events("stack.dumped"))

        # The dump shows the supervisor's loop, the user code that is running, and the worker's own
        # code.
        for place in ("supervisor/supervisor.py", "work.py", "worker/control_channel.py"):
            daemon.wait_for(lambda place=place: place in stacks(), what=f"a stack with {place}")

        (daemon.folder / "go").touch()
        daemon.wait_settled()
        assert daemon.pids() == pids
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0
        assert daemon.plain == []  # every line is JSON


# --- pause ----------------------------------------------------------------------------------------


def test_sigtstp_pauses_and_sigcont_resumes(new_daemon: NewDaemon):
    daemon = new_daemon(partitions=2, daemon={"lease_ttl": "1s"})
    with daemon:
        before, epochs = daemon.pids(), daemon.epochs()
        daemon.send(["sleep 0.005"] * 200)
        daemon.wait_for(lambda: daemon.ledger.count("end") >= 20, what="20 have ended")

        daemon.pause()

        paused_at = daemon.ledger.count("start")
        assert paused_at < 200
        assert daemon.ledger.count("end") == paused_at
        # Messages that had finished were acknowledged before the pause. The others may run
        # elsewhere.
        assert daemon.pending_uids() <= {
            each.uid for each in daemon.ledger.records("sent")
        } - daemon.ledger.finished_uids(GROUP)
        more = daemon.send(["ok"] * 10)
        # For 10 renewals, which take about two TTLs, no message runs and no lease is lost.
        renewals(daemon, 10)
        assert daemon.ledger.count("start") == paused_at
        # A worker that is replaced during the pause starts paused.
        victim = psutil.Process(before[0])
        mark = daemon.mark()
        victim.kill()
        daemon.wait_event("worker.ready", after=mark, partition=0)
        daemon.wait_for(
            lambda: daemon.worker_states() == {WorkerState.PAUSED}, what="both pause again"
        )
        assert daemon.ledger.count("start") == paused_at

        daemon.signal(signal.SIGCONT)
        daemon.wait_settled()
        assert set(more) <= daemon.ledger.finished_uids(GROUP)
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.epochs()[1] == epochs[1]
        assert daemon.pids()[1] == before[1]
        assert daemon.events("lease.lost") == daemon.events("lease.renewed_late") == []
        assert daemon.stop() == 0


def renewals(daemon: Daemon, count: int) -> None:
    """Wait until the lease of partition 1 is renewed `count` times."""
    key = daemon.keys.lease(*daemon.assignments()[-1])
    left = daemon.link.execute("PTTL", key)

    def renewed() -> bool:
        nonlocal left
        before, left = left, daemon.link.execute("PTTL", key)
        return bool(left > before)

    for number in range(count):
        daemon.wait_for(renewed, what=f"renewal {number}", every=0.005)


def test_paused_daemon_drains(new_daemon: NewDaemon):
    daemon = new_daemon()
    with daemon:
        daemon.pause()
        uids = daemon.send(["ok"] * 3)

        assert daemon.stop(5) == 0

        assert daemon.ledger.records("start") == []
        daemon.start()
        daemon.wait_settled()
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.stop() == 0


# --- titles ---------------------------------------------------------------------------------------


def test_process_title_contains_the_role(new_daemon: NewDaemon):
    daemon = new_daemon(partitions=2, groups=["bill", "ship"])
    daemon.write_config(redis={"url": "embedded:"})
    with daemon:
        titles = daemon.titles()

        assert set(titles) == {
            "streamqd: supervisor one",
            "streamqd: redis",
            "streamqd: housekeeper",
            *(
                f"streamqd: worker {TOPIC}/{number} {group}"
                for number in (0, 1)
                for group in ("bill", "ship")
            ),
        }
        # Workers are forks of the supervisor, without children.
        for title, pid in titles.items():
            if "worker" in title:
                one = psutil.Process(pid)
                assert one.ppid() == daemon.pid
                assert one.children() == []
        assert daemon.stop() == 0
