"""`make bench-quick`: throughput beside the bare loop, takeover, hand-over. A few minutes at most.

One private server, everything on this machine, medians of several rounds. The limit is a bare
redis-py loop of our shape (one pipelined round trip of XACK and XREADGROUP per batch, then a plain
call per message) without fence, blame, metrics or retries, measured in the same run. Figures of
one machine: compare the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import redis

PARTITIONS = 2
PAYLOAD = b"x" * 100
HANDLER = """
import os

def nothing(message):
    pass

def slow(message):
    import time
    with open(os.environ["BENCH_LEDGER"], "ab", buffering=0) as ledger:
        ledger.write(b"%d %d\\n" % (os.getpid(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)))
    time.sleep(0.002)
"""


def main() -> None:
    """Run all measurements and print a table and JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=200_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    results: dict[str, Any] = {"machine": machine(), "messages": options.messages}
    for aof in (False, True):
        with server(aof=aof) as path:
            name = "aof everysec" if aof else "aof off"
            results[f"throughput, {name}"] = throughput(path, options.messages, options.rounds)
    with server(aof=False) as path:
        results["takeover after kill -9 of a busy worker, ms"] = takeover(path, options.rounds)
        results["hand-over after SIGTERM of an instance, ms"] = handover(path, options.rounds)
        results["idle at a reload, ms"] = reload_gap(path, options.rounds)
    print(json.dumps(results, indent=2))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Describe what the figures belong to."""
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


# --- throughput -----------------------------------------------------------------------------------


def throughput(path: str, count: int, rounds: int) -> dict[str, Any]:
    """Messages per second with a backlog and a handler that does nothing, two workers."""
    limit, ours = [], []
    for _ in range(rounds):
        limit.append(bare_loop(path, count))
        ours.append(daemon_rate(path, count))
    return {
        "bare loop, messages/s": round(statistics.median(limit)),
        "streamqd, messages/s": round(statistics.median(ours)),
        "ratio": round(statistics.median(ours) / statistics.median(limit), 3),
        "spread of streamqd": [round(min(ours)), round(max(ours))],
    }


def bare_loop(path: str, count: int) -> float:
    """The limit: two processes, redis-py, COUNT 256, acknowledge and read in one round trip."""
    client = redis.Redis(unix_socket_path=path)
    client.flushall()
    fill(path, [f"bare:{number}" for number in range(PARTITIONS)], count)
    for number in range(PARTITIONS):
        client.xgroup_create(f"bare:{number}", "g", id="0")
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(PARTITIONS + 1)
    workers = [
        context.Process(target=_bare_worker, args=(path, f"bare:{number}", gate))
        for number in range(PARTITIONS)
    ]
    for worker in workers:
        worker.start()
    gate.wait()
    began = time.monotonic()
    for worker in workers:
        worker.join()
    return count / (time.monotonic() - began)


def _bare_worker(path: str, stream: str, gate: Any) -> None:
    client = redis.Redis(unix_socket_path=path, protocol=2)
    client.ping()
    gate.wait()
    ids: list[bytes] = []
    while True:
        pipe = client.pipeline(transaction=False)
        if ids:
            pipe.execute_command("XACK", stream, "g", *ids)
        pipe.execute_command("XREADGROUP", "GROUP", "g", "w", "COUNT", 256, "STREAMS", stream, ">")
        found = pipe.execute()[-1]
        if not found:
            return
        entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
        ids = [entry[0] for entry in entries]
        for _, fields in entries:
            _nothing(fields)


def _nothing(_fields: object) -> None:
    return None


def daemon_rate(path: str, count: int) -> float:
    """The daemon, paused while the backlog is written, from its first message to its last."""
    redis.Redis(unix_socket_path=path).flushall()
    with daemon(path, "nothing") as process:
        wait_ready(path)
        process.send_signal(signal.SIGTSTP)
        wait(lambda: _states(path) == {"PAUSED"})
        fill(path, [_stream(number) for number in range(PARTITIONS)], count)
        process.send_signal(signal.SIGCONT)
        began = time.monotonic()
        client = redis.Redis(unix_socket_path=path)
        wait(lambda: _outstanding(client) < count)
        # From the first acknowledgement on: what SIGCONT takes to arrive is not throughput.
        first = time.monotonic()
        left = _outstanding(client)
        wait(lambda: _outstanding(client) == 0)
        return left / (time.monotonic() - first) if left else count / (first - began)


def _outstanding(client: Any) -> int:
    total = 0
    for number in range(PARTITIONS):
        group = client.xinfo_groups(_stream(number))[0]
        total += (group["lag"] or 0) + group["pending"]
    return total


# --- takeover and hand-over -----------------------------------------------------------------------


def takeover(path: str, rounds: int) -> dict[str, float]:
    """From the SIGKILL of a busy worker to the next handler start on its partition."""
    redis.Redis(unix_socket_path=path).flushall()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger"
        ledger.touch()
        with daemon(path, "slow", partitions=1, env={"BENCH_LEDGER": str(ledger)}):
            wait_ready(path, partitions=1)
            fill(path, [_stream(0)], 2_000 * rounds)
            for _ in range(rounds):
                victim = _last_run(ledger)[0]
                killed = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                os.kill(victim, signal.SIGKILL)
                wait(lambda v=victim: _last_run(ledger)[0] not in (0, v))  # type: ignore[misc]
                starts = [t for pid, t in _runs(ledger) if t > killed and pid != victim]
                times.append((starts[0] - killed) / 1e6)
    return _summary(times)


def reload_gap(path: str, rounds: int) -> dict[str, float]:
    """Between two starts of a 2 ms handler, the last in the old worker and the first in the new."""
    redis.Redis(unix_socket_path=path).flushall()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger"
        ledger.touch()
        env = {"BENCH_LEDGER": str(ledger)}
        with daemon(path, "slow", partitions=1, env=env) as supervisor:
            wait_ready(path, partitions=1)
            fill(path, [_stream(0)], 2_000 * rounds)
            for _ in range(rounds):
                old = _last_run(ledger)[0]
                supervisor.send_signal(signal.SIGHUP)
                wait(lambda o=old: _last_run(ledger)[0] not in (0, o))  # type: ignore[misc]
                runs = _runs(ledger)
                last = max(at for pid, at in runs if pid == old)
                times.append((min(at for _, at in runs if at > last) - last) / 1e6)
    return _summary(times)


def handover(path: str, rounds: int) -> dict[str, float]:
    """From the SIGTERM of one of two instances until the other has acquired all partitions."""
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


def _owners(client: Any, partitions: int) -> dict[str, int]:
    owners: dict[str, int] = {}
    for number in range(partitions):
        token, owner = client.hmget(f"streaming:mq:fence:{{bench:p:{number}}}:g", "token", "owner")
        if token:
            owners[owner.decode()] = owners.get(owner.decode(), 0) + 1
    return owners


def _runs(ledger: Path) -> list[tuple[int, int]]:
    lines = ledger.read_bytes().splitlines()
    return [(int(pid), int(at)) for pid, at in (line.split() for line in lines)]


def _last_run(ledger: Path) -> tuple[int, int]:
    wait(lambda: ledger.stat().st_size > 0)
    return _runs(ledger)[-1]


def _summary(times: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times), 1),
        "min": round(min(times), 1),
        "max": round(max(times), 1),
    }


# --- servers and daemons --------------------------------------------------------------------------


@contextlib.contextmanager
def server(*, aof: bool) -> Iterator[str]:
    """A private server on a unix socket."""
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


@contextlib.contextmanager
def daemon(
    path: str,
    handler: str,
    *,
    instance: str = "one",
    partitions: int = PARTITIONS,
    env: dict[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """The real daemon as a process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench_handler.py").write_text(HANDLER)
        config = Path(folder, "streamq.toml")
        config.write_text(
            f'[redis]\nurl = "unix://{path}"\n'
            f'[daemon]\ninstance = "{instance}"\nrebalance_delay = "0s"\nrebalance_hold = "0s"\n'
            f'[http]\nbind = ""\n[topics.bench]\npartitions = {partitions}\n'
            f'[[consumers]]\ntopic = "bench"\ngroup = "g"\nhandler = "bench_handler:{handler}"\n'
            "max_crashes = 0\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "streamqd", "--config", str(config)],
            stderr=subprocess.DEVNULL,
            env=os.environ | (env or {}),
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def wait_ready(path: str, partitions: int = PARTITIONS) -> None:
    """Wait until every partition has a worker that runs."""
    client = redis.Redis(unix_socket_path=path)
    wait(lambda: sum(_owners(client, partitions).values()) == partitions)
    wait(lambda: _states(path) == {"READY"})


def _states(path: str) -> set[str]:
    raw = redis.Redis(unix_socket_path=path).get("streaming:mq:instance:{default}:one")
    summary = json.loads(raw) if raw else {}
    return {str(unit["state"]).upper() for unit in summary.get("units", ())}


def fill(path: str, streams: list[str], count: int) -> None:
    """Write `count` entries over the streams, packed, one connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    for start in range(0, count, 500):
        stream = streams[start // 500 % len(streams)]
        size = min(500, count - start)
        packed = hiredis.pack_command(("XADD", stream, "*", "payload", PAYLOAD))
        connection.sendall(packed * size)
        reader, replies = hiredis.Reader(), 0
        while replies < size:
            reader.feed(connection.recv(65536))
            while reader.gets() is not False:
                replies += 1
    connection.close()


def _stream(number: int) -> str:
    return f"stream:topic:{{bench:p:{number}}}"


def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll a condition; fail when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the awaited condition did not come true")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
