"""Backlog of groups: exact figures for many assignments, even where the server keeps no count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamqd.admin.reading import BadValues, ask, group_names, measure_each
from streamqd.errors import BadValue
from streamqd.model import Unit
from streamqd.store import spark, statistics
from streamqd.store.fetch import CONSUMER
from streamqd.store.keys import Keys
from streamqd.store.scripts import Reply
from streamqd.store.store import Store

COUNT_MAX = 200_000  # unread entries of one stream that are counted one by one
PENDING_MAX = 10_000  # pending entries of one stream that are counted one by one


@dataclass(frozen=True, slots=True)
class UnitBacklog:
    """The backlog of a group on one partition.

    `position` is the ID delivered last. `lag` counts unread messages, including those in the
    group's retry stream (`retry_unread`). Where the server keeps no count, they are counted here,
    and `lag_exact` is false when `lag` is only a lower bound. `pending` messages were delivered and
    not acknowledged, `delayed` ones wait for their next attempt. Both times are the write times of
    the oldest message, null without one.
    """

    position: str
    lag: int
    lag_exact: bool
    pending: int
    retry_unread: int
    delayed: int
    oldest_unread_unix_ms: int | None
    oldest_pending_unix_ms: int | None


_NOTHING = UnitBacklog("0-0", 0, False, 0, 0, 0, None, None)


def backlogs(store: Store, units: Sequence[Unit], bad: BadValues) -> dict[Unit, UnitBacklog]:
    """Return the backlog of each assignment whose group exists.

    An assignment that cannot be measured counts as empty and not exact.
    """
    measured: dict[Unit, statistics.UnitFigures] = {}
    found: dict[Unit, UnitBacklog] = {}
    replies = measure_each(
        store, [statistics.measure_unit(store.keys, unit) for unit in units], bad
    )
    for unit, reply in zip(units, replies, strict=True):
        each = unit_figures(unit, reply, store.keys, bad)
        if each is not None:
            measured[unit] = each
        elif reply is None or reply.word != "NOGROUP":
            found[unit] = _NOTHING
    mains = positions(store, sorted({store.keys.source(*unit) for unit in measured}), bad)
    retries = positions(store, [store.keys.retry_stream(*unit) for unit in measured], bad)
    for unit, each in measured.items():
        stream, retry = store.keys.source(*unit), store.keys.retry_stream(*unit)
        position = mains[stream].get(unit.group, "0-0")
        unread, exact = _unread(store, stream, position, each.main)
        waiting, retry_exact = _unread(
            store, retry, retries[retry].get(unit.group, "0-0"), each.retry
        )
        pending = [each.main.oldest_pending_id, each.retry.oldest_pending_id]
        found[unit] = UnitBacklog(
            position=position,
            lag=unread + waiting,
            lag_exact=exact and retry_exact,
            pending=each.pending,
            retry_unread=waiting,
            delayed=each.delayed,
            oldest_unread_unix_ms=each.oldest_unread_unix_ms(),
            oldest_pending_unix_ms=min(
                (statistics.unix_ms(entry_id) for entry_id in pending if entry_id), default=None
            ),
        )
    return found


def figures(
    store: Store, units: Sequence[Unit], bad: BadValues
) -> list[statistics.UnitFigures | None]:
    """Measure units, as `unit_figures` reads them."""
    calls = [statistics.measure_unit(store.keys, unit) for unit in units]
    replies = measure_each(store, calls, bad)
    return [
        unit_figures(unit, reply, store.keys, bad)
        for unit, reply in zip(units, replies, strict=True)
    ]


def unit_figures(
    unit: Unit, reply: Reply | None, keys: Keys, bad: BadValues
) -> statistics.UnitFigures | None:
    """Parse a reply of `statistics.measure_unit`. None: no such group, or an unreadable reply."""
    if reply is None:
        return None
    try:
        return statistics.unit_figures(reply)
    except BadValue as error:
        # The script gets no key names: the value that it read is the due time of a retry.
        bad.add(BadValue(keys.retry(*unit), "a due time", error.found, error.wanted))
        return None


def positions(store: Store, streams: Sequence[str], bad: BadValues) -> dict[str, dict[str, str]]:
    """Return the groups of each stream, with the last ID delivered to each."""
    replies = ask(store, [("XINFO", "GROUPS", stream) for stream in streams], bad)
    return {
        stream: {
            each["name"]: each["last-delivered-id"].decode()
            for each in group_names(reply, stream, bad)
        }
        for stream, reply in zip(streams, replies, strict=True)
    }


def count_behind(store: Store, stream: str, position: str) -> tuple[int, bool]:
    """Count the entries after a position. False means that there may be more.

    No body is read. Entries written during the count do not prolong it.
    """
    newest = store.execute("XREVRANGE", stream, "+", "-", "COUNT", 1)
    if not newest:
        return 0, True
    return count_between(store, stream, position, newest[0][0].decode())


def count_between(
    store: Store, stream: str, position: str, upto: str, most: int | None = None
) -> tuple[int, bool]:
    """Count the entries after a position, up to `upto` inclusive. False as for `count_behind`."""
    most, total = most or COUNT_MAX, 0
    while total < most:
        gone, last, more = store.run(spark.step(stream, position, upto, spark.STEP_MAX)).rest
        total += int(gone)
        position = last.decode()
        if not more:
            return total, True
    return total, position == upto


def _unread(
    store: Store, stream: str, position: str, backlog: statistics.Backlog
) -> tuple[int, bool]:
    if backlog.unread is not None:
        return backlog.unread, True
    return count_behind(store, stream, position)


def other_clients(store: Store, units: Sequence[Unit], bad: BadValues) -> list[dict[str, int]]:
    """Return, by unit, the other clients that hold entries, and how many.

    '' stands for entries that no client holds.
    """
    asked = [
        ("XPENDING", stream, unit.group)
        for unit in units
        for stream in (store.keys.source(*unit), store.keys.retry_stream(*unit))
    ]
    replies = ask(store, asked, bad)
    return [held_by_others(replies[at : at + 2]) for at in range(0, len(replies), 2)]


def held_by_others(replies: Sequence[Any]) -> dict[str, int]:
    """Return the same for one unit, from the XPENDING summary of each of its streams."""
    found: Counter[str] = Counter()
    for reply in replies:
        clients = [(name, int(count)) for name, count in (reply[3] or ())] if reply else []
        for name, count in clients:
            if name not in (CONSUMER.encode(), b""):
                found[name.decode("utf-8", "replace")] += count
        unowned = int(reply[0]) - sum(count for name, count in clients if name) if reply else 0
        if unowned > 0:
            found[""] += unowned
    return dict(found)
