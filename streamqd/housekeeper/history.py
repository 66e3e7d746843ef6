"""Append counts and lags of this instance's assignments to the history in Redis, once a minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from streamqd.config import Settings
from streamqd.isolate import Isolate
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import COUNTERS, WorkerSlot, now_ns
from streamqd.store import history
from streamqd.store.history import HANDLER_MAX, HistoryRow, Interval
from streamqd.store.store import Store

MINUTE = 60.0
MINUTE_MS = 60_000
COUNT_INTERVAL_SECONDS = 3.0  # seconds between two counts of the written messages
_COUNTED = {name: COUNTERS.index(name) for name in history.COUNTS if name != "added"}


class _SlotCounts:
    """The counters of a slot at the time of the last entry."""

    __slots__ = ("counters", "delays", "handled")

    def __init__(self, slot: WorkerSlot) -> None:
        self.counters: list[int] = slot.counters.tolist()
        self.handled, _ = slot.histogram("handle")
        self.delays, _ = slot.histogram("delay")


class HistoryWriter:
    """Appends one entry to the history at each full minute of the server's clock.

    Each entry covers the time since the previous one, and the first entry covers the time since the
    start of this process. So the time in which no housekeeper was running is missing. The messages
    that are written to a partition are counted from the first time that the partition is measured
    until the last time before it is released.
    """

    def __init__(
        self, store: Store, view: MetricsView, settings: Settings, isolate: Isolate[Assignment]
    ) -> None:
        self._store = store
        self._view = view
        self._daemon = settings.daemon
        self._isolate = isolate
        self._handlers = {
            (each.topic, each.assignment_group): each.handler for each in settings.consumers
        }
        self._slots = {slot.index: _SlotCounts(slot) for slot, _ in view.assigned_slots()}
        self._last_added: dict[
            Assignment, int
        ] = {}  # number of messages ever written, as last measured
        self._added: Counter[Assignment] = Counter()  # messages written since the last entry
        self._since_ns = now_ns()
        self._minute = 0  # minutes since 1970 at the last entry, on the server's clock

    def run(self) -> float:
        """Write an entry if a minute is over. Return the seconds until the next call is due."""
        self._count_written()
        now = self._view.now_unix_ms()
        if self._view.asked_ns and now // MINUTE_MS != self._minute:
            if self._minute:
                self.write()
            self._minute = now // MINUTE_MS
        return min(COUNT_INTERVAL_SECONDS, MINUTE - now % MINUTE_MS / 1000)

    def write(self) -> None:
        """Write an entry for the time since the last one.

        Raises RedisResponseError if Redis refuses it, and RedisUnavailableError if Redis does not
        answer. After an error, nothing is lost, because the next entry also covers this time.
        """
        self._count_written()
        view = self._view
        slots = dict(self._slots)
        measured: Counter[tuple[str, str]] = Counter()
        assignments: list[HistoryRow] = []
        for slot, assignment in view.assigned_slots():
            handler = self._handlers.get((assignment.topic, assignment.group), "")[:HANDLER_MAX]
            row = HistoryRow(assignment.topic, assignment.group, assignment.partition, handler)
            self._isolate(assignment, self._count, row, slot, slots)
            row.counts["added"] = self._added[assignment]
            if slot.owned:
                self._isolate(assignment, self._backlog, row, assignment, measured)
            if not row.idle:
                assignments.append(row)
        now = now_ns()
        history.append(
            self._store,
            self._daemon.fleet,
            Interval(
                "",
                self._daemon.instance,
                view.now_unix_ms(),
                (now - self._since_ns) / 1e9,
                _sum_groups(assignments),
                assignments=assignments,
                measured=measured,
            ),
            self._daemon.history,
        )
        self._slots, self._since_ns = slots, now
        self._added.clear()

    def _count_written(self) -> None:
        """Count the messages that were written to the owned partitions since the last call."""
        before, self._last_added = self._last_added, {}
        for _, assignment in self._view.owned_slots():
            partition = self._view.partitions.get((assignment.topic, assignment.partition))
            if partition is not None:
                added = self._last_added[assignment] = partition.added
                self._added[assignment] += max(0, added - before.get(assignment, added))

    def _count(self, row: HistoryRow, slot: WorkerSlot, slots: dict[int, _SlotCounts]) -> None:
        """Add a slot's counts since the last entry to `row`.

        `slots` holds the counts at the last entry and is updated. A slot that is not in it counts
        from zero.
        """
        before, seen = slots.get(slot.index), _SlotCounts(slot)
        slots[slot.index] = seen
        for name, index in _COUNTED.items():
            row.counts[name] = seen.counters[index] - (before.counters[index] if before else 0)
        row.handled = _new_runs(seen.handled, before.handled if before else None)
        row.delays = _new_runs(seen.delays, before.delays if before else None)

    def _backlog(
        self, row: HistoryRow, assignment: Assignment, measured: Counter[tuple[str, str]]
    ) -> None:
        """Add the lag of an assignment, and the age of its oldest message, to `row`.

        `measured` counts the assignments of each group whose lag is known.
        """
        figures = self._view.assignments.get(assignment)
        if figures is not None:
            measured[assignment.topic, assignment.group] += figures.lag is not None
            row.lag = figures.lag or 0
            row.oldest_ms = round(self._view.age(figures.oldest_unix_ms()) * 1000)


def _new_runs(runs: Sequence[int], before: Sequence[int] | None) -> dict[int, int]:
    """Map each histogram bucket to its number of new runs, without buckets that have none.

    `before` holds the numbers at the last entry, or is None if there was none.
    """
    new = runs if before is None else [a - b for a, b in zip(runs, before, strict=True)]
    return {bucket: count for bucket, count in enumerate(new) if count > 0}


def _sum_groups(assignments: Iterable[HistoryRow]) -> list[HistoryRow]:
    """Return one row for each topic and group, which sums up the rows of its assignments.

    The age of the oldest message is not a sum but the largest age.
    """
    rows: dict[tuple[str, str], HistoryRow] = {}
    for assignment in assignments:
        row = rows.setdefault(
            (assignment.topic, assignment.group), HistoryRow(assignment.topic, assignment.group)
        )
        for name in history.COUNTS:
            row.counts[name] += assignment.counts[name]
        for index, runs in assignment.handled.items():
            row.handled[index] = row.handled.get(index, 0) + runs
        row.lag += assignment.lag
        row.oldest_ms = max(row.oldest_ms, assignment.oldest_ms)
    return list(rows.values())
