"""Compare topics read, archived and written by Spark with baselines: `make bench NAME=spark`.

    python -m tests.benchmarks.spark --rows 1000000 --rounds 3

There is one private server, and everything runs on this machine, one after the other in every
round. The results are medians of the rounds. The baselines are (a) one tuned process that knows its
data and guarantees nothing (`spark_single`), (b) Spark with rows as tuples, and (c) for the
archive, Spark with Arrow batches whose rows Java writes. CPU seconds cover all processes except the
server, including Java and Python workers. On a busy machine, CPU seconds are comparable, but
elapsed seconds are not. The figures are from one machine, so compare the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hiredis

from streamqd import config
from streamqd.store import topics
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.benchmarks.quick import machine, server
from tests.benchmarks.spark_jobs import TARGETS, TOPIC
from tests.benchmarks.spark_tree import Cpu, Memory, adopt_orphans, read_cpu_seconds

PARTITIONS = 4
SMALL = 10_000  # number of rows of the cold run
STREAMS = [f"stream:topic:{{{TOPIC}:p:{number}}}" for number in range(PARTITIONS)]
# Maps a kind of work to its measurements. The first is the baseline for the others.
WORKS = {
    "read": ("single", "read", "read_tuples"),
    "archive": ("single", "archive", "archive_rows", "archive_tuples"),
    "write": ("single", "write", "write_tuples"),
}
NAMES = {
    "single": "one tuned process (a)",
    "read": "**streamqd**",
    "archive": "**streamqd**",
    "write": "**streamqd**, deduplicated",
    "read_tuples": "Spark, rows as tuples (b)",
    "archive_tuples": "Spark, rows as tuples (b)",
    "archive_rows": "Spark, Arrow, written by Java (c)",
    "write_tuples": "Spark, rows as tuples (b)",
}


def main() -> None:
    """Run all measurements, print tables, and write JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--only", choices=["warm", "cold", "whole"])
    arguments.add_argument("--kinds", nargs="+", choices=list(WORKS), default=list(WORKS))
    arguments.add_argument(
        "--one-core", action="store_true", help="one core for all that is measured, one for Redis"
    )
    arguments.add_argument("--output", type=Path, default=Path("var/bench-spark.json"))
    options = arguments.parse_args()
    adopt_orphans()
    found: dict[str, Any] = {"machine": machine() | {"load": os.getloadavg()}}
    found |= {"rows": options.rows, "rounds": options.rounds, "one core": options.one_core}
    with server(aof=False) as path, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.one_core:
            ours, theirs = sorted(os.sched_getaffinity(0))[:2]
            os.sched_setaffinity(_server_pid(path), {theirs})
            os.sched_setaffinity(0, {ours})
        if options.only in (None, "cold"):
            prepare(path, SMALL)
            found["cold"] = measure_cold(path, folder, options.rounds)
        prepare(path, options.rows)
        if options.only in (None, "warm"):
            found["warm"] = measure_warm(path, folder, options)
        if options.only in (None, "whole"):
            found["whole"] = measure_whole_archive(path, folder)
    found["machine"]["load at the end"] = os.getloadavg()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(markdown(found))


# --- data -----------------------------------------------------------------------------------------


