"""Each tick of a schedule is sent exactly once by some instance, even if daemons keep dying."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.schedules.reconciliation import Declaration, declare, server_unix_ms
from streamqd.store import schedules as calls
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.schedules import FILE, OPERATOR, IndexLine
from tests.support import crash_points, quick
from tests.support.clock import Clock, seconds_ahead
from tests.support.cluster import Cluster
from tests.support.crash_points import Strikes
from tests.support.daemon import Daemon, daemons
from tests.support.sentinels import Sentinels
from tests.support.servers import ProcessServer
from tests.support.waiting import wait_until

Make = Callable[..., Daemon]
Ticks = dict[str, list[int]]

TICKS = "ticks"
SECOND = 1_000
PATIENCE = 60.0  # seconds; the longest wait on a busy machine


def schedule_every_second(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "topic": TICKS, "every": "1s", **more}


@pytest.fixture
def fleet(new_daemon: Make) -> Callable[..., list[Daemon]]:
    """Configure the daemons of a fleet, each with its own schedules."""

    def make(*sets: list[dict[str, Any]], **options: Any) -> list[Daemon]:
        made = []
        for number, schedules in enumerate(sets):
            daemon = new_daemon(name=f"i{number}", **options)
            daemon.write_config(schedules=schedules)
            made.append(daemon)
        return made

    return make


def ticks(daemon: Daemon, topic: str = TICKS, partitions: int = 1) -> Ticks:
    """Return the ticks of each schedule (unix ms), in the order in which they were sent."""
    entries = []
    for number in range(partitions):
        for raw, flat in daemon.link.execute("XRANGE", daemon.keys.stream(topic, number), "-", "+"):
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            entries.append((int(raw.partition(b"-")[0]), json.loads(fields[b"headers"])))
    found: Ticks = {}
    for _, headers in sorted(entries, key=lambda each: each[0]):
        when = datetime.fromisoformat(headers["x-scheduled-for"])
        found.setdefault(headers["x-schedule"], []).append(round(when.timestamp() * 1000))
    return found


def wait_ticks(daemon: Daemon, name: str, count: int, **where: Any) -> None:
    """Wait until a schedule has sent `count` ticks."""

    def sent() -> bool:
        try:
            return len(ticks(daemon, **where).get(name, ())) >= count
        except (
            RedisUnavailableError,
            RedisResponseError,
        ):  # the master may be unavailable at this moment
            return False

    wait_until(sent, timeout=PATIENCE, what=f"{count} ticks of {name}", every=0.1)


def assert_each_once(sent: list[int]) -> None:
    """Check that no tick is repeated or missing."""
    assert sent == list(range(sent[0], sent[-1] + 1, SECOND))


def read_tick_counts(daemon: Daemon, name: str) -> dict[str, int]:
    found = daemon.link.execute("HGETALL", daemon.keys.schedules_last(TICKS, 0))
    told = dict(zip(found[::2], found[1::2], strict=True))
    return {part: int(told.get(f"{name}:{part}".encode(), 0)) for part in ("fired", "skipped")}


# --- instances ------------------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kills", "between"), [(4, 3), pytest.param(12, 5, marks=pytest.mark.slow)]
)
def test_repeated_kills_of_five_instances_lose_no_tick(
    fleet: Callable[..., Any], kills: int, between: int
) -> None:
    """No tick is lost while instances are killed.

    The slow variant kills one of five every 5 s for a minute.
    """
    five = fleet(*[[schedule_every_second("tick")]] * 5)
    for daemon in five:
        daemon.start()
    for daemon in five:
        daemon.wait_event("daemon.ready")
    for number in range(kills):
        wait_ticks(five[0], "tick", between * (number + 1))
        victim = five[number % 5]
        victim.kill_all()
        victim.start()
    wait_ticks(five[0], "tick", between * (kills + 1))
    assert_each_once(ticks(five[0])["tick"])
    assert read_tick_counts(five[0], "tick")["skipped"] == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("restarts", "period"), [(8, 3), pytest.param(50, 30, marks=pytest.mark.slow)]
)
def test_restart_in_every_period_loses_no_tick(
    fleet: Callable[..., Any], restarts: int, period: int
) -> None:
    """No tick is lost if the daemon restarts in every period.

    A scheduler that counted from its own start would never fire.
    """
    [daemon] = fleet([schedule_every_second("tick", every=f"{period}s")])
    late: list[int] = []
    begun = time.monotonic()
    for number in range(restarts):
        daemon.start()
        after = daemon.mark()
        daemon.wait_event("daemon.ready", after=after)
        # Every second run is killed. The others stop.
        if number % 2:
            daemon.kill_all()
        else:
            daemon.stop()
        raw = daemon.link.execute("HGET", daemon.keys.schedules_last(TICKS, 0), "tick:late")
        late.append(int(raw or 0))
    if (rest := 2.2 * period - (time.monotonic() - begun)) > 0:  # two ticks must pass
        with daemon:
            wait_until(
                lambda: time.monotonic() - begun > 2.2 * period, timeout=rest + PATIENCE, every=0.1
            )
    sent = ticks(daemon)["tick"]
    assert len(sent) >= 2
    assert sent == list(range(sent[0], sent[-1] + 1, period * SECOND))
    assert read_tick_counts(daemon, "tick")["skipped"] == 0
    print(f"{restarts} restarts: {len(sent)} ticks, late by {max(late)} ms at most")


@pytest.mark.promise
def test_clock_set_back_repeats_no_tick(fresh_server: ProcessServer, tmp_path: Path) -> None:
    """A clock that is set back repeats no tick.

    Neither does an edit, a reload or a restart before the clock has caught up.
    """
    clock = Clock(fresh_server)
    with daemons(tmp_path, fresh_server.url) as make:
        daemon = make()
        daemon.write_config(schedules=[schedule_every_second("tick")])
        with daemon:
            wait_ticks(daemon, "tick", 4)
            clock.jump_to(-10)
            daemon.wait_for(lambda: seconds_ahead(daemon.link) < -5, what="the clock was set back")
            before = len(ticks(daemon)["tick"])
            daemon.write_config(schedules=[schedule_every_second("tick", payload="edited")])
            after = daemon.mark()
            daemon.signal(signal.SIGHUP)
            daemon.wait_event("schedule.changed", after=after)
            daemon.kill_all()
            daemon.start()
            wait_ticks(daemon, "tick", before + 4)
            assert_each_once(ticks(daemon)["tick"])
            assert daemon.stop() == 0


def test_full_memory_delays_but_loses_no_tick(fresh_server: ProcessServer, tmp_path: Path) -> None:
    """A server that rejects writes for 8 s delays ticks, but loses none. The log stays short."""
    with daemons(tmp_path, fresh_server.url) as make:
        daemon = make()
        daemon.write_config(schedules=[schedule_every_second("tick", misfire="all")])
        with daemon:
            wait_ticks(daemon, "tick", 2)
            daemon.link.execute("CONFIG", "SET", "maxmemory", "1mb")
            begun, lines = server_unix_ms(daemon.store), len(daemon.tail(10_000).splitlines())
            before = ticks(daemon)["tick"]
            wait_until(
                lambda: server_unix_ms(daemon.store) > begun + 8 * SECOND, timeout=60.0, every=0.1
            )
            assert len(ticks(daemon)["tick"]) <= len(before) + 1
            assert len(daemon.tail(10_000).splitlines()) < lines + 20
            daemon.link.execute("CONFIG", "SET", "maxmemory", "0")
            wait_ticks(daemon, "tick", len(before) + 12)
            assert_each_once(ticks(daemon)["tick"])
            assert daemon.stop() == 0


SLOW_WORK = """
import time
from streamqd import handler

