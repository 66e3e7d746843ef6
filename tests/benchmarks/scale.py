"""`make bench-scale`: what an instance with hundreds of units costs, and how long scripts take.

A private server and real daemons. A shape is TOPICSxPARTITIONS, or TOPICSxPARTITIONSxGROUPS. Each
is looked at empty, paused before a full backlog, at work, with messages that fail twice and die,
and idle beside everything that stays; what the daemon costs may not differ between the first and
the last. The server's slow log and latency monitor tell of everything that took longer than 5 ms.
Figures of one machine: on a busy one the slow log blames a script for the time in which the server
did not run.

Writes scale.json and scale.md into a folder. The defaults are a trial; the real thing is
`BENCH_ARGS="--shapes 1x1 256x1 16x16 --backlog 10000000 --delayed 1000000 --dead 1000000
--takeover 64 --seconds 20"`. It takes about a quarter of an hour, 3 GiB for the server and 10 MiB
for each of 256 workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from streamqd.model import Unit
from streamqd.store import scripts
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from tests.benchmarks.quick import machine
from tests.benchmarks.scale_page import table
from tests.contract.desk import Desk
from tests.support.costs import Meter, backlog, delayed, letters
from tests.support.daemon import Daemon
from tests.support.servers import ProcessServer, find_binary
from tests.support.waiting import wait_until

SLOW_MS = 5
PATIENCE = 3600.0
SIZES = ("backlog", "delayed", "dead", "failing", "bytes", "seconds")
SEED_MAX = 20_000  # messages that one command writes
FAILING = "f"  # what the body of a message begins with that fails
CODE = f"""
def obey(message):
    if message.payload.startswith(b"{FAILING}"):
        raise ValueError("no")
"""
POLICY = {"kind": "fixed", "base": "1s", "max": "1s", "jitter": "none"}
AT_ONCE = {"rebalance_delay": "0s", "rebalance_hold": "0s", "lease_ttl": "15s"}


class Shape(NamedTuple):
    """How many units there are, and of what."""

    topics: int
    partitions: int
    groups: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `16x16` or `1x16x16`."""
        numbers = [int(part) for part in text.split("x")]
        if len(numbers) not in (2, 3) or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"{text}: a shape is 256x1, 16x16 or 1x16x16")
        return cls(*numbers)

    @property
    def name(self) -> str:
        return "x".join(str(number) for number in self)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Topic and number of every partition."""
        return [(f"t{t}", p) for t in range(self.topics) for p in range(self.partitions)]

    @property
    def units(self) -> list[Unit]:
        return [Unit(*place, f"g{g}") for g in range(self.groups) for place in self.places]


def main() -> None:
    """Measure every shape and the takeovers, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape(8, 1), Shape(2, 4)])
    parser.add_argument("--backlog", type=int, default=10_000, help="messages, over all partitions")
    parser.add_argument("--delayed", type=int, default=1_000, help="retries, and scheduled sends")
    parser.add_argument("--dead", type=int, default=1_000)
    parser.add_argument("--failing", type=int, default=1_000, help="messages that fail and die")
    parser.add_argument("--bytes", type=int, default=100, help="of each body")
    parser.add_argument("--takeover", type=int, default=4, help="partitions that are taken over")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each look lasts")
    parser.add_argument("--server", default="valkey")
    parser.add_argument("--output", type=Path, default=Path("var/scale"))
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(),
        "sizes": {name: vars(options)[name] for name in SIZES},
        "shapes": {},
        "takeover": {},
    }
    for shape in options.shapes:
        results["shapes"][shape.name] = told(shape.name, measure(shape, options))
    results["start"] = told("start", within(options.server, first_message))
    for how in (signal.SIGTERM, signal.SIGKILL):
        found = within(options.server, lambda host, how=how: takeover(host, options.takeover, how))
        results["takeover"][how.name] = told(how.name, found)
    results["load"] = [round(each, 2) for each in os.getloadavg()]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.output / "scale.md").write_text(table(results))
    print(table(results))


