"""Steady memory: many more messages than are kept go through, and nobody grows.

A producer writes messages of random sizes, a daemon handles them and trims; the memory of the
server, and of each process of the daemon, is looked at all the time. Skipped unless MESSAGES says
how many, 2 million or more: `MESSAGES=10_000_000 pytest tests/soak/test_memory.py`. With
RESULT=FILE it leaves its figures there.
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
AHEAD = 100_000  # the producer waits while so many are not settled
WRITE = 1_000  # messages of one write
SAMPLES = 200
KINDS = ("supervisor", "housekeeper", "worker")
PROCESS_GROWTH = 1 << 20  # bytes that a process may gain: 10 million messages leave 0.2 each
CODE = "def obey(message):\n    pass\n"


def memory(link: Connection) -> int:
    """Bytes that the data of the server takes, by its own account."""
    for line in link.execute("INFO", "memory").decode().splitlines():
        if line.startswith("used_memory:"):
            return int(line.partition(":")[2])
    raise AssertionError("INFO memory tells no used_memory")


def processes(daemon: Daemon) -> dict[str, dict[str, int]]:
    """PSS and RSS of each process of the daemon by its kind, in bytes; of workers the largest."""
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


def unsettled(daemon: Daemon) -> int:
    """How far the group is behind; exact, and cheap at any length."""
    behind = 0
    for number in range(PARTITIONS):
        (flat,) = daemon.link.execute("XINFO", "GROUPS", daemon.keys.stream(TOPIC, number))
        info = dict(zip(flat[::2], flat[1::2], strict=True))
        behind += int(info[b"lag"] or 0) + int(info[b"pending"])
    return behind


def test_memory_is_steady(server: Server, tmp_path: Path) -> None:
    if server.version < (7, 0):
        pytest.skip("Redis 6.2 does not tell how far a group is behind")
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
                wait_until(lambda: unsettled(daemon) < AHEAD, timeout=300, every=0.02)
        wait_until(lambda: unsettled(daemon) == 0, timeout=300, every=0.1)
        # Whole nodes go: a node more than asked for may stay in each.
        most = PARTITIONS * (KEPT + 100)
        wait_until(lambda: sample(daemon, sent, began)["entries"] <= most, timeout=60, every=0.2)
        samples.append(sample(daemon, sent, began))
        assert daemon.letters() == []
        report(server, samples)
    # Whatever is kept for each message would show: at 8 bytes each in 10 million it is 80 MB. For
    # each entry that is there, because trimming takes many at a time: a saw, whatever its teeth.
    each_takes = [round(each["used_memory"] / each["entries"]) for each in samples]
    print(f"server: {max(each_takes)} bytes at most for each entry")
    assert grown(each_takes) < 0.15 * statistics.median(each_takes)
    for kind in KINDS:
        # RSS, which sharing with a process that ends does not change.
        sizes = [each["processes"][kind]["rss"] for each in samples]
        growth = grown(sizes)
        print(f"{kind}: {growth / 1024:+,.0f} KiB, {max(sizes) / 1024:,.0f} at most")
        assert growth <= PROCESS_GROWTH, f"{kind} has grown by {growth:,} bytes"
    assert all(each["entries"] >= min(each["messages"], PARTITIONS * KEPT) for each in samples)


def grown(sizes: list[int]) -> float:
    """How much more the last sixth takes than the second one: the first is for warming up."""
    sixth = len(sizes) // 6
    late, early = sizes[-sixth:], sizes[sixth : 2 * sixth]
    return statistics.median(late) - statistics.median(early)


def report(server: Server, samples: list[dict[str, Any]]) -> None:
    """Leave the figures where RESULT says."""
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
