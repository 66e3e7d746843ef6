"""Entries that were pending before: two lists that become one, oldest first."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.store.messages import Recovered


class Held(NamedTuple):
    """An entry that was pending before: what recover or reclaim knows of it."""

    retried: bool
    id: bytes
    fields: list[bytes] | None  # None: the entry itself has been trimmed away
    crashes: int
    context: bytes  # JSON of the last charged crash, b'' if there is none

    @property
    def place(self) -> bytes:
        """The one true name of the entry: its stream and id."""
        return (b"r:" if self.retried else b"m:") + self.id

    @property
    def size(self) -> int:
        """Bytes of its names and values."""
        return sum(map(len, self.fields or ()))


def in_order(page: Recovered, count: int) -> tuple[list[Held], bool]:
    """Merge both lists of a page of `count`; tell whether nothing comes after.

    A list as long as was asked for may go on. What lies beyond its end in the other list must not
    run before the rest of it, and is left for the next page.
    """
    held = [Held(False, e.id, e.fields, e.crashes, e.context) for e in page.main]
    held += [Held(True, e.id, e.fields, e.crashes, e.context) for e in page.retry]
    held.sort(key=lambda entry: _order(entry.id))
    ends = [_order(found[-1].id) for found in (page.main, page.retry) if len(found) >= count]
    if not ends:
        return held, True
    end = min(ends)
    return [entry for entry in held if _order(entry.id) <= end], False


def _order(entry_id: bytes) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)
