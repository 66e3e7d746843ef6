"""The history of a fleet: one entry for each instance and minute, kept for `daemon.history`.

The housekeeper of each instance appends the figures of its own workers. The console reads the rows
of groups, and `streamqd pipeline archive` reads the figures of assignments. No entry covers the
whole fleet, so readers sum the entries of all instances.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from streamqd.config.setting import NAME
from streamqd.errors import InvalidValueError
from streamqd.model import DLQ_SUFFIX
from streamqd.store import untrusted
from streamqd.store.store import Store

ROWS_MAX = 1_000  # topics and groups in one entry, about 80 bytes each
ASSIGNMENTS_MAX = 1_000  # assignments in one entry, about 110 bytes each
BUCKETS_MAX = 64
HANDLER_MAX = 300  # characters of the name of a handler
PARTITIONS_MAX = 1 << 16  # limit of the partition numbers that are read
MEASURED_MAX = 10_000  # groups in one entry whose partitions were measured, about 25 bytes each
ENTRIES_AT_ONCE = 200  # entries in one reply
_ENTRY_BYTES_MAX = 1 << 20
_MINUTE_MS = 60_000
_Item = TypeVar("_Item")
COUNTS = ("added", "acked", "failed", "retried", "dead_lettered", "expired")


@dataclass(slots=True)
class HistoryRow:
    """The figures of an assignment, or of a topic and group, in one interval on one instance.

    `partition` is None in a row for a group. Such a row sums all assignments of the group, or those
    without a row. `handler` is `module:function`, or '' if unknown.

    `added` counts the messages that any producer wrote to the partitions that the instance owns for
    the group. `lag` (messages) and `oldest_ms` (age of the oldest unfinished message) are the
    values at the end of the interval. `handled` maps an index in `scoreboard.BUCKETS` (the run
    time) to the number of runs. `delays` maps an index in `scoreboard.DELAY_BUCKETS` to the number
    of first runs. It is None if unknown: for a group, and in an entry of an older version.
    """

    topic: str
    group: str
    partition: int | None = None
    handler: str = ""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    lag: int = 0
    oldest_ms: int = 0
    handled: dict[int, int] = field(default_factory=dict)
    delays: dict[int, int] | None = None

    @property
    def idle(self) -> bool:
        """True if nothing happened and nothing waits."""
        runs = self.handled or self.delays
        return not (any(self.counts.values()) or self.lag or self.oldest_ms or runs)


@dataclass(frozen=True, slots=True)
class Interval:
    """An entry of one instance, for the `seconds` seconds before `until_unix_ms`.

    `rows` are sums of groups, and `assignments` the figures of assignments. `measured` maps a topic
    and group to the number of partitions that the instance owned at the end and whose lag it
    measured, including idle ones without a row. Entries of older versions have neither
    `assignments` nor `measured`. An invalid entry has only `bad`, the error.
    """

    id: str
    instance: str = ""
    until_unix_ms: int = 0
    seconds: float = 0.0
    rows: Sequence[HistoryRow] = ()
    bad: InvalidValueError | None = None
    assignments: Sequence[HistoryRow] = ()
    measured: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def minutes(self) -> range:
        """The minutes since 1970 to which the figures belong, at least one.

        An entry is written just after its minute. A housekeeper that starts or exits during a
        minute writes an entry for a part of the minute. After an outage, an entry covers several
        minutes.
        """
        spread = max(1, round(self.seconds / 60))
        middle = self.until_unix_ms - min(self.seconds, 60.0) * 500
        last = max(0, round(middle)) // _MINUTE_MS
        return range(max(0, last + 1 - spread), last + 1)

    @property
    def reaches_end(self) -> bool:
        """True if the interval includes the end of its last minute.

        Its lag is then the minute's lag.
        """
        return self.until_unix_ms >= self.minutes.stop * _MINUTE_MS

    def by_assignment(self) -> list[HistoryRow]:
        """Return the figures of assignments, and a row per group for the rest of its figures."""
        rest = {
            (row.topic, row.group): replace(row, counts=dict(row.counts), handled=dict(row.handled))
            for row in self.rows
        }
        for assignment in self.assignments:
            if left := rest.get((assignment.topic, assignment.group)):
                _subtract(left, assignment)
        return [*self.assignments, *(each for each in rest.values() if not each.idle)]


def share(count: int, at: int, parts: int) -> int:
    """Split a count evenly into `parts`, and return the part with index `at`."""
    return count * (at + 1) // parts - count * at // parts


def append(store: Store, fleet: str, interval: Interval, keep_seconds: float) -> None:
    """Add an entry, and remove the entries that are older than `keep_seconds`.

    If there are more than ROWS_MAX rows or ASSIGNMENTS_MAX assignments, only the busiest are
    written. Raises RedisResponseError, RedisUnavailableError.
    """
    rows, assignments = (
        _select_busiest(interval.rows, ROWS_MAX),
        _select_busiest(interval.assignments, ASSIGNMENTS_MAX),
    )
    measured = [[*pair, number] for pair, number in interval.measured.items()][:MEASURED_MAX]
    since = max(0, interval.until_unix_ms - round(keep_seconds * 1000))
    store.execute(
        *("XADD", store.keys.history(fleet), "MINID", "~", since, "*"),
        *("instance", interval.instance, "until", interval.until_unix_ms),
        *("seconds", f"{interval.seconds:.3f}"),
        *("rows", json.dumps([_row_values(row) for row in rows], separators=(",", ":"))),
        *("units", json.dumps(_packed_assignments(assignments), separators=(",", ":"))),
        *("delays", json.dumps(_packed_delays(assignments), separators=(",", ":"))),
        *("measured", json.dumps(measured, separators=(",", ":"))),
    )


def read(store: Store, fleet: str, since_unix_ms: int, after: str = "") -> Iterator[Interval]:
    """Yield entries, oldest first. They are read in pages of ENTRIES_AT_ONCE.

    Start at `since_unix_ms` (the server's clock), or after the entry with the ID `after` if that is
    later. An invalid entry has `bad` and no rows. Raises RedisResponseError, RedisUnavailableError.
    """
    key, start = store.keys.history(fleet), f"({after}" if after else str(since_unix_ms)
    while True:
        page = store.execute("XRANGE", key, start, "+", "COUNT", ENTRIES_AT_ONCE)
        for raw, fields in page:
            yield _interval(key, raw.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        if len(page) < ENTRIES_AT_ONCE:
            return
        start = f"({page[-1][0].decode()}"


def _select_busiest(rows: Iterable[HistoryRow], most: int) -> list[HistoryRow]:
    return sorted(rows, key=lambda row: -sum(row.counts.values()) - row.lag)[:most]


def _subtract(rest: HistoryRow, assignment: HistoryRow) -> None:
    """Subtract the figures of an assignment from the sums of its group."""
    for name in COUNTS:
        rest.counts[name] = max(0, rest.counts[name] - assignment.counts[name])
    rest.lag = max(0, rest.lag - assignment.lag)
    for index, runs in assignment.handled.items():
        rest.handled[index] = max(0, rest.handled.get(index, 0) - runs)
    rest.handled = {index: runs for index, runs in rest.handled.items() if runs}
    rest.handler = rest.handler or assignment.handler
    if not rest.lag:  # no lag is left, so the oldest message belongs to an assignment
        rest.oldest_ms = 0


def _row_values(row: HistoryRow) -> list[Any]:
    return [row.topic, row.group, *_figures(row)]


def _figures(row: HistoryRow) -> list[int]:
    counts = [row.counts[name] for name in COUNTS]
    return [*counts, row.lag, row.oldest_ms, *_flat(row.handled)]


def _packed_assignments(assignments: Iterable[HistoryRow]) -> list[Any]:
    """Return lists of topic, group, handler, and a list of figures for each partition."""
    return _group_by_names(
        ((each.topic, each.group, each.handler), [each.partition, *_figures(each)])
        for each in assignments
    )


def _packed_delays(assignments: Iterable[HistoryRow]) -> list[Any]:
    """Return lists of topic, group, and a list of figures for each partition with known delays.

    They are written to a separate field, which older versions ignore.
    """
    return _group_by_names(
        ((each.topic, each.group), [each.partition, *_flat(each.delays)])
        for each in assignments
        if each.delays is not None
    )


def _group_by_names(rows: Iterable[tuple[tuple[str, ...], list[Any]]]) -> list[Any]:
    """Return a list for each combination of names: the names, and the figures of their rows."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for names, figures in rows:
        found.setdefault(names, []).append(figures)
    return [[*names, listed] for names, listed in found.items()]


def _flat(handled: Mapping[int, int]) -> Iterable[int]:
    for index in sorted(handled):
        yield from (index, handled[index])


def _interval(key: str, entry_id: str, fields: Mapping[bytes, bytes]) -> Interval:
    try:
        assignments = _read(
            key, "units", fields.get(b"units", b"[]"), ASSIGNMENTS_MAX, _assignments
        )
        delays = dict(_read(key, "delays", fields.get(b"delays", b"[]"), ASSIGNMENTS_MAX, _delays))
        for assignment in assignments:
            assignment.delays = delays.get(
                (assignment.topic, assignment.group, assignment.partition)
            )
        return Interval(
            entry_id,
            untrusted.name(fields.get(b"instance"), key, "instance"),
            untrusted.integer(fields.get(b"until"), key, "until"),
            untrusted.number(fields.get(b"seconds"), key, "seconds", high=86_400.0),
            _read(key, "rows", fields.get(b"rows", b""), ROWS_MAX, _row),
            assignments=assignments,
            measured=dict(
                _read(
                    key, "measured", fields.get(b"measured", b"[]"), MEASURED_MAX, _parse_measured
                )
            ),
        )
    except InvalidValueError as error:
        return Interval(entry_id, bad=error)


def _read(
    key: str, name: str, raw: bytes, most: int, read_one: Callable[[Any], Iterable[_Item]]
) -> list[_Item]:
    """Return at most `most` parsed items. `read_one` raises ValueError for an invalid item."""
    try:
        listed = json.loads(raw) if len(raw) <= _ENTRY_BYTES_MAX else None
        if isinstance(listed, list) and len(listed) <= most:
            found = [each for one in listed for each in read_one(one)]
            if len(found) <= most:
                return found
    except (ValueError, RecursionError):
        pass
    raise InvalidValueError(
        key, name, untrusted.format_value(raw), f"at most {most} lists of figures"
    )


def _parse_measured(raw: Any) -> list[tuple[tuple[str, str], int]]:
    """Return a topic and group with the number of measured partitions."""
    if not isinstance(raw, list) or len(raw) != 3 or not _are_names(*raw[:2]):
        raise ValueError
    if not _is_count(raw[2], PARTITIONS_MAX):
        raise ValueError
    return [((raw[0], raw[1]), raw[2])]


def _row(raw: Any) -> list[HistoryRow]:
    """Return the row of a group."""
    if not isinstance(raw, list) or len(raw) < 2 or not _are_names(*raw[:2]):
        raise ValueError
    return [HistoryRow(raw[0], raw[1], None, "", *_read_figures(raw[2:]))]


def _assignments(raw: Any) -> list[HistoryRow]:
    """Return the rows of the assignments of a group."""
    if not isinstance(raw, list) or len(raw) != 4 or not _are_names(*raw[:2]):
        raise ValueError
    topic, group, handler, rows = raw
    if not _is_handler(handler):
        raise ValueError
    return [
        HistoryRow(topic, group, partition, handler, *_read_figures(figures))
        for partition, figures in _by_partition(rows)
    ]


def _delays(raw: Any) -> list[tuple[tuple[str, str, int | None], dict[int, int]]]:
    """Return the delays of the assignments of a group, by topic, group and partition."""
    if not isinstance(raw, list) or len(raw) != 3 or not _are_names(*raw[:2]):
        raise ValueError
    topic, group, rows = raw
    return [
        ((topic, group, partition), _read_buckets(figures))
        for partition, figures in _by_partition(rows)
    ]


def _by_partition(rows: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield the partition and the remaining figures of each list. Raises ValueError."""
    if not isinstance(rows, list):
        raise ValueError
    for row in rows:
        if not isinstance(row, list) or not row or not _is_count(row[0], PARTITIONS_MAX):
            raise ValueError
        yield row[0], row[1:]


def _are_names(topic: Any, group: Any) -> bool:
    """Return True for a valid topic and group. The group may be one that reads dead letters."""
    if not (isinstance(topic, str) and isinstance(group, str)):
        return False
    return all(NAME.fullmatch(name) for name in (topic, group.removesuffix(DLQ_SUFFIX)))


def _is_handler(value: Any) -> bool:
    """Return True for a valid handler name. A JSON string may contain a lone surrogate."""
    if not isinstance(value, str) or len(value) > HANDLER_MAX:
        return False
    return not any("\ud800" <= each <= "\udfff" for each in value)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _read_figures(numbers: list[Any]) -> tuple[dict[str, int], int, int, dict[int, int]]:
    """Return counts, lag, oldest_ms and handled runs of a list of figures. Raises ValueError."""
    named = len(COUNTS) + 2
    if len(numbers) < named:
        raise ValueError
    if not all(_is_count(each, untrusted.INTEGER_MAX) for each in numbers[:named]):
        raise ValueError
    return (
        dict(zip(COUNTS, numbers, strict=False)),
        *(numbers[len(COUNTS)], numbers[len(COUNTS) + 1]),
        _read_buckets(numbers[named:]),
    )


def _read_buckets(numbers: list[Any]) -> dict[int, int]:
    """Return runs by bucket, from a list of alternating buckets and runs. Raises ValueError."""
    if len(numbers) % 2 or len(numbers) > 2 * BUCKETS_MAX:
        raise ValueError
    if not all(_is_count(each, untrusted.INTEGER_MAX) for each in numbers):
        raise ValueError
    if any(index >= BUCKETS_MAX for index in numbers[::2]):
        raise ValueError
    return dict(zip(numbers[::2], numbers[1::2], strict=True))
