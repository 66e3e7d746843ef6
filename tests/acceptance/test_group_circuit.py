"""An outage is one for all partitions of a group: one circuit, counted in calls that fail."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.acceptance.test_error_policies import ask
from tests.support.daemon import TOPIC, Daemon

NewDaemon = Callable[..., Daemon]

PARTITIONS, FAILURES, EACH = 4, 10, 60
# Each of the others may be running one when it opens, and begin one before it hears of it.
MOST = FAILURES + 2 * (PARTITIONS - 1)

# Appends what it does, with the time of one clock for all processes.
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


class Told(NamedTuple):
    what: str  # begin | hang | fail | end
    partition: int
    text: str
    attempt: int
    at: float


def told(daemon: Daemon, *what: str) -> list[Told]:
    path = daemon.folder / "told"
    text = path.read_text() if path.exists() else ""
    lines = (line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines())
    seen = [Told(a, int(b), c, int(d), int(e) / 1e9) for a, b, c, d, e in lines]
    return [each for each in seen if not what or each.what in what]


def configured(new_daemon: NewDaemon, probe_every: str, **consumer: Any) -> Daemon:
    breaker = {"failures": FAILURES, "probe_every": probe_every, "on": ["ConnectionError"]}
    backoff = {"kind": "fixed", "base": "10ms", "max": "10ms"}
    made = {"max_attempts": 1, "backoff": backoff, "breaker": breaker} | consumer
    return new_daemon(partitions=PARTITIONS, consumer=made, code=CODE)


def send_all(daemon: Daemon) -> None:
    for partition in range(PARTITIONS):
        daemon.send([f"{partition}-{number}" for number in range(EACH)], partition=partition)


def mend(daemon: Daemon) -> None:
    """The dependency is back: all is done, and nothing has died."""
    (daemon.folder / "down").unlink()
    daemon.wait_settled()
    daemon.wait_event("circuit.closed")
    assert daemon.letters() == []
    assert len({each.text for each in told(daemon, "end")}) == PARTITIONS * EACH
    assert len(daemon.events("circuit.opened")) == len(daemon.events("circuit.closed")) == 1


def halted(daemon: Daemon) -> int:
    """How many partitions `status` shows as halted."""
    units = json.loads(ask(daemon, "status", "--json"))["units"]
    return sum(each["worker"] == "halted" for each in units)


def test_an_outage_costs_a_group_as_many_messages_as_one_partition(new_daemon: NewDaemon):
    """All four meet it at once."""
    daemon = configured(new_daemon, "1h")
    (daemon.folder / "down").touch()
    with daemon:
        send_all(daemon)
        daemon.wait_for(
            lambda: halted(daemon) == PARTITIONS, what="all partitions are halted", every=0.1
        )
        # U12: one line for the group in `status` and in `why TOPIC`, not one for each partition.
        said = ask(daemon, "status")
        lines = [line for line in said.splitlines() if "circuit breaker" in line]
        assert len(lines) == 1, said
        assert "is open on one: no message is started, the next try in " in lines[0]
        assert "; last: ConnectionError, " in lines[0]
        assert lines[0].endswith(f"; the same in partitions 1-{PARTITIONS - 1}")
        assert " circuit open" in said
        said = ask(daemon, "why", TOPIC)
        assert said.count("circuit breaker") == 1, said
        assert "; the same in partitions " in said
        assert FAILURES <= len(told(daemon, "fail")) <= MOST
        assert len(daemon.events("circuit.opened")) == 1
        assert daemon.stop() == 0
    assert len(told(daemon, "begin")) <= MOST


def test_who_has_not_met_the_outage_need_not_meet_it(new_daemon: NewDaemon):
    daemon = configured(new_daemon, "1h")
    (daemon.folder / "down").touch()
    with daemon:
        daemon.send(["x"] * EACH, partition=0)
        daemon.wait_for(lambda: halted(daemon) == 1, what="one is halted", every=0.1)
        for partition in range(1, PARTITIONS):
            daemon.send(["x"] * EACH, partition=partition)
        daemon.wait_for(lambda: halted(daemon) == PARTITIONS, what="all are halted", every=0.1)
        assert daemon.stop() == 0
    assert len(told(daemon, "begin")) == FAILURES


@pytest.mark.parametrize("lanes", [1, 4])
def test_one_at_a_time_tries_and_all_go_on_when_one_succeeds(new_daemon: NewDaemon, lanes: int):
    daemon = configured(new_daemon, "100ms", concurrency=lanes, order="key")
    most = MOST if lanes == 1 else FAILURES + 2 * lanes * PARTITIONS
    (daemon.folder / "down").touch()
    began = time.monotonic()
    with daemon:
        send_all(daemon)
        daemon.wait_for(lambda: len(told(daemon, "fail")) >= most + 10, what="ten probes")
        mend(daemon)
        assert daemon.stop() == 0
    seen = told(daemon)
    assert {each.attempt for each in seen} == {1}, "no attempt was spent"
    failed = [each for each in seen if each.what == "fail"]
    assert len(failed) <= most + (time.monotonic() - began) / 0.1 + 1
    probes = failed[most:]
    assert len({each.partition for each in probes}) > 1, "they take turns"
    first = seen.index(probes[0]) - 1
    last = seen.index(probes[-1])
    assert [each.what for each in seen[first : last + 1]] == ["begin", "fail"] * len(probes)


def test_nobody_waits_for_a_probe_that_hangs_or_for_a_worker_that_is_gone(new_daemon: NewDaemon):
    daemon = configured(new_daemon, "100ms")
    (daemon.folder / "down").touch()
    with daemon:
        send_all(daemon)
        daemon.wait_for(lambda: len(told(daemon, "fail")) > MOST, what="a probe")
        (daemon.folder / "hang").touch()
        hanging = daemon.wait_for(lambda: told(daemon, "hang"), what="a probe hangs")[0]
        (daemon.folder / "hang").unlink()
        before = len(told(daemon, "fail"))
        daemon.wait_for(
            lambda: len(told(daemon, "fail")) >= before + 5, what="others try meanwhile"
        )
        os.kill(daemon.pids()[hanging.partition], signal.SIGKILL)
        mend(daemon)
        assert daemon.stop() == 0


def test_a_message_that_is_alone_on_its_partition_is_no_outage_while_others_succeed(
    new_daemon: NewDaemon,
):
    breaker = {"failures": 3, "probe_every": "1h", "on": ["ConnectionError"]}
    backoff = {"kind": "fixed", "base": "300ms", "max": "300ms"}
    daemon = configured(new_daemon, "1h", max_attempts=2, breaker=breaker, backoff=backoff)
    with daemon:
        daemon.send(["bad"], partition=3)
        for number in range(1, 4):
            daemon.wait_for(lambda: len(told(daemon, "fail")) == number, what="it fails")  # noqa: B023
            daemon.send([f"good {number}".replace(" ", "-")], partition=0)
            daemon.wait_for(lambda: len(told(daemon, "end")) == number, what="it succeeds")  # noqa: B023
        daemon.wait_for(daemon.letters, what="it is dead")
        assert daemon.events("circuit.opened") == []
        assert daemon.stop() == 0