def told(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Show one result at once."""
    print(name, json.dumps(result), flush=True)
    return result


# --- a server, and daemons on it ------------------------------------------------------------------


class Host:
    """A server, a folder, and the daemons there."""

    def __init__(self, server: ProcessServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.link = Link(server.settings, timeout=60.0, name="bench:scale")
        self.meter = Meter(self.link)
        self.keys = Keys()
        self.daemons: list[Daemon] = []
        self.asked = 0  # commands with which `handled` has disturbed
        self.link.execute("CONFIG", "SET", "latency-monitor-threshold", SLOW_MS)
        self.link.execute("CONFIG", "SET", "slowlog-log-slower-than", SLOW_MS * 1000)
        self.link.execute("CONFIG", "SET", "slowlog-max-len", 1024)

    def daemon(self, shape: Shape, name: str = "one") -> Daemon:
        """A daemon that offers the units of a shape. It has not begun."""
        made = Daemon(
            self.folder,
            self.server.url,
            partitions=len(shape.places),
            groups=[f"g{number}" for number in range(shape.groups)],
            daemon=AT_ONCE,
            code=CODE,
            name=name,
        )
        names = sorted({topic for topic, _ in shape.places})
        made.write_config(
            topics={topic: {"partitions": shape.partitions} for topic in names},
            consumers=[
                {
                    "topic": topic,
                    "group": group,
                    "handler": "work:obey",
                    "max_attempts": 2,
                    "backoff": POLICY,
                }
                for topic in names
                for group in made.groups
            ],
        )
        self.daemons.append(made)
        return made

    def owners(self, shape: Shape) -> list[str]:
        """Who owns each unit, '' for nobody."""
        fences = [self.keys.fence(*unit) for unit in shape.units]
        rows = self.link.pipeline([("HMGET", key, "token", "owner") for key in fences])
        return [owner.decode() if token else "" for token, owner in rows]

    def handled(self, shape: Shape) -> int:
        """How many messages were read and are settled, over all units."""
        places = shape.places
        self.asked += len(places)
        count = 0
        streams = [("XINFO", "GROUPS", self.keys.stream(*place)) for place in places]
        for groups in self.link.pipeline(streams):
            for flat in groups if isinstance(groups, list) else ():
                group = dict(zip(flat[::2], flat[1::2], strict=True))
                count += int(group[b"entries-read"] or 0) - int(group[b"pending"])
        return count

    def dead(self, shape: Shape) -> int:
        """How many letters there are."""
        self.asked += len(shape.places)
        return sum(self.link.pipeline([("XLEN", self.keys.dlq(*each)) for each in shape.places]))

    def forget_slow(self) -> None:
        """Begin anew to look for slow commands."""
        self.link.execute("SLOWLOG", "RESET")
        self.link.execute("LATENCY", "RESET")

    def slow(self) -> dict[str, Any]:
        """What took longer than SLOW_MS since: the longest of each kind, in ms."""
        names = {script.sha: name for name, script in scripts.load().items()}
        commands: dict[str, float] = {}
        for _, _, micros, arguments, *_ in self.link.execute("SLOWLOG", "GET", 1024):
            name, text = (each.decode("latin-1").lower() for each in (*arguments, b"")[:2])
            if name in ("eval", "evalsha"):  # the first line of a source is its name
                name = names.get(text) or text.strip("- ").partition(":")[0]
            commands[name] = max(commands.get(name, 0.0), micros / 1000)
        events = {
            event.decode(): worst
            for event, _, _, worst, *_ in self.link.execute("LATENCY", "LATEST")
        }
        return {"commands": commands, "events": events}

    def used_mib(self) -> float:
        """Memory that the server has in use."""
        info = self.link.execute("INFO", "memory").decode()
        used = next(line for line in info.splitlines() if line.startswith("used_memory:"))
        return round(int(used.partition(":")[2]) / (1 << 20), 1)

    def close(self) -> None:
        """End everything."""
        for each in self.daemons:
            each.close()
        self.link.close()
        self.server.close()


def within(word: str, work: Callable[[Host], dict[str, Any]]) -> dict[str, Any]:
    """Do something on a host that is there for this alone."""
    with tempfile.TemporaryDirectory(prefix="sqb-") as folder:
        host = Host(ProcessServer("bench", find_binary(word)), Path(folder))
        try:
            return work(host)
        finally:
            host.close()


def until(condition: Callable[[], object], what: str) -> float:
    """Wait for a condition; return how many seconds that took."""
    began = time.monotonic()
    wait_until(condition, timeout=PATIENCE, what=what)
    return round(time.monotonic() - began, 2)


# --- one shape ------------------------------------------------------------------------------------


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Everything of one shape, on a server of its own."""
    return within(options.server, lambda host: _measure(host, shape, options))


def _measure(host: Host, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    seconds = options.seconds
    found: dict[str, Any] = {"units": len(shape.units)}
    daemon = host.daemon(shape)
    daemon.start()
    found["start to all owned, s"] = until(lambda: all(host.owners(shape)), "all is owned")
    daemon.wait_event("ready", timeout=PATIENCE)
    found["slow at the start"] = host.slow()
    looks = found["looks"] = {}
    time.sleep(seconds)  # what is done once after a start is not idle cost
    looks["idle, empty"] = look(host, daemon, shape, seconds)

    daemon.pause()
    fill(host, shape, options)
    looks["paused, full"] = look(host, daemon, shape, seconds)

    began = time.monotonic()
    total = host.handled(shape) + options.backlog // len(shape.places) * len(shape.units)
    daemon.signal(signal.SIGCONT)
    looks["at work"] = look(host, daemon, shape, seconds, lambda: host.handled(shape) >= total)
    until(lambda: host.handled(shape) >= total, "the backlog is handled")
    found["backlog handled within, s"] = round(time.monotonic() - began, 2)

    began = time.monotonic()
    each = options.failing // len(shape.places)
    dead = host.dead(shape) + each * len(shape.units)
    write(host, shape, backlog, each, FAILING * options.bytes)
    looks["failing"] = look(host, daemon, shape, seconds, lambda: host.dead(shape) >= dead)
    until(lambda: host.dead(shape) >= dead, "what fails is dead")
    found["failing dead within, s"] = round(time.monotonic() - began, 2)

    time.sleep(seconds)
    looks["idle, full"] = look(host, daemon, shape, seconds)
    found["PSS, MiB"] = memory(daemon)
    host.forget_slow()
    assert daemon.stop(timeout=PATIENCE) == 0, daemon.tail()
    found["slow at the end"] = host.slow()
    return found


def fill(host: Host, shape: Shape, options: argparse.Namespace) -> None:
    """Write the backlog, the delayed and the dead; equally many for each partition."""
    for seed, total in (
        (backlog, options.backlog),
        (delayed, options.delayed),
        (letters, options.dead),
    ):
        write(host, shape, seed, total // len(shape.places), "x" * options.bytes)


def write(
    host: Host, shape: Shape, seed: Callable[[Desk, int, str], None], count: int, body: str
) -> None:
    """Let so many be there in each partition."""
    for place in shape.places:
        desk = Desk(host.link, host.keys, Unit(*place, "g0"))
        for begin in range(0, count, SEED_MAX):
            seed(desk, min(SEED_MAX, count - begin), body)


def look(
    host: Host,
    daemon: Daemon,
    shape: Shape,
    seconds: float,
    done: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """What everybody uses for some seconds, or until something is done.

    All is per second, CPU in ms.
    """
    titles = daemon.titles()
    names = {"supervisor": [daemon.pid], "redis": [host.server.pid]}
    names["housekeeper"] = [pid for title, pid in titles.items() if "housekeeper" in title]
    names["workers"] = [pid for title, pid in titles.items() if "worker" in title]
    host.forget_slow()
    handled, used = host.handled(shape), {name: cpu(pids) for name, pids in names.items()}
    began, asked = time.monotonic(), host.asked
    with host.meter.measuring() as cost:
        while (left := began + seconds - time.monotonic()) > 0:
            time.sleep(min(left, 0.1) if done else left)
            if done and done():
                break
    took, asked = time.monotonic() - began, host.asked - asked
    return {
        "CPU, ms/s": {
            name: round((cpu(pids) - used[name]) / took * 1000, 2) for name, pids in names.items()
        },
        "messages/s": round((host.handled(shape) - handled) / took),
        "commands/s": round((cost.total - asked) / took, 1),
        "scripts/s": round(cost.scripts / took, 1),
        "redis, MiB": host.used_mib(),
        "slow": host.slow(),
    }


def cpu(pids: list[int]) -> float:
    """Seconds of CPU that the threads of processes have used; those that ended count no more."""
    used = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                used += int(path.read_text().split()[0])
    return used / 1e9


def memory(daemon: Daemon) -> dict[str, float]:
    """PSS of each kind of process, in MiB: of workers the median and the largest."""
    sizes: dict[str, list[float]] = {"supervisor": [], "housekeeper": [], "worker": []}
    for title, pid in daemon.titles().items():
        kind = next((kind for kind in sizes if kind in title), "")
        if kind:
            sizes[kind].append(psutil.Process(pid).memory_full_info().pss / (1 << 20))
    workers = sizes.pop("worker")
    found = {kind: max(some, default=0.0) for kind, some in sizes.items()}
    found["worker"], found["largest worker"] = statistics.median(workers), max(workers)
    return {kind: round(size, 1) for kind, size in found.items()}


# --- start ----------------------------------------------------------------------------------------


def first_message(host: Host) -> dict[str, Any]:
    """From the start of a daemon until messages are handled that wait in each of its partitions.

    The topic is there, as after any restart. The middle of five starts.
    """
    shape = Shape(1, 4)
    daemon = host.daemon(shape)
    took: dict[str, list[float]] = {"first": [], "all": []}
    for _ in range(5):
        before = host.handled(shape)
        write(host, shape, backlog, 1, "x")
        began = time.monotonic()
        daemon.start()
        for name, count in (("first", 1), ("all", len(shape.units))):
            until(lambda n=before + count: host.handled(shape) >= n, name)
            took[name].append(time.monotonic() - began)
        assert daemon.stop(timeout=PATIENCE) == 0, daemon.tail()
    middle = {name: round(statistics.median(times), 2) for name, times in took.items()}
    return {"partitions": 4, **{f"{name} handled after, s": at for name, at in middle.items()}}


# --- takeover -------------------------------------------------------------------------------------


def takeover(host: Host, count: int, how: signal.Signals) -> dict[str, Any]:
    """Two instances own `count` partitions each; from a signal until one owns and handles all."""
    shape = Shape(1, 2 * count)
    for name in ("one", "two"):
        host.daemon(shape, name).start()
    shares = {"one": count, "two": count}
    until(lambda: {n: host.owners(shape).count(n) for n in shares} == shares, "both own half")
    one, two = host.daemons
    for each in host.daemons:
        each.wait_event("ready", timeout=PATIENCE)
    began = time.monotonic()
    if how is signal.SIGKILL:
        one.kill()
    else:
        one.signal(how)
    for place in shape.places:
        backlog(Desk(host.link, host.keys, Unit(*place, "g0")), 1)
    until(lambda: set(host.owners(shape)) == {"two"}, "one owns all")
    owned = time.monotonic() - began
    until(lambda: host.handled(shape) == 2 * count, "a message of each partition is handled")
    assert two.running
    return {
        "partitions": count,
        "lease_ttl, s": float(AT_ONCE["lease_ttl"].removesuffix("s")),
        "all owned after, s": round(owned, 2),
        "all handled after, s": round(time.monotonic() - began, 2),
    }


if __name__ == "__main__":
    main()
