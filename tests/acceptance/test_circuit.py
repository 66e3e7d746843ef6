"""The circuit breaker of each partition limits the cost of an outage, probes, and recovers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.acceptance.test_error_policies import run_command
from tests.support.daemon import TOPIC, Daemon

NewDaemon = Callable[..., Daemon]

PARTITIONS, FAILURES, EACH = 4, 10, 60
MOST = PARTITIONS * FAILURES

# The handler appends one line per step, with the time on a clock that all processes share.
CODE = """
import os, time
from pathlib import Path
from streamqd import Message

told = os.open("told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tell(what, message):
    words = f"{what} {message.partition} {message.text()} {message.attempt} {time.monotonic_ns()}"
    os.write(told, f"{words}\\n".encode())

def obey(message: Message) -> None:
    tell("begin", message)
    if Path("hang").exists():
        tell("hang", message)
        time.sleep(3600)
    bad = Path("down").exists() or message.text() == "bad"
    tell("fail" if bad else "end", message)
    if bad:
        raise ConnectionError
"""


class RunRecord(NamedTuple):
    what: str  # begin | hang | fail | end
    partition: int
    text: str
    attempt: int
    at: float


def read_runs(daemon: Daemon, *what: str) -> list[RunRecord]:
    path = daemon.folder / "told"
    text = path.read_text() if path.exists() else ""
    lines = (line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines())
    seen = [RunRecord(a, int(b), c, int(d), int(e) / 1e9) for a, b, c, d, e in lines]
    return [each for each in seen if not what or each.what in what]


def configure_daemon(new_daemon: NewDaemon, probe_every: str, **consumer: Any) -> Daemon:
    breaker = {"failures": FAILURES, "probe_every": probe_every, "on": ["ConnectionError"]}
    # Longer than a partition takes for its first failures, even on a busy machine. If a message
    # failed again before the circuit opens, it would spend another attempt.
    backoff = {"kind": "fixed", "base": "2s", "max": "2s"}
    made = {"max_attempts": 1, "backoff": backoff, "breaker": breaker} | consumer
    return new_daemon(partitions=PARTITIONS, consumer=made, code=CODE)


def send_all(daemon: Daemon) -> None:
    for partition in range(PARTITIONS):
        daemon.send([f"{partition}-{number}" for number in range(EACH)], partition=partition)


def restore_dependency(daemon: Daemon) -> None:
    """Restore the dependency. Check that all messages are handled and none is dead-lettered."""
    (daemon.folder / "down").unlink()
    daemon.wait_settled()
    daemon.wait_for(
        lambda: len(daemon.events("circuit.closed")) == PARTITIONS, what="all circuits are closed"
    )
    assert daemon.letters() == []
    assert len({each.text for each in read_runs(daemon, "end")}) == PARTITIONS * EACH
    assert len(daemon.events("circuit.opened")) == PARTITIONS


def count_halted(daemon: Daemon) -> int:
    """Return the number of partitions that `status` shows as halted."""
    assignments = json.loads(run_command(daemon, "status", "--json"))["assignments"]
    return sum(each["worker"] == "halted" for each in assignments)


def test_outage_costs_each_partition_only_a_few_failures(new_daemon: NewDaemon):
    """An outage of all four partitions costs each only a few failures."""
    daemon = configure_daemon(new_daemon, "1h")
    (daemon.folder / "down").touch()
    with daemon:
        send_all(daemon)
        daemon.wait_for(
            lambda: count_halted(daemon) == PARTITIONS, what="all partitions are halted", every=0.1
        )
        # `status` and `why TOPIC` print one line for the group, not one per partition.
        said = run_command(daemon, "status")
        lines = [line for line in said.splitlines() if "circuit breaker" in line]
        assert len(lines) == 1, said
        assert "is open on one, so no message runs, next attempt in " in lines[0]
        assert "; last: ConnectionError, " in lines[0]
        assert lines[0].endswith(f"; the same in partitions 1-{PARTITIONS - 1}")
        assert " circuit open" in said
        said = run_command(daemon, "why", TOPIC)
        assert said.count("circuit breaker") == 1, said
        assert "; the same in partitions " in said
        assert len(read_runs(daemon, "fail")) == MOST
        assert len(daemon.events("circuit.opened")) == PARTITIONS
        assert daemon.stop() == 0
    assert len(read_runs(daemon, "begin")) == MOST


def test_open_circuit_stops_only_its_partition(new_daemon: NewDaemon):
    daemon = configure_daemon(new_daemon, "1h")
    with daemon:
        daemon.send(["bad"] * EACH, partition=0)
        daemon.wait_for(lambda: count_halted(daemon) == 1, what="one is halted", every=0.1)
        for partition in range(1, PARTITIONS):
            daemon.send(["ok"] * EACH, partition=partition)
        others = (PARTITIONS - 1) * EACH
        daemon.wait_for(lambda: len(read_runs(daemon, "end")) == others, what="others are handled")
        assert count_halted(daemon) == 1
        assert daemon.stop() == 0
    assert len(read_runs(daemon, "fail")) == FAILURES


@pytest.mark.parametrize("lanes", [1, 4])
def test_circuit_probes_one_message_at_a_time(new_daemon: NewDaemon, lanes: int):
    daemon = configure_daemon(new_daemon, "100ms", concurrency=lanes, order="key")
    spent = FAILURES + 2 * (lanes - 1)  # per partition: other lanes may be running when it opens
    (daemon.folder / "down").touch()
    began = time.monotonic()
    with daemon:
        send_all(daemon)
        most = PARTITIONS * spent
        daemon.wait_for(lambda: len(read_runs(daemon, "fail")) >= most + 10, what="ten probes")
        restore_dependency(daemon)
        assert daemon.stop() == 0
    seen = read_runs(daemon)
    assert {each.attempt for each in seen} == {1}, "no attempt was spent"
    for partition in range(PARTITIONS):
        own = [each for each in seen if each.partition == partition]
        failed = [each for each in own if each.what == "fail"]
        assert len(failed) <= spent + (time.monotonic() - began) / 0.1 + 1
        if probes := failed[spent:]:
            first, last = own.index(probes[0]) - 1, own.index(probes[-1])
            assert [each.what for each in own[first : last + 1]] == ["begin", "fail"] * len(probes)


def test_killed_probe_passes_the_circuit_to_the_next_worker(new_daemon: NewDaemon):
    daemon = configure_daemon(new_daemon, "100ms")
    (daemon.folder / "down").touch()

    def failed(partition: int) -> int:
        return sum(each.partition == partition for each in read_runs(daemon, "fail"))

    with daemon:
        send_all(daemon)
        daemon.wait_for(lambda: len(read_runs(daemon, "fail")) > MOST, what="a probe")
        (daemon.folder / "hang").touch()
        hanging = daemon.wait_for(lambda: read_runs(daemon, "hang"), what="a probe hangs")[
            0
        ].partition
        (daemon.folder / "hang").unlink()
        before = failed(hanging)
        os.kill(daemon.pids()[hanging], signal.SIGKILL)
        daemon.wait_for(lambda: failed(hanging) > before, what="the next worker probes")
        for partition, pid in daemon.pids().items():
            hangs = any(each.partition == partition for each in read_runs(daemon, "hang"))
            if hangs and partition != hanging:
                os.kill(pid, signal.SIGKILL)
        restore_dependency(daemon)
        assert daemon.stop() == 0
