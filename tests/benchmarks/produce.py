"""What the producers write per second, side by side in one run: compare the ratios.

    python -m tests.benchmarks.produce --messages 20000

The bare client is redis-py with hiredis and one XADD per call; `pipelined` is the same in pipelines
of 512. Ours do more: they route by the partition count under WATCH, and
say what a lost answer means.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from streamqd import AsyncProducer, BufferedProducer, Producer
from tests.benchmarks.bars import Bar, show
from tests.benchmarks.quick import PAYLOAD, machine, server

TASKS = 200  # asynchronous sends under way together
SINGLES = 10  # of so many messages, one is sent where each waits for its answer


def main() -> None:
    """Measure each way a few times, in turns, and print medians."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=20_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    rates: dict[str, list[float]] = {}
    with server(aof=False) as path:
        url = f"unix://{path}"
        for _ in range(options.rounds):
            for name, (work, share) in WAYS.items():
                count = max(1, options.messages // share)
                redis.Redis(unix_socket_path=path).flushall()
                began = time.monotonic()
                work(url, path, count)
                took = time.monotonic() - began
                assert written(path) == count, name
                rates.setdefault(name, []).append(count / took)
    medians = {name: round(statistics.median(found)) for name, found in rates.items()}
    report: dict[str, Any] = {
        "machine": machine(),
        "messages": options.messages,
        "per second": medians,
        "single send against a bare XADD": ratio(medians, "send", "bare XADD"),
        "send_many against pipelined XADDs": ratio(medians, "send_many", "pipelined XADDs"),
        "buffered against send": ratio(medians, "buffered", "send"),
        "async, many tasks, against send": ratio(medians, "async, many tasks", "send"),
    }
    print(json.dumps(report, indent=2))
    report["bars"] = show(
        [
            Bar("send_many, one process, messages/s", medians["send_many"], 400_000),
            Bar("send, of a bare XADD", ratio(medians, "send", "bare XADD"), 0.95),
        ]
    )
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def ratio(medians: dict[str, int], ours: str, other: str) -> float:
    """How many times as fast."""
    return round(medians[ours] / medians[other], 2)


def written(path: str) -> int:
    """The messages in all partitions."""
    client = redis.Redis(unix_socket_path=path)
    return sum(client.xlen(name) for name in client.scan_iter("stream:topic:*"))


def bare(_url: str, path: str, count: int) -> None:
    client = redis.Redis(unix_socket_path=path)
    for _ in range(count):
        client.xadd("stream:topic:{bench:p:0}", {"payload": PAYLOAD})


def pipelined(_url: str, path: str, count: int) -> None:
    client = redis.Redis(unix_socket_path=path)
    for begin in range(0, count, 512):
        pipe = client.pipeline(transaction=False)
        for _ in range(min(512, count - begin)):
            pipe.xadd("stream:topic:{bench:p:0}", {"payload": PAYLOAD})
        pipe.execute()


def single(url: str, _path: str, count: int) -> None:
    with Producer(url) as producer:
        for _ in range(count):
            producer.send("bench", PAYLOAD)


def limited(url: str, _path: str, count: int) -> None:
    with Producer(url, max_backlog=1 << 30) as producer:
        for _ in range(count):
            producer.send("bench", PAYLOAD)


def many(url: str, _path: str, count: int) -> None:
    with Producer(url) as producer:
        producer.send_many("bench", (PAYLOAD for _ in range(count)))


def buffered(url: str, _path: str, count: int) -> None:
    with BufferedProducer(url) as producer:
        receipts = [producer.send("bench", PAYLOAD) for _ in range(count)]
    for receipt in receipts:
        receipt.result(0)


def one_task(url: str, _path: str, count: int) -> None:
    async def work() -> None:
        async with AsyncProducer(url) as producer:
            for _ in range(count):
                await producer.send("bench", PAYLOAD)

    asyncio.run(work())


def many_tasks(url: str, _path: str, count: int) -> None:
    async def work() -> None:
        async with AsyncProducer(url) as producer:

            async def some(times: int) -> None:
                for _ in range(times):
                    await producer.send("bench", PAYLOAD)

            shares = [len(range(at, count, TASKS)) for at in range(TASKS)]
            await asyncio.gather(*map(some, shares))

    asyncio.run(work())


WAYS: dict[str, tuple[Callable[[str, str, int], Any], int]] = {
    "bare XADD": (bare, SINGLES),
    "pipelined XADDs": (pipelined, 1),
    "send": (single, SINGLES),
    "send, with max_backlog": (limited, SINGLES),
    "send_many": (many, 1),
    "buffered": (buffered, 1),
    "async, one task": (one_task, SINGLES),
    "async, many tasks": (many_tasks, 1),
}

if __name__ == "__main__":
    main()
