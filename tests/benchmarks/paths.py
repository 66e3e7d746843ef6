"""Other paths of a message for `make bench NAME=quick`: concurrency, failures and wake-up."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from tests.benchmarks import quick
from tests.benchmarks.bars import Bar, Work
from tests.benchmarks.throughput import daemon_work

LANES = 100
KEYS = 1000
SLEEP = 0.01  # seconds that the handler `waiting` takes
PER_SECOND = 200  # messages per second when the wake-up is measured
SECONDS = 5
ORDERED = f'concurrency = {LANES}\norder = "key"\n'
LONG = 'backoff = { kind = "fixed", base = "1h", max = "1h", jitter = "none" }\n'


def measure(path: str, messages: int, rounds: int) -> tuple[dict[str, Any], list[Bar]]:
    """Measure all paths. Return the figures and their bars."""
    some = max(10_000, messages // 4)
    ideal = quick.PARTITIONS * LANES / SLEEP

    figures: dict[str, Any] = {}

    def rate(what: str, handler: str, extra: str, *, count: int = some, keys: int = 0) -> float:
        works = [daemon_work(path, count, handler, extra, keys) for _ in range(rounds)]
        middle = Work(*(statistics.median(column) for column in zip(*works, strict=True)))
        figures[what] = {
            "messages/s": round(middle.rate),
            "worker CPU, us/message": round(middle.workers_us, 2),
            "Redis CPU, us/message": round(middle.server_us, 2),
        }
        return round(middle.rate)

    later = rate("coroutines in order of keys", "later", ORDERED, keys=KEYS)
    count = int(ideal)
    waiting = rate("coroutines that wait for 10 ms", "waiting", ORDERED, keys=KEYS, count=count)
    retried = rate("every message fails and is retried later", "failing", LONG)
    dead = rate("every message dies", "failing", "max_attempts = 1\n")
    wake = figures["produced -> handler begins, p50 and p99"] = measure_wake_ups(path, rounds)
    bare, ours = wake["bare loop, us"], wake["streamqd, us"]
    return figures, [
        Bar("coroutines in order of keys, 100 at once, messages/s", later, 150_000),
        Bar("coroutines that wait for 10 ms, of the ideal", round(waiting / ideal, 3), 0.9),
        Bar("every message is retried, messages/s", retried, 30_000),
        Bar("every message dies, messages/s", dead, 30_000),
        Bar("wake-up, p50 of the bare loop's", round(ours[0] / bare[0], 2), 1.2, at_most=True),
        Bar("wake-up, p99 of the bare loop's", round(ours[1] / bare[1], 2), 2.0, at_most=True),
    ]


def measure_wake_ups(path: str, rounds: int) -> dict[str, list[float]]:
    """Measure the time from XADD to the handler's start, at 200 messages/s: p50 and p99 in us."""
    found: dict[str, list[list[float]]] = {"bare loop, us": [], "streamqd, us": []}
    for _ in range(rounds):
        for name, reader in (("bare loop, us", _bare_reader), ("streamqd, us", _daemon_reader)):
            found[name].append(_measure_delays(path, reader))
    return {
        name: [round(statistics.median(column), 1) for column in zip(*each, strict=True)]
        for name, each in found.items()
    }


def measure_daemon_wake_up(path: str) -> list[float]:
    """Measure the wake-up of the daemon alone: p50 and p99 in us."""
    return _measure_delays(path, _daemon_reader)


def _measure_delays(path: str, reader: Callable[[str, Path], list[int]]) -> list[float]:
    """Return p50 and p99 of the delays, in us."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder, "ledger")
        ledger.touch()
        late = sorted(reader(path, ledger)[20:])  # the first messages only warm everything up
        return [late[len(late) // 2] / 1e3, late[len(late) * 99 // 100] / 1e3]


def _daemon_reader(path: str, ledger: Path) -> list[int]:
    redis.Redis(unix_socket_path=path).flushall()
    env = {"BENCH_LEDGER": str(ledger)}
    with quick.daemon(path, "stamped", partitions=1, env=env):
        quick.wait_ready(path, partitions=1)
        return _send_and_read_delays(path, quick.stream(0), lambda: _read_delays(ledger))


def _bare_reader(path: str, ledger: Path) -> list[int]:
    client = redis.Redis(unix_socket_path=path)
    client.flushall()
    client.xgroup_create("bare:0", "g", id="0", mkstream=True)
    context = multiprocessing.get_context("fork")
    reader = context.Process(target=_read_stream, args=(path, ledger))
    reader.start()
    try:
        return _send_and_read_delays(path, "bare:0", lambda: _read_delays(ledger))
    finally:
        reader.terminate()
        reader.join()


def _read_stream(path: str, ledger: Path) -> None:
    client = redis.Redis(unix_socket_path=path, protocol=2)
    read = ("XREADGROUP", "GROUP", "g", "w", "COUNT", 256, "BLOCK", 5000, "STREAMS", "bare:0", ">")
    with ledger.open("ab", buffering=0) as file:
        while True:
            found = client.execute_command(*read)
            entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
            for entry_id, fields in entries:
                payload = fields[b"payload"] if isinstance(fields, dict) else fields[1]
                late = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(payload)
                file.write(b"%d\n" % late)
                client.execute_command("XACK", "bare:0", "g", entry_id)


def _send_and_read_delays(path: str, stream: str, lines: Callable[[], list[int]]) -> list[int]:
    """Send messages at a steady pace. Return the delay of each message, in ns."""
    client = redis.Redis(unix_socket_path=path)
    count, due = PER_SECOND * SECONDS, time.monotonic()
    for _ in range(count):
        due += 1 / PER_SECOND
        time.sleep(max(0.0, due - time.monotonic()))
        sent = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        client.execute_command("XADD", stream, "*", "payload", b"%d" % sent)
    quick.wait(lambda: len(lines()) >= count)
    return lines()


def _read_delays(ledger: Path) -> list[int]:
    return [int(line) for line in ledger.read_bytes().splitlines()]
