"""A network drops everything in one direction or both, or cuts a connection at any byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.acceptance.test_rebalance import GATED, dump_keyspace
from tests.faults.scenario_runner import ScenarioRunner, call_kind
from tests.faults.scenarios_worker import one_at_a_time
from tests.support.daemon import GROUP, Daemon
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer

Make = Callable[..., Daemon]
TTL = 1.0
ALONE = {"lease_ttl": f"{TTL}s", "rebalance_delay": "10m"}
CUTS = 25


@pytest.fixture
def proxy(fresh_server: ProcessServer) -> Iterator[FaultProxy]:
    with FaultProxy(fresh_server.socket_path) as made:
        yield made


@pytest.mark.fault("F11")
@pytest.mark.parametrize("direction", ["requests", "replies", "both"])
def test_isolated_owner_starts_and_changes_nothing(make: Make, proxy: FaultProxy, direction: str):
    """An isolated owner changes nothing if its packets arrive after another instance took over."""
    a = make(name="a", partitions=2, daemon=ALONE, code=GATED, redis_url=proxy.url)
    b = make(name="b", partitions=2, daemon={**ALONE, "state_dir": "b"}, code=GATED)
    with a:
        gated = [a.send(["ack"], partition=number)[0] for number in range(2)]
        for uid in gated:
            a.wait_run(uid)
        a.send(["ok"] * 40)
        with b:
            workers = {each["child"] for each in a.events("worker.started")}
            proxy.hold(
                requests=direction in ("requests", "both"), replies=direction in ("replies", "both")
            )
            cut_at = time.monotonic()
            for number, uid in enumerate(gated):
                b.wait_event("lease.acquired", partition=number, inherited=True, timeout=20.0)
                a.wait_run(uid, count=2)
            print(f"taken over after {time.monotonic() - cut_at:.2f} s, ttl {TTL} s")
            taken = min(each.at for each in a.ledger.records("start") if each.pid not in workers)
            before, epochs = dump_keyspace(b), b.epochs()

            # The runs from before the cut finish now, and the owner's packets arrive.
            (Path(a.folder) / "gate-a").touch()
            for uid in gated:
                a.wait_run(uid, "end")
            mark = a.mark()
            proxy.heal()
            for number in range(2):
                a.wait_event("worker.exited", partition=number, timeout=20.0)
            assert a.events("lease.acquired", mark) == []
            assert dump_keyspace(b) == before, "an act of the old owner had an effect"
            assert b.epochs() == epochs

            (Path(a.folder) / "gate-b").touch()
            b.wait_settled()
            late = [
                each
                for each in a.ledger.records("start")
                if each.pid in workers and each.at >= taken
            ]
            assert late == [], "the old owner started a message after the takeover"
            audit = b.ledger.audit(GROUP)
            assert (audit.lost, audit.unexpected) == ([], [])
            assert set(audit.repeated) == set(gated)
            assert b.letters() == []
            assert a.stop() == b.stop() == 0


@pytest.mark.fault("F11")
def test_worker_stops_before_an_unrenewed_lease_can_expire(make: Make, proxy: FaultProxy):
    """A worker stops before its lease can expire if only the supervisor's connection is dead."""
    ttl = 3.0
    settings = {"lease_ttl": f"{ttl}s", "rebalance_delay": "10m"}
    a = make(name="a", daemon=settings, redis_url=proxy.url)
    b = make(name="b", daemon={**settings, "state_dir": "b"})
    with a:
        a.send("sleep 0.004" for _ in range(1200))
        (worker,) = a.pids().values()
        with b:
            # Anything sent in the same exchange as a renewal or a heartbeat is lost with it.
            for nth in range(1, 200):
                proxy.arm(
                    Fault.CUT_BEFORE,
                    nth=nth,
                    wanted=lambda each: call_kind(each) in ("lease_renew", "member_heartbeat"),
                )
            cut_at = time.monotonic()
            b.wait_event("lease.acquired", inherited=True, timeout=20.0)
            last = max(each.at for each in a.ledger.records("start") if each.pid == worker)
            print(f"last start {last - cut_at:.2f} s after the last renewal, ttl {ttl} s")
            assert last <= cut_at + ttl, "another may have owned it by then"
            b.wait_settled(40.0)
            audit = b.ledger.audit(GROUP)
            assert (audit.lost, audit.unexpected) == ([], [])
            assert len(audit.repeated) <= 1, "more than what ran without an acknowledgment"
            assert b.stop() == 0
        a.kill()


@pytest.mark.fault("F13")
@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_connection_cut_at_any_byte_costs_nothing(
    process_server: ProcessServer, link: Connection, keys: Keys, direction: str
):
    """The server ignores half a command, and clients find the effects of whole commands."""
    runner = ScenarioRunner(process_server, link, keys, one_at_a_time)
    print(runner.survive_cuts(direction, CUTS), "cuts, evenly over all bytes of a life")
