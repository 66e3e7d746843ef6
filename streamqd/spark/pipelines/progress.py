"""Show the progress of a run. Tasks count their rows in Redis, because Spark does not report them.

The progress is approximate, because a repeated task counts its rows again, but the shown progress
never exceeds the total.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.store.client import Connection


class PipelineProgress(NamedTuple):
    """The progress of the current part of a run, with its name, its rows and its duration."""

    what: str
    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """The average number of rows per second so far."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """The estimated number of seconds left, or None until the first row is done."""
        return (self.total - self.done) / self.rate if self.done else None


OnProgress = Callable[[PipelineProgress], None]


class ProgressMeter:
    """Reads the row counts of a run from Redis, and calls a function to show the progress."""

    def __init__(self, link: Connection, key: str, on_progress: OnProgress) -> None:
        self._link = link
        self._key = key
        self._on_progress = on_progress
        self._what = ""
        self._total = 0
        self._began = time.monotonic()

    def begin(self, what: str, total: int) -> None:
        """Start a part of the run that has this number of rows."""
        self._what, self._total, self._began = what, total, time.monotonic()
        self._forget()
        self.show(0)

    def refresh(self) -> None:
        """Show the current progress. If Redis does not answer, nothing is shown."""
        with suppress(RedisUnavailableError, RedisResponseError):
            self.show(sum(map(int, self._link.execute("HVALS", self._key))))

    def show(self, done: int) -> None:
        """Show the progress, given the number of finished rows."""
        elapsed = time.monotonic() - self._began
        self._on_progress(
            PipelineProgress(self._what, min(done, self._total), self._total, elapsed)
        )

    def end(self) -> None:
        """Finish the current part, and remove its counts from Redis."""
        self.show(self._total)
        self._forget()

    def _forget(self) -> None:
        with suppress(RedisUnavailableError, RedisResponseError):  # if this fails, the key expires
            self._link.execute("DEL", self._key)
