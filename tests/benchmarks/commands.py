"""Measure how long each command blocks a server with a large backlog: `make bench NAME=commands`.

A private server has one partition with millions of pending entries, waiting retries, delayed sends
and dead letters. Every admin command that reads or changes them runs against it, followed by a
daemon with its housekeeper. The server's slow log gives the longest call of each script and
command. If permitted, the kernel schedules the server ahead of all other processes, so that it is
not interrupted in the middle of a call. A command that would examine everything is interrupted
after `--seconds`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from streamqd.model import Assignment
from streamqd.store import scripts
from streamqd.store.client import Connection, connect
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.machine import machine
from tests.support.servers import ProcessServer, find_binary

BAR_MS = 20.0
DUE_SECONDS = 3_600  # from the start of the setup to the first due time; one row each 10 ms
SOON, LATER = "3605s", "3615s"  # first due times, plus the time that the setup takes
STEP = 5_000  # rows that one script call of the setup writes
LOGGED_US = 200
HEAD = 90  # bytes of a script that the slow log keeps
ASSIGNMENT = Assignment(TOPIC, 0, GROUP)

_DELAYED = """for i = ARGV[1], ARGV[2] do local place = 'm:' .. i .. '-0'
redis.call('ZADD', KEYS[1], ARGV[3] + 10 * i, place)
redis.call('HSET', KEYS[2], place, cmsgpack.pack({'payload', ARGV[4], 'key', 'k' .. i % 100,
'sentAt', ARGV[3], 'retryCount', '1', 'errorClass', 'ValueError',
'error', 'the card was declined'})) end"""
_LETTERS = """for i = ARGV[1], ARGV[2] do
redis.call('XADD', KEYS[1], ARGV[3] .. '-' .. i, 'failedAt', ARGV[3], 'payload', ARGV[4],
'originalId', i .. '-0', 'group', ARGV[5], 'reason', 'attempts', 'errorClass', 'ValueError',
'error', 'the card was declined', 'retryCount', '3', 'traceback', string.rep('t', ARGV[6])) end"""
_PENDING = """for i = ARGV[1], ARGV[2] do
redis.call('XADD', KEYS[1], '*', 'payload', ARGV[3]) end
redis.call('XREADGROUP', 'GROUP', ARGV[4], 'gone', 'COUNT', ARGV[2] - ARGV[1] + 1, 'STREAMS',
KEYS[1], '>')
return 0"""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("status", TOPIC),
    ("partitions",),
    ("pending", TOPIC),
    ("pending", TOPIC, "--sort", "idle"),
    ("why", TOPIC),
    ("why", f"{TOPIC}/0/{GROUP}"),
    ("doctor",),
    ("dlq", "stats", TOPIC),
    ("dlq", "list", TOPIC),
    ("dlq", "list", TOPIC, "--limit", "1000"),
    ("dlq", "export", TOPIC),
    ("retry", "list", TOPIC, GROUP),
    ("retry", "list", TOPIC, GROUP, "--key", "none"),
    ("delayed", "list", TOPIC),
    ("delayed", "list", TOPIC, "--key", "none"),
    ("retry", "cancel", TOPIC, GROUP, "--all", "--yes", "--due-within", SOON),
    ("delayed", "cancel", TOPIC, "--all", "--yes", "--due-within", SOON),
    ("dlq", "replay", TOPIC, "--all", "--yes"),
    ("dlq", "purge", TOPIC, "--all", "--yes"),
    ("retry", "now", TOPIC, GROUP, "--all", "--yes", "--due-within", LATER),
    ("delayed", "now", TOPIC, "--all", "--yes", "--due-within", LATER),
)
Found = dict[str, dict[str, float]]  # step -> command or script -> ms of its longest call


def main() -> None:
    """Fill the server, run each command and the daemon, and print the longest calls."""
    parser = argparse.ArgumentParser(prog="make bench NAME=commands", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 = a million of each kind")
    parser.add_argument("--body", type=int, default=200, help="bytes of a payload")
    parser.add_argument("--traceback", type=int, default=500, help="bytes of a letter's traceback")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one command, at most")
    parser.add_argument("--only", default="", help="command lines with this text only")
    parser.add_argument("--server", default="valkey")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    server = ProcessServer("bench", find_binary(options.server))
    try:
        first = _raise_priority(server)
        with (
            tempfile.TemporaryDirectory() as folder,
            Daemon(Path(folder), server.url) as daemon,
        ):
            found = measure(server, daemon, options)
    finally:
        server.close()
    print(table(found))
    loads = f"load average {load:.2f} before and {os.getloadavg()[0]:.2f} after"
    print(f"\n{machine()}; {loads}; server first: {first}")


def _raise_priority(server: ProcessServer) -> bool:
    try:
        server.come_first()
    except PermissionError:
        return False
    return True


def measure(server: ProcessServer, daemon: Daemon, options: argparse.Namespace) -> Found:
    """Return the longest calls of each command line, and of the daemon."""
    link = connect(server.settings, timeout=120.0, name="bench:commands")
    names = {script.sha: script.name for script in scripts.load().values()}
    daemon.wait_event("daemon.ready")  # the daemon has created the topic and its group
    daemon.stop()
    started = time.monotonic()
    fill(link, daemon, options)
    print(f"filled in {time.monotonic() - started:.0f} s", flush=True)
    found: Found = {}
    link.execute("CONFIG", "SET", "slowlog-max-len", 100_000)
    link.execute("CONFIG", "SET", "slowlog-log-slower-than", LOGGED_US)
    for command in COMMANDS:
        if options.only not in " ".join(command):
            continue
        link.execute("SLOWLOG", "RESET")
        run(daemon, command, options.seconds)
        found[" ".join(command)] = read_longest_calls(link, names)
        print(" ".join(command), found[" ".join(command)], flush=True)
    link.execute("SLOWLOG", "RESET")
    daemon.start()
    daemon.wait_event("daemon.ready", timeout=60.0)
    time.sleep(3 * options.seconds)
    daemon.kill()
    found["the daemon"] = read_longest_calls(link, names)
    link.close()
    return found


def fill(link: Connection, daemon: Daemon, options: argparse.Namespace) -> None:
    """Write all data for the commands."""
    keys, body = daemon.keys, "x" * options.body
    now = int(link.execute("TIME")[0]) * 1000
    due_from = now + 1000 * DUE_SECONDS
    most = int(1_000_000 * options.scale)
    retries = (keys.retry(*ASSIGNMENT), keys.retry_items(*ASSIGNMENT))
    scheduled = (keys.delayed_sends(TOPIC, 0), keys.delayed_send_items(TOPIC, 0))
    for first in range(1, most + 1, STEP):
        last = min(first + STEP - 1, most)
        for due, items in (retries, scheduled):
            link.execute("EVAL", _DELAYED, 2, due, items, first, last, due_from, body)
        stream = keys.stream(TOPIC, 0)
        link.execute("EVAL", _PENDING, 1, stream, first, last, body, GROUP)
        if first <= most // 2:
            last = min(last, most // 2)
            letters = (first, last, now, body, GROUP, options.traceback)
            link.execute("EVAL", _LETTERS, 1, keys.dlq(TOPIC, 0), *letters)


def run(daemon: Daemon, command: tuple[str, ...], seconds: float) -> None:
    """Run one command, and interrupt it after a number of seconds."""
    line = [sys.executable, "-m", "streamqd", "--config", str(daemon.config_path), *command]
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, error = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command)}: interrupted", flush=True)
        child.send_signal(signal.SIGINT)
        child.communicate()
        return
    if child.returncode not in (0, 1):
        print(f"{' '.join(command)}: exit {child.returncode}: {error.decode()}", flush=True)


def read_longest_calls(link: Connection, names: dict[str, str]) -> dict[str, float]:
    """Return the longest call of each script and command in the slow log, in ms."""
    sources = {script.name: script.source for script in scripts.load().values()}
    spent: dict[str, float] = {}
    log: list[Any] = link.execute("SLOWLOG", "GET", -1)
    for row in log:
        words = row[3]
        name = words[0].decode().upper()
        if name in ("SLOWLOG", "CONFIG"):
            continue
        if name == "EVALSHA":
            name = names.get(words[1].decode(), "another script")
        elif name == "EVAL":  # the first call, which compiles; the log truncates long words
            head = words[1][:HEAD]
            found = [n for n, source in sources.items() if source[:HEAD] == head]
            name = f"{found[0] if found else 'another script'} (compiled)"
        spent[name] = max(spent.get(name, 0.0), row[2] / 1000)
    return dict(sorted(spent.items(), key=lambda each: -each[1]))


def table(found: Found) -> str:
    """Return Markdown: each script's or command's longest call, and the line that made it."""
    worst: dict[str, tuple[float, str]] = {}
    for step, spent in found.items():
        for name, taken in spent.items():
            worst[name] = max(worst.get(name, (0.0, "")), (taken, step))
    lines = ["| Script or command | Longest call, ms | Made by |", "| --- | ---: | --- |"]
    for name, (taken, step) in sorted(worst.items(), key=lambda each: -each[1][0]):
        mark = " **over**" if taken > BAR_MS else ""
        lines.append(f"| `{name}` | {taken:.2f}{mark} | `{step}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
