"""Merge small files of a table into large ones, and delete files that no reader needs any longer.

The merge is a commit of the Delta log, so a reader sees the table before or after it. The deletion
is not a commit. It keeps replaced files for `grace`, because readers may still use them.
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
GRACE = 86_400.0  # seconds that replaced files stay for readers that already use them
FAN_IN = 8  # files of similar size, date and partition that are merged into one
_SMALLEST = 1 << 20  # bytes. Smaller files count as similar in size.
_DATES = 200  # dates in one merge commit
_BATCHES = 50  # batches between two searches for files to delete
_HOUR = 3600
_DATE, _NUMBER = "[0-9]{4}-[0-9]{2}-[0-9]{2}", "[0-9]+"  # partition columns, in this order


@dataclass
class Compacted:
    """The result of a run for one table: of a topic, or of another kind such as `parsed/orders`."""

    topic: str
    rows: int = 0
    files_before: int = 0
    files_after: int = 0
    purged: int = 0  # files that were replaced earlier and are deleted now
    seconds: float = 0.0


def compact(
    settings: config.Settings,
    folder: str | Path | Location,
    wanted: Sequence[str] = (),
    *,
    target: int = TARGET,
    grace: float = _HOUR,
) -> tuple[list[Compacted], list[RequestRefusedError | SparkError]]:
    """Compact these topics, or without `wanted` all topics, results of queries, and the history.

    Return the results, and the errors of the tables that failed. An error of one table does not
    stop the others. `target` is in bytes, `grace` in seconds. Raises RequestRefusedError for an
    invalid request.
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
        # Do not take the lease, which a standing query may hold for weeks. Delta detects conflicts.
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
    """Merge the small files of a table after `batches` new batches, so that reads stay fast.

    Every `_BATCHES` batches, also delete files that no reader needs any longer. A row is
    rewritten once per size class. Each class is eight times as large as the one before.
    """
    try:
        _merge_small_files(table, batches)
    except RequestRefusedError:
        return  # another program is changing the files. It or the next run merges them.
    except ArchiveDamagedError:
        raise
    except (ArchiveError, OSError) as error:  # only the merge failed, and the entries are archived
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
        for at in range(0, len(dates), _DATES):  # a message can have any date
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
    """Write small files into files of about `target` bytes. Return the old and the new ones."""
    from deltalake import CommitProperties

    before, version, mark = table.files(), table.version, uuid.uuid4().hex
    with table.changing():
        table.delta.optimize.compact(
            partition_filters=only,
            target_size=target,
            max_concurrent_tasks=1,
            writer_properties=_writer_properties(table),
            # Write no note, which would discard a batch that another run commits meanwhile.
            commit_properties=CommitProperties(custom_metadata={MARK: mark}),
        )
        # delta-rs writes and commits in one call, without flushing. Flush the files first, then the
        # log.
        table.reload()
        gone, new = _read_commit(table, version + 1, mark)
        table.settle(new)
    old = [each for each in before if each.path in gone]
    if sum(each.rows for each in old) != sum(each.rows for each in new):
        raise ArchiveDamagedError(f"{table.folder}: a compaction has changed the number of rows")
    return old, new


def _writer_properties(table: ArchiveTable) -> WriterProperties:
    """Return the writer properties of a table. Results of a query may contain NaN."""
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
    """Return the names of the files that the commit with this mark removed, and the added files.

    Other programs may have committed before and after it.
    """
    for actions in table.commits(first):
        if any(action.get("commitInfo", {}).get(MARK) == mark for action in actions):
            gone = {unquote(action["remove"]["path"]) for action in actions if "remove" in action}
            return gone, [
                _parse_added(table, action["add"]) for action in actions if "add" in action
            ]
    return set(), []  # there was no file to merge


def _parse_added(table: ArchiveTable, found: dict[str, Any]) -> WrittenFile:
    date, partition = table.parse_partition(found["partitionValues"])
    count = json.loads(found["stats"])["numRecords"]
    return WrittenFile(unquote(found["path"]), date, partition, count, found["size"], ZERO, ZERO)


def purge(table: ArchiveTable, grace: float) -> int:
    """Delete files that no version of the last `grace` seconds uses. Return their number.

    delta-rs only lists the files, because it would follow links and delete files outside the
    layout. Raises ArchiveError for a file that cannot be deleted.
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
    """Return True for the name of a file in the layout of a table."""
    layout = zip(table.partitioned, (_DATE, _NUMBER), strict=False)
    folders = "".join(f"{column}={value}/" for column, value in layout)
    return re.fullmatch(rf"{folders}[^/]+\.parquet", name) is not None
