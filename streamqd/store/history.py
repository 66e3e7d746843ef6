"""The history of a fleet, which has one entry for each instance and minute.

Every minute, the housekeeper of each instance appends an entry with the figures of its own workers.
Entries are kept for `daemon.history`. The console reads the rows of groups, and `streamqd pipeline
archive` reads the rows of assignments. Because no entry covers the whole fleet, readers add up the
entries of all instances.
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

ROWS_MAX = 1_000  # maximum number of group rows in one entry, each about 80 bytes
ASSIGNMENTS_MAX = 1_000  # maximum number of assignments in one entry, each about 110 bytes
BUCKETS_MAX = 64  # maximum number of histogram buckets in a row
HANDLER_MAX = 300  # maximum number of characters in the name of a handler
PARTITIONS_MAX = 1 << 16  # largest partition number that is accepted
MEASURED_MAX = 10_000  # maximum number of groups in `measured` of one entry, each about 25 bytes
ENTRIES_AT_ONCE = 200  # maximum number of entries in one reply
_ENTRY_BYTES_MAX = 1 << 20
_MINUTE_MS = 60_000
_Item = TypeVar("_Item")
COUNTS = ("added", "acked", "failed", "retried", "dead_lettered", "expired")


@dataclass(slots=True)
class HistoryRow:
    """The figures of one assignment or of one group for an interval on one instance.

    In the row of a group, `partition` is None, and the figures are totals of the group's
    assignments. They include either all assignments, or only those that have no row of their own
    (see `Interval.by_assignment`). `handler` is `module:function`, or '' if it is unknown.

    In `counts`, `added` is the number of messages that producers wrote to the partitions that the
    instance owns for the group. `lag` (messages) and `oldest_ms` (age of the oldest unfinished
    message) are the values at the end of the interval. `handled` is a histogram of run times, which
    maps an index in `scoreboard.BUCKETS` to a number of runs. `delays` is a histogram of the delays
    before the first run, which maps an index in `scoreboard.DELAY_BUCKETS` to a number of runs. It
    is None for a group, and in an entry that an older version has written.
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
        """True if nothing happened in the interval and no message is waiting."""
        runs = self.handled or self.delays
        return not (any(self.counts.values()) or self.lag or self.oldest_ms or runs)


@dataclass(frozen=True, slots=True)
class Interval:
    """An entry of the history, in which one instance reports its figures for an interval.

    The interval ends at `until_unix_ms` and lasts `seconds` seconds. `rows` holds the totals of
    groups, and `assignments` the figures of single assignments. `measured` maps each topic and
    group to the number of partitions that the instance owned at the end of the interval and whose
    lag it measured. Idle partitions are included in this number, although they have no row.

    Entries from older versions have no `assignments` and no `measured`. If an entry is invalid,
    `bad` is the error, and all other fields except `id` have their default values.
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
        """The minutes to which the figures belong, counted from 1970.

        Usually this is the single minute that ended just before the entry was written. The entry of
        a housekeeper that started or exited in the middle of a minute covers only a part of that
        minute. After an outage, an entry may cover several minutes.
        """
        spread = max(1, round(self.seconds / 60))
        middle = self.until_unix_ms - min(self.seconds, 60.0) * 500
        last = max(0, round(middle)) // _MINUTE_MS
        return range(max(0, last + 1 - spread), last + 1)

    @property
    def reaches_end(self) -> bool:
        """True if the interval includes the end of its last minute.

        In that case, the lag in this entry is the lag at the end of the minute. Otherwise, it was
        measured in the middle of the minute.
        """
        return self.until_unix_ms >= self.minutes.stop * _MINUTE_MS

    def by_assignment(self) -> list[HistoryRow]:
        """Return the rows of assignments, and a row for the rest of each group.

        The rest of a group consists of the assignments that have no row of their own. If all its
        figures are 0, there is no row for it.
        """
        rest = {
            (row.topic, row.group): replace(row, counts=dict(row.counts), handled=dict(row.handled))
            for row in self.rows
        }
        for assignment in self.assignments:
            if left := rest.get((assignment.topic, assignment.group)):
                _subtract(left, assignment)
        return [*self.assignments, *(each for each in rest.values() if not each.idle)]


def split_evenly(count: int, at: int, parts: int) -> int:
    """Split a count into `parts` parts that are as equal as possible, and return part number `at`.

    Parts are numbered from 0.
    """
    return count * (at + 1) // parts - count * at // parts


def append(store: Store, fleet: str, interval: Interval, keep_seconds: float) -> None:
    """Add an entry to the history, and remove entries that are older than `keep_seconds`.

    If there are more than ROWS_MAX rows or ASSIGNMENTS_MAX assignments, only the busiest ones are
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
    """Yield the entries of the history, oldest first. Each round trip reads ENTRIES_AT_ONCE.

    If `after` is given, start after the entry with this ID. Otherwise, start at `since_unix_ms`
    (server clock). An invalid entry has no rows, and `bad` contains the error. Raises
    RedisResponseError, RedisUnavailableError.
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
    """Subtract the figures of an assignment from the totals of its group, which are `rest`."""
    for name in COUNTS:
        rest.counts[name] = max(0, rest.counts[name] - assignment.counts[name])
    rest.lag = max(0, rest.lag - assignment.lag)
    for index, runs in assignment.handled.items():
        rest.handled[index] = max(0, rest.handled.get(index, 0) - runs)
    rest.handled = {index: runs for index, runs in rest.handled.items() if runs}
    rest.handler = rest.handler or assignment.handler
    # `oldest_ms` is the age of the oldest message in the whole group. If the rest of the group has
    # no lag, that message belongs to an assignment with a row of its own.
    if not rest.lag:
        rest.oldest_ms = 0


def _row_values(row: HistoryRow) -> list[Any]:
    return [row.topic, row.group, *_figures(row)]


def _figures(row: HistoryRow) -> list[int]:
    counts = [row.counts[name] for name in COUNTS]
    return [*counts, row.lag, row.oldest_ms, *_flat(row.handled)]


def _packed_assignments(assignments: Iterable[HistoryRow]) -> list[Any]:
    """Convert rows of assignments to lists, to be stored as JSON.

    Each list has the form `[topic, group, handler, rows]`, in which `rows` contains a list for each
    partition: its number, followed by its figures.
    """
    return _group_by_names(
        ((each.topic, each.group, each.handler), [each.partition, *_figures(each)])
        for each in assignments
    )


def _packed_delays(assignments: Iterable[HistoryRow]) -> list[Any]:
    """Convert the known delays of assignments to lists, to be stored as JSON.

    Each list has the form `[topic, group, rows]`, in which `rows` contains a list for each
    partition: its number, followed by its histogram. Delays are stored in a field of their own,
    which older versions ignore.
    """
    return _group_by_names(
        ((each.topic, each.group), [each.partition, *_flat(each.delays)])
        for each in assignments
        if each.delays is not None
    )


def _group_by_names(rows: Iterable[tuple[tuple[str, ...], list[Any]]]) -> list[Any]:
    """Group rows by their names. Return a list for each group: the names, and its rows' figures."""
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
    """Parse a JSON list, and return its parsed items.

    `read_one` parses one element, and raises ValueError if it is invalid. Raises InvalidValueError
    if an element is invalid or there are more than `most` items.
    """
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
    """Parse an item of `measured`: a topic, a group, and how many partitions were measured."""
    if not isinstance(raw, list) or len(raw) != 3 or not _are_names(*raw[:2]):
        raise ValueError
    if not _is_count(raw[2], PARTITIONS_MAX):
        raise ValueError
    return [((raw[0], raw[1]), raw[2])]


