"""Take over entries that other clients of the group have read and left pending.

The housekeeper requests this when it finds an entry that has been idle for too long. Other clients
may have many pending entries, and most of them may not be idle. So the worker examines them page by
page, with reads of new entries in between.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamqd import logs
from streamqd.store import messages
from streamqd.worker.context import WorkerContext
from streamqd.worker.fenced import FencedCalls


class Reclaim:
    """A worker's progress through the pending entries of both streams, after a request."""

    def __init__(self, context: WorkerContext, calls: FencedCalls) -> None:
        self._context = context
        self._slot = context.slot
        self._calls = calls
        self._pages: dict[bool, messages.Cursor] = {}  # next page of each stream, by `retried`
        self._page_taken = False  # True if a page was taken and no read was sent since then

    @property
    def is_requested(self) -> bool:
        """True while the housekeeper's request is not complete."""
        slot = self._slot
        return slot.reclaim_requested != slot.reclaim_done

    def is_turn(self, *, reading: bool) -> bool:
        """Return True if the worker must take over a page next.

        `reading` is true if the worker also wants to read new entries. In that case, pages and
        reads alternate.
        """
        return self.is_requested and not (self._page_taken and reading)

    def record_read(self) -> None:
        """Record that a read was sent, so that the next page may follow."""
        self._page_taken = False

    def pages(self) -> Iterator[bool]:
        """Yield each stream that has pages left, for which the caller must call `take_page`.

        True stands for the retry stream, and False for the partition. When neither stream has any
        page left, the request is complete.
        """
        wanted, self._page_taken = self._slot.reclaim_requested, False
        self._pages = self._pages or {False: messages.BEGIN, True: messages.BEGIN}
        yield from list(self._pages)
        self._page_taken = (
            True  # set last, so that it stays False if taking a page fails, which is then repeated
        )
        if not self._pages:
            self._slot.reclaim_done = wanted

    def take_page(self, retried: bool, session: str, count: int) -> list[messages.PendingEntry]:
        """Take over up to `count` idle entries from the next page of a stream, and return them.

        Raises the errors of `FencedCalls.run`.
        """
        settler, slot = self._context.settler, self._slot
        call = messages.reclaim(
            settler.keys,
            settler.lease,
            session,
            source="r" if retried else "m",
            idle=self._context.consumer.reclaim_idle,
            count=count,
            page=self._pages[retried],
        )
        entries, missing_entries, after = messages.Reclaimed.parse(self._calls.run(call))
        if after is None:
            del self._pages[retried]
        else:
            self._pages[retried] = after
        slot.add("missing_entries", missing_entries)
        slot.add("reclaimed", len(entries))
        if entries:
            logs.event(
                "entries.reclaimed",
                assignment=self._context.assignment,
                entries=len(entries),
                missing_entries=missing_entries,
            )
        return [messages.PendingEntry(retried, entry_id, fields) for entry_id, fields in entries]
