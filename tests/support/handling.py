"""Measure the cost of messages in a worker that runs in the test process with stopped clocks.

The clocks that would make a slow machine send something earlier are stopped, after checking their
settings. The count therefore contains only the work that the number of messages requires.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from streamqd.message import Message
from streamqd.worker import ExitCode, assembly, concurrent, prefetch, runs
from tests.contract.harness import Harness
from tests.support.costs import Cost, Meter
from tests.support.life import Life, Work

BATCH = 256  # the default of prefetch_max
# Four messages of the maximum size reach the byte limit. After that, the worker learns their true
# size.
READS = (4, 8, 16, 32, 64, 128, BATCH, BATCH, BATCH)
FIRST = sum(READS)
FULL = 10 * BATCH  # the messages of ten more reads
PAGE = 128  # entries that one settling script handles
RECOVERED = 64  # entries that one recovery handles
PROMOTED = 32  # entries that one promotion handles

# With a shorter time, quick messages would be settled one by one; with a longer time, they would
# stay unsettled too long.
MS = 1_000_000
CLOCKS: tuple[tuple[Any, str, int, int], ...] = (
    (runs, "ACK_DELAY_NS", 5 * MS, 100 * MS),
    (assembly, "ACK_DELAY_NS", 5 * MS, 100 * MS),
    (runs, "QUICK_RUN_NS", 1 * MS, 10 * MS),
    (prefetch, "WORK_IN_FLIGHT_NS", 100 * MS, 5_000 * MS),
    (concurrent, "WORK_IN_FLIGHT_NS", 100 * MS, 5_000 * MS),
)
A_DAY_NS = 86_400_000 * MS

Seed = Callable[[int], None]


def stop_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop all clocks of the hot path. Fail if the setting of a clock is out of bounds."""
    for module, name, least, most in CLOCKS:
        value = getattr(module, name)
        where = f"{module.__name__}.{name}"
        assert least <= value <= most, f"{where} is {value:,} ns, not {least:,} to {most:,}"
        monkeypatch.setattr(module, name, A_DAY_NS)


def do_nothing(_message: Message) -> None:
    """A handler that does nothing."""


def seed_nothing(_count: int) -> None:
    """A seed that creates no entries."""


class Handling:
    """Measures the cost of worker lives that handle messages."""

    def __init__(self, harness: Harness, life: Life, meter: Meter) -> None:
        self._harness = harness
        self._life = life
        self._meter = meter

    def __call__(
        self,
        count: int,
        work: Work = do_nothing,
        seed: Seed = seed_nothing,
        first: Callable[[], None] | None = None,
        runs: int = 1,
        **changed: Any,
    ) -> Cost:
        """Return the cost of a life that handles `count` messages, `runs` times each, and exits.

        The cost includes that of `first`. Pass settings of the consumer in `changed`.
        """
        self._harness.do("FLUSHALL")
        self._harness.groups()
        token = secrets.token_hex(4)
        self._harness.own(token)
        seed(count)
        one = self._life.worker(token, max_messages=count * runs, **changed)
        with self._meter.measuring() as cost:
            if first is not None:
                first()
            assert self._life.run(one, work) == ExitCode.RECYCLE
        return cost

    def measure_full_batches(self, work: Work = do_nothing, *, seed: Seed, **given: Any) -> Cost:
        """Return the cost of FULL messages that follow FIRST others, so that batches are full."""
        self(FIRST, work, seed, **given)  # this call loads the scripts into the server
        return self(FIRST + FULL, work, seed, **given) - self(FIRST, work, seed, **given)
