"""Entries that were pending before: two lists that become one, oldest first."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.message import Delivery, Message
from streamqd.scoreboard import now_ns
from streamqd.store.messages import Pending, Recovered


class PendingEntry(NamedTuple):
    """An entry that was pending before: what recover or reclaim knows of it."""

    retried: bool
    id: bytes
    fields: list[bytes] | None  # None: the entry itself has been trimmed away
    crashes: int
    context: bytes  # JSON of the last charged crash, b'' if there is none
    failures: int = 0  # in place, of one that is kept in hand
    wait_ms: int = 0  # until it is due again, of such a one

    @property
    def place(self) -> bytes:
        """The one true name of the entry: its stream and id."""
        return (b"r:" if self.retried else b"m:") + self.id

    @property
    def size(self) -> int:
        """Bytes of its names and values."""
        return sum(map(len, self.fields or ()))

    def message(self, delivery: Delivery) -> Message:
        """The entry as its handler sees it. Its fields must be there."""
        message = Message(delivery, self.id, self.fields or [], retried=self.retried)
        if self.failures:
            message.failures_in_place = self.failures
        if self.wait_ms:
            message.due_in_place_ns = now_ns() + self.wait_ms * 1_000_000
        return message


def in_order(page: Recovered) -> tuple[list[PendingEntry], bool]:
    """Merge both lists of a page; tell whether nothing comes after.

    What lies beyond the end of a list that may go on must not run before the rest of it, and is
    left for the next page.
    """
    held = [_held(each, retried=False) for each in page.main]
    held += [_held(each, retried=True) for each in page.retry]
    held.sort(key=lambda entry: _order(entry.id))
    lists = ((page.main, page.more_main), (page.retry, page.more_retry))
    ends = [_order(found[-1].id) for found, more in lists if more]
    if not ends:
        return held, True
    end = min(ends)
    return [entry for entry in held if _order(entry.id) <= end], False


def _held(entry: Pending, *, retried: bool) -> PendingEntry:
    return PendingEntry(
        retried,
        entry.id,
        entry.fields,
        entry.crashes,
        entry.context,
        failures=entry.failures,
        wait_ms=entry.wait_ms,
    )


def _order(entry_id: bytes) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)