@handler(topic="ticks", group="slow")
def work(msg):
    time.sleep(2.5)
"""


def test_tick_is_skipped_while_the_last_message_runs(new_daemon: Make) -> None:
    daemon = new_daemon(code=SLOW_WORK)
    table = schedule_every_second("tick", overlap="skip:slow")
    daemon.write_config(
        consumers=[{"topic": TICKS, "group": "slow", "handler": "work:work"}], schedules=[table]
    )
    with daemon:
        wait_ticks(daemon, "tick", 3)
        assert daemon.stop() == 0
    sent = ticks(daemon)["tick"]
    assert all(later - tick >= 3 * SECOND for tick, later in itertools.pairwise(sent))
    assert read_tick_counts(daemon, "tick")["skipped"] >= 2 * (len(sent) - 1)


@pytest.mark.promise
def test_misfire_policy_applies_to_twenty_missed_ticks(fleet: Callable[..., Any]) -> None:
    """After 20 ticks without an instance, the three policies send 1, 0 and 20 messages."""
    policies = ("once", "skip", "all")
    [daemon] = fleet([schedule_every_second(each, misfire=each) for each in policies])
    daemon.start()
    wait_ticks(daemon, "all", 2)
    daemon.kill_all()
    last = ticks(daemon)["all"][-1]
    wait_until(
        lambda: server_unix_ms(daemon.store) > last + 20 * SECOND, timeout=PATIENCE, every=0.1
    )
    daemon.start()
    wait_ticks(daemon, "skip", 4)
    daemon.stop()
    once, skip, each = (read_tick_counts(daemon, name) for name in policies)
    missed = skip["skipped"]
    assert missed >= 20
    assert once == {"fired": skip["fired"] + 1, "skipped": missed - 1}
    assert each == {"fired": skip["fired"] + missed, "skipped": 0}
    sent = ticks(daemon)
    assert_each_once(sent["all"])
    assert {*sent["once"]} - {*sent["skip"]} == {max({*sent["all"]} - {*sent["skip"]})}


@pytest.mark.promise
def test_two_releases_fire_all_their_schedules(fleet: Callable[..., Any]) -> None:
    a, b, c = (schedule_every_second(each) for each in "abc")
    two = fleet([a, b], [b, c])
    for daemon in two:
        daemon.start()
    for name in "abc":
        wait_ticks(two[0], name, 5)
    for sent in ticks(two[0]).values():
        assert_each_once(sent)


# --- a housekeeper killed at each step ------------------------------------------------------------

FIRING = [
    f"schedule_{name}-{side}"
    for name in ("declare", "stamp", "fire")
    for side in ("calls", "called")
]
MOVING = [
    f"schedule_{name}-{side}"
    for name in ("hold", "declare", "drop")
    for side in ("calls", "called")
]


@pytest.fixture
def daemon_with_strikes(fleet: Callable[..., Any], tmp_path: Path) -> tuple[Daemon, Strikes]:
    """A daemon whose housekeeper can be killed between two steps."""
    strikes = Strikes(tmp_path / "strikes")
    [daemon] = fleet([schedule_every_second("tick")])
    daemon.module = crash_points.__name__
    daemon.environment = {crash_points.VARIABLE: str(strikes.folder)}
    return daemon, strikes


def wait_struck(daemon: Daemon, strikes: Strikes, point: str) -> None:
    daemon.wait_for(lambda: strikes.struck(point, 0), timeout=PATIENCE, what=f"{point} has struck")


@pytest.mark.parametrize("point", FIRING)
def test_housekeeper_killed_while_firing_repeats_no_tick(
    daemon_with_strikes: tuple[Daemon, Strikes], point: str
) -> None:
    daemon, strikes = daemon_with_strikes
    strikes.arm(point, 0, "KILL", after=1 if "fire" in point or "stamp" in point else 0)
    daemon.start()
    wait_struck(daemon, strikes, point)
    before = len(ticks(daemon).get("tick", ()))
    wait_ticks(daemon, "tick", before + 4)
    assert_each_once(ticks(daemon)["tick"])
    assert daemon.stop() == 0


@pytest.mark.parametrize("point", MOVING)
def test_housekeeper_killed_in_a_move_repeats_no_tick(
    daemon_with_strikes: tuple[Daemon, Strikes], point: str
) -> None:
    daemon, strikes = daemon_with_strikes
    daemon.start()
    wait_ticks(daemon, "tick", 2)
    daemon.stop()
    daemon.write_config(schedules=[schedule_every_second("tick") | {"topic": "others"}])
    strikes.arm(point, 0, "KILL")
    daemon.start()
    wait_struck(daemon, strikes, point)
    wait_ticks(daemon, "tick", 4, topic="others")
    daemon.stop()
    old, new = ticks(daemon)["tick"], ticks(daemon, "others")["tick"]
    assert_each_once(old)
    assert_each_once(new)
    assert old[-1] < new[0]
    assert daemon.link.execute("HLEN", daemon.keys.schedules(TICKS, 0)) == 0


# --- servers --------------------------------------------------------------------------------------


def test_schedules_on_a_cluster_fire_move_and_survive_a_failover(
    binary: Path, tmp_path: Path
) -> None:
    names = [f"s{number}" for number in range(8)]
    where = {"partitions": 4}
    with Cluster(binary) as cluster, daemons(tmp_path, cluster.url) as make:
        daemon = make()
        daemon.write_config(
            topics={"orders": {"partitions": 1}, TICKS: {"partitions": 4}},
            schedules=[schedule_every_second(name, misfire="all") for name in names],
        )

        def run(*words: str) -> str:
            done = CliRunner().invoke(
                cli, ["--config", str(daemon.config_path), "schedule", *words]
            )
            assert done.exit_code == 0, done.output
            return done.stdout

        with daemon:
            for name in names:
                wait_ticks(daemon, name, 3, **where)
            masters = {
                cluster.master_for_key(daemon.keys.stream(TICKS, number)) for number in range(4)
            }
            assert len(masters) > 1
            run("add", "byhand", "--topic", TICKS, "--every", "1s")
            wait_ticks(daemon, "byhand", 2, **where)
            run("edit", "byhand", "--topic", "orders")
            wait_ticks(daemon, "byhand", 1, topic="orders")
            run("pause", "byhand")
            assert "sent orders/0/" in run("run", "byhand")
            assert " paused " in run("list")
            run("remove", "byhand", "--yes")
            victim = cluster.master_for_key(daemon.keys.stream(TICKS, 0))
            before = len(ticks(daemon, **where)["s0"])
            victim.kill()
            cluster.wait_ok()
            for name in names:
                wait_ticks(daemon, name, before + 8, **where)
            for name in names:
                assert_each_once(ticks(daemon, **where)[name])
            assert daemon.stop() == 0


def test_schedules_survive_a_sentinel_failover(binary: Path, tmp_path: Path) -> None:
    options = {"min_replicas_to_write": "1", "min_replicas_max_lag": "2"}
    with (
        Sentinels(binary, replicas=2, **options) as sentinels,
        daemons(tmp_path, sentinels.url) as make,
    ):
        daemon = make()
        daemon.write_config(schedules=[schedule_every_second("tick", misfire="all")])
        with daemon:
            wait_ticks(daemon, "tick", 4)
            old = sentinels.master
            old.kill()
            sentinels.wait_failover(old)
            wait_ticks(daemon, "tick", 12)
            assert_each_once(ticks(daemon)["tick"])
            assert daemon.stop() == 0


# --- many schedules -------------------------------------------------------------------------------

MANY = 10_000
LEAD_MS = 15_000  # time from the declaration to the due time, on an idle machine


def lead_ms() -> int:
    """Return LEAD_MS, or up to four times as much if processes have to wait for the CPU."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return int(LEAD_MS * min(max(load, 1.0), 4.0))


