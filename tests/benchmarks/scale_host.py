"""A server, its daemons, and everything that is slow on it, for `make bench NAME=scale`."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from streamqd.model import Assignment
from streamqd.store import scripts
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from tests.benchmarks.scale_ping import Pinger
from tests.contract.harness import Harness
from tests.support.costs import Meter
from tests.support.daemon import Daemon
from tests.support.servers import ProcessServer, find_binary
from tests.support.waiting import wait_until

SLOW_MS = 5
SLOW_KEPT = 8192
PATIENCE = 3600.0
SEED_MAX = 20_000  # messages per command
OWN_NAME = "bench:scale"
FAILING = "f"  # a message fails if its body starts with this
CODE = f"""
def obey(message):
    if message.payload.startswith(b"{FAILING}"):
        raise ValueError("no")
"""
POLICY = {"kind": "fixed", "base": "1s", "max": "1s", "jitter": "none"}
AT_ONCE = {"rebalance_delay": "0s", "rebalance_hold": "0s", "lease_ttl": "15s"}

Slow = dict[str, dict[str, float]]


class Shape(NamedTuple):
    """The number of topics, partitions and groups."""

    topics: int
    partitions: int
    groups: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse a text such as `16x16` or `1x16x16`."""
        numbers = [int(part) for part in text.split("x")]
        if len(numbers) not in (2, 3) or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"{text}: a shape is 256x1, 16x16 or 1x16x16")
        return cls(*numbers)

    @property
    def name(self) -> str:
        return "x".join(str(number) for number in self)

    @property
    def places(self) -> list[tuple[str, int]]:
        """The topic and the number of every partition."""
        return [(f"t{t}", p) for t in range(self.topics) for p in range(self.partitions)]

    @property
    def assignments(self) -> list[Assignment]:
        return [Assignment(*place, f"g{g}") for g in range(self.groups) for place in self.places]


