"""Compare this tree with another one, in turns: `make bench NAME=beside ARGS="--tree PATH"`.

The speed of a machine changes within minutes, so two runs one after the other say little about two
trees. This benchmark therefore measures both trees within seconds in each round, and reports the
median of the rounds' ratios. The other tree needs its own environment with its package installed:
`python -m venv .venv && .venv/bin/pip install -e .`
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.benchmarks import paths, quick
from tests.benchmarks.bars import worker_pids
from tests.benchmarks.throughput import daemon_work, log_lines, run_load
from tests.support.machine import machine

MESSAGES = 60_000


def main() -> None:
    """Measure both trees, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tree", type=Path, required=True)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--only", help="those whose name contains this")
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    pythons = {"other": str(options.tree.absolute() / ".venv/bin/python"), "this": sys.executable}
    results: dict[str, Any] = {"machine": machine(), "rounds": options.rounds}
    with quick.server(aof=False) as path:
        for what, measure in KINDS.items():
            if (options.only or "") in what:
                results[what] = _measure_in_turns(
                    lambda m=measure: m(path), pythons, options.rounds
                )  # type: ignore[misc]
                print(_format_row(what, results[what]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


def _measure_in_turns(
    measure: Callable[[], float], pythons: dict[str, str], rounds: int
) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in pythons}
    for number in range(rounds):
        # The first tree of a pair runs in the state that the previous pair left, so the order
        # alternates.
        for name in sorted(pythons, reverse=bool(number % 2)):
            quick.PYTHON = pythons[name]
            found[name].append(measure())
    ratios = [ours / theirs for ours, theirs in zip(found["this"], found["other"], strict=True)]
    return {
        name: {"median": statistics.median(values), "from": min(values), "to": max(values)}
        for name, values in found.items()
    } | {"ratio": statistics.median(ratios), "ratios": sorted(ratios)}


def _format_row(what: str, found: dict[str, Any]) -> str:
    middle = [found[name]["median"] for name in ("other", "this")]
    ratios = found["ratios"]
    return (
        f"{what:46} {middle[0]:10,.5g} {middle[1]:10,.5g}   "
        f"{found['ratio']:.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def _rate_measurement(handler: str, extra: str = "", **given: int) -> Callable[[str], float]:
    count = given.pop("count", MESSAGES)
    return lambda path: daemon_work(path, count, handler, extra, **given).rate


def _measure_startup(path: str) -> float:
    """Return the time in ms from the daemon's start until each partition has a running worker."""
    redis.Redis(unix_socket_path=path).flushall()
    began = time.monotonic()
    with quick.daemon(path, "nothing"):
        quick.wait_ready(path)
        return (time.monotonic() - began) * 1000


def _measure_memory(path: str, kind: str) -> float:
    """Return a worker's memory use after 10,000 messages, in MiB. `kind` is pss or uss."""
    redis.Redis(unix_socket_path=path).flushall()
    with quick.daemon(path, "nothing") as process:
        quick.wait_ready(path)
        streams = [quick.stream(number) for number in range(quick.PARTITIONS)]
        quick.fill(path, streams, 10_000)
        client = redis.Redis(unix_socket_path=path)
        quick.wait(lambda: all(_is_done(client, name) for name in streams))
        used = [psutil.Process(pid).memory_full_info() for pid in worker_pids(process.pid)]
        return statistics.median(getattr(each, kind) for each in used) / 2**20


def _is_done(client: Any, name: str) -> bool:
    [group] = client.xinfo_groups(name)
    return group["lag"] == 0 and group["pending"] == 0


def _measure_wake_up(path: str) -> float:
    return paths.measure_daemon_wake_up(path)[0]


KINDS: dict[str, Callable[[str], float]] = {
    "one after another, messages/s": _rate_measurement("nothing", count=2 * MESSAGES),
    "real log lines in two groups, messages/s": lambda path: (
        run_load(path, MESSAGES, log_lines()).rate
    ),
    "coroutines in order of keys, messages/s": _rate_measurement(
        "later", paths.ORDERED, keys=paths.KEYS
    ),
    "coroutines that wait for 10 ms, messages/s": _rate_measurement(
        "waiting", paths.ORDERED, keys=paths.KEYS, count=20_000
    ),
    "every message is retried, messages/s": _rate_measurement("failing", paths.LONG),
    "every message dies, messages/s": _rate_measurement("failing", "max_attempts = 1\n"),
    "produced -> handler begins, p50, us": _measure_wake_up,
    "takeover after kill -9 in a run, ms": lambda path: quick.measure_takeover(path, 1)["median"],
    "hand-over after SIGTERM of an instance, ms": lambda path: quick.measure_handover(path, 1)[
        "median"
    ],
    "idle at a reload, ms": lambda path: quick.measure_reload_gap(path, 1)["median"],
    "start of the daemon until it is ready, ms": _measure_startup,
    "memory of a worker, its share (PSS), MiB": lambda path: _measure_memory(path, "pss"),
    "memory of a worker, its own (USS), MiB": lambda path: _measure_memory(path, "uss"),
}


if __name__ == "__main__":
    main()
