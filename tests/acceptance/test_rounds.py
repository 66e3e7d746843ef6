"""Recovery in rounds repeats few of many runs after a crash, and charges only the guilty message.

Handlers take 1 s, like a call to another service. Timeouts are far longer than a recovery in rounds
takes, and far shorter than it would take to run the suspects one by one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from tests.acceptance.test_operator_questions import run_command
from tests.support.cluster import Cluster
from tests.support.daemon import GROUP, TOPIC, Daemon, daemons
from tests.support.sentinels import Sentinels

NewDaemon = Callable[..., Daemon]

pytestmark = [pytest.mark.slow, pytest.mark.fault("F1")]

MESSAGES, TOGETHER, MAX_CRASHES, STARTS_MAX = 400, 128, 3, 9

COMMON = """
import asyncio, os, time
from contextlib import ExitStack
from streamqd import Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1")
"""
TASKS = """
async def obey(message: Message) -> None:
    with ledger.run(message):
        word, seconds = message.text().split()
        await asyncio.sleep(float(seconds))
        if word == "exit":
            os._exit(9)
"""
THREADS = TASKS.replace("async def", "def").replace("await asyncio", "time")
BATCHES = """
def obey(batch: list[Message]) -> None:
    with ExitStack() as stack:
        for message in batch:
            stack.enter_context(ledger.run(message))
        time.sleep(1)
        if any(message.text().startswith("exit") for message in batch):
            os._exit(9)
