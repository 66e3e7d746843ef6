"""What messages cost that a worker handles, in the test's process, with its clocks out of reach.

Clocks that would send something earlier on a slow machine are stopped: what is counted is what the
number of messages alone makes necessary. What they are set to is judged before.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from streamqd.message import Message
from streamqd.worker import ExitCode, assembly, concurrent, prefetch, runs
from tests.contract.desk import Desk
from tests.support.costs import Cost, Meter
from tests.support.life import Life, Work

BATCH = 256  # prefetch_max where nobody says otherwise
# Four of the largest messages are as many bytes as may be in hand; then it learns their true size.
READS = (4, 8, 16, 32, 64, 128, BATCH, BATCH, BATCH)
FIRST = sum(READS)
FULL = 10 * BATCH  # messages of ten reads more
PAGE = 128  # entries of one script that settles
RECOVERED = 64  # of one that recovers
PROMOTED = 32  # of one that promotes
PATIENCE = 60.0  # seconds that thousands of messages may take beside load

# Shorter, and quick messages are settled one by one; longer, and they are in doubt for too long.
MS = 1_000_000
CLOCKS: tuple[tuple[Any, str, int, int], ...] = (
    (runs, "ACK_DELAY_NS", 5 * MS, 100 * MS),
    (assembly, "ACK_DELAY_NS", 5 * MS, 100 * MS),
    (runs, "QUICK_RUN_NS", 1 * MS, 10 * MS),
    (prefetch, "WORK_IN_HAND_NS", 100 * MS, 5_000 * MS),
    (concurrent, "WORK_IN_HAND_NS", 100 * MS, 5_000 * MS),
)
A_DAY_NS = 86_400_000 * MS

Seed = Callable[[int], None]


def stop_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no wait of the hot path end by the clock; fail where a clock is out of its bounds."""
    for module, name, least, most in CLOCKS:
        value = getattr(module, name)
        where = f"{module.__name__}.{name}"
        assert least <= value <= most, f"{where} is {value:,} ns, not {least:,} to {most:,}"
        monkeypatch.setattr(module, name, A_DAY_NS)


def nothing(_message: Message) -> None:
    """The handler that does nothing."""


def nobody(_count: int) -> None:
    """Seed nothing."""


class Handling:
    """Measures lives that handle messages."""

    def __init__(self, desk: Desk, life: Life, meter: Meter) -> None:
        self._desk = desk
        self._life = life
        self._meter = meter

    def __call__(
        self,
        count: int,
        work: Work = nothing,
        seed: Seed = nobody,
        first: Callable[[], None] | None = None,
        runs: int = 1,
        **changed: Any,
    ) -> Cost:
        """What a life costs that handles so many messages and ends, each in so many `runs`.

        What `first` does is part of it; `changed` are settings of its consumer.
        """
        self._desk.do("FLUSHALL")
        self._desk.groups()
        token = secrets.token_hex(4)
        self._desk.own(token)
        seed(count)
        one = self._life.worker(token, max_messages=count * runs, **changed)
        with self._meter.measuring() as cost:
            if first is not None:
                first()
            assert self._life.run(one, work, PATIENCE) == ExitCode.RECYCLE
        return cost

    def more(self, work: Work = nothing, *, seed: Seed, **given: Any) -> Cost:
        """What FULL messages cost that come behind FIRST ones: batches are full."""
        self(FIRST, work, seed, **given)  # lets the server learn the scripts
        return self(FIRST + FULL, work, seed, **given) - self(FIRST, work, seed, **given)