def cpu_seconds(link: Connection) -> float:
    told = link.execute("INFO", "cpu").decode().splitlines()
    found = dict(line.split(":") for line in told if ":" in line)
    return float(found["used_cpu_sys"]) + float(found["used_cpu_user"])


@pytest.fixture(params=quick.slow_after(1, [FILE, OPERATOR]))
def daemon_with_many_schedules(
    new_daemon: Make, request: pytest.FixtureRequest
) -> tuple[Daemon, int]:
    """A daemon with 10,000 schedules that are due at the same instant (unix ms)."""
    daemon = new_daemon()
    store = daemon.store
    topics.create(store, TICKS, config.Topic(partitions=1))
    due = server_unix_ms(store) // SECOND * SECOND + lead_ms() // SECOND * SECOND
    at = f"{datetime.fromtimestamp(due / 1000).astimezone().isoformat()}"
    names = [f"s{number}" for number in range(MANY)]
    if request.param == FILE:
        daemon.write_config(schedules=[{"name": each, "topic": TICKS, "at": at} for each in names])
        return daemon, due
    some = [
        Declaration(config.Schedule(each, TICKS, at=at), "default", OPERATOR, 1) for each in names
    ]
    place = (TICKS, 0)
    for first in range(0, MANY, 100):
        declare(store, place, some[first : first + 100])
    line = IndexLine("default", OPERATOR, place).text()
    store.execute("SADD", store.keys.schedule_places(), f"{TICKS}/0")
    store.execute("HSET", store.keys.schedule_index(), *(p for each in names for p in (each, line)))
    return daemon, due


