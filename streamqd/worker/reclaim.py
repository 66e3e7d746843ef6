"""Taking over what foreign consumers of the group read and left pending.

The housekeeper raises a flag when it saw an idle entry. What those consumers hold may be long, most
of it fresh: it is looked through page by page, and reading goes on between two pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from streamqd import logs
from streamqd.store import messages
from streamqd.store.scripts import Call, Reply
from streamqd.worker.pending_entry import PendingEntry

if TYPE_CHECKING:
    from streamqd.worker.worker import WorkerProcess


class Reclaim:
    """How far a worker has looked through both streams since the flag was raised."""

    def __init__(self, worker: WorkerProcess, run_script: Callable[[Call], Reply]) -> None:
        self._worker = worker
        self._run_script = run_script
        self._pages: dict[bool, messages.Cursor] = {}  # the next of each stream, by `retried`
        self._looked = False  # a look has been done, and no reading since

    @property
    def wanted(self) -> bool:
        """Whether the flag is up."""
        slot = self._worker.slot
        return slot.reclaim_requested != slot.reclaim_done

    def has_turn(self, *, reading: bool = True) -> bool:
        """Whether to look now; with `reading`, every other time: the others are for reading."""
        looks = self.wanted and not (self._looked and reading)
        self._looked = False
        return looks

    def turn(self) -> Iterator[bool]:
        """Yield the streams, as `retried`, of which a page is to be taken; then end the walk.

        The flag is taken down once both have been looked through.
        """
        worker = self._worker
        wanted = worker.slot.reclaim_requested
        self._pages = self._pages or {False: messages.BEGIN, True: messages.BEGIN}
        yield from list(self._pages)
        self._looked = True  # what failed is done again first
        if not self._pages:
            worker.slot.reclaim_done = wanted

    def take(self, retried: bool, count: int) -> list[PendingEntry]:
        """Take over at most `count` entries of the next page.

        Raises Fenced, RedisRefused, RedisUnavailable.
        """
        worker = self._worker
        call = messages.reclaim(
            worker.keys,
            worker.unit,
            worker.token,
            worker.session,
            source="r" if retried else "m",
            idle=worker.consumer.reclaim_idle,
            count=count,
            page=self._pages[retried],
        )
        entries, ghosts, after = messages.Reclaimed.parse(self._run_script(call))
        if after is None:
            del self._pages[retried]
        else:
            self._pages[retried] = after
        worker.slot.add("ghosts", ghosts)
        worker.slot.add("reclaimed", len(entries))
        if entries:
            logs.event("reclaim", unit=worker.unit, entries=len(entries), ghosts=ghosts)
        return [PendingEntry(retried, entry_id, fields, 0, b"") for entry_id, fields in entries]
