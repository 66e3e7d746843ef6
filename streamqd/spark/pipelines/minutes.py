"""Archive the figures that housekeepers write to Redis each minute, in a Delta table per fleet.

A row contains the figures of one assignment for one minute. It comes from an entry of the history,
and is identified by the entry's ID, the minute and the assignment. An entry that covers several
minutes is divided among them, as in the charts of the console.

The commit that adds rows also stores the ID of the last entry as the table's position, so no row is
repeated if a run is killed. Redis trims entries that are older than `daemon.history`. Entries that
were trimmed before a run are not in the table. Spark is not needed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streamqd.scoreboard import BUCKETS, DELAY_BUCKETS, quantile
from streamqd.spark import offsets
from streamqd.spark.offsets import Position
from streamqd.spark.pipelines import compact
from streamqd.spark.pipelines.kinds import (
    COUNTS,
    DELAY_QUANTILES,
    HISTORY,
    QUANTILES,
    minute_columns,
)
from streamqd.spark.pipelines.storage import Archive, ArchiveTable
from streamqd.store import history
from streamqd.store.history import HistoryRow, Interval
from streamqd.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

    from streamqd.spark.pipelines.parts import WrittenFile

ROWS_MAX = 50_000  # approximate number of rows in one commit
_LAST_MINUTE = 253_402_300_799 // 60  # last minute of the calendar, at the end of the year 9999


class MinuteArchiver:
    """Archives the history of one fleet. The caller must hold the lease on this history."""

    def __init__(self, archive: Archive, store: Store, fleet: str) -> None:
        self._archive = archive
        self._store = store
        self._fleet = fleet
        self.unreadable = 0  # number of invalid entries that were left out

    def run(self, check: Callable[[], None]) -> int:
        """Archive all entries that exist now. Return the number of new rows.

        `check` must raise an error if the lease is lost. Raises ArchiveError, RequestRefusedError,
        RedisUnavailableError, RedisResponseError or OSError.
        """
        table = self._archive.derived_table(self._fleet, HISTORY)
        entries = history.read(self._store, self._fleet, 0, _last_entry_id(table, self._fleet))
        total = commits = 0
        for last, rows in _portions(self._read(entries)):
            table = table or self._archive.derived_table(self._fleet, HISTORY, minute_columns())
            assert table is not None
            if not commits:
                table.grow(minute_columns())  # older tables lack the columns for delays
            files = _write_rows(table, rows)
            check()
            table.append(files, {(self._fleet, 0): Position(offsets.read_id(last))})
            total, commits = total + len(rows), commits + 1
        if table is not None and commits:
            compact.merge_small_files(table, commits)
        return total

    def _read(self, entries: Iterable[Interval]) -> Iterator[Interval]:
        for entry in entries:
            self.unreadable += entry.bad is not None
            yield entry


def unarchived_rows(store: Store, table: ArchiveTable | None, fleet: str) -> pa.Table:
    """Return the history rows in Redis that are not in the table, or all if there is no table."""
    import pyarrow as pa

    schema = minute_columns()
    entries = history.read(store, fleet, 0, _last_entry_id(table, fleet))
    parts = [pa.Table.from_pylist(rows, schema) for _, rows in _portions(entries)]
    return pa.concat_tables(parts or [pa.Table.from_pylist([], schema)])


def _last_entry_id(table: ArchiveTable | None, fleet: str) -> str:
    """Return the ID of the last archived entry, or '' if no entry was archived."""
    end = None if table is None else table.positions.get((fleet, 0))
    return "" if end is None else offsets.write_id(end.id)


def _portions(entries: Iterable[Interval]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield rows in portions of whole entries, each with the ID of its last entry."""
    last, rows = "", list[dict[str, Any]]()
    for entry in entries:
        last = entry.id
        rows += _rows(entry)
        if len(rows) >= ROWS_MAX:
            yield last, rows
            last, rows = "", []
    if rows:
        yield last, rows


def _write_rows(table: ArchiveTable, rows: list[dict[str, Any]]) -> list[WrittenFile]:
    """Write rows to one file for each date."""
    import pyarrow as pa

    from streamqd.spark.pipelines.parts import DateWriter

    own = pa.schema([column for column in minute_columns() if column.name != "date"])
    writer = DateWriter(table.folder, "date", own)
    dates: dict[dt.date, list[dict[str, Any]]] = {}
    for row in rows:
        dates.setdefault(row["date"], []).append(row)
    try:
        for date, found in sorted(dates.items()):
            writer.write(date.isoformat(), pa.RecordBatch.from_pylist(found, own))
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


def _rows(entry: Interval) -> list[dict[str, Any]]:
    """Return the rows of an entry, or no rows if the entry cannot be read.

    An entry after an outage covers several minutes. Each of these minutes gets a share of the
    counts.
    """
    assignments, minutes = entry.by_assignment(), entry.minutes
    if not assignments:
        return []
    minutes = minutes[-max(1, ROWS_MAX // len(assignments)) :]  # limits the rows from one entry
    rows, parts = [], len(minutes)
    for at, number in enumerate(minutes):
        minute = dt.datetime.fromtimestamp(min(number, _LAST_MINUTE) * 60, dt.UTC)
        shared = {"date": minute.date(), "minute": minute, "instance": entry.instance}
        shared |= {"covered_seconds": entry.seconds / parts, "entry": entry.id}
        at_end = at == parts - 1 and entry.reaches_end
        rows += [
            shared | _figures(assignment, at, parts, at_end=at_end) for assignment in assignments
        ]
    return rows


def _figures(assignment: HistoryRow, at: int, parts: int, *, at_end: bool) -> dict[str, Any]:
    """Return part `at` of an assignment's figures, which are divided into a number of equal parts.

    The lag was measured at the end of the entry, so only the part that reaches this end (`at_end`)
    has a lag.
    """
    handled = _bucket_part(assignment.handled, at, parts)
    delays = None if assignment.delays is None else _bucket_part(assignment.delays, at, parts)
    return {
        "topic": assignment.topic,
        "group": assignment.group,
        "partition": assignment.partition,
        "handler": assignment.handler or None,
        **{
            column: history.split_evenly(assignment.counts[name], at, parts)
            for column, name in COUNTS.items()
        },
        "lag": assignment.lag if at_end else None,
        "oldest_seconds": assignment.oldest_ms / 1000 if at_end else None,
        **{name: quantile(handled, share) for name, share in QUANTILES.items()},
        "handling": list(_by_bound(handled, BUCKETS).items()),
        **{
            name: quantile(delays or {}, share, DELAY_BUCKETS)
            for name, share in DELAY_QUANTILES.items()
        },
        "delay": None if delays is None else list(_by_bound(delays, DELAY_BUCKETS).items()),
    }


def _bucket_part(runs: Mapping[int, int], at: int, parts: int) -> dict[int, int]:
    """Return part `at` of the runs in each bucket, without empty buckets."""
    shares = ((bucket, history.split_evenly(count, at, parts)) for bucket, count in runs.items())
    return {bucket: count for bucket, count in shares if count}


def _by_bound(runs: Mapping[int, int], bounds: Sequence[float]) -> dict[float, int]:
    """Return the number of runs by their bucket's upper bound (seconds), smallest bound first."""
    found: dict[float, int] = {}
    for index, count in sorted(runs.items()):
        bound = bounds[min(index, len(bounds) - 1)]
        found[bound] = found.get(bound, 0) + count
    return found
