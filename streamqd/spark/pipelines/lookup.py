"""Find a message in an archive without Spark, by reading the table's files with pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyarrow import compute, parquet

from streamqd.spark.entries import LONG_MAX
from streamqd.spark.location import Location
from streamqd.spark.offsets import Id, read_id
from streamqd.spark.pipelines.parts import WrittenFile
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, opened_alone

_MS, _SEQ = compute.field("id_ms"), compute.field("id_seq")


@dataclass(frozen=True, slots=True)
class FoundInArchive:
    """The result of a search for a message in an archive.

    `file` is the path or the URL of a file whose range of IDs includes the message, or '' if there
    is none. `found` is True if this file contains the message.
    """

    file: str
    found: bool


def find_entry(
    folder: str | Path | Location,
    topic: str,
    partition: int,
    entry_id: str,
    options: Mapping[str, str] | None = None,
) -> FoundInArchive:
    """Find an entry in an archive.

    For an object store, `options` contains the client options from `[archive]`. Raises
    RequestRefusedError if there is no archive, and ArchiveError if it is damaged.
    """
    table = Archive(folder, options=options).table(topic)
    wanted = read_id(entry_id)
    looked = FoundInArchive("", False)
    for file in [] if table is None else table.files(partition):
        assert table is not None
        if file.first <= wanted <= file.last:
            looked = FoundInArchive(table.locate(file), _contains(table, file, wanted))
            if looked.found:
                break
    return looked


def _contains(table: ArchiveTable, file: WrittenFile, wanted: Id) -> bool:
    # The columns hold at most 63 bits of each half of an ID, and the largest 63-bit number for
    # anything higher. The wanted ID is therefore limited in the same way.
    ms, seq = (min(half, LONG_MAX) for half in wanted)
    return bool(_count(table, file, (ms == _MS) & (seq == _SEQ)))


def rows_up_to(table: ArchiveTable, file: WrittenFile, end: Id) -> int:
    """Return the number of rows in a file with IDs up to `end`.

    Raises ArchiveError if the file cannot be read.
    """
    ms, seq = (min(half, LONG_MAX) for half in end)
    return _count(table, file, (ms > _MS) | ((ms == _MS) & (seq >= _SEQ)))


def _count(table: ArchiveTable, file: WrittenFile, wanted: compute.Expression) -> int:
    """Return the number of rows in a file that match a condition on the ID."""
    with opened_alone(table.folder, file.path) as raw:
        return int(parquet.read_table(raw, columns=["id_ms"], filters=wanted).num_rows)
