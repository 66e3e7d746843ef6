"""Run all scenarios with 500 instances and 10,000 partitions: `make verify NAME=simulation`.

It also writes the page. A full run takes about 90 minutes on one core; at a tenth of the size, it
takes two minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import psutil

from streamqd.policy.rebalance import MemberView, place
from tests.simulation.fleet import Fleet
from tests.simulation.scenarios import (
    LARGE,
    NEW_FLEET_SCENARIOS,
    RUNNING_FLEET_SCENARIOS,
    SEQUENCE,
    Figures,
    Scope,
    new_fleet,
)
from tests.support.machine import processor

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "simulation.md"
MARK = "<!-- figures -->\n"

SCENARIOS = SEQUENCE | NEW_FLEET_SCENARIOS
Result = tuple[str, Figures | None, int, float]  # no figures (None) if a check failed

COLUMNS = {
    "owned_seconds": "all owned, s",
    "quiet_seconds": "last move, s",
    "acquired": "acquired",
    "handed_over": "handed over",
    "moved_at_rest": "moved at rest",
    "acquires_per_second": "acquires/s",
    "heartbeats_per_second": "heartbeats/s",
    "views_per_second": "partitions checked/s",
}
NOTES = {"even_seconds": "balanced after {} s", "least_moves": "minimum moves {}"}


def main() -> None:
    """Run the scenarios and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--members", type=int, default=LARGE.members)
    parser.add_argument("--partitions", type=int, default=LARGE.partitions, help="of each topic")
    parser.add_argument(
        "--only", nargs="+", metavar="SCENARIO", help=", ".join(SEQUENCE | NEW_FLEET_SCENARIOS)
    )
    parser.add_argument("--append", action="store_true", help="keep the figures that are there")
    arguments = parser.parse_args()
    scope = Scope(arguments.members, LARGE.topics, arguments.partitions, LARGE.offered)
    wanted = set(arguments.only or SCENARIOS)
    context = get_context("fork")
    results: SimpleQueue[Result] = context.SimpleQueue()
    # The fleets are independent of each other, so each one is simulated in its own process.
    for name in ["cold start", *NEW_FLEET_SCENARIOS]:
        if wanted & ({name} if name in NEW_FLEET_SCENARIOS else SEQUENCE.keys()):
            context.Process(
                target=run_new_fleet, args=(scope, arguments.seed, name, wanted, results)
            ).start()
    found: dict[str, Figures] = {}
    decided, spent = 0, 0.0
    while wanted - found.keys():
        name, figures, decisions, seconds = results.get()
        if figures is None:
            raise SystemExit(f"{name}: it does not hold")
        print(name, json.dumps(figures), flush=True)
        found[name] = figures
        decided += decisions
        spent += seconds
    found = {name: found[name] for name in SCENARIOS if name in wanted}
    page = PAGE.read_text()
    text = page if arguments.append else page.partition(MARK)[0] + MARK
    PAGE.write_text(text + render_report(scope, arguments.seed, found, decided, spent))


def run_new_fleet(
    scope: Scope, seed: int, name: str, wanted: set[str], results: SimpleQueue[Result]
) -> None:
    """Start a new fleet, and run the scenarios for a running fleet, each on its own copy."""
    fleet = new_fleet(scope, seed)
    gc.freeze()  # exclude the fleet's permanent objects from garbage collection
    gc.set_threshold(100_000)
    run_scenarios(fleet, [name], results)
    if name not in NEW_FLEET_SCENARIOS:
        for names in RUNNING_FLEET_SCENARIOS:
            if wanted.intersection(names):
                get_context("fork").Process(
                    target=run_scenarios, args=(fleet, names, results)
                ).start()


def run_scenarios(fleet: Fleet, names: Iterable[str], results: SimpleQueue[Result]) -> None:
    """Run scenarios on one fleet. Store figures, decisions and CPU seconds in `results`."""
    for name in names:
        started, decided = time.process_time(), fleet.decisions
        try:
            figures = SCENARIOS[name](fleet)
        except AssertionError:
            results.put((name, None, 0, 0.0))
            raise
        results.put((name, figures, fleet.decisions - decided, time.process_time() - started))


def render_report(
    scope: Scope, seed: int, results: dict[str, Figures], decided: int, spent: float
) -> str:
    """Return the generated part of the page."""
    rows = [["scenario", *COLUMNS.values(), "notes"], ["---", *["---:"] * len(COLUMNS), "---"]]
    for name, figures in results.items():
        notes = [
            NOTES.get(key, f"{key.replace('_', ' ')} {{}}").format(value)
            for key, value in figures.items()
            if key not in COLUMNS
        ]
        rows.append([name, *(format_number(figures.get(key)) for key in COLUMNS), ", ".join(notes)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"\n{scope.members} instances, {len(scope.assignments):,} partitions in {scope.topics}"
        " topics, of"
        f" which each instance offers {scope.offered}; lease_ttl 15 s, everything else at its"
        f" default. Seed {seed}.\n\n{table}\n\n"
        f"{decided:,} decisions in {spent:,.0f} s of CPU time. One decision about"
        f" {scope.offered * scope.partitions:,} partitions and {scope.members} instances at rest:"
        f" {1000 * measure_decision_seconds(scope):.0f} ms. Python {platform.python_version()},"
        f" {psutil.cpu_count()} CPUs ({processor()}).\n"
    )


def format_number(value: Any) -> str:
    """Return a figure as text."""
    return "" if value is None else f"{value:,}"


def measure_decision_seconds(scope: Scope) -> float:
    """Return the CPU seconds that one observation of an idle fleet takes (the best of five)."""
    members = [MemberView(scope.member(n), 0, leaving=False) for n in range(scope.members)]
    offers = members[0].member.offers
    assignments = [
        assignment
        for assignment in scope.assignments
        if (assignment.topic, assignment.group) in offers
    ]
    owners = place(members, assignments, {})
    times = []
    for _ in range(5):
        started = time.process_time()
        place(members, assignments, owners)
        times.append(time.process_time() - started)
    return min(times)


if __name__ == "__main__":
    main()
