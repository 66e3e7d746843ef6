"""Throughput with a backlog, beside the bare loop: part of `make bench-quick`."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import redis

from tests.benchmarks import quick
from tests.benchmarks.bars import Meter, Work, workers_of
from tests.benchmarks.quick import PARTITIONS


def throughput(path: str, count: int, rounds: int) -> dict[str, Any]:
    """Messages per second with a backlog and a handler that does nothing, two workers."""
    pairs = [(bare_loop(path, count), daemon_work(path, count)) for _ in range(rounds)]

    def middle(number: Callable[[Work, Work], float], digits: int) -> float:
        return round(statistics.median(number(*pair) for pair in pairs), digits)

    rates = [ours.rate for _, ours in pairs]
    return {
        "bare loop, messages/s": middle(lambda bare, _: bare.rate, 0),
        "streamqd, messages/s": middle(lambda _, ours: ours.rate, 0),
        "ratio": middle(lambda bare, ours: ours.rate / bare.rate, 3),
        "spread of streamqd": [round(min(rates)), round(max(rates))],
        "worker CPU, us/message": {
            "bare loop": middle(lambda bare, _: bare.workers_us, 2),
            "streamqd": middle(lambda _, ours: ours.workers_us, 2),
        },
        "ratio of Redis CPU": middle(lambda bare, ours: ours.server_us / bare.server_us, 3),
    }


def bare_loop(path: str, count: int) -> Work:
    """The limit: two processes, redis-py, COUNT 256, acknowledge and read in one round trip."""
    client = redis.Redis(unix_socket_path=path)
    client.flushall()
    quick.fill(path, [f"bare:{number}" for number in range(PARTITIONS)], count)
    for number in range(PARTITIONS):
        client.xgroup_create(f"bare:{number}", "g", id="0")
    context = multiprocessing.get_context("fork")
    gate, spent = context.Barrier(PARTITIONS + 1), context.SimpleQueue()
    workers = [
        context.Process(target=_bare_worker, args=(path, f"bare:{number}", gate, spent))
        for number in range(PARTITIONS)
    ]
    for worker in workers:
        worker.start()
    gate.wait()
    server_meter = Meter([quick.server_pid(path)])
    seconds = sum(spent.get() for _ in workers)
    rate = count / (time.monotonic() - server_meter.began)
    server_us = server_meter.us(count)
    for worker in workers:
        worker.join()
    return Work(rate, seconds * 1e6 / count, server_us)


def _bare_worker(path: str, stream: str, gate: Any, spent: Any) -> None:
    client = redis.Redis(unix_socket_path=path, protocol=2)
    client.ping()
    gate.wait()
    began = time.process_time()
    ids: list[bytes] = []
    while True:
        pipe = client.pipeline(transaction=False)
        if ids:
            pipe.execute_command("XACK", stream, "g", *ids)
        pipe.execute_command("XREADGROUP", "GROUP", "g", "w", "COUNT", 256, "STREAMS", stream, ">")
        found = pipe.execute()[-1]
        if not found:
            spent.put(time.process_time() - began)
            return
        entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
        ids = [entry[0] for entry in entries]
        for _, fields in entries:
            _nothing(fields)


def _nothing(_fields: object) -> None:
    return None


def daemon_work(
    path: str, count: int, handler: str = "nothing", extra: str = "", keys: int = 0
) -> Work:
    """The daemon, paused while the backlog is written, from its first message to its last.

    `extra` are settings of the consumer; with `keys` the messages have so many keys.
    """
    redis.Redis(unix_socket_path=path).flushall()
    with quick.daemon(path, handler, extra=extra) as process:
        quick.wait_ready(path)
        process.send_signal(signal.SIGTSTP)
        quick.wait(lambda: quick.states(path) == {"PAUSED"})
        quick.fill(path, [quick.stream(number) for number in range(PARTITIONS)], count, keys=keys)
        workers, server_meter = Meter(workers_of(process.pid)), Meter([quick.server_pid(path)])
        process.send_signal(signal.SIGCONT)
        rate = _drained(redis.Redis(unix_socket_path=path), count)
        return Work(rate, workers.us(count), server_meter.us(count))


def _drained(client: Any, count: int) -> float:
    """Wait for all acknowledgements. Messages per second, from the first that was seen on.

    What SIGCONT takes to arrive is not throughput, and each look takes time from the workers: it
    is seldom looked while much is left.
    """
    quick.wait(lambda: _outstanding(client) < count)
    first, left = time.monotonic(), _outstanding(client)
    assert left, "all was done at the first look: measure with more messages"
    rest, deadline = left, first + 300
    while rest:
        assert time.monotonic() < deadline, f"{rest} messages are not done"
        per_message = (time.monotonic() - first) / max(1, left - rest)
        time.sleep(min(0.2, max(0.002, rest * per_message / 2)) if rest < left else 0.005)
        rest = _outstanding(client)
    return left / (time.monotonic() - first)


def _outstanding(client: Any) -> int:
    total = 0
    for number in range(PARTITIONS):
        group = client.xinfo_groups(quick.stream(number))[0]
        total += (group["lag"] or 0) + group["pending"]
    return total
