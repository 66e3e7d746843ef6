"""Owners of partitions, and the messages that wait there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from streamqd.admin import backlog, topics
from streamqd.admin.reading import (
    BadValues,
    Unreadable,
    lease_views,
    measure,
    server_unix_ms,
)
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import spark
from streamqd.store.leases import LeaseView
from streamqd.store.statistics import UnitFigures
from streamqd.store.store import Store

COUNT_MAX = 1_000  # unread messages counted one by one where the server keeps no count


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One group on one partition.

    `state` is owned, expired (not renewed in time, and not taken over yet), free, or query: the
    group shows the position of a Spark query, which no instance owns. `owner` and `since_unix_ms`
    describe the owner, '' and null without one. `epoch` grows with each change of owner. `lag`
    counts unread messages, null when the server keeps no count and there are more than 1,000.
    `pending` messages were delivered and not acknowledged. `delayed` ones wait for their next
    attempt. `oldest_unix_ms` is the write time of the oldest unread or pending message,
    `oldest_unread_unix_ms` of the oldest unread one.
    """

    topic: str
    partition: int
    group: str
    state: str
    owner: str
    epoch: int
    since_unix_ms: int | None
    lag: int | None
    pending: int
    delayed: int
    oldest_unix_ms: int | None
    oldest_unread_unix_ms: int | None

    @property
    def unit(self) -> Unit:
        """Which unit it is."""
        return Unit(self.topic, self.partition, self.group)


@dataclass(frozen=True, slots=True)
class PartitionsView:
    """All assignments of the chosen topics. `idle_topics` are the topics without a group.

    `unreadable` are values in Redis that cannot be read. An unreadable number counts as missing.
    """

    now_unix_ms: int
    assignments: list[UnitRow]
    idle_topics: list[str]
    unreadable: list[Unreadable]


def view(
    store: Store,
    topic: str | None = None,
    group: str | None = None,
    partition: int | None = None,
) -> PartitionsView:
    """Look at the assignments of one topic or all, of one group or all, of one partition or all.

    A partition needs its topic. Raises TopicMissing, Refused.
    """
    bad = BadValues()
    counts = topics.counts_of(store, topic, bad)
    if partition is not None:
        topics.check_partition(topic or "", partition, counts.get(topic or "", 0))
    units: list[Unit] = []
    idle = []
    for each, count in counts.items():
        found = topics.groups(store, each, range(count), bad=bad)
        units += [
            Unit(each, number, name)
            for name in found
            if group in (None, name)
            for number in (range(count) if partition is None else (partition,))
        ]
        if not found:
            idle.append(each)
    if group is not None and not units:
        raise Refused(f"no group {group} reads {f'the topic {topic}' if topic else 'any topic'}")
    found_rows = rows(store, units, bad)
    return PartitionsView(server_unix_ms(store.connection), found_rows, idle, bad.rows)


class OfUnit(Protocol):
    """All facts about one assignment."""

    @property
    def unit(self) -> Unit:
        """Which unit it is."""


AnyUnit = TypeVar("AnyUnit", bound=OfUnit)


def by_group(rows: Iterable[AnyUnit]) -> dict[tuple[str, str], list[AnyUnit]]:
    """Return the rows of each group of each topic."""
    found: dict[tuple[str, str], list[AnyUnit]] = {}
    for row in rows:
        found.setdefault((row.unit.topic, row.unit.group), []).append(row)
    return found


class MeasuredUnit(NamedTuple):
    """The state of one assignment in Redis. `figures` is None when unreadable.

    `lag` is None when the server keeps no count and there are more than `COUNT_MAX`.
    """

    unit: Unit
    lease: LeaseView
    figures: UnitFigures | None
    lag: int | None

    def row(self) -> UnitRow:
        """Return the assignment as the partitions view shows it."""
        state, owner, since = holder(self.lease)
        state = "query" if self.unit.is_of_query else state
        figures = self.figures
        return UnitRow(
            *self.unit,
            state=state,
            owner=owner,
            epoch=self.lease.epoch,
            since_unix_ms=since,
            lag=self.lag,
            pending=figures.pending if figures else 0,
            delayed=figures.delayed if figures else 0,
            oldest_unix_ms=figures.oldest_unix_ms() if figures else None,
            oldest_unread_unix_ms=figures.oldest_unread_unix_ms() if figures else None,
        )


def holder(lease: LeaseView) -> tuple[str, str, int | None]:
    """Return the state of a lease (owned, expired or free), the owner, and since when."""
    if not lease.token:
        return "free", "", None
    return "expired" if lease.ttl is None else "owned", lease.owner, lease.since_unix_ms


def rows(store: Store, units: list[Unit], bad: BadValues) -> list[UnitRow]:
    """Return a row for each unit, as the partitions view shows it."""
    return [each.row() for each in measured(store, units, bad)]


def measured(store: Store, units: list[Unit], bad: BadValues) -> list[MeasuredUnit]:
    """Look at each assignment."""
    leases = lease_views(store, units, bad)
    figures = backlog.figures(store, units, bad)
    both = zip(units, figures, strict=True)
    counted = _counted(store, {unit: each for unit, each in both if each and each.lag is None})
    return [
        MeasuredUnit(
            *(unit, lease, each),
            each.lag if each and each.lag is not None else counted.get(unit),
        )
        for unit, lease, each in zip(units, leases, figures, strict=True)
    ]


def _counted(store: Store, figures: dict[Unit, UnitFigures]) -> dict[Unit, int]:
    """Count the lag of assignments without a count of the server, up to `COUNT_MAX`.

    A call counts no more than its byte limit allows, so all assignments take turns.
    """
    found: Counter[Unit] = Counter()
    left: list[tuple[Unit, str, str]] = []  # possibly more entries: the ID to continue after
    for unit, each in figures.items():
        streams = {store.keys.source(*unit): each.main, store.keys.retry_stream(*unit): each.retry}
        for stream, behind in streams.items():
            found[unit] += 1 if behind.unread is None else behind.unread
            if behind.unread is None:
                left.append((unit, stream, behind.oldest_unread_id))
    while left:
        steps = [spark.step(stream, after, "+", spark.STEP_MAX) for _, stream, after in left]
        before, left = left, []
        for (unit, stream, _), reply in zip(before, measure(store, steps), strict=True):
            gone, last, more = reply.rest
            found[unit] += int(gone)
            if more and found[unit] <= COUNT_MAX:
                left.append((unit, stream, last.decode()))
    return {unit: lag for unit, lag in found.items() if lag <= COUNT_MAX}
