"""Measure takeovers, hand-overs, and the losses of a dead server: `make bench NAME=bounds`.

The benchmark uses real daemons and servers, without any other load. It writes
docs/explanation/bounds.json and the table in docs/explanation/recovery-and-data-loss.md.

A power cut differs from a kill, because the kernel's cache survives only a kill. To imitate a power
cut, the benchmark truncates every file of the server to its last synced size
(tests/benchmarks/synced.c). This is the worst that a disk may do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from streamqd import config
from streamqd.producer import Outgoing, Producer
from streamqd.store.client import connect
from tests.benchmarks.quick import machine
from tests.support.daemon import ROOT, TOPIC, Daemon
from tests.support.servers import ProcessServer, find_binary
from tests.support.waiting import wait_until

RESULTS = ROOT / "docs" / "explanation" / "bounds.json"
PAGE = ROOT / "docs" / "explanation" / "recovery-and-data-loss.md"
MARK = "<!-- figures -->\n"
PARTITIONS = 4
BUSY = "sleep 0.005"
AT_ONCE = {"rebalance_delay": "0s", "rebalance_hold": "0s"}
SEND_SECONDS = (1.5, 4.0)  # seconds before the server dies
BATCH = 10

DURABILITY = {
    "appendfsync always": {"appendonly": "yes", "appendfsync": "always"},
    "appendfsync everysec": {"appendonly": "yes", "appendfsync": "everysec"},
    "appendfsync no": {"appendonly": "yes", "appendfsync": "no"},
    "snapshot after 1 s": {"appendonly": "no", "save": "1 1"},
}


def main() -> None:
    """Measure everything, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--server", default="valkey")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    binary = find_binary(options.server)
    results: dict[str, Any] = {"machine": machine(), "rounds": options.rounds}
    for name, measure in MEASURES.items():
        results[name] = print_result(name, summarize(repeat(measure, binary, options.rounds), "s"))
    with tempfile.TemporaryDirectory() as folder:
        shim = compile_shim(Path(folder))
        for name, settings in DURABILITY.items():
            for how in ("kill", "power cut"):
                lost = [measure_loss(binary, settings, shim, how) for _ in range(options.rounds)]
                results[f"{name}, {how}"] = print_result(
                    f"{name}, {how}",
                    {
                        "lost": summarize([count for count, _, _ in lost], "messages"),
                        "window": summarize([window for _, window, _ in lost], "s"),
                        "sent": summarize([sent for _, _, sent in lost], "messages"),
                    },
                )
    results["load"] = {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    text = PAGE.read_text().partition(MARK)[0] + MARK
    PAGE.write_text(text + render_tables(results))


def print_result(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Print a result as soon as it is available."""
    print(name, json.dumps(result), flush=True)
    return result


def summarize(values: Iterable[float], unit: str) -> dict[str, Any]:
    """Return the median, the minimum and the maximum of the values."""
    values = list(values)
    digits = 3 if unit == "s" else None
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "unit": unit,
    }


# --- owners ---------------------------------------------------------------------------------------


def repeat(measure: Callable[[Path, str], list[float]], binary: Path, count: int) -> list[float]:
    """Measure `count` values, each with a private server and folder."""
    found: list[float] = []
    while len(found) < count:
        server = ProcessServer("bench", binary)
        with tempfile.TemporaryDirectory() as folder:
            found += measure(Path(folder), server.url)
        server.close()
    return found


def measure_worker_death(folder: Path, url: str) -> list[float]:
    """Measure the time from the SIGKILL of a busy worker to the next run on its partition."""
    with Daemon(folder, url) as one:
        one.send([BUSY] * 3000)
        times = []
        for _ in range(5):
            victim = wait_next_start(one).pid
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            times.append(wait_first_start(one, killed, {0}, not_by={victim}) - killed)
    return times


def measure_host_death(folder: Path, url: str, ttl: str) -> list[float]:
    """Measure the time from a supervisor's SIGKILL until all its partitions run elsewhere.

    A partition runs again when the first run on another instance starts. The slowest partition
    counts.
    """
    with DaemonPair(folder, url, ttl) as (one, two):
        one.send([BUSY] * 4000)
        theirs, pids = one.pids(), set(one.pids().values())
        wait_until(lambda: len({r.uid.split("/")[1] for r in read_starts(one)}) == PARTITIONS)
        killed = time.monotonic()
        one.kill()
        one.wait_gone(10.0)
        times = [wait_first_start(two, killed, {number}, not_by=pids) - killed for number in theirs]
    return [max(times)]


def measure_handover(folder: Path, url: str) -> list[float]:
    """Measure how long each partition of a stopped instance pauses.

    The pause lasts from the last end of a run on this instance to the first start on another one.
    """
    with DaemonPair(folder, url, "15s") as (one, two):
        one.send([BUSY] * 4000)
        theirs, pids = one.pids(), set(one.pids().values())
        wait_until(lambda: len({r.uid.split("/")[1] for r in read_starts(one)}) == PARTITIONS)
        assert one.stop() == 0
        ended = {number: read_last_end(one, number, pids) for number in theirs}
        return [
            wait_first_start(two, at, {number}, not_by=pids) - at for number, at in ended.items()
        ]


def measure_drain(folder: Path, url: str) -> list[float]:
    """Measure the time from SIGTERM to the exit of the process, with messages that take 5 ms."""
    with Daemon(folder, url, partitions=PARTITIONS) as one:
        one.send([BUSY] * 4000)
        wait_until(lambda: len(read_starts(one)) > 10)
        signalled = time.monotonic()
        assert one.stop() == 0
        return [time.monotonic() - signalled]


MEASURES: dict[str, Callable[[Path, str], list[float]]] = {
    "takeover after the death of a worker": measure_worker_death,
    "takeover after the death of a host, lease_ttl 5 s": lambda f, u: measure_host_death(
        f, u, "5s"
    ),
    "takeover after the death of a host, lease_ttl 15 s": lambda f, u: measure_host_death(
        f, u, "15s"
    ),
    "planned hand-over, rest of a partition": measure_handover,
    "drain of a busy instance": measure_drain,
}


class DaemonPair:
    """Two instances that share the partitions."""

    def __init__(self, folder: Path, url: str, ttl: str) -> None:
        settings = {**AT_ONCE, "lease_ttl": ttl}
        self.both = [
            Daemon(folder, url, name=name, partitions=PARTITIONS, daemon=settings)
            for name in ("one", "two")
        ]

    def __enter__(self) -> list[Daemon]:
        for each in self.both:
            each.start()
            each.wait_event("daemon.ready")
        share = PARTITIONS // 2
        wait_until(lambda: all(len(d.pids()) == share for d in self.both), timeout=30)
        return self.both

    def __exit__(self, *_: object) -> None:
        for each in self.both:
            each.close()


def read_starts(daemon: Daemon) -> list[Any]:
    """Return every handler run that has started."""
    return daemon.ledger.records("start")


def wait_next_start(daemon: Daemon) -> Any:
    """Wait until another run has started, and return it."""
    begun = time.monotonic()
    wait_until(lambda: any(r.at > begun for r in read_starts(daemon)), what="a message runs")
    return read_starts(daemon)[-1]


def read_last_end(daemon: Daemon, number: int, pids: set[int]) -> float:
    """Return the time at which one of `pids` finished its last run on a partition."""
    place = f"{TOPIC}/{number}/"
    return float(
        max(r.at for r in daemon.ledger.records("end") if r.pid in pids and r.uid.startswith(place))
    )


def wait_first_start(daemon: Daemon, after: float, numbers: set[int], not_by: set[int]) -> float:
    """Wait until a run starts on one of these partitions. Return the time of the first start.

    Runs before `after`, and runs of the processes in `not_by`, do not count.
    """

    def found() -> float:
        times = [
            r.at
            for r in read_starts(daemon)
            if r.at > after and r.pid not in not_by and int(r.uid.split("/")[1]) in numbers
        ]
        return min(times, default=0.0)

    return wait_until(found, timeout=60.0, what=f"partition {numbers} continues", every=0.005)


# --- loss -----------------------------------------------------------------------------------------


def compile_shim(folder: Path) -> Path:
    """Compile the shim, which logs each sync."""
    target = folder / "synced.so"
    source = Path(__file__).with_name("synced.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"], check=True)
    return target


def measure_loss(
    binary: Path, settings: dict[str, str], shim: Path, how: str
) -> tuple[int, float, int]:
    """Kill the server while a producer is sending.

    Return how many acknowledged messages are missing after the restart, the seconds from the first
    missing message to the death, and the number of acknowledged messages.
    """
    server = ProcessServer("bench", binary, **settings)
    server.kill()
    log = server.folder / "synced"
    server.environment = {"LD_PRELOAD": str(shim), "SYNCED_LOG": str(log)}
    server.start()
    try:
        producer = Producer(settings=config.Settings(redis=server.settings))
        sent: list[tuple[str, float]] = []
        end = time.monotonic() + random.uniform(*SEND_SECONDS)
        while time.monotonic() < end:
            ids = producer.send_many(TOPIC, [Outgoing(b"x" * 100, partition=0)] * BATCH)
            at = time.monotonic()
            sent += [(each.id, at) for each in ids]
        server.kill()
        died = time.monotonic()
        producer.close()
        if how == "power cut":
            truncate_to_synced(server.folder, log)
        server.start()
        link = connect(server.settings, timeout=10.0, name="bench")
        stream = f"stream:topic:{{{TOPIC}:p:0}}"
        kept = {row[0].decode() for row in link.execute("XRANGE", stream, "-", "+")}
        link.close()
    finally:
        server.close()
    missing = [at for each, at in sent if each not in kept]
    return len(missing), died - min(missing, default=died), len(sent)


def truncate_to_synced(folder: Path, log: Path) -> None:
    """Truncate every file of the server to its last synced size."""
    synced: dict[Path, int] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        size, _, path = line.partition(" ")
        synced[Path(path)] = int(size)
    for path in folder.rglob("*.aof"):
        os.truncate(path, min(synced.get(path, 0), path.stat().st_size))


# --- the page -------------------------------------------------------------------------------------


def render_tables(results: dict[str, Any]) -> str:
    """Return the tables of the page."""
    load, of = results["load"], results["machine"]
    lines = [
        "",
        "| Event | median | max |",
        "| --- | ---: | ---: |",
        *(
            f"| {name} | {results[name]['median']:.2f} s | {results[name]['max']:.2f} s |"
            for name in MEASURES
        ),
        "",
        "| Redis setting | failure | acknowledged and missing, median | max | window, max |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name in DURABILITY:
        for how in ("kill", "power cut"):
            found = results[f"{name}, {how}"]
            lost, window = found["lost"], found["window"]
            lines.append(
                f"| {name} | {how} | {lost['median']:,.0f} | {lost['max']:,} |"
                f" {window['max']:.2f} s |"
            )
    sent = {name: results[f"{name}, kill"]["sent"]["median"] for name in DURABILITY}
    closing = (
        f"Each figure is from at least {results['rounds']} rounds on {of['cores']} cores"
        f" ({of['cpu']}) with Python {of['python']}. The load average was {load['before']} before"
        f" the measurement and {load['after']} after it, and processes start more slowly on a busy"
        f" machine. The producer sent ten messages per call. In a round, Redis acknowledged"
        f" {sent['appendfsync no']:,.0f} of its messages with `appendfsync no`, and"
        f" {sent['appendfsync always']:,.0f} with `appendfsync always`."
    )
    lines += ["", closing, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
