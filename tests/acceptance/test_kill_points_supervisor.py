"""The kill-point matrix of the supervisor: its crash points x {SIGKILL, pause, lost reply}.

These tests kill a supervisor after a call that was answered, and delay a call that it is about to
make. `make soak NAME=kill-points` runs every point with both faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamqd.store import scripts
from streamqd.store.client import Connection
from tests.support import crash_points, kill_trials
from tests.support.kill_trials import PATIENCE, ROWS, SIDE_BY_SIDE, Row, Trial
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer, Server

NewTrials = Callable[[list[Row]], list[Trial]]
LATE = [row for row in ROWS if row.point.endswith("-calls")]
LAST = [row for row in ROWS if row not in LATE]


@pytest.fixture
def new_trials(server: Server, link: Connection, tmp_path: Path) -> Iterator[NewTrials]:
    """Create the trials of some rows, on an empty server."""
    with ExitStack() as stack:

        def make(rows: list[Row]) -> list[Trial]:
            link.execute("FLUSHALL")
            made = [Trial(tmp_path, f"{server.url}?db={n}", row) for n, row in enumerate(rows)]
            for trial in made:
                stack.callback(trial.close)
            return made

        yield make


def rounds(rows: list[Row]) -> list[list[Row]]:
    return [rows[start : start + SIDE_BY_SIDE] for start in range(0, len(rows), SIDE_BY_SIDE)]


@pytest.mark.fault("F6")
@pytest.mark.parametrize("rows", rounds(LAST), ids=lambda rows: rows[0].point)
def test_supervisor_killed_at_any_point_has_the_modeled_cost(
    new_trials: NewTrials, rows: list[Row]
):
    kill_trials.run_killed(new_trials(rows))


@pytest.mark.fault("F8")
@pytest.mark.parametrize("rows", rounds(LATE), ids=lambda rows: rows[0].point)
def test_instance_paused_in_its_supervisor_has_the_modeled_cost(
    new_trials: NewTrials, rows: list[Row]
):
    kill_trials.run_paused(new_trials(rows))


@pytest.mark.fault("F12")
def test_lost_reply_to_a_supervisor_repeats_no_message(fresh_server: ProcessServer, tmp_path: Path):
    """No message runs again, although each script loses one reply.

    The supervisor starts, charges a crash and stops, so that it calls all of its scripts.
    """
    by_sha = {script.sha.encode(): script for script in scripts.load().values()}
    names = {row.point.rpartition("-")[0] for row in ROWS if row.point.endswith("-called")}

    def is_call(arguments: list[bytes], name: str) -> bool:
        if arguments[0].upper() != b"EVALSHA":
            return False
        return crash_points.point_name(by_sha[arguments[1]], arguments[3:]) == name

    with FaultProxy(fresh_server.socket_path) as proxy:
        row = Row("lease_refence-called", "crash")
        trial = Trial(tmp_path, proxy.url, row)
        for script in by_sha.values():
            trial.one.link.execute("SCRIPT", "LOAD", script.source)
        triggers = {
            name: proxy.arm(
                Fault.DROP_REPLY,
                # The first call is part of the registration, which fails if Redis is unreachable.
                nth=2 if name == "group_ensure" else 1,
                wanted=lambda arguments, name=name: is_call(arguments, name),
            )
            for name in sorted(names)
        }
        try:
            trial.begin("")
            trial.one.wait_event("daemon.ready", timeout=PATIENCE)
            trial.one.wait_settled(PATIENCE)
            triggers["lease_renew"].wait(PATIENCE)
            assert trial.verdict(0) == ""
            assert trial.one.stop() == 0
        finally:
            trial.close()
        assert [name for name, trigger in triggers.items() if not trigger.hit] == []
