"""Measure the time from a fault until full throughput, for the page. The tests assert no times.

Each row has one scenario: a partition with a backlog, or one partition for each of two instances,
with eight concurrent runs and one strike. Other tests cover the other requirements of the row.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults.results import FULL_SPEED
from tests.support.clock import HOUR, Clock
from tests.support.daemon import Daemon, daemons
from tests.support.full_speed import CODE, CONSUMER, Control, Load
from tests.support.kill_matrix import freeze, thaw
from tests.support.proxy import FaultProxy
from tests.support.servers import ProcessServer

Make = Callable[..., Daemon]
Record = Callable[[str, Any], None]
TTL_SECONDS = 5.0
OPTIONS = {"lease_ttl": f"{TTL_SECONDS}s", "rebalance_delay": "0s", "rebalance_hold": "0s"}


@pytest.fixture
def control(
    new_server: Callable[..., ProcessServer], tmp_path_factory: pytest.TempPathFactory
) -> Control:
    """Start a daemon that is not affected by any fault."""

    @contextmanager
    def start(partitions: int) -> Iterator[Daemon]:
        with (
            daemons(tmp_path_factory.mktemp("control"), new_server().url) as make,
            make(code=CODE, consumer=CONSUMER, partitions=partitions) as made,
        ):
            yield made

    return start


@contextmanager
def run_load(make: Make, control: Control, **given: Any) -> Iterator[tuple[Daemon, Load]]:
    """Run one daemon with a backlog, at full speed."""
    made = make(code=CODE, consumer=CONSUMER, daemon=OPTIONS, **given)
    with made:
        yield made, Load(made, control)
        assert made.stop() == 0


@contextmanager
def run_two_loads(make: Make, control: Control) -> Iterator[tuple[Daemon, Daemon, Load]]:
    """Run two daemons at full speed, with one partition each."""
    given = {"partitions": 2, "code": CODE, "consumer": CONSUMER, "daemon": OPTIONS}
    first, second = make(name="a", **given), make(name="b", **given)
    with first, second:
        first.wait_for(
            lambda: len(first.pids()) == len(second.pids()) == 1, what="one each", timeout=30
        )
        yield first, second, Load(second, control)
        assert second.stop() == 0


@pytest.mark.fault("F1")
def test_full_speed_after_a_worker_kill(
    make: Make, control: Control, record_property: Record
) -> None:
    with run_load(make, control) as (daemon, load):
        killed_at = time.monotonic()
        os.kill(daemon.pids()[0], signal.SIGKILL)
        record_property(FULL_SPEED, load.seconds_until_full(killed_at))


@pytest.mark.fault("F6")
def test_full_speed_after_a_supervisor_kill(
    make: Make, control: Control, record_property: Record
) -> None:
    """A killed supervisor's successor starts once its processes have exited, as under systemd."""
    with run_load(make, control) as (daemon, load):
        killed_at = time.monotonic()
        daemon.kill()
        daemon.wait_gone(5.0)
        daemon.start()
        record_property(FULL_SPEED, load.seconds_until_full(killed_at))


@pytest.mark.fault("F7")
def test_full_speed_after_a_host_loss(
    make: Make, control: Control, record_property: Record
) -> None:
    """A lost host's lease of 5 s must expire first, because nothing proves the host's death."""
    with run_two_loads(make, control) as (first, _second, load):
        freeze(first)  # the host gets no time to release anything
        lost_at = time.monotonic()
        first.kill()
        record_property(FULL_SPEED, load.seconds_until_full(lost_at))


@pytest.mark.fault("F8")
def test_full_speed_after_an_instance_pause(
    make: Make, control: Control, record_property: Record
) -> None:
    """Another instance takes the partition over if a pause exceeds the lease of 5 s."""
    with run_two_loads(make, control) as (first, _second, load):
        paused_at = time.monotonic()
        freeze(first)
        try:
            record_property(FULL_SPEED, load.seconds_until_full(paused_at))
        finally:
            thaw(first)


@pytest.mark.fault("F9")
def test_full_speed_after_a_server_pause(
    make: Make, control: Control, fresh_server: ProcessServer, record_property: Record
) -> None:
    with run_load(make, control) as (daemon, load):
        mark = daemon.mark()
        fresh_server.pause()
        daemon.wait_event("redis.lost", after=mark, role="supervisor", timeout=30)
        resumed_at = time.monotonic()
        fresh_server.resume()
        record_property(FULL_SPEED, load.seconds_until_full(resumed_at))


@pytest.mark.fault("F10")
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_full_speed_after_a_clock_jump(
    make: Make, control: Control, fresh_server: ProcessServer, record_property: Record, jump: int
) -> None:
    clock = Clock(fresh_server)
    with run_load(make, control) as (_daemon, load):
        jumped_at = time.monotonic()
        clock.jump_to(jump)
        record_property(FULL_SPEED, load.seconds_until_full(jumped_at))


@pytest.fixture
def proxy(fresh_server: ProcessServer) -> Iterator[FaultProxy]:
    with FaultProxy(fresh_server.socket_path) as made:
        yield made


@pytest.mark.fault("F11")
def test_full_speed_after_a_network_outage(
    make: Make, control: Control, proxy: FaultProxy, record_property: Record
) -> None:
    with run_load(make, control, redis_url=proxy.url) as (daemon, load):
        mark = daemon.mark()
        proxy.hold(requests=True, replies=True)
        daemon.wait_event("redis.lost", after=mark, role="supervisor", timeout=30)
        healed_at = time.monotonic()
        proxy.heal()
        record_property(FULL_SPEED, load.seconds_until_full(healed_at))


@pytest.mark.fault("F13")
def test_full_speed_after_connection_resets(
    make: Make, control: Control, proxy: FaultProxy, record_property: Record
) -> None:
    with run_load(make, control, redis_url=proxy.url) as (_daemon, load):
        cut_at = time.monotonic()
        proxy.cut()
        record_property(FULL_SPEED, load.seconds_until_full(cut_at))


@pytest.mark.fault("F14")
def test_full_speed_after_a_server_kill(
    make: Make, control: Control, fresh_server: ProcessServer, record_property: Record
) -> None:
    """A killed server resumes from its append-only file. The time starts when it serves again."""
    with run_load(make, control) as (daemon, load):
        mark = daemon.mark()
        fresh_server.kill()
        daemon.wait_event("redis.lost", after=mark, role="supervisor", timeout=30)
        fresh_server.restart()
        record_property(FULL_SPEED, load.seconds_until_full(time.monotonic()))


@pytest.mark.fault("F20")
def test_full_speed_after_a_script_flush(
    make: Make, control: Control, record_property: Record
) -> None:
    with run_load(make, control) as (daemon, load):
        flushed_at = time.monotonic()
        daemon.link.execute("SCRIPT", "FLUSH")
        record_property(FULL_SPEED, load.seconds_until_full(flushed_at))


@pytest.mark.fault("F38")
def test_full_speed_after_silent_connection_failures(
    make: Make, control: Control, proxy: FaultProxy, record_property: Record
) -> None:
    with run_load(make, control, redis_url=proxy.url) as (_daemon, load):
        died_at = time.monotonic()
        proxy.silence()
        record_property(FULL_SPEED, load.seconds_until_full(died_at))
