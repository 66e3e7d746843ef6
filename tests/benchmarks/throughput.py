"""Throughput with a backlog, compared with the bare loop: part of `make bench NAME=quick`."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import redis

from tests.benchmarks import access_log, quick
from tests.benchmarks.bars import CpuMeter, Work, worker_pids
from tests.benchmarks.quick import PARTITIONS


class Load(NamedTuple):
    """The bodies of messages, and the handler and the bare counterpart for each group."""

    handlers: Sequence[str]
    bare: Sequence[Callable[[Any], object]]  # each function takes the fields of an entry
    bodies: Sequence[bytes] = (quick.PAYLOAD,)

    @property
    def groups(self) -> list[str]:
        """A name for each group."""
        return ["g", *(f"g{number}" for number in range(1, len(self.handlers)))]


def compare_throughput(
    path: str, count: int, rounds: int, load: Load | None = None
) -> dict[str, Any]:
    """Measure the messages per second with a backlog. A message counts once in each group.

    Each group has two partitions with one worker each. If `load` is None, there is one group whose
    handler does nothing.
    """
    load = load or NOTHING
    pairs = [(run_bare_loop(path, count, load), run_load(path, count, load)) for _ in range(rounds)]

    def median(number: Callable[[Work, Work], float], digits: int) -> float:
        return round(statistics.median(number(*pair) for pair in pairs), digits)

    rates = [ours.rate for _, ours in pairs]
    return {
        "bare loop, messages/s": median(lambda bare, _: bare.rate, 0),
        "streamqd, messages/s": median(lambda _, ours: ours.rate, 0),
        "ratio": median(lambda bare, ours: ours.rate / bare.rate, 3),
        "spread of streamqd": [round(min(rates)), round(max(rates))],
        "worker CPU, us/message": {
            "bare loop": median(lambda bare, _: bare.workers_us, 2),
            "streamqd": median(lambda _, ours: ours.workers_us, 2),
        },
        "ratio of Redis CPU": median(lambda bare, ours: ours.server_us / bare.server_us, 3),
    }


def run_bare_loop(path: str, count: int, load: Load) -> Work:
    """Run the limit: redis-py with COUNT 256, acknowledging and reading in one round trip.

    Each partition in each group has its own process.
    """
    client = redis.Redis(unix_socket_path=path)
    client.flushall()
    streams = [f"bare:{number}" for number in range(PARTITIONS)]
    quick.fill(path, streams, count, bodies=load.bodies)
    shares = [
        (name, *each) for each in zip(load.groups, load.bare, strict=True) for name in streams
    ]
    for name, group, _ in shares:
        client.xgroup_create(name, group, id="0")
    context = multiprocessing.get_context("fork")
    gate, spent = context.Barrier(len(shares) + 1), context.SimpleQueue()
    workers = [
        context.Process(target=_bare_worker, args=(path, *share, gate, spent)) for share in shares
    ]
    for worker in workers:
        worker.start()
    gate.wait()
    server_meter = CpuMeter([quick.server_pid(path)])
    seconds = sum(spent.get() for _ in workers)
    handled = count * len(load.groups)
    rate = handled / (time.monotonic() - server_meter.began)
    server_us = server_meter.us_per_message(handled)
    for worker in workers:
        worker.join()
    return Work(rate, seconds * 1e6 / handled, server_us)


def _bare_worker(
    path: str, stream: str, group: str, handle: Callable[[Any], object], gate: Any, spent: Any
) -> None:
    client = redis.Redis(unix_socket_path=path, protocol=2)
    client.ping()
    gate.wait()
    began = time.process_time()
    ids: list[bytes] = []
    while True:
        pipe = client.pipeline(transaction=False)
        if ids:
            pipe.execute_command("XACK", stream, group, *ids)
        pipe.execute_command(
            *("XREADGROUP", "GROUP", group, "w", "COUNT", 256, "STREAMS", stream, ">")
        )
        found = pipe.execute()[-1]
        if not found:
            spent.put(time.process_time() - began)
            return
        entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
        ids = [entry[0] for entry in entries]
        for _, fields in entries:
            handle(fields)


def _ignore_fields(_fields: object) -> None:
    return None


NOTHING = Load(["nothing"], [_ignore_fields])


def log_lines() -> Load:
    """Return a load of real log lines that two groups parse."""
    module = access_log.__name__
    return Load(
        [f"{module}:hits", f"{module}:agents"],
        [access_log.bare_hits, access_log.bare_agents],
        access_log.lines(),
    )


def run_load(path: str, count: int, load: Load) -> Work:
    """Handle the same load with the daemon."""
    others = zip(load.groups[1:], load.handlers[1:], strict=True)
    extra = "".join(
        f'[[consumers]]\ntopic = "bench"\ngroup = "{group}"\nhandler = "{handler}"\n'
        for group, handler in others
    )
    return daemon_work(path, count, load.handlers[0], extra, groups=load.groups, bodies=load.bodies)


def daemon_work(
    path: str,
    count: int,
    handler: str = "nothing",
    extra: str = "",
    keys: int = 0,
    *,
    groups: Sequence[str] = ("g",),
    bodies: Sequence[bytes] = (quick.PAYLOAD,),
    more: Sequence[bytes] = (),
    env: dict[str, str] | None = None,
) -> Work:
    """Measure the daemon from its first message to its last.

    It is paused while the backlog is written. `extra` contains settings of the consumer, and
    consumers for further `groups`. If `keys` is not 0, the messages have that many different keys.
    """
    redis.Redis(unix_socket_path=path).flushall()
    with quick.daemon(path, handler, extra=extra, env=env) as process:
        quick.wait_ready(path, groups=groups)
        process.send_signal(signal.SIGTSTP)
        quick.wait(lambda: quick.worker_states(path) == {"PAUSED"})
        streams = [quick.stream(number) for number in range(PARTITIONS)]
        quick.fill(path, streams, count, keys=keys, bodies=bodies, more=more)
        workers, server_meter = (
            CpuMeter(worker_pids(process.pid)),
            CpuMeter([quick.server_pid(path)]),
        )
        process.send_signal(signal.SIGCONT)
        handled = count * len(groups)
        rate = _wait_until_drained(redis.Redis(unix_socket_path=path), handled)
        return Work(rate, workers.us_per_message(handled), server_meter.us_per_message(handled))


def _wait_until_drained(client: Any, count: int) -> float:
    """Wait until all messages are acknowledged. Return messages per second.

    The time counts from the first acknowledgment that is observed, so the time until SIGCONT
    arrives is left out. Each look takes time from the workers, so looks are rare while many
    messages are left.
    """
    quick.wait(lambda: _count_outstanding(client) < count)
    first, left = time.monotonic(), _count_outstanding(client)
    assert left, "all was done at the first look: measure with more messages"
    rest, deadline = left, first + 300
    while rest:
        assert time.monotonic() < deadline, f"{rest} messages are not done"
        per_message = (time.monotonic() - first) / max(1, left - rest)
        time.sleep(min(0.2, max(0.002, rest * per_message / 2)) if rest < left else 0.005)
        rest = _count_outstanding(client)
    return left / (time.monotonic() - first)


def _count_outstanding(client: Any) -> int:
    total = 0
    for number in range(PARTITIONS):
        for group in client.xinfo_groups(quick.stream(number)):
            total += (group["lag"] or 0) + group["pending"]
    return total
