"""`make bench`: streamqd beside its peers; `make bench-page` writes the page and its plots.

Each round runs every system once, one after the other, so that a noisy minute hits all of them. A
round takes about eight minutes; the first run installs the systems from PyPI and npm (BullMQ needs
Node). Figures of one machine: compare the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.benchmarks.peers import environments, page, server
from tests.benchmarks.peers.bench import Round
from tests.benchmarks.peers.systems import SYSTEMS
from tests.support.machine import machine


def main() -> int:
    """Measure, write the results, print the table. 1: nothing could be measured."""
    arguments = argparse.ArgumentParser(prog="make bench", description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--only", action="append", default=[], help="part of a system's name")
    arguments.add_argument("--output", type=Path, default=page.RESULTS)
    options = arguments.parse_args()
    chosen = [each for each in SYSTEMS if _chosen(each.name, options.only)]
    commands = {system.name: environments.prepare(system) for system in chosen}
    missing = [name for name, found in commands.items() if found is None]
    for name in missing:
        print(f"left out, cannot be installed here: {name}", file=sys.stderr)
    figures: dict[str, list[dict[str, float]]] = {each.name: [] for each in chosen}
    with server.private() as (port, pid, about):
        for number in range(options.rounds):
            for system in chosen:
                folder = commands[system.name]
                if folder is None:
                    continue
                print(f"round {number + 1}: {system.name}", file=sys.stderr)
                try:
                    figures[system.name].append(Round(system, folder, port, pid).measure())
                except Exception:  # noqa: BLE001 - one that fails must not cost the others' rounds
                    traceback.print_exc()
    results = {
        "machine": machine() | {"server": about},
        "date": time.strftime("%Y-%m-%d"),
        "rounds": options.rounds,
        "systems": {
            system.name: {
                "version": environments.version(system, commands[system.name] or Path()),
                "survives": system.survives,
                "rounds": len(figures[system.name]),
                "figures": _summary(figures[system.name]),
            }
            for system in chosen
            if figures[system.name]
        },
        "left out": missing + [name for name, rounds in figures.items() if not rounds],
    }
    if not results["systems"]:
        print("nothing could be measured: see above why", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(page.table(results["systems"]))
    print(f"\nwritten to {options.output}; `make bench-page` makes the page of it")
    return 0


def _chosen(name: str, parts: list[str]) -> bool:
    return not parts or any(part.lower() in name.lower() for part in parts)


def _summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {
        name: {
            "median": round(statistics.median(each[name] for each in rounds), 4),
            "min": round(min(each[name] for each in rounds), 4),
            "max": round(max(each[name] for each in rounds), 4),
        }
        for name in rounds[0]
    }


if __name__ == "__main__":
    sys.exit(main())
