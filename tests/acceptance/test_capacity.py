"""An instance that cannot start its workers releases their partitions and takes them back later."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from streamqd.supervisor.worker_pool import KEPT_DESCRIPTORS
from tests.support.daemon import GROUP, ROOT, TOPIC, Daemon

NewDaemon = Callable[..., Daemon]
PARTITIONS = 12
QUICK = {"lease_ttl": "3s", "rebalance_delay": "0s", "rebalance_hold": "0s", "rebalance_moves": 8}
PATIENCE = 60.0


def count_owned(daemon: Daemon) -> Counter[str]:
    """Return the number of partitions that each instance owns."""
    fences = daemon.link.pipeline(
        [
            ("HMGET", daemon.keys.fence(TOPIC, number, GROUP), "token", "owner")
            for number in range(PARTITIONS)
        ]
    )
    return Counter(owner.decode() for token, owner in fences if token)


def pair(new_daemon: NewDaemon, **second: object) -> tuple[Daemon, Daemon]:
    made = [
        new_daemon(partitions=PARTITIONS, name=name, daemon=QUICK, **options)
        for name, options in (("one", {}), ("two", second))
    ]
    return made[0], made[1]


def limit_file_descriptors(daemon: Daemon, soft: int) -> None:
    """Set the limit on open file descriptors for the running supervisor."""
    hard = psutil.Process(daemon.pid).rlimit(resource.RLIMIT_NOFILE)[1]
    psutil.Process(daemon.pid).rlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run_command(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, "-m", "streamqd", "--config", str(daemon.config_path), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def count_ready_workers(daemon: Daemon) -> int:
    """Return the number of workers that have reported ready."""
    return len(daemon.events("worker.ready"))


def kill_workers(daemon: Daemon, count: int) -> None:
    for pid in list(daemon.pids().values())[:count]:
        psutil.Process(pid).kill()


@pytest.mark.promise
def test_partitions_without_workers_move_away_and_back(new_daemon: NewDaemon):
    """The other instance takes the partitions immediately.

    This one takes them back once it can start workers again.
    """
    one, two = pair(new_daemon)
    with two, one:
        one.wait_for(
            lambda: count_owned(one) == Counter(one=6, two=6), timeout=PATIENCE, what="half each"
        )
        one.wait_for(lambda: count_ready_workers(one) >= 6, timeout=PATIENCE, what="six workers")
        limit_file_descriptors(one, KEPT_DESCRIPTORS)
        mark = one.mark()
        kill_workers(one, 3)
        failed = one.wait_event("fork.failed", after=mark)
        reduced = one.wait_event("capacity.reduced", after=mark, timeout=PATIENCE)
        assert reduced["partitions"] == 3
        assert "Too many open files" in reduced["error"]
        assert _seconds(reduced) - _seconds(failed) < 5.0
        one.wait_for(
            lambda: count_owned(one) == Counter(one=3, two=9), timeout=PATIENCE, what="two has them"
        )
        uids = one.send(["ok"] * PARTITIONS)
        for uid in uids:
            one.wait_run(uid, "end", timeout=PATIENCE)
        _assert_limit_reported(one)

        limit_file_descriptors(one, 1024)
        one.wait_event("capacity.raised", after=mark, timeout=PATIENCE)
        one.wait_for(
            lambda: count_owned(one) == Counter(one=6, two=6),
            timeout=PATIENCE,
            what="half each again",
        )
        one.wait_for(
            lambda: one.events("capacity.raised", mark)[-1].get("partitions") is None,
            timeout=PATIENCE,
            what="there is no limit any more",
        )
        one.send(["ok"] * PARTITIONS)
        one.wait_settled()
        assert one.ledger.audit(GROUP).lost == []
        assert (one.stop(), two.stop()) == (0, 0)


def _assert_limit_reported(one: Daemon) -> None:
    """Check that `status` and `doctor` report the limit of 3 partitions."""

    def shown() -> bool:
        seen = json.loads(run_command(one, "status", "--json").stdout)
        row = next(each for each in seen["instances"] if each["instance"] == "one")
        told = any("one can run no more than 3 partitions" in each for each in seen["problems"])
        return told and (row["state"], row["capacity"]) == ("limited", 3)

    one.wait_for(shown, timeout=PATIENCE, what="status says it", every=0.3)
    told = run_command(one, "doctor", "--only", "fleet.limited")
    assert told.returncode == 1
    assert "one can run no more than 3 partitions" in told.stdout


def _seconds(event: dict[str, object]) -> float:
    minutes, seconds = str(event["ts"]).rstrip("Z").split(":")[1:]
    return int(minutes) * 60 + float(seconds)


def test_instance_with_a_low_limit_serves_a_part_of_its_share(new_daemon: NewDaemon):
    """If `ulimit -n` is too low for an instance's share, the other instance serves the rest."""
    one, two = pair(new_daemon)
    one.within = ["prlimit", f"--nofile={KEPT_DESCRIPTORS + 20}", "--"]
    with two, one:
        one.wait_event("capacity.reduced", timeout=PATIENCE)
        one.wait_for(
            lambda: count_owned(one).total() == PARTITIONS and count_owned(one)["two"] > 6,
            timeout=PATIENCE,
            what="all are owned",
        )
        uids = one.send(["ok"] * PARTITIONS)
        for uid in uids:
            one.wait_run(uid, "end", timeout=PATIENCE)
        served = count_owned(one)["one"]
        assert served == len(one.pids()) > 0
        assert (one.stop(), two.stop()) == (0, 0)


def test_why_names_the_limit_of_the_only_instance(new_daemon: NewDaemon):
    """`why` names the limit of the only instance, and messages wait until the limit is lifted."""
    one, _ = pair(new_daemon)
    with one:
        one.wait_for(lambda: len(one.pids()) == PARTITIONS, timeout=PATIENCE, what="all run")
        limit_file_descriptors(one, KEPT_DESCRIPTORS)
        mark = one.mark()
        kill_workers(one, PARTITIONS)
        one.wait_for(
            lambda: count_owned(one).total() == 0, timeout=PATIENCE, what="it has given up all"
        )
        (uid,) = one.send(["ok"], partition=0)
        told = run_command(one, "why", f"{TOPIC}/0", "--json")
        assert [each["word"] for each in json.loads(told.stdout)["answers"][0]["causes"]] == [
            "no-capacity"
        ]
        limit_file_descriptors(one, 1024)
        one.wait_run(uid, "end", timeout=PATIENCE)
        one.wait_for(lambda: len(one.pids()) == PARTITIONS, timeout=PATIENCE, what="all run again")
        assert len(one.events("capacity.reduced", mark)) >= 1
        assert one.stop() == 0
