"""If a script's reply about one partition is nonsense, the others and their processes continue."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd.model import Assignment
from tests.faults.scenario_runner import BY_SOURCE, call_kind
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.proxy import FaultProxy, Trigger
from tests.support.servers import ProcessServer

pytestmark = pytest.mark.promise

Make = Callable[..., Daemon]
PARTITIONS = 3
VICTIM = Assignment(TOPIC, 1, GROUP)
FAST = {"kind": "fixed", "base": "50ms", "jitter": "none"}
SETTINGS = {"lease_ttl": "2s", "crash_backoff": FAST, "crash_loop": 1000}
UNKNOWN_WORD = b"*1\r\n$3\r\nWAT\r\n"
NO_VALUES = b"*1\r\n$2\r\nOK\r\n"
WRONG_TYPES = b"*4\r\n$2\r\nOK\r\n*0\r\n:1\r\n$1\r\nx\r\n"
NOT_A_LIST = b":7\r\n"
NO_EPOCH = b"*3\r\n$2\r\nOK\r\n$3\r\nWAT\r\n:0\r\n"


@pytest.fixture
def proxy(fresh_server: ProcessServer) -> Iterator[FaultProxy]:
    with FaultProxy(fresh_server.socket_path, remember=1) as made:
        yield made


def forge(proxy: FaultProxy, reply: bytes, *scripts: str, partition: int | None = None) -> Trigger:
    """Forge the replies of scripts, either to all calls or only to those about one partition."""
    place = b"" if partition is None else f"{{{TOPIC}:p:{partition}}}".encode()

    def wanted(command: list[bytes]) -> bool:
        named = call_kind(command).removeprefix(BY_SOURCE) in scripts
        return named and any(place in argument for argument in command[2:])

    return proxy.forge(reply, wanted)


def others_work(daemon: Daemon, *, payload: str = "ok", runs: int = 1) -> None:
    """Send a message to each partition except the victim's, and wait until it runs."""
    for number in range(PARTITIONS):
        if number != VICTIM.partition:
            (uid,) = daemon.send([payload], partition=number)
            daemon.wait_run(uid, count=runs)


def victim_works(daemon: Daemon) -> None:
    (uid,) = daemon.send(["ok"], partition=VICTIM.partition)
    daemon.wait_run(uid, "end")


def other_pids(daemon: Daemon) -> dict[int, int]:
    return {number: pid for number, pid in daemon.pids().items() if number != VICTIM.partition}


@pytest.mark.parametrize(
    ("reply", "payload", "scripts"),
    [
        pytest.param(UNKNOWN_WORD, "ok", ["lease_renew"], id="renew"),
        pytest.param(NOT_A_LIST, "exit 9", ["lease_refence", "lease_release"], id="several"),
        pytest.param(NO_VALUES, "exit 9", ["lease_refence"], id="refence-without-values"),
        pytest.param(NO_EPOCH, "exit 9", ["lease_refence"], id="refence-without-epoch"),
    ],
)
def test_nonsense_lease_reply_gives_up_only_its_assignment(
    make: Make, proxy: FaultProxy, reply: bytes, payload: str, scripts: list[str]
):
    """Only the assignment is given up, because the pipeline's other replies still count."""
    with make(partitions=PARTITIONS, daemon=SETTINGS, redis_url=proxy.url) as daemon:
        others_work(daemon)
        victim_works(daemon)
        pids, mark = other_pids(daemon), daemon.mark()
        forged = forge(proxy, reply, *scripts, partition=VICTIM.partition)
        daemon.send([payload], partition=VICTIM.partition)
        told = daemon.wait_event("assignment.given_up", after=mark)
        assert (told["topic"], told["partition"]) == (TOPIC, VICTIM.partition)
        assert "ContractError" in told["error"]
        others_work(daemon)
        assert other_pids(daemon) == pids
        forged.disarm()
        victim_works(daemon)
        assert other_pids(daemon) == pids
        given_up = daemon.events("assignment.given_up")
        assert {each["partition"] for each in given_up} == {VICTIM.partition}
        assert daemon.stop() == 0


