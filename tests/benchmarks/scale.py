"""Measure an instance with hundreds of assignments, and script times: `make bench NAME=scale`.

The benchmark runs real daemons on a private server. A shape is TOPICSxPARTITIONS or
TOPICSxPARTITIONSxGROUPS. Each shape is measured in these states: empty; paused with a full backlog,
first while the housekeeper promotes due messages and deletes old dead letters, then afterwards;
after the death of a worker with many pending messages; at work, including the takeover from a dead
consumer and trimming; with messages that fail twice and are dead-lettered; and idle with all
remaining data. The cost of the daemon must be the same in the first and the last state. All work
that the run claims is counted.

The server's slow log and latency monitor report everything above 5 ms over the whole run. Another
client sends PING all the time and reports its wait. Its commands are not counted, but their CPU
time is part of the server's. The figures are from one machine. On a busy machine, all three blame
the server for time in which it did not run. To avoid this, pass --first, if permitted: the kernel
then schedules the server ahead of everything else.

The results are written to scale.json and scale.md in a folder. The defaults are a trial. For the
full run, set `ARGS="--shapes 1x1 256x1 16x16 --backlog 10000000 --delayed 1000000 --dead 1000000
--pending 1000000 --keep 1000000 --takeover 64 --seconds 20"`. It takes more than 15 minutes, 4 GiB
for the server, and 10 MiB for each of 256 workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from streamqd.model import Assignment
from tests.benchmarks.quick import machine
from tests.benchmarks.scale_host import (
    AT_ONCE,
    FAILING,
    PATIENCE,
    Host,
    Shape,
    add_options,
    run_on_host,
    time_until,
)
from tests.benchmarks.scale_page import KINDS, table
from tests.contract.harness import Harness
from tests.support.costs import seed_backlog, seed_dead_letters, seed_delayed, seed_pending
from tests.support.daemon import Daemon

SIZES = ("backlog", "delayed", "dead", "pending", "failing", "keep", "bytes", "seconds")
LETTERS_STAY = 3600.0  # seconds; half of the dead letters that are written are older
NODE = 100  # entries that a stream drops together, so up to this many more may remain
MISSING_ENTRY = "gone"  # a consumer that has no process


def main() -> None:
    """Measure every shape and the takeovers, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape(8, 1), Shape(2, 4)])
    parser.add_argument("--backlog", type=int, default=10_000, help="messages, over all partitions")
    parser.add_argument("--delayed", type=int, default=1_000, help="retries, and delayed sends")
    parser.add_argument("--dead", type=int, default=1_000)
    parser.add_argument("--pending", type=int, default=1_000, help="half of a dead consumer")
    parser.add_argument("--keep", type=int, default=1_000, help="messages that retention keeps")
    parser.add_argument("--failing", type=int, default=1_000, help="messages that fail and die")
    parser.add_argument("--takeover", type=int, default=4, help="partitions that are taken over")
    add_options(parser)
    parser.add_argument("--first", action="store_true", help="the server runs before all others")
    parser.add_argument("--output", type=Path, default=Path("var/scale"))
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(),
        "sizes": {name: vars(options)[name] for name in SIZES},
        "shapes": {},
        "takeover": {},
    }
    for shape in options.shapes:
        results["shapes"][shape.name] = print_result(shape.name, measure(shape, options))
    results["start"] = print_result("start", run_on_host(options, measure_first_message))
    for how in (signal.SIGTERM, signal.SIGKILL):
        found = run_on_host(
            options, lambda host, how=how: measure_takeover(host, options.takeover, how)
        )
        results["takeover"][how.name] = print_result(how.name, found)
    results["load"] = [round(each, 2) for each in os.getloadavg()]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.output / "scale.md").write_text(table(results))
    print(table(results))