def prepare(path: str, count: int) -> None:
    """Create the topics. Fill one with `count` access log lines of about 110 bytes, with a key."""
    settings = config.Redis(url=f"unix://{path}")
    link, keys = (
        connect(settings, timeout=60.0, name="bench"),
        Keys("streaming:mq", "stream:topic"),
    )
    link.execute("FLUSHALL")
    for name in (TOPIC, *TARGETS.values()):
        topics.create(Store(link, keys), name, config.Topic(partitions=PARTITIONS))
    link.close()
    chance = random.Random(1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        for start in range(0, count, 500):
            stream = STREAMS[start // 500 % PARTITIONS]
            size = min(500, count - start)
            commands = [
                ("XADD", stream, "*", "payload", line, "key", address)
                for address, line in (_hit(chance, start + number) for number in range(size))
            ]
            connection.sendall(b"".join(map(hiredis.pack_command, commands)))  # type: ignore[arg-type]
            reader, replies = hiredis.Reader(), 0
            while replies < size:
                reader.feed(connection.recv(1 << 16))
                while reader.gets() is not False:
                    replies += 1


def _hit(chance: random.Random, number: int) -> tuple[str, str]:
    address = ".".join(str(chance.randrange(256)) for _ in range(4))
    moment = f"21/Nov/2026:09:{number // 60 % 60:02d}:{number % 60:02d} +0000"
    page, size = chance.randrange(100_000), chance.randrange(90_000)
    return address, f'{address} - - [{moment}] "GET /item/{page} HTTP/1.1" 200 {size} "-" "curl"'


# --- warm -----------------------------------------------------------------------------------------


def measure_warm(path: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything in turn, in a session that has done each kind once before."""
    (folder / "source").mkdir()
    run_single_process(path, folder / "source", "archive")
    measured: dict[str, dict[str, list[Any]]] = {}
    with start_driver(path, folder) as ask:
        for number in range(options.rounds + 1):
            for kind in options.kinds:
                for work in WORKS[kind]:
                    empty_targets(path)
                    if work == "single":
                        sink = folder / ("source" if kind == "write" else "single")
                        sink.mkdir(exist_ok=True)
                        one = run_single_process(path, sink, kind)
                    else:
                        one = ask(work)
                    print(number, kind, work, one, file=sys.stderr, flush=True)
                    if number:  # the first round only warms up
                        measured.setdefault(kind, {}).setdefault(work, []).append(one)
        empty_targets(path)
    return {
        kind: {work: _summary(each, options.rows) for work, each in works.items()}
        for kind, works in measured.items()
    }


def _summary(rounds: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    return {
        "rows/s": round(statistics.median(rows / each["seconds"] for each in rounds)),
        "rows per core-second": round(statistics.median(rows / each["cpu"] for each in rounds)),
        "spread of rows per core-second": sorted(round(rows / each["cpu"]) for each in rounds),
        "CPU seconds of": [each["of"] for each in rounds if "of" in each],
        "server us/row": round(
            statistics.median(each["server"] / rows for each in rounds) * 1e6, 2
        ),
    }


def empty_targets(path: str) -> None:
    """Empty the topics and folders to which the measurements write."""
    client = connect(config.Redis(url=f"unix://{path}"), timeout=60.0, name="bench")
    for target in TARGETS.values():
        keys = [f"stream:topic:{{{target}:p:{number}}}" for number in range(PARTITIONS)]
        client.execute("DEL", *keys)
    for key in client.execute("KEYS", "streaming:mq:dedup*"):
        client.execute("DEL", key)
    client.close()


def run_single_process(path: str, folder: Path, work: str) -> dict[str, float]:
    """Run one tuned process. It measures its own work, without its start."""
    streams = STREAMS
    if work == "write":
        streams = [each.replace(TOPIC, TARGETS["write_tuples"]) for each in STREAMS]
    command = [sys.executable, "-m", "tests.benchmarks.spark_single", work, path, str(folder)]
    before = read_cpu_seconds(_server_pid(path))
    ended = subprocess.run([*command, *streams], stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(ended.stdout)
    return found | {"server": read_cpu_seconds(_server_pid(path)) - before}


@contextlib.contextmanager
def start_driver(path: str, folder: Path) -> Iterator[Any]:
    """Run a warm session. Yield a function that does one kind of work and returns its cost."""
    command = [sys.executable, "-m", "tests.benchmarks.spark_jobs", path, str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()

    def ask(work: str) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        before = read_cpu_seconds(_server_pid(path))
        with Cpu(process.pid) as cpu:
            print(work, file=process.stdin, flush=True)
            found: dict[str, Any] = json.loads(process.stdout.readline())
        spent = read_cpu_seconds(_server_pid(path)) - before
        return found | {"cpu": cpu.seconds, "of": cpu.by_kind(), "server": spent}

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait()
        _reap()


def _server_pid(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(peer[:4], sys.byteorder)


# --- cold -----------------------------------------------------------------------------------------


def measure_cold(path: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Archive a small topic once, timed from the start of the command to its exit."""
    works = {
        "single": _single_command(path, folder),
        "archive": _archive_command(path, folder),
        "archive_tuples": None,
    }
    found = {}
    for work, command in works.items():
        times = []
        for _ in range(rounds):
            (folder / "single").mkdir(exist_ok=True)
            _remove_archive(folder)
            times.append(
                _measure_command(command) if command else _measure_cold_driver(path, folder, work)
            )
        found[work] = {
            "seconds": round(statistics.median(each[0] for each in times), 2),
            "CPU seconds": round(statistics.median(each[1] for each in times), 2),
            "spread of seconds": sorted(round(each[0], 2) for each in times),
        }
    return found


def _single_command(path: str, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "tests.benchmarks.spark_single", "archive", path]
    return [*command, str(folder / "single"), *STREAMS]


def _archive_command(path: str, folder: Path) -> list[str]:
    (folder / "streamq.toml").write_text(f'[redis]\nurl = "unix://{path}"\n', "utf-8")
    command = [sys.executable, "-m", "streamqd", "--config", str(folder / "streamq.toml")]
    return [*command, "pipeline", "archive", "--json", "--archive", str(folder / "command")]


def _remove_archive(folder: Path) -> None:
    for name in ("command", "tuples"):
        subprocess.run(["rm", "-rf", str(folder / name)], check=True)


def _measure_command(command: list[str]) -> tuple[float, float]:
    """Return the seconds and CPU seconds of a command and all its descendants."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with Cpu(process.pid) as cpu:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, command)
    seconds = time.monotonic() - began
    _reap()
    return seconds, cpu.total


def _measure_cold_driver(path: str, folder: Path, work: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "tests.benchmarks.spark_jobs", path, str(folder)]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with Cpu(process.pid) as cpu:
        process.communicate(work.encode() + b"\n")
    seconds = time.monotonic() - began
    _reap()
    return seconds, cpu.total


def _reap() -> None:
    """Wait for orphans that this process has adopted, except the server, which keeps running."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ours = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        orphans = [pid for pid in map(int, ours) if b"unixsocket" not in _command(pid)]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _command(pid: int) -> bytes:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
    # A server overwrites its arguments with its address.
    return b"unixsocket" if b"redis.sock" in command or b"unixsocket" in command else command


# --- the whole archive, and memory ----------------------------------------------------------------


def measure_whole_archive(path: str, folder: Path) -> dict[str, Any]:
    """Archive all rows with the command, and measure the memory of all its processes."""
    _remove_archive(folder)
    began = time.monotonic()
    process = subprocess.Popen(
        _archive_command(path, folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with Memory(process.pid) as memory, Cpu(process.pid) as cpu:
        document = json.loads(process.communicate()[0])
    seconds = time.monotonic() - began
    _reap()
    # In the second third, Java is up and running, and both are at work.
    third = max(1, len(memory.samples) // 3)
    middle, last = memory.samples[third : 2 * third], memory.samples[2 * third :]
    step = max(1, len(memory.samples) // 20)
    return {
        "rows": document["rows"],
        "batches": document["topics"][0]["batches"],
        "bytes": document["topics"][0]["size"],
        "seconds": round(seconds, 2),
        "seconds to start Spark": document["start_seconds"],
        "CPU seconds": round(cpu.total, 2),
        "rows per core-second, Spark's start included": round(document["rows"] / cpu.total),
        "peak PSS, MiB": memory.peak,
        "PSS over time, MiB": memory.samples[::step],
        "growth, last third over second, MiB": round(
            statistics.median(last or [0]) - statistics.median(middle or [0]), 1
        ),
    }


# --- tables ---------------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    """Return the results as Markdown tables."""
    lines = []
    if "warm" in found:
        lines += [
            f"Warm, {found['rows']:,} rows, medians of {found['rounds']}:",
            "",
            "| Work | By | rows/s | of (a) | rows per core-second | of (a) | server us/row |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for kind, works in found["warm"].items():
            base = works["single"]
            for work, one in works.items():
                total = one["rows/s"] / base["rows/s"]
                core = one["rows per core-second"] / base["rows per core-second"]
                lines.append(
                    f"| {kind} | {NAMES[work]} | {one['rows/s']:,} | {total:.0%}"
                    f" | {one['rows per core-second']:,} | {core:.0%} | {one['server us/row']} |"
                )
        lines.append("")
    if "cold" in found:
        lines += [f"Cold, one archive of {SMALL:,} rows:", ""]
        lines += ["| By | seconds | CPU seconds |", "| --- | --- | --- |"]
        for work, one in found["cold"].items():
            lines.append(f"| {NAMES[work]} | {one['seconds']} | {one['CPU seconds']} |")
        lines.append("")
    if "whole" in found:
        one = found["whole"]
        peaks = ", ".join(f"{kind} {size:,.0f}" for kind, size in one["peak PSS, MiB"].items())
        lines.append(
            f"All {one['rows']:,} rows by the command: {one['seconds']} s,"
            f" {one['CPU seconds']} CPU seconds, {one['batches']} batches;"
            f" peak PSS in MiB: {peaks}; growth {one['growth, last third over second, MiB']} MiB."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
