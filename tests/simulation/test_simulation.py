"""The decisions of a whole fleet over minutes, in a second: it comes to rest, evenly, in few moves.

`make simulate` runs the same scenarios with 500 instances and 10,000 partitions, and writes
docs/internals/simulation.md. SIMULATION_SEEDS=n runs more seeds.
"""

from __future__ import annotations

import os

import pytest

from streamqd.policy import heartbeats
from tests.simulation.scenarios import (
    ALONE,
    IN_TURN,
    PARTIAL,
    SMALL,
    Scenario,
    Scope,
    cold_start,
    new,
    start,
)

SEEDS = range(1, int(os.environ.get("SIMULATION_SEEDS", "1")) + 1)
SCOPES = {"same offers": SMALL, "different offers": PARTIAL}


@pytest.mark.fault("F9", "F28")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
def test_a_fleet_comes_to_rest_after_whatever_happens(scope: Scope, seed: int) -> None:
    fleet = new(scope, seed)
    for name, scenario in IN_TURN.items():
        print(f"{name}: {scenario(fleet)}")
    assert fleet.stolen == 0, "a living instance that knew of no loss has lost something"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", ALONE.values(), ids=ALONE)
def test_a_fleet_of_odd_instances_comes_to_rest(scenario: Scenario, seed: int) -> None:
    print(scenario(new(SMALL, seed)))


@pytest.mark.fault("F28")
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_cold_start_is_no_herd(seed: int) -> None:
    fleet = new(SMALL, seed)
    figures = cold_start(fleet)
    # Every free partition is asked for about once, whoever else wants it too.
    asked = fleet.server.calls["acquire"]
    assert asked <= figures["acquired"] + len(fleet.instances) * len(SMALL.units) / 10
    # A third is where it belongs from the beginning; 190 of 200 move if the first takes all.
    assert figures["handed_over"] <= 140
    # Wake-ups of everybody, because of everybody's hand-overs, are bounded for the whole fleet.
    most = 1.5 * heartbeats.WOKEN_PER_SECOND + len(fleet.instances) / fleet.beat
    assert figures["beats_per_second"] <= 2 * most


def test_the_first_of_many_leaves_something_for_the_others() -> None:
    fleet = new(SMALL, 1)
    first = next(iter(fleet.instances))
    start(fleet, [first], within=0.05)
    assert 0 < fleet.server.owned[first] <= 20
    fleet.run_until(lambda: fleet.free() == 0, 20.0)


def test_one_seed_is_one_run() -> None:
    runs = [new(PARTIAL, 7) for _ in range(2)]
    runs.append(new(PARTIAL, 8))
    for fleet in runs:
        start(fleet, list(fleet.instances))
        fleet.run(5.0)
    assert runs[0].server.acquired == runs[1].server.acquired != runs[2].server.acquired
