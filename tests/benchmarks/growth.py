"""Measure how the daemon's cost grows with assignments and stored data: `make bench NAME=growth`.

Each shape and each kind of data has its own private server and real daemon. A shape is
TOPICSxPARTITIONS or TOPICSxPARTITIONSxGROUPS. It is measured at rest, and then while each group
handles its backlog. After that, a small shape is measured at rest with growing amounts of one kind
of data: waiting messages of a paused consumer, pending messages, retries and delayed sends, and
dead letters. No other client uses the server.

The benchmark writes growth.json in ten minutes. `make bench NAME=growth-page` turns this file into
docs/internals/cost-by-size.md and its plots. The 256 workers take 10 MiB each. For a trial, use
fewer and smaller sizes and another file: `--shapes 1x1 2x1 2x1x2 --amounts 100 1000 --messages 2000
--least 9 --seconds 1 --settle 1 --output var/growth/benchmarks/growth.json`. With `--page`, the
trial's page and plots are written to var/growth.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks import growth_page
from tests.benchmarks.scale import MISSING_ENTRY, measure_usage, print_result
from tests.benchmarks.scale_host import PATIENCE, Host, Shape, add_options, open_host, time_until
from tests.contract.harness import Harness
from tests.support.costs import seed_backlog, seed_dead_letters, seed_delayed
from tests.support.daemon import Daemon
from tests.support.machine import machine
from tests.support.servers import about
from tests.support.waiting import wait_until

SHAPES = ("1x1", "4x1", "16x1", "64x1", "256x1", "16x1x2", "16x1x4", "16x1x8")
PARTS = ("units", "amounts")
SIZES = ("only", "shapes", "shape", "amounts", "messages", "least", "bytes", "seconds", "settle")
OURS = ("supervisor", "housekeeper", "workers")
WATCH_SECONDS = 0.1  # seconds between two checks of the backlog
PAUSED = "backlog"  # the kind whose messages wait for a paused consumer


def main() -> None:
    """Measure and write the results, or write the page from existing results."""
    parser = argparse.ArgumentParser(prog="make bench NAME=growth", description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument(
        "--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(text) for text in SHAPES]
    )
    parser.add_argument("--shape", type=Shape.parse, default=Shape(4, 1), help="of the amounts")
    parser.add_argument("--amounts", type=int, nargs="+", default=[10**n for n in range(3, 7)])
    parser.add_argument("--messages", type=int, default=200_000, help="backlog of each group")
    parser.add_argument("--least", type=int, default=10_000, help="of them, in each partition")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before each look")
    add_options(parser)
    parser.add_argument("--output", type=Path, default=growth_page.RESULTS)
    parser.add_argument("--page", action="store_true", help="make the page, measure nothing")
    options = parser.parse_args()
    if options.page:
        growth_page.write(options.output)
        return
    trial = any(vars(options)[name] != parser.get_default(name) for name in SIZES)
    if trial and options.output == growth_page.RESULTS:
        parser.error("figures of other sizes are not for the page: name a file by --output")
    results: dict[str, Any] = {
        "machine": machine() | {"server": about(options.server)},
        "date": time.strftime("%Y-%m-%d"),
        **{
            name: vars(options)[name]
            for name in ("messages", "least", "bytes", "seconds", "settle")
        },
        "shape": options.shape.name,
    }
    if "units" in options.only:
        results["units"] = [measure_shape(shape, options) for shape in options.shapes]
    if "amounts" in options.only:
        results["amounts"] = {kind: measure_kind(kind, options) for kind in KINDS}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.output}; `make bench NAME=growth-page` writes its page")


# --- assignments ----------------------------------------------------------------------------------


def measure_shape(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Return the cost of a shape at rest and at work."""
    with private_host(options) as host:
        daemon = start_daemon(host, shape, options)
        rest = measure_at_rest(host, daemon, shape, options)
        each = max(options.least, -(-options.messages // len(shape.places)))
        daemon.pause()
        host.write(shape, seed_backlog, each, "x" * options.bytes)
        wanted = host.handled(shape) + each * len(shape.assignments)

        def work() -> None:
            daemon.signal(signal.SIGCONT)
            wait_until(
                lambda: host.handled(shape) >= wanted,
                timeout=PATIENCE,
                what="the backlog is handled",
                every=WATCH_SECONDS,
            )

        found = {
            "shape": shape.name,
            **shape._asdict(),
            "units": len(shape.assignments),
            "rest": rest,
        }
        return print_result(
            shape.name, found | {"work": cost_per_message(measure_usage(host, daemon, shape, work))}
        )


def cost_per_message(used: dict[str, float]) -> dict[str, float]:
    """Return the resources used per handled message."""
    messages = used["messages"]
    return {
        "messages": messages,
        "seconds": round(used["seconds"], 2),
        "messages/s": round(messages / used["seconds"]),
        "workers, us/message": round(used["workers"] * 1e6 / messages, 3),
        "redis, us/message": round(used["redis"] * 1e6 / messages, 3),
        "commands/message": round(used["commands"] / messages, 4),
    }


# --- amounts --------------------------------------------------------------------------------------


def make_pending(harness: Harness, count: int, body: str) -> None:
    """Make messages pending for a dead consumer, because the share of our own is bounded."""
    seed_backlog(harness, count, body)
    assert len(harness.fetch(count, MISSING_ENTRY)) == count


def delay_messages(harness: Harness, count: int, body: str) -> None:
    """Delay `count` messages, half of them as retries and half as delayed sends."""
    seed_delayed(harness, count // 2, body)


KINDS: dict[str, Callable[[Harness, int, str], None]] = {
    PAUSED: seed_backlog,
    "pending": make_pending,
    "delayed": delay_messages,
    "dead": seed_dead_letters,
}


def measure_kind(kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the cost at rest for growing amounts of one kind, starting from zero."""
    shape, there, rows = options.shape, 0, []
    with private_host(options) as host:
        daemon = start_daemon(host, shape, options)
        for amount in (0, *sorted(options.amounts)):
            daemon.pause()
            more = (amount - there) // len(shape.places)
            host.write(shape, KINDS[kind], more, "x" * options.bytes)
            there += more * len(shape.places)
            if kind != PAUSED:
                daemon.signal(signal.SIGCONT)
            time.sleep(options.settle)
            found = measure_at_rest(host, daemon, shape, options)
            rows.append({"amount": there, **found, "redis, MiB": host.used_mib()})
    return print_result(kind, rows)


# --- measurements ---------------------------------------------------------------------------------


@contextmanager
def private_host(options: argparse.Namespace) -> Iterator[Host]:
    """A private server and a private folder."""
    with open_host(options.server) as host:
        host.pinger.close()  # this excludes the cost of its pings from the figures
        yield host


def start_daemon(host: Host, shape: Shape, options: argparse.Namespace) -> Daemon:
    """Start a daemon. Return when it owns all assignments and has finished its start-up work."""
    # This keeps the pending messages of the dead consumer where they are.
    daemon = host.daemon(shape, consumer={"reclaim_idle": "1d"})
    daemon.start()
    time_until(lambda: all(host.owners(shape)), "all is owned")
    daemon.wait_event("daemon.ready", timeout=PATIENCE)
    time.sleep(options.settle)
    return daemon


def measure_at_rest(
    host: Host, daemon: Daemon, shape: Shape, options: argparse.Namespace
) -> dict[str, float]:
    """Return the resource use at rest. CPU is in ms per second."""
    used = measure_usage(host, daemon, shape, lambda: time.sleep(options.seconds))
    assert used["messages"] == 0, "it was not at rest"
    rates = {name: round(used[name] * 1000 / used["seconds"], 2) for name in (*OURS, "redis")}
    return {
        **{f"{name}, ms/s": rate for name, rate in rates.items()},
        "ours, ms/s": round(sum(rates[name] for name in OURS), 2),
        "commands/s": round(used["commands"] / used["seconds"], 1),
    }


if __name__ == "__main__":
    main()
