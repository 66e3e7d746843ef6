"""A short table of the most recent failures, in shared memory.

Each assignment has a table in its slot of the scoreboard. A row contains the class of an exception
or the exit of a process, the number of such failures, and the time of the last one. It never
contains messages or tracebacks, which could include parts of a payload. The worker writes the table
when a handler fails. While no worker is running, the supervisor writes it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

ROWS = 12
HOUSEKEEPING = "housekeeping"  # first word in the name of a failed housekeeping task
_NAME_BYTES = 80
_ROW = struct.Struct(f"<QQ{_NAME_BYTES}s")  # count, `now_ns` time of the last failure, name
_COUNT = struct.Struct("<QQ")  # the first two fields of a row
BYTES = ROWS * _ROW.size


class Failure(NamedTuple):
    """A kind of failure, with the number of such failures and the time of the last one.

    `times` counts since the slot was given to its assignment. `last_ns` is on the `now_ns` clock.
    """

    name: str
    times: int
    last_ns: int


class RecentFailures:
    """A table with room for 12 kinds of failure.

    When the table is full, a new kind replaces the one that has not occurred for the longest time.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def note(self, name: str, now: int) -> None:
        """Count one failure of this kind."""
        raw = _cut(name)
        quietest, quietest_ns = 0, -1
        for at in range(ROWS):
            count, last, stored = _ROW.unpack_from(self._view, at * _ROW.size)
            if count and stored == raw:
                _COUNT.pack_into(self._view, at * _ROW.size, count + 1, now)
                return
            if quietest_ns < 0 or last < quietest_ns:
                quietest, quietest_ns = at, last
        _ROW.pack_into(self._view, quietest * _ROW.size, 1, now, raw)

    def recent(self) -> list[Failure]:
        """Return the kinds of failure, with the most recent first."""
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
    # A character that was cut in the middle is dropped.
    return raw.decode("utf-8", "ignore").encode().ljust(_NAME_BYTES, b"\0")
