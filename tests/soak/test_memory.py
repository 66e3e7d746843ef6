"""Steady memory: many more messages pass through than are retained, and no process grows.

A producer writes messages of random sizes, and a daemon handles and trims them. The memory of the
server and of each process of the daemon is sampled throughout. Skipped unless MESSAGES sets their
number, at least 2 million: `MESSAGES=10_000_000 pytest tests/soak/test_memory.py`. RESULT names the
result file.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamqd.store.client import Connection
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.machine import machine
from tests.support.servers import Server
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif("MESSAGES" not in os.environ, reason="a soak test: MESSAGES=10_000_000"),
]

MESSAGES = int(os.environ.get("MESSAGES", "0"))
SEED = int(os.environ.get("SEED", "1"))
PARTITIONS = 2
KEPT = 50_000  # entries retained per partition
AHEAD = 100_000  # unsettled messages at which the producer waits
WRITE = 1_000  # messages per write
SAMPLES = 200
KINDS = ("supervisor", "housekeeper", "worker")
PROCESS_GROWTH = 1 << 20  # bytes that a process may grow: 0.2 per message with 10 million
CODE = "def obey(message):\n    pass\n"


def memory(link: Connection) -> int:
    """Return the bytes that the server reports for its data."""
    for line in link.execute("INFO", "memory").decode().splitlines():
        if line.startswith("used_memory:"):
            return int(line.partition(":")[2])
    raise AssertionError("INFO memory has no used_memory")


def processes(daemon: Daemon) -> dict[str, dict[str, int]]:
    """Return PSS and RSS in bytes by kind of process; for workers, those of the largest."""
    found: dict[str, dict[str, int]] = {kind: {"pss": 0, "rss": 0} for kind in KINDS}
    for title, pid in daemon.titles().items():
        info = psutil.Process(pid).memory_full_info()
        for kind in KINDS:
            if kind in title:
                found[kind]["pss"] = max(found[kind]["pss"], info.pss)
                found[kind]["rss"] = max(found[kind]["rss"], info.rss)
    assert all(each["rss"] for each in found.values()), f"not all are there: {daemon.titles()}"
    return found


def sample(daemon: Daemon, sent: int, began: float) -> dict[str, Any]:
    streams = [daemon.keys.stream(TOPIC, number) for number in range(PARTITIONS)]
    return {
        "messages": sent,
        "seconds": round(time.monotonic() - began, 1),
        "used_memory": memory(daemon.link),
        "entries": sum(daemon.link.pipeline([("XLEN", key) for key in streams])),
        "pending": daemon.pending(),
        "processes": processes(daemon),
    }


def exact_lag(daemon: Daemon) -> int:
    """Return the exact lag of the group. Cheap at any length."""
    behind = 0
    for number in range(PARTITIONS):
        (flat,) = daemon.link.execute("XINFO", "GROUPS", daemon.keys.stream(TOPIC, number))
        info = dict(zip(flat[::2], flat[1::2], strict=True))
        behind += int(info[b"lag"] or 0) + int(info[b"pending"])
    return behind


def test_memory_does_not_grow(server: Server, tmp_path: Path) -> None:
    if server.version < (7, 0):
        pytest.skip("Redis 6.2 does not report the lag of a group")
    assert MESSAGES >= 2_000_000, "fewer are not enough to see it"
    chance = random.Random(SEED)
    bodies = [chance.randbytes(chance.randrange(20, 400)) for _ in range(997)]
    daemon = Daemon(tmp_path, server.url, partitions=PARTITIONS, code=CODE)
    retention = {"max_length": KEPT}
    daemon.write_config(topics={TOPIC: {"partitions": PARTITIONS, "retention": retention}})
    samples = []
    with daemon:
        began, sent, every = time.monotonic(), 0, max(WRITE, MESSAGES // SAMPLES)
        while sent < MESSAGES:
            commands = [
                ("XADD", daemon.keys.stream(TOPIC, n % PARTITIONS), "*", "payload", bodies[n % 997])
                for n in range(sent, min(MESSAGES, sent + WRITE))
            ]
            daemon.link.pipeline(commands)
            if sent // every != (sent + len(commands)) // every:
                samples.append(sample(daemon, sent + len(commands), began))
            sent += len(commands)
            if sent % (20 * WRITE) == 0:
                wait_until(lambda: exact_lag(daemon) < AHEAD, timeout=300, every=0.02)
        wait_until(lambda: exact_lag(daemon) == 0, timeout=300, every=0.1)
        # Trimming removes whole nodes, so each stream may keep one node more.
        most = PARTITIONS * (KEPT + 100)
        wait_until(lambda: sample(daemon, sent, began)["entries"] <= most, timeout=60, every=0.2)
        samples.append(sample(daemon, sent, began))
        assert daemon.letters() == []
        report(server, samples)
    # Any memory that is kept for each message would show: 8 bytes for each of 10 million messages
    # are 80 MB. The figure is per present entry, because trimming removes many entries at a time.
    each_takes = [round(each["used_memory"] / each["entries"]) for each in samples]
    print(f"server: {max(each_takes)} bytes at most for each entry")
    assert grown(each_takes) < 0.15 * statistics.median(each_takes)
    for kind in KINDS:
        # RSS: unlike PSS, it does not change when a process that shares pages exits.
        sizes = [each["processes"][kind]["rss"] for each in samples]
        growth = grown(sizes)
        print(f"{kind}: {growth / 1024:+,.0f} KiB, {max(sizes) / 1024:,.0f} at most")
        assert growth <= PROCESS_GROWTH, f"{kind} has grown by {growth:,} bytes"
    assert all(each["entries"] >= min(each["messages"], PARTITIONS * KEPT) for each in samples)


def grown(sizes: list[int]) -> float:
    """Return the growth from the second sixth of the samples to the last. The first is warm-up."""
    sixth = len(sizes) // 6
    late, early = sizes[-sixth:], sizes[sixth : 2 * sixth]
    return statistics.median(late) - statistics.median(early)


def report(server: Server, samples: list[dict[str, Any]]) -> None:
    """Write the figures to the file that RESULT names."""
    if "RESULT" not in os.environ:
        return
    document = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "server": f"{server.product} {server.facts.version}",
        "seed": SEED,
        "messages": MESSAGES,
        "group": GROUP,
        "partitions": PARTITIONS,
        "retention": {"max_length": KEPT},
        "grown_rss": {
            kind: round(grown([each["processes"][kind]["rss"] for each in samples]))
            for kind in KINDS
        },
        "used_memory_max": max(each["used_memory"] for each in samples),
        "samples": samples,
    }
    file = Path(os.environ["RESULT"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")
