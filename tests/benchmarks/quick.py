"""Measure the hot path, takeover and hand-over against their bars: `make bench NAME=quick`.

The benchmark takes a few minutes, and uses one private server and only this machine. The results
are medians of several rounds. The limit is a bare redis-py loop with our access pattern: for each
batch, one pipelined round trip with XACK and XREADGROUP, then a plain call for each message. The
loop has no fence, blame, metrics or retries, and runs in turn with the daemon in every round. The
figures are from one machine, so compare the ratios. The required figures are printed at the end.
`tests.benchmarks.paths` measures the other paths of a message, and `produce` the producers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hiredis
import redis

from tests.benchmarks.bars import Bar, print_bars
from tests.support.machine import machine

PARTITIONS = 2
PAYLOAD = b"x" * 100
PYTHON = sys.executable  # Python for the daemons; `beside` sets that of another tree
HANDLER = """
import asyncio, os, time

async def later(message):
    pass

async def waiting(message):
    await asyncio.sleep(0.01)

def failing(message):
    raise ValueError("no")

def stamped(message):
    late = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(message.payload)
    with open(os.environ["BENCH_LEDGER"], "ab", buffering=0) as ledger:
        ledger.write(b"%d\\n" % late)

def nothing(message):
    pass

def slow(message):
    with open(os.environ["BENCH_LEDGER"], "ab", buffering=0) as ledger:
        ledger.write(b"%d %d\\n" % (os.getpid(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)))
    time.sleep(0.002)
"""


def main() -> None:
    """Run all measurements, and print JSON and the bars."""
    from tests.benchmarks import paths, throughput  # these modules import this one

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=200_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    results: dict[str, Any] = {"machine": machine(), "messages": options.messages}
    bars: list[Bar] = []
    for aof in (False, True):
        with server(aof=aof) as path:
            name = "AOF everysec" if aof else "AOF off"
            found = throughput.compare_throughput(path, options.messages, options.rounds)
            results[f"throughput, {name}"] = found
            bars.append(Bar(f"handled/s of the bare loop, {name}", found["ratio"], 0.8))
            what = f"CPU of Redis of the bare loop's, {name}"
            bars.append(Bar(what, found["ratio of Redis CPU"], 1.15, at_most=True))
            some = options.messages // 4  # each of these messages takes longer
            found = throughput.compare_throughput(
                path, some, options.rounds, throughput.log_lines()
            )
            results[f"real log lines in two groups, {name}"] = found
            what = f"log lines parsed/s in two groups, of the bare loop, {name}"
            bars.append(Bar(what, found["ratio"], 0.8))
    with server(aof=False) as path:
        results["paths"], more = paths.measure(path, options.messages, options.rounds)
        bars += more
        results["takeover after kill -9 of a busy worker, ms"] = measure_takeover(
            path, options.rounds
        )
        results["hand-over after SIGTERM of an instance, ms"] = measure_handover(
            path, options.rounds
        )
        results["idle at a reload, ms"] = measure_reload_gap(path, options.rounds)
    print(json.dumps(results, indent=2))
    results["bars"] = print_bars(bars)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


# --- takeover and hand-over -----------------------------------------------------------------------


def measure_takeover(path: str, rounds: int) -> dict[str, float]:
    """Measure the time from the SIGKILL of a worker during a run to the partition's next run.

    A kill between two runs is different, because the supervisor attributes it to the code or the
    host. After such a death, it waits before the next start if that would be too soon.
    """
    redis.Redis(unix_socket_path=path).flushall()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger"
        ledger.touch()
        with daemon(path, "slow", partitions=1, env={"BENCH_LEDGER": str(ledger)}):
            wait_ready(path, partitions=1)
            fill(path, [stream(0)], 2_000 * rounds)
            for _ in range(4 * rounds):
                victim = _wait_for_run(ledger, after=len(_runs(ledger)) + random.randint(5, 25))
                killed = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                os.kill(victim, signal.SIGKILL)
                wait(lambda v=victim: _last_run(ledger)[0] not in (0, v))  # type: ignore[misc]
                starts = [t for pid, t in _runs(ledger) if t > killed and pid != victim]
                times.append((starts[0] - killed) / 1e6)
    return _summary(times)


def measure_reload_gap(path: str, rounds: int) -> dict[str, float]:
    """Measure the gap of a reload: from the old worker's last start to the new one's first.

    The handler takes 2 ms.
    """
    redis.Redis(unix_socket_path=path).flushall()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger"
        ledger.touch()
        env = {"BENCH_LEDGER": str(ledger)}
        with daemon(path, "slow", partitions=1, env=env) as supervisor:
            wait_ready(path, partitions=1)
            fill(path, [stream(0)], 2_000 * rounds)
            for _ in range(rounds):
                old = _last_run(ledger)[0]
                supervisor.send_signal(signal.SIGHUP)
                wait(lambda o=old: _last_run(ledger)[0] not in (0, o))  # type: ignore[misc]
                runs = _runs(ledger)
                last = max(at for pid, at in runs if pid == old)
                times.append((min(at for _, at in runs if at > last) - last) / 1e6)
    return _summary(times)


def measure_handover(path: str, rounds: int) -> dict[str, float]:
    """Measure the time from SIGTERM until another instance has acquired all partitions."""
    times = []
    for _ in range(rounds):
        redis.Redis(unix_socket_path=path).flushall()
        with daemon(path, "nothing", instance="one", partitions=4) as one:
            wait_ready(path, partitions=4)
            with daemon(path, "nothing", instance="two", partitions=4):
                client = redis.Redis(unix_socket_path=path)
                wait(lambda: _owners(client, 4) == {"one": 2, "two": 2})  # noqa: B023
                began = time.monotonic()
                one.send_signal(signal.SIGTERM)
                wait(lambda: _owners(client, 4) == {"two": 4})  # noqa: B023
                times.append((time.monotonic() - began) * 1000)
    return _summary(times)


def _owners(client: Any, partitions: int, group: str = "g") -> dict[str, int]:
    owners: dict[str, int] = {}
    for number in range(partitions):
        fence = f"streaming:mq:fence:{{bench:p:{number}}}:{group}"
        token, owner = client.hmget(fence, "token", "owner")
        if token:
            owners[owner.decode()] = owners.get(owner.decode(), 0) + 1
    return owners


def _runs(ledger: Path) -> list[tuple[int, int]]:
    lines = ledger.read_bytes().splitlines()
    return [(int(pid), int(at)) for pid, at in (line.split() for line in lines)]


def _last_run(ledger: Path) -> tuple[int, int]:
    wait(lambda: ledger.stat().st_size > 0)
    return _runs(ledger)[-1]


def _wait_for_run(ledger: Path, *, after: int) -> int:
    """Return the process whose run has just started, once there were `after` runs."""
    size = len(b"%d %d\n" % _last_run(ledger))
    while ledger.stat().st_size < size * after or _may_be_over(_last_run(ledger)[1]):
        time.sleep(0.0002)
    return _last_run(ledger)[0]


def _may_be_over(began: int) -> bool:
    """Return True if a run of 2 ms may already be over."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) - began > 1_000_000


