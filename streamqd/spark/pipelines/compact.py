"""Merge small files of a table into large ones, and delete files that no reader needs any longer.

A merge is a commit in the Delta log, so readers see the table either before or after it. Replaced
files are deleted in a separate step and only after a grace period, because readers may still be
using them.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from streamqd import config
from streamqd.errors import RequestRefusedError, SparkError
from streamqd.spark.location import Location
from streamqd.spark.offsets import ZERO
from streamqd.spark.pipelines import derived, tables
from streamqd.spark.pipelines.kinds import DEAD, HISTORY
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.parts import GROUP_ROWS, WrittenFile, bounded_with_nan
from streamqd.spark.pipelines.storage import (
    MARK,
    Archive,
    ArchiveDamagedError,
    ArchiveError,
    ArchiveTable,
)
from streamqd.store.keys import Keys

if TYPE_CHECKING:
    from deltalake import WriterProperties

_log = logging.getLogger("streamqd.spark")

TARGET = 256 << 20  # target size of a file in bytes
GRACE = 86_400.0  # seconds for which replaced files are kept for readers that already use them
FAN_IN = 8  # number of files with the same date, partition and size class that triggers a merge
_SMALLEST = 1 << 20  # bytes up to which all files are in the same size class
_DATES = 200  # maximum dates in one merge commit
_BATCHES = 50  # batches between two searches for files to delete
_HOUR = 3600
_DATE, _NUMBER = "[0-9]{4}-[0-9]{2}-[0-9]{2}", "[0-9]+"  # partition columns, in this order


@dataclass
class Compacted:
    """The result of a run for one table.

    `topic` is the name of a topic, or the path of a table of another kind, such as `parsed/orders`.
    """

    topic: str
    rows: int = 0
    files_before: int = 0
    files_after: int = 0
    purged: int = 0  # files that were replaced earlier, and that this run has deleted
    seconds: float = 0.0


def compact(
    settings: config.Settings,
    folder: str | Path | Location,
    wanted: Sequence[str] = (),
    *,
    target: int = TARGET,
    grace: float = _HOUR,
) -> tuple[list[Compacted], list[RequestRefusedError | SparkError]]:
    """Compact the tables of these topics, which contain entries, dead letters and parsed payloads.

    If no topics are given, all topics, the results of queries and the history are compacted.
    `target` is the size of the new files in bytes. `grace` is the time in seconds for which
    replaced files are kept.

    Returns the results, and the errors of the tables that failed. An error in one table does not
    stop the others. Raises RequestRefusedError for an invalid request.
    """
    if grace < _HOUR:
        raise RequestRefusedError(
            "the grace period must be at least 1h, because a run may still write these files"
        )
    archive = Archive(folder, options=settings.archive.pairs)
    known = archive.topics()
    missing = [name for name in wanted if name not in known]
    if missing:
        raise RequestRefusedError(f"{archive.root} contains no data of topic {missing[0]}")
    keys = Keys(settings.keys.control, settings.keys.streams)
    done: list[Compacted] = []
    problems: list[RequestRefusedError | SparkError] = []
    for topic in wanted or known:
        lease = PipelineLease(lambda: tables.connect(settings), keys, topic, archive.lease_name)
        with _collect_problems(problems), lease:
            with _collect_problems(problems):
                table = archive.table(topic)
                assert table is not None
                done.append(_compact_table(table, topic, target, grace))
            with _collect_problems(problems):
                if dead_letters := archive.derived_table(topic, DEAD):
                    done.append(
                        _compact_table(dead_letters, f"{DEAD.folder}/{topic}", target, grace)
                    )
            for made in derived.open_pair(archive, topic) or ():
                with _collect_problems(problems):
                    done.append(_compact_table(made, f"{made.kind.folder}/{topic}", target, grace))
    for kind in () if wanted else (derived.RESULTS, HISTORY):
        # These tables are compacted without their lease, because a standing query may hold it for
        # weeks. If both commit changes that conflict, Delta detects this.
        for name in archive.names(kind):
            with _collect_problems(problems):
                result = archive.derived_table(name, kind)
                assert result is not None
                done.append(_compact_table(result, f"{kind.folder}/{name}", target, grace))
    return done, problems


@contextmanager
def _collect_problems(problems: list[RequestRefusedError | SparkError]) -> Iterator[None]:
    try:
        yield
    except (RequestRefusedError, SparkError) as error:
        problems.append(error)


def _compact_table(table: ArchiveTable, name: str, target: int, grace: float) -> Compacted:
    began = time.monotonic()
    result = Compacted(name)
    old, new = rewrite(table, target)
    result.rows = sum(file.rows for file in new)
    result.files_before, result.files_after = len(old), len(new)
    result.purged = purge(table, grace)
    result.seconds = round(time.monotonic() - began, 3)
    return result


def merge_small_files(table: ArchiveTable, batches: int) -> None:
    """Merge the small files of a table, so that reads remain fast.

    `batches` is the number of batches added since the last call. Every `_BATCHES` batches, this
    also deletes files that no reader needs any longer.

    Only files of the same size class are merged with each other, and each class is eight times as
    large as the previous one. A row is therefore rewritten only once per size class.
    """
    try:
        _merge_small_files(table, batches)
    except RequestRefusedError:
        return  # another program is changing the files, so that program or the next run merges them
    except ArchiveDamagedError:
        raise
    except (ArchiveError, OSError) as error:  # the entries are safe, as only the merge failed
        _log.warning("the small files of %s were not merged: %s", table.topic, error)


def _merge_small_files(table: ArchiveTable, batches: int) -> None:
    sizes = Counter(
        (each.date, each.partition, _size_class(each.size))
        for each in table.files()
        if each.size < TARGET
    )
    many: dict[tuple[int, int], list[str]] = defaultdict(list)
    for (date, partition, size), count in sorted(sizes.items()):
        if count >= FAN_IN:
            many[partition, size].append(date)
    for (partition, size), dates in many.items():
        target = min(TARGET, _SMALLEST * FAN_IN ** (size + 1))
        for at in range(0, len(dates), _DATES):  # there can be many, as messages can have any date
            part = dates[at : at + _DATES]
            only = [
                (name, "in", part) if name == table.partitioned[0] else (name, "=", value)
                for name, value in table.values(part[0], partition).items()
            ]
            rewrite(table, target, only or None)
    if table.note.batch // _BATCHES > (table.note.batch - batches) // _BATCHES:
        purge(table, GRACE)


def _size_class(size: int) -> int:
    """Return the size class of a file: 0 up to 1 MiB, 1 up to 8 MiB, and so on."""
    return max(0, math.ceil(math.log(max(size, 1) / _SMALLEST, FAN_IN)))


def rewrite(
    table: ArchiveTable, target: int, only: Any = None
) -> tuple[list[WrittenFile], list[WrittenFile]]:
    """Merge small files into files of about `target` bytes. Return the old and the new files.

    Raises ArchiveDamagedError if the merge has changed the number of rows.
    """
    from deltalake import CommitProperties

    before, version, mark = table.files(), table.version, uuid.uuid4().hex
    with table.changing():
        table.delta.optimize.compact(
            partition_filters=only,
            target_size=target,
            max_concurrent_tasks=1,
            writer_properties=_writer_properties(table),
            # The commit has no note. If another run commits a batch at the same time, a note here
            # would replace that run's note and so discard the batch.
            commit_properties=CommitProperties(custom_metadata={MARK: mark}),
        )
        # delta-rs writes and commits in a single call, without flushing. The new files are
        # therefore flushed here, and the log is flushed at the end of this block.
        table.reload()
        gone, new = _read_commit(table, version + 1, mark)
        table.settle(new)
    old = [each for each in before if each.path in gone]
    if sum(each.rows for each in old) != sum(each.rows for each in new):
        raise ArchiveDamagedError(f"{table.folder}: a compaction has changed the number of rows")
    return old, new


def _writer_properties(table: ArchiveTable) -> WriterProperties:
    """Return the properties with which the files of a table are written.

    Tables of results may contain NaN, which breaks the bounds of columns. In these tables, only
    columns whose bounds can be trusted get statistics.
    """
    from deltalake import ColumnProperties, WriterProperties

    if table.kind != derived.RESULTS:
        return WriterProperties(compression="ZSTD", max_row_group_size=GROUP_ROWS)
    names = bounded_with_nan(tables.arrow_columns(table))
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=GROUP_ROWS,
        default_column_properties=ColumnProperties(statistics_enabled="NONE"),
        column_properties={name: ColumnProperties(statistics_enabled="CHUNK") for name in names},
    )


def _read_commit(table: ArchiveTable, first: int, mark: str) -> tuple[set[str], list[WrittenFile]]:
    """Return the names of the files that the commit with this mark removed, and the files it added.

    All commits from version `first` on are searched, because other programs may have committed
    before or after the merge.
    """
    for actions in table.commits(first):
        if any(action.get("commitInfo", {}).get(MARK) == mark for action in actions):
            gone = {unquote(action["remove"]["path"]) for action in actions if "remove" in action}
            return gone, [
                _parse_added(table, action["add"]) for action in actions if "add" in action
            ]
    return set(), []  # there were no files to merge, so there is no commit


def _parse_added(table: ArchiveTable, found: dict[str, Any]) -> WrittenFile:
    date, partition = table.parse_partition(found["partitionValues"])
    count = json.loads(found["stats"])["numRecords"]
    return WrittenFile(unquote(found["path"]), date, partition, count, found["size"], ZERO, ZERO)


def purge(table: ArchiveTable, grace: float) -> int:
    """Delete the files that no version of the last `grace` seconds contains. Return their number.

    delta-rs only lists these files. It does not delete them, because it would follow links and also
    delete files that do not belong to the table. Raises ArchiveError if a file cannot be deleted.
    """
    count = 0
    for name in table.find_unnamed(grace):
        try:
            if _is_table_file(table, name) and table.folder.remove(name):
                count += 1
        except OSError as error:
            raise ArchiveError(
                f"{table.folder}/{name} cannot be deleted: {table.folder.describe_error(error)}"
            ) from error
    return count


def _is_table_file(table: ArchiveTable, name: str) -> bool:
    """Return True if a name fits the layout of the table's files."""
    layout = zip(table.partitioned, (_DATE, _NUMBER), strict=False)
    folders = "".join(f"{column}={value}/" for column, value in layout)
    return re.fullmatch(rf"{folders}[^/]+\.parquet", name) is not None
