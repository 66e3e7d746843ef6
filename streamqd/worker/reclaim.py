"""Taking over what foreign consumers of the group read and left pending.

The housekeeper raises a flag when it saw an idle entry. What those consumers hold may be long, most
of it fresh: it is looked through page by page, and reading goes on between two pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamqd import logs
from streamqd.store import messages
from streamqd.worker.context import WorkerContext
from streamqd.worker.fenced import FencedCalls


class Reclaim:
    """How far a worker has looked through both streams since the flag was raised."""

    def __init__(self, context: WorkerContext, calls: FencedCalls) -> None:
        self._context = context
        self._slot = context.slot
        self._calls = calls
        self._pages: dict[bool, messages.Cursor] = {}  # the next of each stream, by `retried`
        self._looked = False  # a look has been done, and no reading since

    @property
    def wanted(self) -> bool:
        """Whether the flag is up."""
        slot = self._slot
        return slot.reclaim_requested != slot.reclaim_done

    def is_due(self, *, reading: bool = True) -> bool:
        """Whether to look now; with `reading`, every other time: the others are for reading."""
        looks = self.wanted and not (self._looked and reading)
        self._looked = False
        return looks

    def pages(self) -> Iterator[bool]:
        """Yield the streams, as `retried`, of which a page is to be taken; then end the walk.

        The flag is taken down once both have been looked through.
        """
        wanted = self._slot.reclaim_requested
        self._pages = self._pages or {False: messages.BEGIN, True: messages.BEGIN}
        yield from list(self._pages)
        self._looked = True  # what failed is done again first
        if not self._pages:
            self._slot.reclaim_done = wanted

    def take(self, retried: bool, session: str, count: int) -> list[messages.PendingEntry]:
        """Take over at most `count` entries of the next page.

        Raises Fenced, RedisRefused, RedisUnavailable.
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
        entries, ghosts, after = messages.Reclaimed.parse(self._calls.run(call))
        if after is None:
            del self._pages[retried]
        else:
            self._pages[retried] = after
        slot.add("ghosts", ghosts)
        slot.add("reclaimed", len(entries))
        if entries:
            logs.event("reclaim", unit=self._context.unit, entries=len(entries), ghosts=ghosts)
        return [messages.PendingEntry(retried, entry_id, fields) for entry_id, fields in entries]
