"""Entries delivered to a worker and not settled: one list over all partitions."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamqd.admin import groups
from streamqd.admin.reading import BATCH, BadValues, Id, Unreadable, ask, behind, read_id
from streamqd.errors import Malformed
from streamqd.store import untrusted
from streamqd.store.replies import accepted
from streamqd.store.store import Store

SCAN_MAX = 100_000  # entries looked at for one ranking by idle time or deliveries
PAGE = 500
ORDERS = ("id", "idle", "deliveries")


@dataclass(frozen=True, slots=True)
class PendingRow:
    """One pending entry.

    `place` is `m:` (the partition's stream) or `r:` (the group's retry stream) and the entry's ID.
    `idle_ms` is the time since its last delivery, `deliveries` the count kept by Redis, `crashes`
    the number of processes it took down here. `consumer` is `w` for streamqd, '' when no consumer
    has the entry (`idle_ms` is null then). Any other name is another client.
    """

    partition: int
    place: str
    written_unix_ms: int
    idle_ms: int | None
    deliveries: int
    crashes: int
    consumer: str


@dataclass(frozen=True, slots=True)
class PendingView:
    """A page. `total` counts all pending entries of the group on the topic.

    Pass `cursor` for the next page ('' on the last one). `complete` is false when a ranking by idle
    time or deliveries stopped after 100,000 entries. `unreadable` are values in Redis that cannot
    be read. An unreadable count of crashes is shown as 0.
    """

    topic: str
    group: str
    total: int
    rows: list[PendingRow]
    cursor: str
    complete: bool
    unreadable: list[Unreadable]


class _Source(NamedTuple):
    partition: int
    kind: str  # m | r
    stream: str


class _Found(NamedTuple):
    rank: int  # ascending in the requested order
    id: Id
    partition: int
    kind: str
    idle_ms: int | None
    deliveries: int
    consumer: str

    @property
    def position(self) -> tuple[int, Id, int, str]:
        return self[:4]


def view(
    store: Store,
    topic: str,
    group: str,
    *,
    order: str = "id",
    limit: int = 50,
    cursor: str = "",
) -> PendingView:
    """Look at one page of the pending entries, in one of `ORDERS`.

    By id (the oldest first) pages fit together exactly. By idle time (the longest first) and by
    deliveries (the most first) they are a ranking of a moment: entries move between two looks.
    Raises TopicMissing, Refused.
    """
    bad = BadValues()
    count = groups.known(store, topic, group, bad)
    sources = [
        source
        for number in range(count)
        for source in (
            _Source(number, "m", store.keys.source(topic, number, group)),
            _Source(number, "r", store.keys.retry_stream(topic, number, group)),
        )
    ]
    totals = ask(store, [("XPENDING", source.stream, group) for source in sources], bad)
    total = sum(int(reply[0]) for reply in totals if reply)
    after = _read_cursor(cursor) if cursor else None
    busy = [s for s, reply in zip(sources, totals, strict=True) if reply and reply[0]]
    complete = True
    if order == "id":
        start = after[1] if after else None
        readers = [_ordered(store, source, group, start) for source in busy]
        stream: Iterator[_Found] = heapq.merge(*readers, key=lambda found: found.position)
        page = _take(stream, after, limit + 1)
    else:
        complete = total <= SCAN_MAX
        scanned = _scan(store, busy, group, order)
        behind = (found for found in scanned if after is None or found.position > after)
        page = heapq.nsmallest(limit + 1, behind, key=lambda found: found.position)
    more = len(page) > limit
    page = page[:limit]
    rows = _rows(store, topic, group, page, bad)
    return PendingView(
        topic=topic,
        group=group,
        total=total,
        rows=rows,
        cursor=_write_cursor(page[-1]) if more else "",
        complete=complete,
        unreadable=bad.rows,
    )


def _take(
    found: Iterator[_Found], after: tuple[int, Id, int, str] | None, count: int
) -> list[_Found]:
    page: list[_Found] = []
    for each in found:
        if after is None or each.position > after:
            page.append(each)
            if len(page) == count:
                break
    return page


def _ordered(store: Store, source: _Source, group: str, start: Id | None) -> Iterator[_Found]:
    """Yield the pending entries of one stream by id, from `start` on."""
    lower = "-" if start is None else str(start)
    while lower:
        page = store.execute("XPENDING", source.stream, group, lower, "+", PAGE)
        for raw in page:
            yield _found(source, raw, 0)
        if len(page) < PAGE:
            return
        lower = behind(page[-1][0])


def _scan(store: Store, sources: list[_Source], group: str, order: str) -> Iterator[_Found]:
    """Yield all pending entries, up to the bound, ranked."""
    left = SCAN_MAX
    positions = dict.fromkeys(sources, "-")
    while positions and left > 0:
        batch = list(positions.items())[: BATCH // 2]
        # The server's clock is read right before each page: an idle time means an instant
        # only together with the moment when it was read.
        commands: list[tuple[object, ...]] = []
        for source, lower in batch:
            commands += (("TIME",), ("XPENDING", source.stream, group, lower, "+", PAGE))
        replies = store.pipeline(commands)
        for at, (source, _) in enumerate(batch):
            time_reply, page = accepted(replies[2 * at : 2 * at + 2])
            now = int(time_reply[0]) * 1000 + int(time_reply[1]) // 1000
            for raw in page:
                # An entry without a consumer is always idle, and Redis reports an idle time of -1.
                since = now - int(raw[2]) if _owned(raw) else 0
                rank = since if order == "idle" else -int(raw[3])
                yield _found(source, raw, rank)
            left -= len(page)
            if len(page) < PAGE or not (following := behind(page[-1][0])):
                del positions[source]
            else:
                positions[source] = following


def _owned(raw: list[Any]) -> bool:
    return bool(raw[1]) and int(raw[2]) >= 0


def _found(source: _Source, raw: list[Any], rank: int) -> _Found:
    raw_id, consumer, idle, deliveries = raw
    return _Found(
        rank=rank,
        id=read_id(raw_id),
        partition=source.partition,
        kind=source.kind,
        idle_ms=int(idle) if _owned(raw) else None,
        deliveries=int(deliveries),
        consumer=consumer.decode("utf-8", "replace"),
    )


def _rows(
    store: Store, topic: str, group: str, page: list[_Found], bad: BadValues
) -> list[PendingRow]:
    places = [f"{found.kind}:{found.id}" for found in page]
    asked = [
        ("HGET", store.keys.attempts(topic, found.partition, group), f"{place}:c")
        for found, place in zip(page, places, strict=True)
    ]
    crashes = [
        bad.read(untrusted.integer, raw, key, field, default=0) or 0
        for (_, key, field), raw in zip(asked, ask(store, asked, bad), strict=True)
    ]
    return [
        PendingRow(
            partition=found.partition,
            place=place,
            written_unix_ms=found.id.ms,
            idle_ms=found.idle_ms,
            deliveries=found.deliveries,
            crashes=charged,
            consumer=found.consumer,
        )
        for found, place, charged in zip(page, places, crashes, strict=True)
    ]


def _write_cursor(last: _Found) -> str:
    return f"{last.rank}:{last.id}:{last.partition}:{last.kind}"


def _read_cursor(text: str) -> tuple[int, Id, int, str]:
    try:
        rank, entry_id, partition, kind = text.split(":")
        if kind not in ("m", "r"):
            raise ValueError(kind)
        return int(rank), read_id(entry_id), int(partition), kind
    except ValueError:
        raise Malformed(f"{text!r} is not a cursor that `streamqd pending` has printed") from None