"""
SEVERAL: dict[str, Any] = {"concurrency": TOGETHER, "order": "none"}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tasks": (TASKS, SEVERAL),
    "threads": (THREADS, SEVERAL),
    "key": (TASKS, SEVERAL | {"order": "key"}),
    "hold-key": (TASKS, SEVERAL | {"order": "key", "on_error": "hold-key"}),
    "batches": (BATCHES, {"batch": 100}),
}
# To start a run, a message may need not only a lane, but also a rate of 200 per second or a closed
# circuit breaker.
RATE: dict[str, Any] = {"rate": "200/s"}
BREAKER: dict[str, Any] = {"breaker": {"failures": 5, "window": "10s"}}
GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "rate": (TASKS, SEVERAL | RATE),
    "rate-of-batches": (BATCHES, {"batch": 100} | RATE),
    "breaker": (THREADS, SEVERAL | BREAKER),
    "breaker-of-batches": (BATCHES, {"batch": 100} | BREAKER),
}
each_shape = pytest.mark.parametrize("shape", SHAPES)


def configure_daemon(new_daemon: NewDaemon, shape: str, **options: Any) -> Daemon:
    code, consumer = (SHAPES | GATED)[shape]
    consumer = {"max_crashes": MAX_CRASHES} | consumer
    return new_daemon(code=COMMON + code, consumer=consumer, **options)


def send_while_paused(daemon: Daemon, words: list[str]) -> list[str]:
    """Send messages while the worker is paused, then resume it. Return their uids."""
    daemon.pause()
    uids = daemon.send(words)
    daemon.signal(signal.SIGCONT)
    return uids


def starts(daemon: Daemon) -> Counter[str]:
    return Counter(each.uid for each in daemon.ledger.records("start"))


@pytest.fixture(params=["sentinel", "cluster"])
def new_ha_daemon(
    request: pytest.FixtureRequest, binary: Path, tmp_path: Path
) -> Iterator[NewDaemon]:
    """Configure daemons that use Sentinel, or a cluster of three masters."""
    sentinel = request.param == "sentinel"
    made = Sentinels(binary, replicas=1) if sentinel else Cluster(binary)
    with made as servers, daemons(tmp_path, servers.url) as make:
        yield make


@each_shape
def test_killed_worker_is_recovered_in_few_rounds(new_daemon: NewDaemon, shape: str):
    recover_from_a_killed_worker(new_daemon, shape)


def test_killed_worker_recovers_in_few_rounds_on_ha_servers(new_ha_daemon: NewDaemon):
    recover_from_a_killed_worker(new_ha_daemon, "key")


def recover_from_a_killed_worker(new_daemon: NewDaemon, shape: str) -> None:
    with configure_daemon(new_daemon, shape) as daemon:
        uids = send_while_paused(daemon, ["nap 1"] * MESSAGES)
        daemon.wait_for(lambda: daemon.ledger.count("end") > 0, what="the first ones have ended")
        daemon.wait_for(
            lambda: daemon.ledger.count("start") > daemon.ledger.count("end") + 50,
            what="many run again",
        )
        os.kill(daemon.pids()[0], signal.SIGKILL)
        daemon.wait_settled(20)
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        assert daemon.ledger.finished_uids(GROUP) == {*uids}
        assert max(starts(daemon).values()) <= 2
        assert "charged" not in daemon.wait_event("worker.crashed")
        assert (daemon.letters(), daemon.traces()) == ([], [])
        assert daemon.stop() == 0


def test_status_and_why_show_the_progress_of_a_recovery(new_daemon: NewDaemon):
    with configure_daemon(new_daemon, "tasks") as daemon:
        send_while_paused(daemon, ["nap 4"] * TOGETHER)
        daemon.wait_for(lambda: daemon.ledger.count("start") == TOGETHER, what="all run")
        os.kill(daemon.pids()[0], signal.SIGKILL)
        told = rf"recovering.*: (64|{TOGETHER}) of {TOGETHER} suspects left, round of 64"

        def tells(*words: str) -> bool:
            said = " ".join(run_command(daemon, *words)[1].split())
            return re.search(told, said) is not None

        for words in (("status",), ("status", TOPIC), ("why", f"{TOPIC}/0")):
            daemon.wait_for(lambda words=words: tells(*words), what=f"{words} tells it")
        daemon.wait_settled(30)
        daemon.wait_for(
            lambda: "recovering" not in run_command(daemon, "status")[1],
            what="the recovery is over",
        )
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("shape", "partitions"),
    [("tasks", 1), ("batches", 1), ("tasks", 4), ("hold-key", 4), ("batches", 4)],
)
def test_killed_supervisor_is_recovered_in_few_rounds(
    new_daemon: NewDaemon, shape: str, partitions: int
):
    """A killed supervisor is recovered in few rounds.

    The default TTL does not delay that, because the lock proves that no old process is left.
    """
    lease = {"lease_ttl": f"{config.Daemon().lease_ttl:g}s"}
    with configure_daemon(new_daemon, shape, partitions=partitions, daemon=lease) as daemon:
        uids = send_while_paused(daemon, ["nap 1"] * MESSAGES)
        daemon.wait_for(lambda: daemon.ledger.count("start") >= 100, what="many run")
        daemon.kill()
        began = time.monotonic()
        daemon.start()
        daemon.wait_settled(20)
        print(shape, partitions, "handled after", round(time.monotonic() - began, 1))
        assert daemon.ledger.finished_uids(GROUP) == {*uids}
        assert max(starts(daemon).values()) <= 2
        assert not [each for each in daemon.events("lease.acquired") if each.get("suspected")]
        assert (daemon.letters(), daemon.traces()) == ([], [])
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("shape", "partitions", "patience"),
    [*((shape, 1, 30) for shape in (*SHAPES, *GATED)), ("tasks", 4, 40)],
)
def test_lost_host_is_recovered_in_few_rounds(
    new_daemon: NewDaemon, shape: str, partitions: int, patience: int
):
    recover_from_a_lost_host(new_daemon, shape, partitions, patience)


def test_lost_host_recovers_in_few_rounds_on_ha_servers(new_ha_daemon: NewDaemon):
    recover_from_a_lost_host(new_ha_daemon, "key", 4, 40)


def recover_from_a_lost_host(
    new_daemon: NewDaemon, shape: str, partitions: int, patience: int
) -> None:
    options: dict[str, Any] = {"partitions": partitions}
    lost = configure_daemon(new_daemon, shape, daemon={"lease_ttl": "10s"}, **options)
    with lost:
        uids = send_while_paused(lost, ["nap 1"] * MESSAGES)
        lost.wait_for(lambda: lost.ledger.count("start") >= 100, what="many run")
        lost.kill()
        heir = configure_daemon(
            new_daemon, shape, daemon={"lease_ttl": "10s"}, name="two", **options
        )
        began = time.monotonic()
        with heir:
            heir.wait_settled(patience)
            print(shape, partitions, "handled after", round(time.monotonic() - began, 1))
            assert heir.ledger.finished_uids(GROUP) == {*uids}
            assert not [each for each in heir.events("lease.acquired") if each.get("suspected")]
            assert (heir.letters(), heir.traces()) == ([], [])
            assert heir.stop() == 0


@pytest.mark.parametrize("poisons", [1, 2])
@each_shape
def test_poison_among_many_messages_is_charged_alone(
    new_daemon: NewDaemon, shape: str, poisons: int
):
    with configure_daemon(new_daemon, shape) as daemon:
        words = ["nap 1"] * MESSAGES
        bad = [37, 300][:poisons]
        for at in bad:
            words[at] = "exit 0.2"
        uids = send_while_paused(daemon, words)
        guilty = {uids[at] for at in bad}
        daemon.wait_settled(60)
        letters = daemon.letters()
        assert {each["uid"] for each in letters} == guilty
        assert len(letters) == poisons
        assert {(each["reason"], each["crashes"]) for each in letters} == {
            ("crashes", str(MAX_CRASHES))
        }
        charged = Counter(
            each["charged"] for each in daemon.events("worker.crashed") if "charged" in each
        )
        assert charged == {"m:" + uid.rpartition("/")[2]: MAX_CRASHES for uid in guilty}
        assert daemon.ledger.finished_uids(GROUP) == {*uids} - guilty
        innocent = [count for uid, count in starts(daemon).items() if uid not in guilty]
        print(
            shape, poisons, "starts", max(innocent), "crashes", len(daemon.events("worker.crashed"))
        )
        assert max(innocent) <= STARTS_MAX
        assert daemon.traces() == []
        assert daemon.stop() == 0