def _row(raw: Any) -> list[HistoryRow]:
    """Parse the row of a group. Raises ValueError."""
    if not isinstance(raw, list) or len(raw) < 2 or not _are_names(*raw[:2]):
        raise ValueError
    return [HistoryRow(raw[0], raw[1], None, "", *_read_figures(raw[2:]))]


def _assignments(raw: Any) -> list[HistoryRow]:
    """Parse the rows of a group's assignments. Raises ValueError."""
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
    """Parse the delays of a group's assignments, and return them by topic, group and partition."""
    if not isinstance(raw, list) or len(raw) != 3 or not _are_names(*raw[:2]):
        raise ValueError
    topic, group, rows = raw
    return [
        ((topic, group, partition), _read_buckets(figures))
        for partition, figures in _by_partition(rows)
    ]


def _by_partition(rows: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield the partition number and the other figures of each list. Raises ValueError."""
    if not isinstance(rows, list):
        raise ValueError
    for row in rows:
        if not isinstance(row, list) or not row or not _is_count(row[0], PARTITIONS_MAX):
            raise ValueError
        yield row[0], row[1:]


def _are_names(topic: Any, group: Any) -> bool:
    """Return True if both names are valid. The group may be one that reads dead letters."""
    if not (isinstance(topic, str) and isinstance(group, str)):
        return False
    return all(NAME.fullmatch(name) for name in (topic, group.removesuffix(DLQ_SUFFIX)))


def _is_handler(value: Any) -> bool:
    """Return True if the value is a valid handler name.

    A JSON string may contain a lone surrogate, which cannot be encoded and is therefore rejected.
    """
    if not isinstance(value, str) or len(value) > HANDLER_MAX:
        return False
    return not any("\ud800" <= each <= "\udfff" for each in value)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _read_figures(numbers: list[Any]) -> tuple[dict[str, int], int, int, dict[int, int]]:
    """Parse a list of figures into counts, lag, `oldest_ms` and `handled`. Raises ValueError."""
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
    """Parse a list of alternating bucket indexes and numbers of runs. Raises ValueError."""
    if len(numbers) % 2 or len(numbers) > 2 * BUCKETS_MAX:
        raise ValueError
    if not all(_is_count(each, untrusted.INTEGER_MAX) for each in numbers):
        raise ValueError
    if any(index >= BUCKETS_MAX for index in numbers[::2]):
        raise ValueError
    return dict(zip(numbers[::2], numbers[1::2], strict=True))