@pytest.mark.promise
@pytest.mark.timeout(300)
def test_ten_thousand_due_schedules_fire_once_each(
    daemon_with_many_schedules: tuple[Daemon, int],
) -> None:
    """Each of 10,000 schedules fires once.

    The test prints how late the last one is, and how much CPU the server uses while it waits and
    fires.
    """
    daemon, due = daemon_with_many_schedules
    with daemon:
        places = daemon.keys.schedules_due(TICKS, 0)
        wait_until(
            lambda: daemon.link.execute("ZCARD", places) == MANY, timeout=4 * PATIENCE, every=0.05
        )
        begun, idle = server_unix_ms(daemon.store), cpu_seconds(daemon.link)
        assert begun < due - SECOND, "the machine is too slow to be ready in time"
        wait_until(
            lambda: server_unix_ms(daemon.store) >= due - 100, timeout=4 * PATIENCE, every=0.05
        )
        before = cpu_seconds(daemon.link)
        idle = (before - idle) / (due - begun) * 1000
        stream = daemon.keys.stream(TICKS, 0)
        wait_until(
            lambda: daemon.link.execute("XLEN", stream) >= MANY, timeout=PATIENCE, every=0.05
        )
        cpu = cpu_seconds(daemon.link) - before
        late = [
            int(daemon.link.execute("HGET", daemon.keys.schedules_last(TICKS, 0), f"s{n}:late"))
            for n in range(0, MANY, 100)
        ]
        print(
            f"{MANY} at once: all within {max(late)} ms, half within {sorted(late)[50]} ms;"
            f" the server used {cpu:.2f} s of CPU, and {idle:.1%} of a core while it waited"
        )
        assert {name: len(each) for name, each in ticks(daemon).items()} == {
            f"s{number}": 1 for number in range(MANY)
        }
        assert calls.places(daemon.store) == [(TICKS, 0)]
