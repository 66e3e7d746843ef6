"""Compare the messages per second of all producers in one run: `make bench NAME=produce`.

Compare the ratios. The bare client is redis-py with hiredis, as in `make bench`: one XADD per call
with `execute_command`, which is faster than its `xadd`. `pipelined` sends the same in pipelines of
512. Our producers do more: they route by the partition count, which a script compares while it
writes, and they report the meaning of a lost reply. `four threads` share one producer. Its lock
lets only one of them send at a time, so their bar is the same as that of one thread.

Before the clock starts, connections are open, and scripts and topics are known. The clock stops
once all replies have arrived. CPU is that of this process, with all its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import redis

from streamqd import AsyncProducer, BufferedProducer, Producer
from tests.benchmarks.bars import Bar, print_bars
from tests.benchmarks.quick import PAYLOAD, machine, server

STREAM = "stream:topic:{bench:p:0}"
CHUNK = 512  # messages per pipeline
TASKS = 200  # asynchronous sends that run at a time
TOPICS = 10
THREADS = 4
SINGLES = 10  # ways that wait for each reply send only one in this many messages

Send = Callable[[int], object]  # sends that number of messages


def main() -> None:
    """Measure each way several times, in turns, and print medians."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=200_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    with server(aof=False) as path:
        for _ in range(options.rounds):
            for name, (way, share) in WAYS.items():
                rate, cost = measure(way, path, max(1, options.messages // share))
                rates.setdefault(name, []).append(rate)
                costs.setdefault(name, []).append(cost)
    medians = {name: round(statistics.median(found)) for name, found in rates.items()}
    cpu = {name: round(statistics.median(found), 2) for name, found in costs.items()}
    report: dict[str, Any] = {
        "machine": machine(),
        "messages": options.messages,
        "per second": medians,
        "CPU, us per message": cpu,
        "of the baseline": {
            name: {"per second": ratio(medians, name, base), "CPU": ratio(cpu, name, base)}
            for name, base in BASELINES.items()
        },
    }
    print(json.dumps(report, indent=2))
    report["bars"] = print_bars(
        [
            Bar("send_many, one process, messages/s", medians["send_many"], 400_000),
            Bar("send, of a bare XADD", ratio(medians, "send", "bare XADD"), 0.95),
            Bar(
                "ten topics in turn, of one",
                ratio(medians, "send, ten topics in turn", "send"),
                0.95,
            ),
        ]
    )
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def measure(
    way: Callable[[str], AbstractContextManager[Send]], path: str, count: int
) -> tuple[float, float]:
    """Return the messages per second of one way, and this process's CPU in us per message."""
    redis.Redis(unix_socket_path=path).flushall()
    with way(path) as send:
        send(1)
        before = count_written(path)
        began, used = time.perf_counter(), time.process_time()
        send(count)
        took, used = time.perf_counter() - began, time.process_time() - used
        assert count_written(path) - before == count, way.__name__
    return count / took, used * 1e6 / count


def ratio(medians: Mapping[str, float], ours: str, other: str) -> float:
    """Return the ratio of two medians."""
    return round(medians[ours] / medians[other], 2)


def count_written(path: str) -> int:
    """Return the number of messages in all partitions."""
    client = redis.Redis(unix_socket_path=path)
    return sum(client.xlen(name) for name in client.scan_iter("stream:topic:*"))


@contextmanager
def send_with_redis_py(path: str) -> Iterator[Send]:
    with redis.Redis(unix_socket_path=path, protocol=2) as client:

        def send(count: int) -> None:
            for _ in range(count):
                client.execute_command("XADD", STREAM, "*", "payload", PAYLOAD)

        yield send


@contextmanager
def send_in_pipelines(path: str) -> Iterator[Send]:
    with redis.Redis(unix_socket_path=path, protocol=2) as client:

        def send(count: int) -> None:
            for begin in range(0, count, CHUNK):
                pipe = client.pipeline(transaction=False)
                for _ in range(min(CHUNK, count - begin)):
                    pipe.execute_command("XADD", STREAM, "*", "payload", PAYLOAD)
                pipe.execute()

        yield send


@contextmanager
def send_to_topics_in_turn(path: str) -> Iterator[Send]:
    with Producer(f"unix://{path}") as producer:
        for number in range(TOPICS):
            producer.send(f"bench{number}", PAYLOAD)

        def send(count: int) -> None:
            for number in range(count):
                producer.send(f"bench{number % TOPICS}", PAYLOAD)

        yield send


@contextmanager
def send_singly(path: str, **options: Any) -> Iterator[Send]:
    with Producer(f"unix://{path}", **options) as producer:

        def send(count: int) -> None:
            for _ in range(count):
                producer.send("bench", PAYLOAD)

        yield send


@contextmanager
def send_from_threads(path: str) -> Iterator[Send]:
    with Producer(f"unix://{path}") as producer, ThreadPoolExecutor(THREADS) as pool:

        def send_some(count: int) -> None:
            for _ in range(count):
                producer.send("bench", PAYLOAD)

        def send(count: int) -> None:
            list(pool.map(send_some, (len(range(at, count, THREADS)) for at in range(THREADS))))

        yield send


def send_with_backlog_limit(path: str) -> AbstractContextManager[Send]:
    return send_singly(path, max_backlog=1 << 30)


@contextmanager
def send_many(path: str) -> Iterator[Send]:
    with Producer(f"unix://{path}") as producer:
        yield lambda count: producer.send_many("bench", (PAYLOAD for _ in range(count)))


@contextmanager
def send_buffered(path: str) -> Iterator[Send]:
    with BufferedProducer(f"unix://{path}") as producer:

        def send(count: int) -> None:
            receipts = [producer.send("bench", PAYLOAD) for _ in range(count)]
            assert producer.flush()
            for receipt in receipts:
                receipt.result(0)

        yield send


@contextmanager
def send_from_tasks(path: str, tasks: int) -> Iterator[Send]:
    async def work(producer: AsyncProducer, count: int) -> None:
        async def send_some(times: int) -> None:
            for _ in range(times):
                await producer.send("bench", PAYLOAD)

        await asyncio.gather(*(send_some(len(range(at, count, tasks))) for at in range(tasks)))

    with asyncio.Runner() as runner:
        producer = AsyncProducer(f"unix://{path}")
        yield lambda count: runner.run(work(producer, count))
        runner.run(producer.close())


def send_from_one_task(path: str) -> AbstractContextManager[Send]:
    return send_from_tasks(path, 1)


def send_from_many_tasks(path: str) -> AbstractContextManager[Send]:
    return send_from_tasks(path, TASKS)


WAYS: dict[str, tuple[Callable[[str], AbstractContextManager[Send]], int]] = {
    "bare XADD": (send_with_redis_py, SINGLES),
    "pipelined XADDs": (send_in_pipelines, 1),
    "send": (send_singly, SINGLES),
    "send, ten topics in turn": (send_to_topics_in_turn, SINGLES),
    "send, four threads": (send_from_threads, SINGLES),
    "send, with max_backlog": (send_with_backlog_limit, SINGLES),
    "send_many": (send_many, 1),
    "buffered": (send_buffered, 1),
    "async, one task": (send_from_one_task, SINGLES),
    "async, many tasks": (send_from_many_tasks, 1),
}
BASELINES = {
    "send": "bare XADD",
    "send, ten topics in turn": "send",
    "send, four threads": "send",
    "send, with max_backlog": "bare XADD",
    "async, one task": "bare XADD",
    "send_many": "pipelined XADDs",
    "buffered": "pipelined XADDs",
    "async, many tasks": "pipelined XADDs",
}

if __name__ == "__main__":
    main()
