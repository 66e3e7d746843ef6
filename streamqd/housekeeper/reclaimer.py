"""Find entries that clients other than streamqd have read and left pending for too long.

The housekeeper does not claim such entries itself. It sets a flag in the slot of the partition's
worker, and the worker claims the entries under its token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from streamqd import logs
from streamqd.config import Consumer
from streamqd.housekeeper.batch import run_commands
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.scoreboard import WorkerSlot
from streamqd.store.store import Store

OUR_CONSUMER = b"w"  # consumer name of every owner, because the fence identifies the owner
# Largest number of a consumer's pending entries in one reply. The commands do not use the option
# IDLE, because with it, Redis would scan all entries that are not idle in a single command.
PAGE = 500
PAGES_MAX = 32  # largest number of pages in one check
NEXT_PAGE_SECONDS = 1.0  # pause before the next pages while a scan is not finished
BEGIN = b"0-0"


class GroupWalk(NamedTuple):
    """A scan of another client's pending entries in one stream, page by page.

    `key` is the stream, and `name` the client's consumer name. `is_later` is False for the first
    page, and True for a scan of the pages after it.
    """

    assignment: Assignment
    key: str
    name: bytes
    is_later: bool


class Reclaimer:
    """Sets the flag in the slots of workers that must claim entries of other clients.

    The consumers are listed periodically. After each listing, the first page of each consumer's
    pending entries is read again, because its entries are the oldest and become idle first. A scan
    of later pages continues independently of that.
    """

    def __init__(
        self,
        store: Store,
        consumers: Iterable[Consumer],
        isolate: Isolate[Assignment] = run_directly,
    ) -> None:
        self._store = store
        self._isolate = isolate
        self._idle = {(each.topic, each.assignment_group): each.reclaim_idle for each in consumers}
        self._walks: dict[GroupWalk, bytes] = {}  # position of each scan, in the order of turns
        self._list_at = 0.0  # monotonic time of the next listing of consumers

    @property
    def every(self) -> float:
        """The number of seconds between two listings, from 1 to 15.

        Within this range, it is a quarter of the shortest `reclaim_idle`.
        """
        return min(15.0, max(1.0, min(self._idle.values(), default=60.0) / 4))

    def run(self, owned: Iterable[tuple[WorkerSlot, Assignment]]) -> float | None:
        """Read up to PAGES_MAX pages of other clients' pending entries.

        Return the seconds until more pages must be read, or None if all scans are complete.
        """
        slots = {
            assignment: slot
            for slot, assignment in owned
            if (assignment.topic, assignment.group) in self._idle
        }
        if not self._walks or time.monotonic() >= self._list_at:
            self._list_at = time.monotonic() + self.every
            self._list_consumers(slots)
        # While a worker's flag is set, its entries need not be scanned. The worker examines all of
        # them and then clears the flag.
        self._walks = {
            walk: at
            for walk, at in self._walks.items()
            if walk.assignment in slots and not _is_flagged(slots[walk.assignment])
        }
        made = [
            (walk, self._isolate(walk.assignment, self._command, walk))
            for walk in list(self._walks)[:PAGES_MAX]
        ]
        asked = [(walk, command) for walk, command in made if command is not None]
        pages = run_commands(self._store, [command for _, command in asked])
        for (walk, _), rows in zip(asked, pages, strict=True):
            page = rows if isinstance(rows, list) else []
            self._isolate(walk.assignment, self._record_reply, walk, page, slots[walk.assignment])
        return NEXT_PAGE_SECONDS if self._walks else None

    def _list_consumers(self, slots: Mapping[Assignment, WorkerSlot]) -> None:
        """Start a scan of each other client that has pending entries. Scans in progress continue.

        An entry that has no consumer counts as idle, so the flag is set without a scan.
        """
        places = [
            (assignment, key)
            for assignment in slots
            for key in (
                self._store.keys.source(*assignment),
                self._store.keys.retry_stream(*assignment),
            )
        ]
        replies = run_commands(
            self._store, [("XPENDING", key, assignment.group) for assignment, key in places]
        )
        found: list[GroupWalk] = []
        for (assignment, key), pending in zip(places, replies, strict=True):
            if isinstance(pending, list):
                found += (
                    self._isolate(
                        assignment, _other_clients, assignment, key, pending, slots[assignment]
                    )
                    or ()
                )
        walks = set(found)
        kept = {
            walk: at for walk, at in self._walks.items() if walk._replace(is_later=False) in walks
        }
        self._walks = {**kept, **{walk: BEGIN for walk in found if walk not in kept}}

    def _command(self, walk: GroupWalk) -> tuple[Any, ...]:
        after = b"(" + self._walks[walk]
        return ("XPENDING", walk.key, walk.assignment.group, after, "+", PAGE, walk.name)

    def _record_reply(self, walk: GroupWalk, rows: list[Any], slot: WorkerSlot) -> None:
        """Set the flag if a page contains an idle entry. Otherwise, continue with the next page."""
        del self._walks[walk]
        idle_ms = round(self._idle[walk.assignment.topic, walk.assignment.group] * 1000)
        if any(row[2] >= idle_ms for row in rows):
            _raise_flag(slot, walk.assignment, walk.name)
        elif len(rows) == PAGE:
            rest = walk._replace(is_later=True)
            if walk.is_later or rest not in self._walks:
                self._walks[rest] = rows[-1][0]


def _other_clients(
    assignment: Assignment, key: str, pending: list[Any], slot: WorkerSlot
) -> list[GroupWalk]:
    """Return a scan for each other client that has pending entries in a stream.

    `pending` is the reply to XPENDING. If it counts entries without a consumer, set the flag.
    """
    held = {name: int(count) for name, count in pending[3] or () if name}
    if int(pending[0]) > sum(held.values()):
        _raise_flag(slot, assignment, b"")
    return [
        GroupWalk(assignment, key, name, is_later=False) for name in held if name != OUR_CONSUMER
    ]


def _is_flagged(slot: WorkerSlot) -> bool:
    return slot.reclaim_requested != slot.reclaim_done


def _raise_flag(slot: WorkerSlot, assignment: Assignment, name: bytes) -> None:
    if not _is_flagged(slot):
        slot.reclaim_requested = slot.reclaim_done + 1
        logs.event("reclaim.requested", assignment=assignment, consumer_name=name)
