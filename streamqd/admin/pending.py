"""List the entries that a group has received but not acknowledged, over all partitions."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamqd.admin import groups
from streamqd.admin.messages import FoundMessage, MessageFilter, MessageList, MessagePosition
from streamqd.admin.reading import BATCH, Id, ViewReader, range_after, read_id
from streamqd.store import untrusted
from streamqd.store.replies import check_replies
from streamqd.store.store import Store

SCAN_MAX = 100_000  # maximum number of entries that are ranked by idle time or deliveries
PAGE = 500
ORDERS = ("id", "idle", "deliveries")


@dataclass(frozen=True, slots=True)
class PendingRow:
    """One pending entry.

    `place` is the ID of the entry with a prefix: `m:` for the partition's stream, or `r:` for the
    group's retry stream. `idle_ms` is the time since its last delivery, and `deliveries` is the
    number of its deliveries, as counted by Redis. `crashes` is the number of crashes of worker
    processes that were counted against the entry. `consumer` is `w` for streamqd, or the name of
    another client's consumer. If no consumer holds the entry, `consumer` is '' and `idle_ms` is
    null.
    """

    partition: int
    place: str
    written_unix_ms: int
    idle_ms: int | None
    deliveries: int
    crashes: int
    consumer: str


class _Source(NamedTuple):
    partition: int
    kind: str  # m | r
    stream: str


Pending = FoundMessage[list[Any]]  # a row of XPENDING: ID, consumer, idle time, deliveries


def messages(
    store: Store, topic: str, group: str, order: str = "id"
) -> MessageList[list[Any], PendingRow]:
    """Return the pending entries of a group, in one of `ORDERS`.

    The order `id` starts with the oldest entry, and its pages together contain every entry. The
    orders `idle` and `deliveries` start with the highest value. They rank no more than 100,000
    entries for each page. Because an entry's rank can change between two pages, they may omit or
    repeat entries. Raises TopicNotFoundError and RequestRefusedError.
    """
    reader = ViewReader(store)
    partitions = groups.partition_count(store, topic, group, reader)
    sources = [
        source
        for number in range(partitions)
        for source in (
            _Source(number, "m", store.keys.source(topic, number, group)),
            _Source(number, "r", store.keys.retry_stream(topic, number, group)),
        )
    ]
    totals = reader.ask([("XPENDING", source.stream, group) for source in sources])
    busy = [s for s, reply in zip(sources, totals, strict=True) if reply and reply[0]]
    total = sum(int(reply[0]) for reply in totals if reply)

    def read(
        some: Sequence[int], choice: MessageFilter, after: MessagePosition | None, limit: int
    ) -> list[Iterator[Pending]]:
        chosen = [source for source in busy if source.partition in some]
        if order == "id":
            start = "-" if after is None else after.place[2:]
            return [_by_id(store, source, group, start) for source in chosen]
        ranked = (
            each
            for each in _scan(store, chosen, group, order)
            if choice.takes(each.unix_ms, each.fields)
            and (after is None or _key(each.position) > _key(after))
        )
        return [iter(heapq.nsmallest(limit, ranked, key=lambda each: _key(each.position)))]

    return MessageList(
        reader=reader,
        topic=topic,
        partitions=partitions,
        total=lambda: total,
        order=_key,
        read=read,
        rows=lambda found: _rows(reader, topic, group, found),
        complete=order == "id" or total <= SCAN_MAX,
    )


def _key(position: MessagePosition) -> tuple[int, Id, int, str]:
    kind, _, raw = position.place.partition(":")
    if kind not in ("m", "r"):
        raise ValueError(kind)
    return position.rank, read_id(raw), position.partition, kind


def _by_id(store: Store, source: _Source, group: str, lower: str) -> Iterator[Pending]:
    while lower:
        page = store.execute("XPENDING", source.stream, group, lower, "+", PAGE)
        for raw in page:
            yield _to_message(source, raw, 0)
        if len(page) < PAGE:
            return
        lower = range_after(page[-1][0])


def _scan(store: Store, sources: list[_Source], group: str, order: str) -> Iterator[Pending]:
    """Yield up to SCAN_MAX pending entries, each with its rank in this order."""
    left = SCAN_MAX
    positions = dict.fromkeys(sources, "-")
    while positions and left > 0:
        batch = list(positions.items())[: BATCH // 2]
        # The server's clock is read immediately before each page. The time of the last delivery is
        # this time minus the idle time in the page.
        commands: list[tuple[object, ...]] = []
        for source, lower in batch:
            commands += (("TIME",), ("XPENDING", source.stream, group, lower, "+", PAGE))
        replies = store.pipeline(commands)
        for at, (source, _) in enumerate(batch):
            time_reply, page = check_replies(replies[2 * at : 2 * at + 2])
            now = int(time_reply[0]) * 1000 + int(time_reply[1]) // 1000
            for raw in page:
                # Redis reports an idle time of -1 for an entry without a consumer. Such an entry is
                # ranked as if it had always been idle.
                since = now - int(raw[2]) if _is_owned(raw) else 0
                rank = since if order == "idle" else -int(raw[3])
                yield _to_message(source, raw, rank)
            left -= len(page)
            if len(page) < PAGE or not (following := range_after(page[-1][0])):
                del positions[source]
            else:
                positions[source] = following


def _is_owned(raw: list[Any]) -> bool:
    return bool(raw[1]) and int(raw[2]) >= 0


def _to_message(source: _Source, raw: list[Any], rank: int) -> Pending:
    position = MessagePosition(rank, source.partition, f"{source.kind}:{raw[0].decode()}")
    return FoundMessage(position, read_id(raw[0]).ms, {}, raw)


def _rows(reader: ViewReader, topic: str, group: str, found: Sequence[Pending]) -> list[PendingRow]:
    asked = [
        ("HGET", reader.keys.attempts(topic, at.partition, group), f"{at.place}:c")
        for at, *_ in found
    ]
    crashes = [
        reader.read(untrusted.integer, raw, key, field, default=0) or 0
        for (_, key, field), raw in zip(asked, reader.ask(asked), strict=True)
    ]
    return [
        PendingRow(
            partition=at.partition,
            place=at.place,
            written_unix_ms=written,
            idle_ms=int(raw[2]) if _is_owned(raw) else None,
            deliveries=int(raw[3]),
            crashes=charged,
            consumer=raw[1].decode("utf-8", "replace"),
        )
        for (at, written, _, raw), charged in zip(found, crashes, strict=True)
    ]