def test_nonsense_group_reply_does_not_stop_the_start(make: Make, proxy: FaultProxy):
    """The other partitions start even if the group of one partition cannot be created."""
    forged = forge(proxy, UNKNOWN_WORD, "group_ensure", partition=VICTIM.partition)
    with make(partitions=PARTITIONS, daemon=SETTINGS, redis_url=proxy.url) as daemon:
        others_work(daemon)
        given_up = daemon.wait_event("assignment.given_up")
        assert given_up["partition"] == VICTIM.partition
        pids = other_pids(daemon)
        forged.disarm()
        victim_works(daemon)
        assert other_pids(daemon) == pids
        assert daemon.stop() == 0


@pytest.mark.parametrize("reply", [UNKNOWN_WORD, NO_VALUES, WRONG_TYPES, NOT_A_LIST])
def test_nonsense_heartbeat_reply_stops_no_worker(make: Make, proxy: FaultProxy, reply: bytes):
    """After a nonsense heartbeat reply, the instance keeps its last view of the fleet."""
    with make(partitions=PARTITIONS, daemon=SETTINGS, redis_url=proxy.url) as daemon:
        others_work(daemon)
        pids, mark = daemon.pids(), daemon.mark()
        forged = forge(proxy, reply, "member_heartbeat")
        told = daemon.wait_event("redis.refused", after=mark)
        assert told["request"] == "heartbeat"
        forged.happened.clear()
        forged.wait()  # the next heartbeat
        others_work(daemon)
        victim_works(daemon)
        assert daemon.pids() == pids
        forged.disarm()
        others_work(daemon)
        assert len(daemon.events("redis.refused")) == 1
        assert daemon.stop() == 0


LANES = {"concurrency": 3, "order": "none", "backoff": FAST, "max_crashes": 1, "max_attempts": 2}


def test_nonsense_reply_during_runs_charges_no_message(
    make: Make, proxy: FaultProxy, tmp_path: Path
):
    """A worker exits while a handler is running, but does not blame the handler's message."""
    gate = tmp_path / "gate"
    with make(daemon=SETTINGS, consumer=LANES, redis_url=proxy.url) as daemon:
        (slow,) = daemon.send([f"await {gate}"])
        daemon.wait_run(slow)
        forged = forge(proxy, UNKNOWN_WORD, "settle_retry")
        daemon.send(["fail"])
        daemon.wait_event("worker.crashed")
        forged.disarm()
        daemon.wait_run(slow, count=2)
        gate.touch()
        daemon.wait_settled()
        assert daemon.events("worker.charged") == []
        assert [each["payload"] for each in daemon.letters()] == ["fail"]
        assert daemon.stop() == 0


def test_nonsense_reply_during_a_stop_charges_no_message(
    make: Make, proxy: FaultProxy, tmp_path: Path
):
    """A worker that is stopping does not wait for its other handlers."""
    gates = [tmp_path / "first", tmp_path / "second"]
    with make(daemon=SETTINGS, consumer=LANES, redis_url=proxy.url) as daemon:
        for uid in daemon.send([f"await {gate}" for gate in gates]):
            daemon.wait_run(uid)
        forge(proxy, UNKNOWN_WORD, "settle_ack")
        daemon.signal(signal.SIGTERM)
        daemon.wait_event("drain.started")
        gates[0].touch()
        daemon.wait_event("worker.crashed")
        assert daemon.wait() == 0
        assert daemon.events("worker.charged") == []
        assert daemon.pending() == 1


@pytest.mark.parametrize("reply", [UNKNOWN_WORD, NO_VALUES])
@pytest.mark.parametrize("script", ["message_promote", "assignment_measure"])
def test_nonsense_housekeeper_reply_delays_one_partition(
    make: Make, proxy: FaultProxy, script: str, reply: bytes
):
    """After a nonsense reply about one partition, the task continues with the next ones."""
    consumer = {"backoff": FAST, "max_attempts": 2}
    daemon = make(partitions=PARTITIONS, daemon=SETTINGS, consumer=consumer, redis_url=proxy.url)
    with daemon:
        forged = forge(proxy, reply, script, partition=VICTIM.partition)
        daemon.send(["fail"], partition=VICTIM.partition)
        daemon.wait_event("housekeeper.failed", partition=VICTIM.partition)
        others_work(daemon, payload="fail", runs=2)
        others_work(daemon, payload="fail", runs=2)
        assert daemon.events("housekeeper.exited") == []
        failed = daemon.events("housekeeper.failed")
        assert {each.get("partition") for each in failed} == {VICTIM.partition}
        forged.disarm()
        daemon.wait_event("housekeeper.recovered")
        assert daemon.stop() == 0