class Host:
    """A server, a folder, and the daemons that use them."""

    def __init__(self, server: ProcessServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.link = connect(server.settings, timeout=60.0, name=OWN_NAME)
        self.meter = Meter(self.link)
        self.keys = Keys()
        self.daemons: list[Daemon] = []
        self.asked = 0  # number of commands that the checks of the benchmark have sent
        self.longest: dict[str, float] = {}  # longest delays over the whole run, in ms
        self.pinger = Pinger(str(server.socket_path))
        self.link.execute("CONFIG", "SET", "latency-monitor-threshold", SLOW_MS)
        self.link.execute("CONFIG", "SET", "slowlog-log-slower-than", SLOW_MS * 1000)
        self.link.execute("CONFIG", "SET", "slowlog-max-len", SLOW_KEPT)

    def daemon(
        self,
        shape: Shape,
        name: str = "one",
        topic: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
    ) -> Daemon:
        """Return a daemon that offers the assignments of a shape. It is not started.

        `topic` and `consumer` are settings for every topic and every consumer.
        """
        made = Daemon(
            self.folder,
            self.server.url,
            partitions=len(shape.places),
            groups=[f"g{number}" for number in range(shape.groups)],
            daemon=AT_ONCE,
            code=CODE,
            name=name,
        )
        names = sorted({each for each, _ in shape.places})
        made.write_config(
            topics={each: {"partitions": shape.partitions, **(topic or {})} for each in names},
            consumers=[
                {
                    "topic": each,
                    "group": group,
                    "handler": "work:obey",
                    "max_attempts": 2,
                    "backoff": POLICY,
                    **(consumer or {}),
                }
                for each in names
                for group in made.groups
            ],
        )
        self.daemons.append(made)
        return made

    # --- state ---

    def owners(self, shape: Shape) -> list[str]:
        """Return the owner of each assignment, or '' if it has none."""
        fences = [self.keys.fence(*assignment) for assignment in shape.assignments]
        rows = self.link.pipeline([("HMGET", key, "token", "owner") for key in fences])
        return [owner.decode() if token else "" for token, owner in rows]

    def _groups(self, streams: list[str]) -> Iterator[dict[bytes, Any]]:
        self.asked += len(streams)
        for groups in self.link.pipeline_each([("XINFO", "GROUPS", key) for key in streams]):
            for flat in groups if isinstance(groups, list) else ():  # error: no stream yet
                yield dict(zip(flat[::2], flat[1::2], strict=True))

    def handled(self, shape: Shape) -> int:
        """Return how many messages have been read and settled, over all assignments."""
        groups = self._groups([self.keys.stream(*place) for place in shape.places])
        return sum(int(each[b"entries-read"] or 0) - int(each[b"pending"]) for each in groups)

    def count_unhandled(self, shape: Shape) -> int:
        """Return how many messages are unread or pending, or wait for a retry."""
        streams = [self.keys.stream(*place) for place in shape.places]
        streams += [self.keys.retry_stream(*assignment) for assignment in shape.assignments]
        return sum(int(each[b"lag"] or 0) + int(each[b"pending"]) for each in self._groups(streams))

    def count_due(self, shape: Shape) -> int:
        """Return how many retries and delayed sends are due but have not been promoted."""
        seconds, _ = self.link.execute("TIME")
        sets = [self.keys.retry(*assignment) for assignment in shape.assignments]
        sets += [self.keys.delayed_sends(*place) for place in shape.places]
        self.asked += len(sets)
        return sum(self.link.pipeline([("ZCOUNT", key, 0, int(seconds) * 1000) for key in sets]))

    def count_entries(self, keys: list[str]) -> tuple[int, int]:
        """Return how many entries were ever written to these keys, and how many are still there."""
        self.asked += len(keys)
        found = self.link.pipeline_each([("XINFO", "STREAM", key) for key in keys])
        infos = [dict(zip(f[::2], f[1::2], strict=True)) for f in found if isinstance(f, list)]
        return (
            sum(info[b"entries-added"] for info in infos),
            sum(info[b"length"] for info in infos),
        )

    def messages(self, shape: Shape) -> tuple[int, int]:
        """Return how many messages were ever sent, and how many are still there."""
        return self.count_entries([self.keys.stream(*place) for place in shape.places])

    def count_dead(self, shape: Shape) -> tuple[int, int]:
        """Return how many dead letters were ever written, and how many are still there."""
        return self.count_entries([self.keys.dlq(*place) for place in shape.places])

    # --- latency ---

    def take_longest_delays(self) -> Slow:
        """Return each kind's longest delay above SLOW_MS since the last call, in ms.

        The benchmark's own commands are left out. Latency events are included, as they name no
        client.
        """
        names = {script.sha: name for name, script in scripts.load().items()}
        commands: dict[str, float] = {}
        for _, _, micros, arguments, _, client in self.link.execute("SLOWLOG", "GET", SLOW_KEPT):
            if client.decode() == OWN_NAME:
                continue
            name, text = (each.decode("latin-1").lower() for each in (*arguments, b"")[:2])
            if name in ("eval", "evalsha"):  # the first line of the source contains the name
                name = names.get(text) or text.strip("- ").partition(":")[0]
            commands[name] = max(commands.get(name, 0.0), micros / 1000)
        events = {
            event.decode(): float(worst)
            for event, _, _, worst, *_ in self.link.execute("LATENCY", "LATEST")
        }
        self.link.execute("SLOWLOG", "RESET")
        self.link.execute("LATENCY", "RESET")
        for name, worst in {**events, **commands}.items():
            self.longest[name] = max(self.longest.get(name, 0.0), worst)
        return {"commands": commands, "events": events}

    def write(
        self, shape: Shape, seed: Callable[[Harness, int, str], object], count: int, body: str
    ) -> None:
        """Write `count` messages to each partition."""
        self.take_longest_delays()
        for place in shape.places:
            harness = Harness(self.link, self.keys, Assignment(*place, "g0"))
            for begin in range(0, count, SEED_MAX):
                seed(harness, min(SEED_MAX, count - begin), body)
        self.link.execute("LATENCY", "RESET")  # this ignores our own long commands

    def used_mib(self) -> float:
        """Return the memory that the server uses, in MiB."""
        info = self.link.execute("INFO", "memory").decode()
        used = next(line for line in info.splitlines() if line.startswith("used_memory:"))
        return round(int(used.partition(":")[2]) / (1 << 20), 1)

    def longest_delays(self) -> dict[str, Any]:
        """Return the longest delays of the whole run."""
        self.take_longest_delays()
        return {
            "longest, ms": self.longest,
            "another client, ms": self.pinger.delays(whole=True)._asdict(),
        }

    def close(self) -> None:
        """Stop everything."""
        self.pinger.close()
        for each in self.daemons:
            each.close()
        self.link.close()
        self.server.close()


@contextmanager
def open_host(word: str) -> Iterator[Host]:
    """Run a private server, selected by `word`, with a folder."""
    with tempfile.TemporaryDirectory(prefix="sqb-") as folder:
        host = Host(ProcessServer("bench", find_binary(word)), Path(folder))
        try:
            yield host
        finally:
            host.close()


def run_on_host(
    options: argparse.Namespace, work: Callable[[Host], dict[str, Any]]
) -> dict[str, Any]:
    """Run `work` on a private host. Add the longest delays of the whole run to its results."""
    with open_host(options.server) as host:
        if options.first:
            host.server.come_first()
        return {**work(host), **host.longest_delays()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all measurements on such a host have in common."""
    parser.add_argument("--bytes", type=int, default=100, help="of each body")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="how long each state is measured"
    )
    parser.add_argument("--server", default="valkey")


def time_until(condition: Callable[[], object], what: str) -> float:
    """Wait for a condition, and return the seconds that it took."""
    began = time.monotonic()
    wait_until(condition, timeout=PATIENCE, what=what)
    return round(time.monotonic() - began, 2)
