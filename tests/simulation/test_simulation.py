"""Simulate minutes in the life of a fleet within a second: it settles evenly, with few moves.

`make verify NAME=simulation` runs the same scenarios with 500 instances and 10,000 partitions, and
writes docs/internals/simulation.md. Set SIMULATION_SEEDS=n to run more seeds.
"""

from __future__ import annotations

import os

import pytest

from streamqd.policy import heartbeats
from tests.simulation.scenarios import (
    NEW_FLEET_SCENARIOS,
    PARTIAL,
    SEQUENCE,
    SMALL,
    Scenario,
    Scope,
    cold_start,
    new_fleet,
    start_instances,
)

pytestmark = pytest.mark.promise

SEEDS = range(1, int(os.environ.get("SIMULATION_SEEDS", "1")) + 1)
SCOPES = {"same offers": SMALL, "different offers": PARTIAL}


@pytest.mark.fault("F9", "F28")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
def test_fleet_settles_after_each_event(scope: Scope, seed: int) -> None:
    fleet = new_fleet(scope, seed)
    for name, scenario in SEQUENCE.items():
        print(f"{name}: {scenario(fleet)}")
    assert fleet.stolen == 0, "an instance lost a lease that it still trusted"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", NEW_FLEET_SCENARIOS.values(), ids=NEW_FLEET_SCENARIOS)
def test_fleet_of_unequal_instances_settles(scenario: Scenario, seed: int) -> None:
    print(scenario(new_fleet(SMALL, seed)))


@pytest.mark.fault("F28")
@pytest.mark.parametrize("seed", range(1, 4))
def test_cold_start_causes_no_stampede(seed: int) -> None:
    fleet = new_fleet(SMALL, seed)
    figures = cold_start(fleet)
    # There is about one request per free partition, although many instances could take it.
    asked = fleet.server.calls["acquire"]
    assert asked <= figures["acquired"] + len(fleet.instances) * len(SMALL.assignments) / 10
    # About a third of the assignments are in their final place from the start. If one instance took
    # all of them, 190 of 200 would have to move.
    assert figures["handed_over"] <= 140
    # The number of wake-ups after hand-overs is bounded for the whole fleet.
    most = 1.5 * heartbeats.WOKEN_PER_SECOND + len(fleet.instances) / fleet.heartbeat_interval
    assert figures["heartbeats_per_second"] <= 2 * most


def test_first_instance_leaves_assignments_for_the_others() -> None:
    fleet = new_fleet(SMALL, 1)
    first = next(iter(fleet.instances))
    start_instances(fleet, [first], within=0.05)
    assert 0 < fleet.server.owned[first] <= 20
    fleet.run_until(lambda: fleet.count_free() == 0, 20.0)


def test_equal_seeds_give_equal_runs() -> None:
    runs = [new_fleet(PARTIAL, 7) for _ in range(2)]
    runs.append(new_fleet(PARTIAL, 8))
    for fleet in runs:
        start_instances(fleet, list(fleet.instances))
        fleet.run(5.0)
    assert runs[0].server.acquired == runs[1].server.acquired != runs[2].server.acquired
