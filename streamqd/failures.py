"""A short table of what has gone wrong most recently, in memory that processes share.

Each unit has one in its slot of the scoreboard: the class of an exception, or how a process ended,
how often, and when last. Never a message or a traceback, which may hold what was in a payload. It
is written by the worker when a handler fails, and by the supervisor when no worker lives.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

ROWS = 12
HOUSEKEEPING = "housekeeping"  # first word of the failures of the housekeeper's tasks
_NAME_BYTES = 80
_ROW = struct.Struct(f"<QQ{_NAME_BYTES}s")  # count, `now_ns` of the last one, name
_COUNT = struct.Struct("<QQ")  # the beginning of a row
BYTES = ROWS * _ROW.size


class Failure(NamedTuple):
    """One kind of failure: how often since the slot was named, and when last (`now_ns` clock)."""

    name: str
    times: int
    last_ns: int


class RecentFailures:
    """The table. A new kind takes the row that has been quiet for longest."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def note(self, name: str, now: int) -> None:
        """Count one failure."""
        raw = _cut(name)
        quietest, quietest_ns = 0, -1
        for at in range(ROWS):
            count, last, there = _ROW.unpack_from(self._view, at * _ROW.size)
            if count and there == raw:
                _COUNT.pack_into(self._view, at * _ROW.size, count + 1, now)
                return
            if quietest_ns < 0 or last < quietest_ns:
                quietest, quietest_ns = at, last
        _ROW.pack_into(self._view, quietest * _ROW.size, 1, now, raw)

    def recent(self) -> list[Failure]:
        """The kinds, the latest first."""
        rows = [_ROW.unpack_from(self._view, at * _ROW.size) for at in range(ROWS)]
        found = [
            Failure(raw.rstrip(b"\0").decode("utf-8", "replace"), count, last)
            for count, last, raw in rows
            if count
        ]
        return sorted(found, key=lambda each: -each.last_ns)


@lru_cache(maxsize=ROWS)
def _cut(name: str) -> bytes:
    raw = name.encode("utf-8", "replace")[:_NAME_BYTES]
    # A character that was cut in two goes whole.
    return raw.decode("utf-8", "ignore").encode().ljust(_NAME_BYTES, b"\0")
