"""The required figures (bars), and a line that reports whether each of them is met."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil


class Bar(NamedTuple):
    """A figure and the value that it must reach.

    Figures are ratios within one run, unless their name contains a unit.
    """

    what: str
    value: float
    bar: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """True if the figure meets its bar."""
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def line(self) -> str:
        """Return the bar as a line of text."""
        side = "at most" if self.at_most else "at least"
        state = "met" if self.is_met else "NOT MET"
        return f"{state:8} {self.what}: {self.value:,.6g} ({side} {self.bar:,.6g})"


def print_bars(bars: Iterable[Bar]) -> list[dict[str, Any]]:
    """Print the bars, and return them as JSON data."""
    bars = list(bars)
    print("\n".join(bar.line() for bar in bars))
    return [bar._asdict() | {"met": bar.is_met} for bar in bars]


class Work(NamedTuple):
    """The cost of handling messages: messages per second, and CPU in us per message."""

    rate: float
    workers_us: float
    server_us: float


def measure_in_turns(kinds: dict[str, Callable[[], Work]], rounds: int) -> dict[str, list[Work]]:
    """Measure each kind once per round. Return the results, ordered by round."""
    works: dict[str, list[Work]] = {name: [] for name in kinds}
    for number in range(rounds):
        # The first kind runs in the state that the previous round left, so the order alternates.
        for name in sorted(kinds, reverse=bool(number % 2)):
            works[name].append(kinds[name]())
    return works


class CpuMeter:
    """Measures the CPU time that processes use after the meter is created."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._before = self._used()
        self.began = time.monotonic()

    def us_per_message(self, messages: int) -> float:
        """Return the CPU time since the meter was created, in us per message."""
        return (self._used() - self._before) / 1000 / messages

    def _used(self) -> int:
        tasks = [task for pid in self._pids for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def worker_pids(supervisor: int) -> list[int]:
    """Return the pids of a supervisor's workers."""
    children = psutil.Process(supervisor).children()
    return [child.pid for child in children if "worker" in " ".join(child.cmdline())]