def print_result(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Print a result as soon as it is available."""
    print(name, json.dumps(result), flush=True)
    return result


# --- one shape ------------------------------------------------------------------------------------


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape on its own server."""
    return run_on_host(options, lambda host: Trial(host, shape, options).run())


class Trial:
    """A shape on its own host."""

    def __init__(self, host: Host, shape: Shape, options: argparse.Namespace) -> None:
        self.host, self.shape, self.options = host, shape, options
        self.keep = max(1, options.keep // len(shape.places))
        self.daemon = host.daemon(
            shape,
            topic={"retention": {"max_length": self.keep}, "dlq_retention": f"{LETTERS_STAY:g}s"},
            consumer={"reclaim_idle": f"{max(1.0, options.seconds):g}s"},
        )
        self.found: dict[str, Any] = {"units": len(shape.assignments), "looks": {}, "done": {}}

    def run(self) -> dict[str, Any]:
        """Measure all states, one after the other."""
        host, shape, daemon, found = self.host, self.shape, self.daemon, self.found
        seconds = self.options.seconds
        daemon.start()
        found["start to all owned, s"] = time_until(lambda: all(host.owners(shape)), "all is owned")
        daemon.wait_event("daemon.ready", timeout=PATIENCE)
        found["slow at the start"] = host.take_longest_delays()
        time.sleep(seconds)  # one-time work after a start does not belong to the idle cost
        self.measure_state("idle, empty")
        daemon.pause()
        self.fill()
        self.measure_state(
            "promoting, expiring",
            lambda: not (host.count_due(shape) or self.has_expired_dead_letters()),
        )
        time_until(
            lambda: not (host.count_due(shape) or self.has_expired_dead_letters()),
            "what is due is done",
        )
        self.measure_state("paused, full")
        self.lose_a_worker()
        self.work()
        self.fail()
        time_until(self.is_trimmed, "what is not retained is trimmed")
        self.count()
        time.sleep(seconds)
        self.measure_state("idle, full")
        found["PSS, MiB"] = memory_by_kind(daemon)
        host.take_longest_delays()
        assert daemon.stop(timeout=PATIENCE) == 0, daemon.tail()
        found["slow at the end"] = host.take_longest_delays()
        return found

    def fill(self) -> None:
        """Write pending, unread, delayed and dead messages, evenly over all partitions.

        Half of the delayed messages are due immediately, and half of the dead letters are too old.
        Half of the pending messages belong to a dead consumer, and half to the worker of the first
        partition.
        """
        sizes, body, first = self.options, "x" * self.options.bytes, self.shape.places[0]
        write, everywhere = partial(self.host.write, self.shape), len(self.shape.places)

        def make_pending(harness: Harness, count: int, _body: str, consumer: str) -> None:
            if count and (consumer == MISSING_ENTRY or harness.assignment[:2] == first):
                seed_pending(harness, count, consumer)

        ours = sizes.pending // 2
        write(partial(make_pending, consumer="w"), ours, body)
        write(partial(make_pending, consumer=MISSING_ENTRY), ours // everywhere, body)
        write(seed_backlog, sizes.backlog // everywhere, body)
        each = sizes.delayed // 2 // everywhere
        write(seed_delayed, each, body)
        due = partial(seed_delayed, ahead=-float(each) / 1000 - 1)
        write(due, each, body)
        self.found["done"]["promoted"] = 2 * each * everywhere
        write(partial(seed_dead_letters, age=2 * LETTERS_STAY), sizes.dead // 2 // everywhere, body)
        write(seed_dead_letters, sizes.dead // 2 // everywhere, body)
        self.kept = sizes.dead // 2 // everywhere * everywhere

    def has_expired_dead_letters(self) -> bool:
        """Return True if expired dead letters are left, apart from those of incomplete nodes.

        The server removes only whole nodes.
        """
        return self.host.count_dead(self.shape)[1] > self.kept + NODE * len(self.shape.places)

    def is_trimmed(self) -> bool:
        """Return True if only the messages that retention keeps are left."""
        there = self.host.messages(self.shape)[1]
        return there <= (self.keep + 2 * NODE) * len(self.shape.places)

    def lose_a_worker(self) -> None:
        """Kill the worker with the most pending messages, resume the daemon, time the recovery."""
        host, first = self.host, self.shape.assignments[0]
        title = f"streamqd: worker {first.topic}/{first.partition} {first.group}"
        stream = host.keys.stream(first.topic, first.partition)

        def own() -> int:
            rows = host.link.execute("XINFO", "CONSUMERS", stream, first.group)
            flat = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
            return sum(int(row[b"pending"]) for row in flat if row[b"name"] == b"w")

        victim = self.daemon.titles()[title]
        os.kill(victim, signal.SIGKILL)
        time_until(
            lambda: self.daemon.titles().get(title) not in (None, victim), "there is another"
        )
        self.found["done"]["recovered"] = own()
        self.began = time.monotonic()
        self.daemon.signal(signal.SIGCONT)
        self.measure_state("after the death of a worker", lambda: not own())

    def work(self) -> None:
        """Handle the whole backlog."""
        self.measure_state("at work", lambda: not self.host.count_unhandled(self.shape))
        time_until(lambda: not self.host.count_unhandled(self.shape), "the backlog is handled")
        self.found["backlog handled within, s"] = round(time.monotonic() - self.began, 2)

    def fail(self) -> None:
        """Handle messages that fail twice and are then dead-lettered."""
        host, shape = self.host, self.shape
        began = time.monotonic()
        each = self.options.failing // len(shape.places)
        dead = host.count_dead(shape)[0] + each * len(shape.assignments)
        host.write(shape, seed_backlog, each, FAILING * self.options.bytes)
        self.measure_state("failing", lambda: host.count_dead(shape)[0] >= dead)
        time_until(lambda: host.count_dead(shape)[0] >= dead, "what fails is dead")
        self.found["failing dead within, s"] = round(time.monotonic() - began, 2)

    def count(self) -> None:
        """Count the messages reclaimed from the dead consumer, and those that were removed."""
        taken = self.daemon.events("entries.reclaimed")
        self.found["done"]["reclaimed"] = sum(each["entries"] for each in taken)
        for name, (ever, there) in (
            ("trimmed", self.host.messages(self.shape)),
            ("expired", self.host.count_dead(self.shape)),
        ):
            self.found["done"][name] = ever - there

    def measure_state(self, name: str, done: Callable[[], bool] | None = None) -> None:
        """Record the resource use for some seconds, or until `done` returns True."""
        seconds = self.options.seconds
        self.found["looks"][name] = measure_state(self.host, self.daemon, self.shape, seconds, done)


def measure_state(
    host: Host,
    daemon: Daemon,
    shape: Shape,
    seconds: float,
    done: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Measure the resource use for some seconds, or until `done` returns True.

    All values are per second. CPU is in ms.
    """

    def wait() -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1) if done else left)
            if done and done():
                break

    host.take_longest_delays()
    host.pinger.delays()
    used = measure_usage(host, daemon, shape, wait)
    took = used["seconds"]
    return {
        "CPU, ms/s": {name: round(used[name] / took * 1000, 2) for name in KINDS},
        "messages/s": round(used["messages"] / took),
        "commands/s": round(used["commands"] / took, 1),
        "scripts/s": round(used["scripts"] / took, 1),
        "redis, MiB": host.used_mib(),
        "another client, ms": host.pinger.delays()._asdict(),
        "slow": host.take_longest_delays(),
    }


def measure_usage(
    host: Host, daemon: Daemon, shape: Shape, wait: Callable[[], object]
) -> dict[str, float]:
    """Return the resource use while `wait` runs.

    It consists of elapsed and CPU seconds, commands, and handled messages.
    """
    names = pids_by_kind(host, daemon)
    handled, asked = host.handled(shape), host.asked
    began, before = time.monotonic(), {name: cpu_seconds(pids) for name, pids in names.items()}
    with host.meter.measuring() as cost:
        wait()
        took = time.monotonic() - began
        used = {name: cpu_seconds(pids) - before[name] for name, pids in names.items()}
        asked = host.asked - asked
    return {
        **used,
        "seconds": took,
        "commands": cost.total - cost.commands["ping"] - asked,
        "scripts": cost.scripts,
        "messages": host.handled(shape) - handled,
    }


def pids_by_kind(host: Host, daemon: Daemon) -> dict[str, list[int]]:
    """Return the pids that use CPU, by kind."""
    titles = daemon.titles()
    return {
        "supervisor": [daemon.pid],
        "housekeeper": [pid for title, pid in titles.items() if "housekeeper" in title],
        "workers": [pid for title, pid in titles.items() if "worker" in title],
        "redis": [host.server.pid],
    }


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of all threads of these processes. Exited threads do not count."""
    used = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                used += int(path.read_text().split()[0])
    return used / 1e9


def memory_by_kind(daemon: Daemon) -> dict[str, float]:
    """Return the PSS of each kind of process, in MiB. For workers, return median and largest."""
    sizes: dict[str, list[float]] = {"supervisor": [], "housekeeper": [], "worker": []}
    for title, pid in daemon.titles().items():
        kind = next((kind for kind in sizes if kind in title), "")
        if kind:
            sizes[kind].append(psutil.Process(pid).memory_full_info().pss / (1 << 20))
    workers = sizes.pop("worker")
    found = {kind: max(some, default=0.0) for kind, some in sizes.items()}
    found["worker"], found["largest worker"] = statistics.median(workers), max(workers)
    return {kind: round(size, 1) for kind, size in found.items()}


# --- start ----------------------------------------------------------------------------------------


def measure_first_message(host: Host) -> dict[str, Any]:
    """Measure the time from a daemon's start until it handled a message in each partition.

    The messages are waiting, and the topic exists, as after any restart. Return the median of five
    starts.
    """
    shape = Shape(1, 4)
    daemon = host.daemon(shape)
    took: dict[str, list[float]] = {"first": [], "all": []}
    for _ in range(5):
        before = host.handled(shape)
        host.write(shape, seed_backlog, 1, "x")
        began = time.monotonic()
        daemon.start()
        for name, count in (("first", 1), ("all", len(shape.assignments))):
            time_until(lambda n=before + count: host.handled(shape) >= n, name)
            took[name].append(time.monotonic() - began)
        assert daemon.stop(timeout=PATIENCE) == 0, daemon.tail()
    middle = {name: round(statistics.median(times), 2) for name, times in took.items()}
    return {"partitions": 4, **{f"{name} handled after, s": at for name, at in middle.items()}}


# --- takeover -------------------------------------------------------------------------------------


def measure_takeover(host: Host, count: int, how: signal.Signals) -> dict[str, Any]:
    """Signal one of two instances, and time the takeover of its partitions by the other.

    Each of the instances has `count` partitions.
    """
    shape = Shape(1, 2 * count)
    for name in ("one", "two"):
        host.daemon(shape, name).start()
    shares = {"one": count, "two": count}
    time_until(lambda: {n: host.owners(shape).count(n) for n in shares} == shares, "both own half")
    one, two = host.daemons
    for each in host.daemons:
        each.wait_event("daemon.ready", timeout=PATIENCE)
    began = time.monotonic()
    if how is signal.SIGKILL:
        one.kill()
    else:
        one.signal(how)
    for place in shape.places:
        seed_backlog(Harness(host.link, host.keys, Assignment(*place, "g0")), 1)
    time_until(lambda: set(host.owners(shape)) == {"two"}, "one owns all")
    owned = time.monotonic() - began
    time_until(lambda: host.handled(shape) == 2 * count, "a message of each partition is handled")
    assert two.running
    return {
        "partitions": count,
        "lease_ttl, s": float(AT_ONCE["lease_ttl"].removesuffix("s")),
        "all owned after, s": round(owned, 2),
        "all handled after, s": round(time.monotonic() - began, 2),
    }


if __name__ == "__main__":
    main()
