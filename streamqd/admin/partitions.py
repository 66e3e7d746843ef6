"""Who owns which partition, and what lies before them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from streamqd.admin import backlog, topics
from streamqd.admin.pages import measure, server_unix_ms
from streamqd.admin.unreadable import BadValues, Unreadable, lease_views, measure_each
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import leases, spark, statistics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

COUNT_MAX = 1_000  # unread messages counted one by one where the server keeps no count


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One group on one partition.

    `state` is owned, expired (the owner has not renewed in time, and nobody has taken over yet) or
    free. `owner` and `since_unix_ms` are those of the owner, '' and null when it is free. `epoch`
    grows with each change of owner. `lag` counts unread messages, null when the server cannot tell
    and there are more than 1,000; `pending` those handed out and not acknowledged; `delayed` those
    that wait for their next attempt. `oldest_unix_ms` is when the oldest of the unread and pending
    ones was written, `oldest_unread_unix_ms` when the oldest of the unread ones was.
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


@dataclass(frozen=True, slots=True)
class PartitionsView:
    """All units of the topics looked at; `idle_topics` are those that no group reads.

    `unreadable` are values in Redis that cannot be read: a number among them counts as none.
    """

    now_unix_ms: int
    units: list[UnitRow]
    idle_topics: list[str]
    unreadable: list[Unreadable]


def view(
    link: Connection,
    keys: Keys,
    topic: str | None = None,
    group: str | None = None,
    partition: int | None = None,
) -> PartitionsView:
    """Look at the units of one topic or all, of one group or all, of one partition or all.

    A partition needs its topic. Raises TopicMissing, Refused.
    """
    bad = BadValues()
    if topic is not None:
        counts = {topic: topics.partition_count(link, keys, topic)}
    else:
        counts = topics.known_counts(link, keys, bad)
    if partition is not None and partition not in range(counts.get(topic or "", 0)):
        last = counts.get(topic or "", 0) - 1
        raise Refused(f"{topic} has no partition {partition}: they are numbered 0 to {last}")
    units: list[Unit] = []
    idle = []
    for each, count in counts.items():
        found = topics.groups(link, keys, each, range(count), bad=bad)
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
    found_rows = rows(link, keys, units, bad)
    return PartitionsView(server_unix_ms(link), found_rows, idle, bad.rows)


def rows(link: Connection, keys: Keys, units: list[Unit], bad: BadValues) -> list[UnitRow]:
    """Look at each of the units."""
    views = lease_views(link, keys, units, bad)
    measured = measure_each(link, [statistics.measure_unit(keys, unit) for unit in units], bad)
    figures = [
        backlog.unit_figures(unit, reply, keys, bad)
        for unit, reply in zip(units, measured, strict=True)
    ]
    told = zip(units, figures, strict=True)
    counted = _counted(link, keys, {unit: each for unit, each in told if each and each.lag is None})
    return [
        _row(unit, lease, each, counted.get(unit))
        for unit, lease, each in zip(units, views, figures, strict=True)
    ]


def _counted(
    link: Connection, keys: Keys, figures: dict[Unit, statistics.UnitFigures]
) -> dict[Unit, int]:
    """The lag of units of which the server does not tell it, where it is at most `COUNT_MAX`.

    One call counts no more than its bytes allow, so all units are counted on in turns.
    """
    found: Counter[Unit] = Counter()
    left: list[tuple[Unit, str, str]] = []  # where there may be more: behind which id
    for unit, each in figures.items():
        streams = {keys.source(*unit): each.main, keys.retry_stream(*unit): each.retry}
        for stream, behind in streams.items():
            found[unit] += 1 if behind.unread is None else behind.unread
            if behind.unread is None:
                left.append((unit, stream, behind.oldest_unread_id))
    while left:
        steps = [spark.step(stream, after, "+", spark.STEP_MAX) for _, stream, after in left]
        before, left = left, []
        for (unit, stream, _), reply in zip(before, measure(link, steps), strict=True):
            gone, last, more = reply.rest
            found[unit] += int(gone)
            if more and found[unit] <= COUNT_MAX:
                left.append((unit, stream, last.decode()))
    return {unit: lag for unit, lag in found.items() if lag <= COUNT_MAX}


def _row(
    unit: Unit,
    lease: leases.LeaseView,
    figures: statistics.UnitFigures | None,
    counted: int | None,
) -> UnitRow:
    held = bool(lease.token)
    return UnitRow(
        topic=unit.topic,
        partition=unit.partition,
        group=unit.group,
        state=("expired" if lease.ttl is None else "owned") if held else "free",
        owner=lease.owner if held else "",
        epoch=lease.epoch,
        since_unix_ms=lease.since_unix_ms if held else None,
        lag=figures.lag if figures and figures.lag is not None else counted,
        pending=figures.pending if figures else 0,
        delayed=figures.delayed if figures else 0,
        oldest_unix_ms=figures.oldest_unix_ms() if figures else None,
        oldest_unread_unix_ms=figures.oldest_unread_unix_ms() if figures else None,
    )
