"""The history of a fleet: one entry for each instance and minute, kept for `daemon.history`.

The housekeeper of each instance appends the figures of its own workers, and the console reads them.
No entry covers the whole fleet, so a reader sums the entries of all instances.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.config.setting import NAME
from streamqd.errors import BadValue
from streamqd.store import untrusted
from streamqd.store.store import Store

ROWS_MAX = 1_000  # topics and groups in one entry, about 80 bytes each
BUCKETS_MAX = 64
ENTRIES_AT_ONCE = 200  # entries in one reply
_ENTRY_BYTES_MAX = 1 << 20
COUNTS = ("added", "acked", "failed", "retried", "dead_lettered", "expired")


@dataclass(slots=True)
class GroupMinute:
    """The figures of one group and topic in one interval, on one instance.

    `added`, the messages written to the partitions that the instance owns for the group, includes
    those of other producers. `lag` (messages) and `oldest_ms` (age of the oldest unfinished
    message) are those at the end of the interval. `handled` maps the index of a bucket of handling
    times, as in `scoreboard.BUCKETS`, to runs.
    """

    topic: str
    group: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    lag: int = 0
    oldest_ms: int = 0
    handled: dict[int, int] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """True if nothing happened and nothing waits."""
        return not (any(self.counts.values()) or self.lag or self.oldest_ms or self.handled)


@dataclass(frozen=True, slots=True)
class Interval:
    """One entry of one instance, for the `seconds` seconds before `until_unix_ms`.

    An entry that cannot be read has its error in `bad`, and no rows.
    """

    id: str
    instance: str = ""
    until_unix_ms: int = 0
    seconds: float = 0.0
    rows: Sequence[GroupMinute] = ()
    bad: BadValue | None = None


def append(store: Store, fleet: str, interval: Interval, keep_seconds: float) -> None:
    """Add an entry, and remove the entries that are older than `keep_seconds`.

    Beyond ROWS_MAX rows, the busiest are kept. Raises RedisRefused, RedisUnavailable.
    """
    busiest = sorted(interval.rows, key=lambda row: -sum(row.counts.values()) - row.lag)[:ROWS_MAX]
    since = max(0, interval.until_unix_ms - round(keep_seconds * 1000))
    store.execute(
        *("XADD", store.keys.history(fleet), "MINID", "~", since, "*"),
        *("instance", interval.instance, "until", interval.until_unix_ms),
        *("seconds", f"{interval.seconds:.3f}"),
        *("rows", json.dumps([_packed(row) for row in busiest], separators=(",", ":"))),
    )


def read(store: Store, fleet: str, since_unix_ms: int, after: str = "") -> Iterator[Interval]:
    """Yield the entries of the last intervals, oldest first, in pages of ENTRIES_AT_ONCE.

    Starts at `since_unix_ms` (the server's clock), or after the entry with the id `after` if that
    is later. An invalid entry has `bad` and no rows. Raises RedisRefused, RedisUnavailable.
    """
    key, start = store.keys.history(fleet), f"({after}" if after else str(since_unix_ms)
    while True:
        page = store.execute("XRANGE", key, start, "+", "COUNT", ENTRIES_AT_ONCE)
        for raw, fields in page:
            yield _interval(key, raw.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        if len(page) < ENTRIES_AT_ONCE:
            return
        start = f"({page[-1][0].decode()}"


def _packed(row: GroupMinute) -> list[Any]:
    counts = [row.counts[name] for name in COUNTS]
    return [row.topic, row.group, *counts, row.lag, row.oldest_ms, *_flat(row.handled)]


def _flat(handled: Mapping[int, int]) -> Iterable[int]:
    for index in sorted(handled):
        yield from (index, handled[index])


def _interval(key: str, entry_id: str, fields: Mapping[bytes, bytes]) -> Interval:
    try:
        return Interval(
            entry_id,
            untrusted.name(fields.get(b"instance"), key, "instance"),
            untrusted.integer(fields.get(b"until"), key, "until"),
            untrusted.number(fields.get(b"seconds"), key, "seconds", high=86_400.0),
            _rows(key, fields.get(b"rows", b"")),
        )
    except BadValue as error:
        return Interval(entry_id, bad=error)


def _rows(key: str, raw: bytes) -> list[GroupMinute]:
    bad = BadValue(key, "rows", untrusted.shown(raw), f"at most {ROWS_MAX} lists of figures")
    try:
        found = json.loads(raw) if len(raw) <= _ENTRY_BYTES_MAX else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) > ROWS_MAX:
        raise bad
    rows = [_row(each) for each in found]
    if None in rows:
        raise bad
    return [row for row in rows if row is not None]


def _row(raw: Any) -> GroupMinute | None:
    """Return a row, or None for anything else."""
    named = 2 + len(COUNTS) + 2
    if not isinstance(raw, list) or not named <= len(raw) <= named + 2 * BUCKETS_MAX:
        return None
    topic, group, *numbers = raw
    if not all(isinstance(name, str) and NAME.fullmatch(name) for name in (topic, group)):
        return None
    if not all(type(each) is int and 0 <= each <= untrusted.INTEGER_MAX for each in numbers):
        return None
    *_, lag, oldest = numbers[: len(COUNTS) + 2]
    buckets = numbers[len(COUNTS) + 2 :]
    if len(buckets) % 2 or any(index >= BUCKETS_MAX for index in buckets[::2]):
        return None
    return GroupMinute(
        topic,
        group,
        dict(zip(COUNTS, numbers, strict=False)),
        lag,
        oldest,
        dict(zip(buckets[::2], buckets[1::2], strict=True)),
    )
