"""Compare async handlers with a loop of redis.asyncio, in turns: `make bench NAME=coroutines`.

The loop is the code that a team writes without streamqd. It reads with XREADGROUP, starts one task
for each message, and acknowledges with the next read, on the same event loop. It has no order of
keys, no fence, no retries and no metrics. Each of the two partitions has its own process, on this
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from tests.benchmarks import quick
from tests.benchmarks.bars import Bar, CpuMeter, Work, measure_in_turns, print_bars
from tests.benchmarks.paths import SLEEP
from tests.benchmarks.quick import PARTITIONS
from tests.benchmarks.throughput import daemon_work
from tests.support.machine import machine

LOOPS = {"asyncio": 1.0, "uvloop": 1.2}  # the required ratio to the loop of redis.asyncio
HANDLERS = ("later", "waiting")  # one handler returns immediately, and one waits for 10 ms


def main() -> None:
    """Run all measurements, and print JSON and the bars."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=200_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument(
        "--lanes", type=int, default=256, help="messages at a time, as many as a read returns"
    )
    arguments.add_argument("--keys", type=int, default=1000)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    results: dict[str, Any] = {
        "machine": machine(),
        **{name: getattr(options, name) for name in ("messages", "lanes", "keys")},
    }
    bars: list[Bar] = []
    with quick.server(aof=False) as path:
        for handler in HANDLERS:
            for loop, least in LOOPS.items():
                count = options.messages // (1 if handler == "later" else 4)
                kinds = _kinds(path, count, handler, loop, options.lanes, options.keys)
                works = measure_in_turns(kinds, options.rounds)
                results[f"{handler}, {loop}"] = {
                    name: _figures(each) for name, each in works.items()
                }
                theirs = works["redis.asyncio"]
                for order in ("key", "none"):
                    ours, what = (
                        works[f'order = "{order}"'],
                        f'{handler}, {loop}, order = "{order}"',
                    )
                    rate = _ratio(ours, theirs, lambda each: each.rate)
                    bars.append(Bar(f"{what}: messages/s", rate, least))
                    cpu = _ratio(ours, theirs, lambda each: each.workers_us)
                    bars.append(Bar(f"{what}: worker CPU", cpu, 1 / least, at_most=True))
    print(json.dumps(results, indent=2))
    results["bars"] = print_bars(bars)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


def _kinds(
    path: str, count: int, handler: str, loop: str, lanes: int, keys: int
) -> dict[str, Callable[[], Work]]:
    def ours(order: str) -> Work:
        extra = f'concurrency = {lanes}\norder = "{order}"\n'
        env = {"STREAMQ_DAEMON__EVENT_LOOP": loop}
        return daemon_work(path, count, handler, extra, keys, env=env)

    return {
        "redis.asyncio": lambda: measure_bare_loop(path, count, handler, loop, lanes, keys),
        'order = "key"': lambda: ours("key"),
        'order = "none"': lambda: ours("none"),
    }


def _figures(works: list[Work]) -> dict[str, float]:
    middle = Work(*(statistics.median(column) for column in zip(*works, strict=True)))
    return {
        "messages/s": round(middle.rate),
        "worker CPU, us/message": round(middle.workers_us, 2),
        "Redis CPU, us/message": round(middle.server_us, 2),
    }


def _ratio(ours: list[Work], theirs: list[Work], figure: Callable[[Work], float]) -> float:
    """Return the median of the rounds' ratios. Within a round, the machine's state is similar."""
    pairs = zip(ours, theirs, strict=True)
    return round(statistics.median(figure(each) / figure(other) for each, other in pairs), 3)


# --- the loop of redis.asyncio --------------------------------------------------------------------


def measure_bare_loop(
    path: str, count: int, handler: str, loop: str, lanes: int, keys: int
) -> Work:
    """Measure redis.asyncio handling `count` messages, from the first to the last."""
    client = redis.Redis(unix_socket_path=path)
    client.flushall()
    streams = [f"bare:{number}" for number in range(PARTITIONS)]
    quick.fill(path, streams, count, keys=keys)
    for name in streams:
        client.xgroup_create(name, "g", id="0")
    context = multiprocessing.get_context("fork")
    gate, spent = context.Barrier(PARTITIONS + 1), context.SimpleQueue()
    workers = [
        context.Process(target=_worker, args=(path, name, handler, loop, lanes, gate, spent))
        for name in streams
    ]
    for worker in workers:
        worker.start()
    gate.wait()
    meter = CpuMeter([quick.server_pid(path)])
    seconds = sum(spent.get() for _ in workers)
    rate, server_us = count / (time.monotonic() - meter.began), meter.us_per_message(count)
    for worker in workers:
        worker.join()
    return Work(rate, seconds * 1e6 / count, server_us)


def _worker(
    path: str, stream: str, handler: str, loop: str, lanes: int, gate: Any, spent: Any
) -> None:
    made = importlib.import_module(loop).new_event_loop()
    asyncio.set_event_loop(made)
    spent.put(made.run_until_complete(_serve(path, stream, handler, lanes, gate)))


async def _serve(path: str, stream: str, handler: str, lanes: int, gate: Any) -> float:
    client = redis.asyncio.Redis(unix_socket_path=path, protocol=2)
    await client.ping()
    gate.wait()
    began = time.process_time()
    loop, done = asyncio.get_running_loop(), list[bytes]()
    running: dict[bytes, asyncio.Task[None]] = {}
    room_made = loop.create_future()

    async def handle(entry_id: bytes) -> None:
        if handler == "waiting":
            await asyncio.sleep(SLEEP)
        done.append(entry_id)
        del running[entry_id]
        if not room_made.done():  # this is cheaper than `asyncio.wait`, which checks every task
            room_made.set_result(None)

    while True:
        room = lanes - len(running)
        pipe, acked = client.pipeline(transaction=False), len(done)
        if acked:
            pipe.execute_command("XACK", stream, "g", *done)
            del done[:acked]
        pipe.execute_command(
            *("XREADGROUP", "GROUP", "g", "w", "COUNT", room, "STREAMS", stream, ">")
        )
        found = (await pipe.execute())[-1]
        entries = found[0][1] if isinstance(found, list) and found else []
        for entry in entries:
            running[entry[0]] = loop.create_task(handle(entry[0]))
        if not entries and not running and not done:
            return time.process_time() - began
        if len(running) == lanes or (running and not entries):
            room_made = loop.create_future()
            await room_made


if __name__ == "__main__":
    main()
