"""`make bench-growth`: how what the daemon costs grows with units, and with what lies around.

Each shape and each kind has a private server and a real daemon of its own. A shape is
TOPICSxPARTITIONS, or TOPICSxPARTITIONSxGROUPS. It is looked at while there is nothing to do, and
while a backlog is handled, which each group has for itself. Then, on one small shape, more and more
of one kind lies there while there is nothing to do: messages that wait while their consumer is
paused, messages in hand, retries and scheduled sends, dead letters. Nobody else uses the server.

Writes growth.json, in ten minutes; `make bench-growth-page` makes docs/internals/growth.md and
its plots of it. 256 workers take 10 MiB each. A trial takes fewer and smaller sizes, and a file of
its own: `--shapes 1x1 2x1 2x1x2 --amounts 100 1000 --messages 2000 --least 9 --seconds 1 --settle 1
--output var/growth/benchmarks/growth.json`. With `--page` its page and plots go into var/growth.
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
from tests.benchmarks.scale import GHOST, spent, told
from tests.benchmarks.scale_host import PATIENCE, Host, Shape, add_options, private, until
from tests.contract.desk import Desk
from tests.support.costs import backlog, delayed, letters
from tests.support.daemon import Daemon
from tests.support.machine import machine
from tests.support.servers import about
from tests.support.waiting import wait_until

SHAPES = ("1x1", "4x1", "16x1", "64x1", "256x1", "16x1x2", "16x1x4", "16x1x8")
PARTS = ("units", "amounts")
SIZES = ("only", "shapes", "shape", "amounts", "messages", "least", "bytes", "seconds", "settle")
OURS = ("supervisor", "housekeeper", "workers")
WATCH_SECONDS = 0.1  # between two looks whether the backlog is handled
PAUSED = "backlog"  # the kind that waits for a consumer that is paused


def main() -> None:
    """Measure, and write what was measured; or make the page of it."""
    parser = argparse.ArgumentParser(prog="make bench-growth", description=__doc__)
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
        results["units"] = [of_shape(shape, options) for shape in options.shapes]
    if "amounts" in options.only:
        results["amounts"] = {kind: of_kind(kind, options) for kind in KINDS}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.output}; `make bench-growth-page` makes the page of it")


# --- units ----------------------------------------------------------------------------------------


def of_shape(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """What so many units cost, at rest and at work."""
    with alone(options) as host:
        daemon = started(host, shape, options)
        rest = at_rest(host, daemon, shape, options)
        each = max(options.least, -(-options.messages // len(shape.places)))
        daemon.pause()
        host.write(shape, backlog, each, "x" * options.bytes)
        wanted = host.handled(shape) + each * len(shape.units)

        def work() -> None:
            daemon.signal(signal.SIGCONT)
            wait_until(
                lambda: host.handled(shape) >= wanted,
                timeout=PATIENCE,
                what="the backlog is handled",
                every=WATCH_SECONDS,
            )

        found = {"shape": shape.name, **shape._asdict(), "units": len(shape.units), "rest": rest}
        return told(shape.name, found | {"work": per_message(spent(host, daemon, shape, work))})


def per_message(used: dict[str, float]) -> dict[str, float]:
    """What was used for each message that was handled."""
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


def in_hand(desk: Desk, count: int, body: str) -> None:
    """Let so many be in the hands of a consumer that is not ours. What ours have is bounded."""
    backlog(desk, count, body)
    assert len(desk.fetch(count, GHOST)) == count


def half_of_each(desk: Desk, count: int, body: str) -> None:
    """Let so many be delayed: half of them retries, half scheduled sends."""
    delayed(desk, count // 2, body)


KINDS: dict[str, Callable[[Desk, int, str], None]] = {
    PAUSED: backlog,
    "pending": in_hand,
    "delayed": half_of_each,
    "dead": letters,
}


def of_kind(kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What more and more of one kind costs while there is nothing to do. It begins with nothing."""
    shape, there, rows = options.shape, 0, []
    with alone(options) as host:
        daemon = started(host, shape, options)
        for amount in (0, *sorted(options.amounts)):
            daemon.pause()
            more = (amount - there) // len(shape.places)
            host.write(shape, KINDS[kind], more, "x" * options.bytes)
            there += more * len(shape.places)
            if kind != PAUSED:
                daemon.signal(signal.SIGCONT)
            time.sleep(options.settle)
            found = at_rest(host, daemon, shape, options)
            rows.append({"amount": there, **found, "redis, MiB": host.used_mib()})
    return told(kind, rows)


# --- looks ----------------------------------------------------------------------------------------


@contextmanager
def alone(options: argparse.Namespace) -> Iterator[Host]:
    """A server and a folder that are there for this alone."""
    with private(options.server) as host:
        host.pinger.close()  # what its pings cost the server is not ours
        yield host


def started(host: Host, shape: Shape, options: argparse.Namespace) -> Daemon:
    """A daemon that owns all units of a shape. What it does once after a start is done."""
    # What a dead consumer has in hand must stay there.
    daemon = host.daemon(shape, consumer={"reclaim_idle": "1d"})
    daemon.start()
    until(lambda: all(host.owners(shape)), "all is owned")
    daemon.wait_event("ready", timeout=PATIENCE)
    time.sleep(options.settle)
    return daemon


def at_rest(
    host: Host, daemon: Daemon, shape: Shape, options: argparse.Namespace
) -> dict[str, float]:
    """What everybody uses while there is nothing to do: CPU in ms of each second."""
    used = spent(host, daemon, shape, lambda: time.sleep(options.seconds))
    assert used["messages"] == 0, "it was not at rest"
    rates = {name: round(used[name] * 1000 / used["seconds"], 2) for name in (*OURS, "redis")}
    return {
        **{f"{name}, ms/s": rate for name, rate in rates.items()},
        "ours, ms/s": round(sum(rates[name] for name in OURS), 2),
        "commands/s": round(used["commands"] / used["seconds"], 1),
    }


if __name__ == "__main__":
    main()
