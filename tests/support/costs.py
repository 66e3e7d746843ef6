"""Measure the cost of work in counts that are the same on every machine.

A round trip is a write of this process that follows a read. The sockets count the round trips. The
counts of commands and script calls come from the server, and include commands within scripts.

docs/internals/counted-costs.md lists the costs. A test that measures a cost compares it with the
cost in that page's row, or writes the row (`make bench NAME=costs`).
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamqd.store.client import Connection
from tests.contract.harness import Harness

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "counted-costs.md"
_SCRIPTS = ("evalsha", "eval")
_ORIGINAL = socket.socket


class Cost:
    """The cost of some work: `commands` by lower-case name, and round trips (`trips`)."""

    def __init__(self, commands: Counter[str] | None = None, trips: int = 0) -> None:
        self.commands = commands or Counter()
        self.trips = trips

    @property
    def scripts(self) -> int:
        return sum(self.commands[name] for name in _SCRIPTS)

    @property
    def total(self) -> int:
        """The number of all commands, including those within scripts."""
        return sum(self.commands.values())

    @property
    def sent(self) -> Counter[str]:
        """The commands by name. If no script ran, they are exactly the commands that were sent."""
        return Counter({name: count for name, count in self.commands.items() if count})

    def __sub__(self, other: Cost) -> Cost:
        names = {*self.commands, *other.commands}
        left = {name: self.commands[name] - other.commands[name] for name in names}
        return Cost(Counter({name: n for name, n in left.items() if n}), self.trips - other.trips)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cost) and self.trips == other.trips and self.sent == other.sent

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.trips} round trips, {self.scripts} scripts, {dict(self.sent)}>"


class CountingSocket(socket.socket):
    """A socket that counts the round trips of all connections together."""

    trips = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asks = False  # True if there was a write since the last read

    def _ask(self) -> None:
        if not self._asks:
            self._asks = True
            CountingSocket.trips += 1

    def send(self, *args: Any) -> int:
        self._ask()
        return super().send(*args)

    def sendall(self, *args: Any) -> None:
        self._ask()
        super().sendall(*args)

    def recv(self, size: int, flags: int = 0) -> bytes:
        found = super().recv(size, flags)
        self._asks = self._asks and bool(flags & socket.MSG_PEEK)
        return found

    def recv_into(self, *args: Any) -> int:
        size = super().recv_into(*args)
        self._asks = False
        return size


class Meter:
    """Counts the work of one server.

    The connection `link` is opened before the count starts, so its own work is not counted.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        link.open()

    @contextmanager
    def measuring(self) -> Iterator[Cost]:
        """Yield a cost, and fill it in when the block ends."""
        cost = Cost()
        before, trips = self._read_command_counts(), CountingSocket.trips
        yield cost
        cost.trips = CountingSocket.trips - trips
        cost.commands = self._read_command_counts() - before

    def _read_command_counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for line in self._link.execute("INFO", "commandstats").decode().splitlines():
            line = line.removeprefix("cmdstat_")
            name, _, rest = line.partition(":calls=")
            if rest:
                # Redis 6.2 does not distinguish XINFO GROUPS from XINFO STREAM.
                found[name.partition("|")[0]] += int(rest.partition(",")[0])
        del found["info"]
        return found


@contextmanager
def counting_sockets() -> Iterator[None]:
    """Count the round trips of every socket that is created in the block."""
    socket.socket = CountingSocket  # type: ignore[misc]
    try:
        yield
    finally:
        socket.socket = _ORIGINAL  # type: ignore[misc]


class Page:
    """The page with the tables of costs.

    If `writes` is True, rows are written. Otherwise, rows are checked if `judges` is True.
    """

    def __init__(self) -> None:
        self.writes = bool(os.environ.get("COSTS"))
        self.judges = True

    def check_cost(self, what: str, cost: Cost, *, assignments: float = 1.0, per: str) -> None:
        """Check or write the row with this cost, divided by the number of assignments."""
        numbers = [_number(n / assignments) for n in (cost.trips, cost.scripts, cost.total)]
        self.check_row(what, per, *numbers)

    def check_row(self, what: str, *cells: str) -> None:
        """Check or write a row."""
        self._row(what, cells, judged=self.judges)

    def write_row(self, what: str, *cells: str) -> None:
        """Write a row that is never checked."""
        self._row(what, cells, judged=False)

    def _row(self, what: str, cells: tuple[str, ...], *, judged: bool) -> None:
        text = PAGE.read_text("utf-8")
        found = re.search(rf"^\| {re.escape(what)} \|.*$", text, re.MULTILINE)
        assert found, f"docs/internals/counted-costs.md has no row `{what}`"
        row = f"| {' | '.join((what, *cells))} |"
        if self.writes:
            PAGE.write_text(text.replace(found[0], row), "utf-8")
        elif judged:
            assert found[0] == row, "counted-costs.md is not current: run `make bench NAME=costs`"


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


# --- stored data ----------------------------------------------------------------------------------

DAY = 86_400.0
FEW, MANY = 100, 10_000  # work must not cost more with many entries than with few

# The server itself writes them to save time, because there are ten thousand of each kind.
_STREAM = "for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'payload', ARGV[2]) end"
_LETTERS = """local time, id = redis.call('TIME'), '*'
local old = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[3])
for i = 1, ARGV[1] do
if ARGV[3] ~= '0' then id = old .. '-' .. i end
redis.call('XADD', KEYS[1], id, 'payload', ARGV[2], 'originalId', i .. '-0', 'group', 'hits',
'retryCount', '1') end"""
_DELAYED = """local time = redis.call('TIME')
local due, there = time[1] * 1000 + ARGV[3], redis.call('ZCARD', KEYS[1])
for i = there + 1, there + ARGV[1] do local member = 'm:' .. i .. '-' .. time[2]
redis.call('ZADD', KEYS[1], due + i, member)
redis.call('HSET', KEYS[2], member, cmsgpack.pack({'payload', ARGV[2]})) end"""


def seed_backlog(harness: Harness, count: int, body: str = "x") -> None:
    """Add unread messages."""
    harness.do("EVAL", _STREAM, 1, harness.stream, count, body)


def seed_dead_letters(harness: Harness, count: int, body: str = "x", age: float = 0.0) -> None:
    """Add dead letters. They are `age` seconds old, and the oldest comes first."""
    harness.do("EVAL", _LETTERS, 1, harness.dlq, count, body, round(age * 1000))


def seed_retries(harness: Harness, count: int, body: str = "x", ahead: float = DAY) -> None:
    """Add retries. The first is due in `ahead` seconds, and each next one a millisecond later."""
    harness.do(
        "EVAL", _DELAYED, 2, harness.delayed, harness.items, count, body, round(ahead * 1000)
    )


def seed_delayed(harness: Harness, count: int, body: str = "x", ahead: float = DAY) -> None:
    """Add `count` retries and as many delayed sends."""
    seed_retries(harness, count, body, ahead)
    schedule = (harness.delayed_sends, harness.delayed_send_items)
    harness.do("EVAL", _DELAYED, 2, *schedule, count, body, round(ahead * 1000))


def seed_undue_entries(harness: Harness, count: int) -> None:
    """Add `count` entries of each kind that is not due yet."""
    seed_dead_letters(harness, count)
    seed_delayed(harness, count)


def seed_pending(harness: Harness, count: int, consumer: str = "w") -> None:
    """Add pending messages of a consumer."""
    seed_backlog(harness, count)
    harness.fetch(count, consumer)