def _summary(times: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times), 1),
        "min": round(min(times), 1),
        "max": round(max(times), 1),
    }


# --- servers and daemons --------------------------------------------------------------------------


@contextlib.contextmanager
def server(*, aof: bool) -> Iterator[str]:
    """Run a private server on a unix socket."""
    from streamqd.embedded import find_server

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/redis.sock"
        command = [str(find_server()), "--port", "0", "--unixsocket", path, "--dir", folder]
        command += ["--save", "", "--appendonly", "yes" if aof else "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait(lambda: _answers(path))
            yield path
        finally:
            process.terminate()
            process.wait()


def _answers(path: str) -> bool:
    try:
        return bool(redis.Redis(unix_socket_path=path).ping())
    except redis.ConnectionError:
        return False


def server_pid(path: str) -> int:
    """Return the pid of a server."""
    return int(redis.Redis(unix_socket_path=path).info("server")["process_id"])


@contextlib.contextmanager
def daemon(
    path: str,
    handler: str,
    *,
    instance: str = "one",
    partitions: int = PARTITIONS,
    extra: str = "",
    env: dict[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the real daemon as a process.

    `handler` is one of the handlers above, or any `module:function`.
    """
    reference = handler if ":" in handler else f"bench_handler:{handler}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench_handler.py").write_text(HANDLER)
        config = Path(folder, "streamq.toml")
        config.write_text(
            f'[redis]\nurl = "unix://{path}"\n'
            f'[daemon]\ninstance = "{instance}"\nrebalance_delay = "0s"\nrebalance_hold = "0s"\n'
            f'[http]\nbind = ""\n[topics.bench]\npartitions = {partitions}\n'
            f'[[consumers]]\ntopic = "bench"\ngroup = "g"\nhandler = "{reference}"\n'
            f"max_crashes = 0\n{extra}"
        )
        process = subprocess.Popen(
            [PYTHON, "-m", "streamqd", "--config", str(config)],
            stderr=subprocess.DEVNULL,
            # An installed package contains compiled files. Without them, a start spends most of its
            # time compiling.
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""} | (env or {}),
            cwd=folder,  # not a source tree, whose package would run instead
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def wait_ready(path: str, partitions: int = PARTITIONS, groups: Sequence[str] = ("g",)) -> None:
    """Wait until every partition has a running worker in each group."""
    client = redis.Redis(unix_socket_path=path)
    for group in groups:
        wait(lambda g=group: sum(_owners(client, partitions, g).values()) == partitions)  # type: ignore[misc]
    wait(lambda: worker_states(path) == {"READY"})


def worker_states(path: str) -> set[str]:
    """Return the states of the workers of instance `one`."""
    raw = redis.Redis(unix_socket_path=path).get("streaming:mq:instance:{default}:one")
    summary = json.loads(raw) if raw else {}
    # Older trees, which `beside` may measure, publish the assignments under `units`.
    assignments = summary.get("assignments") or summary.get("units", ())
    return {str(each["state"]).upper() for each in assignments}


def fill(
    path: str,
    streams: list[str],
    count: int,
    *,
    keys: int = 0,
    bodies: Sequence[bytes] = (PAYLOAD,),
    more: Sequence[bytes] = (),
) -> None:
    """Write `count` packed entries, spread over the streams, on one connection.

    If `keys` is not 0, the entries have that many different keys. The bodies are used in turns.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    for start in range(0, count, 500):
        name = streams[start // 500 % len(streams)]
        size = min(500, count - start)
        numbers = range(start, start + size)
        packed = []
        for number in numbers if keys or len(bodies) > 1 else numbers[:1]:
            key = ("key", f"k{number % keys}") if keys else ()
            body = bodies[number % len(bodies)]
            packed.append(hiredis.pack_command(("XADD", name, "*", "payload", body, *key, *more)))
        connection.sendall(b"".join(packed) * (size // len(packed)))
        reader, replies = hiredis.Reader(), 0
        while replies < size:
            reader.feed(connection.recv(65536))
            while reader.gets() is not False:
                replies += 1
    connection.close()


def stream(number: int) -> str:
    """Return the key of a partition's stream."""
    return f"stream:topic:{{bench:p:{number}}}"


def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll a condition until it is true. Raise TimeoutError if this takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the awaited condition did not come true")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
