"""Run every scenario with 500 instances and 10,000 partitions; write the page. See `make simulate`.

Takes about two hours of one core; a tenth of each takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import psutil

from streamqd.policy.rebalance import Seen, place
from tests.simulation.scenarios import ALONE, IN_TURN, LARGE, Figures, Scope, new

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "simulation.md"
MARK = "<!-- figures -->\n"

COLUMNS = {
    "owned_seconds": "all owned, s",
    "quiet_seconds": "last move, s",
    "acquired": "acquired",
    "handed_over": "handed over",
    "moved_at_rest": "moved at rest",
    "acquires_per_second": "acquires/s",
    "beats_per_second": "beats/s",
    "looks_per_second": "partitions looked at/s",
}


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--members", type=int, default=LARGE.members)
    parser.add_argument("--partitions", type=int, default=LARGE.partitions, help="of each topic")
    arguments = parser.parse_args()
    scope = Scope(arguments.members, LARGE.topics, arguments.partitions, LARGE.offered)
    started = time.process_time()
    results: dict[str, Figures] = {}
    fleet = new(scope, arguments.seed)
    for name, scenario in IN_TURN.items():
        results[name] = told(name, scenario(fleet))
    decided = fleet.decided
    for name, scenario in ALONE.items():
        fleet = new(scope, arguments.seed)
        results[name] = told(name, scenario(fleet))
        decided += fleet.decided
    spent = time.process_time() - started
    text = PAGE.read_text().partition(MARK)[0] + MARK
    PAGE.write_text(text + report(scope, arguments.seed, results, decided, spent))


def told(name: str, figures: Figures) -> Figures:
    """Show one result at once."""
    print(name, json.dumps(figures), flush=True)
    return figures


def report(scope: Scope, seed: int, results: dict[str, Figures], decided: int, spent: float) -> str:
    """The part of the page that is written anew."""
    rows = [["scenario", *COLUMNS.values(), "of note"], ["---", *["---:"] * len(COLUMNS), "---"]]
    for name, figures in results.items():
        notes = [f"{k.replace('_', ' ')} {v}" for k, v in figures.items() if k not in COLUMNS]
        rows.append([name, *(number(figures.get(key)) for key in COLUMNS), ", ".join(notes)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"\n{scope.members} instances, {len(scope.units):,} partitions in {scope.topics} topics, of"
        f" which each instance offers {scope.offered}; lease_ttl 15 s, everything else at its"
        f" default. Seed {seed}.\n\n{table}\n\n"
        f"{decided:,} decisions in {spent:,.0f} s of processor time. One decision about"
        f" {scope.offered * scope.partitions:,} partitions and {scope.members} instances at rest:"
        f" {1000 * seconds_of_one(scope):.0f} ms. Python {platform.python_version()},"
        f" {psutil.cpu_count()} processors ({processor()}).\n"
    )


def number(value: Any) -> str:
    """A figure as text."""
    return "" if value is None else f"{value:,}"


def seconds_of_one(scope: Scope) -> float:
    """What one look at a fleet at rest costs an instance, of processor time: the best of five."""
    members = [Seen(scope.member(n), 0, leaving=False) for n in range(scope.members)]
    offers = members[0].member.offers
    units = [unit for unit in scope.units if (unit.topic, unit.group) in offers]
    owners = place(members, units, {})
    times = []
    for _ in range(5):
        started = time.process_time()
        place(members, units, owners)
        times.append(time.process_time() - started)
    return min(times)


def processor() -> str:
    """The model of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
