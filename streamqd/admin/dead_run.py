"""One pass over dead letters: its pace, its counts, and how it ended.

A pass can be stopped and can lose Redis at any time. Each letter is dealt with in atomic steps that
can be done again, so the counts of a pass that ended early are exact but for the letters whose
answer did not come, and the same pass can be begun again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from streamqd.admin import audit
from streamqd.admin.dead_choice import Page
from streamqd.admin.pages import PAGE_MAX, Entry
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

DONE, LIMIT, STOPPED, FAILED = "done", "limit", "stopped", "failed"  # how a pass ended
_LOOK = 0.1  # seconds between two looks at whether to stop

Stop = Callable[[], bool]
Progress = Callable[[int], None]


def never() -> bool:
    """Do not stop."""
    return False


def silent(_count: int) -> None:
    """Tell nobody."""


class ReplayPace:
    """Spaces things evenly in time; what was missed is not made up for by a burst."""

    def __init__(
        self, per_second: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._clock = clock
        self._free_at = 0.0

    @property
    def batch(self) -> int:
        """How many things go at once: about as many as a tenth of a second allows."""
        if self._per_second is None:
            return PAGE_MAX
        return max(1, min(PAGE_MAX, math.floor(self._per_second / 10)))

    def take(self, count: int) -> float:
        """Take the room of so many things; return how many seconds to wait before they go."""
        if self._per_second is None:
            return 0.0
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._per_second
        return begin - now


class Pass:
    """Counts what happens to letters, and knows when it is over."""

    def __init__(self, stop: Stop = never, progress: Progress = silent) -> None:
        self._stop = stop
        self._progress = progress
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.unknown = 0
        self.ended = DONE
        self.error = ""
        self.first = self.last = ""

    def pieces(self, pages: Iterable[Page], throttle: ReplayPace) -> Iterator[Page]:
        """Yield the letters in batches, each when it is its time, until told to stop."""
        try:
            for page in pages:
                for start in range(0, len(page), throttle.batch):
                    piece = page[start : start + throttle.batch]
                    self._wait(throttle.take(len(piece)))
                    if self._stop():
                        self.ended = STOPPED
                        return
                    yield piece
                    if self.ended != DONE:
                        return
                    self._progress(len(piece))
        except RedisUnavailable as error:
            self.fail(error)

    def touched(self, entry: Entry) -> None:
        """Note a letter that was dealt with."""
        self.first = self.first or str(entry.place)
        self.last = str(entry.place)

    def fail(self, error: RedisUnavailable | RedisRefused, sent: int = 0) -> None:
        """Note what ended the pass, and how many letters were under way."""
        self.ended, self.error = FAILED, str(error)
        if isinstance(error, RedisUnavailable) and error.sent:
            self.unknown += sent

    def record(
        self,
        link: Connection,
        keys: Keys,
        topic: str,
        verb: str,
        what: dict[str, Any],
        note: str = "",
    ) -> bool:
        """Write the pass into the audit trail; return whether that could be done."""
        counts = dict(self.counts)
        if self.refused:
            counts["refused"] = self.refused.total()
        if self.unknown:
            counts["unknown"] = self.unknown
        ended = "" if self.ended in (DONE, LIMIT) else f"{self.ended}: {self.error}".rstrip(": ")
        try:
            audit.record(
                *(link, keys, topic, verb),
                what=what,
                counts=counts,
                first_id=self.first,
                last_id=self.last,
                note="; ".join(filter(None, (note, ended))),
            )
        except (RedisUnavailable, RedisRefused):
            return False
        return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK))
