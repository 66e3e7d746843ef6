"""Define the tables that are derived from a topic's entries, and keep them consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from streamqd.errors import RequestRefusedError
from streamqd.spark import rows
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, TableKind

if TYPE_CHECKING:
    import pyarrow as pa

OWN = ("event_date", "entry_partition", "entry_id", "entry_time")  # columns before the schema's


# Columns that the configuration can add to the parsed table.
KEY, HEADERS, RESCUED = "entry_key", "entry_headers", "_rescued"


def extra_columns(names: Sequence[str]) -> pa.Schema:
    """Return the columns with these names that the configuration can add to the parsed table."""
    import pyarrow as pa

    headers = rows.arrow_schema([rows.HEADERS]).types[0]
    kinds = {KEY: pa.binary(), HEADERS: headers, RESCUED: pa.string()}
    return pa.schema([(name, kinds[name]) for name in dict.fromkeys(names)])


def quarantine_extra(names: Sequence[str]) -> pa.Schema:
    """Return the additional columns of the quarantine, given those of the parsed table.

    If the parsed table has headers, the quarantine needs them as well, so that they are still
    available when a row in quarantine fits a later schema.
    """
    return rows.arrow_schema([rows.HEADERS] if HEADERS in names else [])


def parsed_columns() -> pa.Schema:
    """Return the columns of every parsed table: the event's date, and where the raw entry is."""
    import pyarrow as pa

    kinds = (pa.date32(), pa.int32(), pa.string(), pa.timestamp("us", tz="UTC"))
    return pa.schema(list(zip(OWN, kinds, strict=True)))


def quarantine_columns() -> pa.Schema:
    """Return the columns of every quarantine: the raw entry, and the reason why it was rejected."""
    import pyarrow as pa

    return pa.schema(
        [
            *(("date", pa.date32()), ("partition", pa.int32()), ("id", pa.string())),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            *(("key", pa.binary()), ("value", pa.binary()), ("reason", pa.string())),
        ]
    )


def result_columns() -> pa.Schema:
    """Return an empty schema, because the columns of a result table depend on its query."""
    import pyarrow as pa

    return pa.schema([])


PARSED = TableKind("parsed", OWN[:1], parsed_columns, "")
QUARANTINE = TableKind("quarantine", ("date",), quarantine_columns, "timestamp")
RESULTS = TableKind("results", (), result_columns, "")


class TablePair(NamedTuple):
    """A topic's parsed table and quarantine, in a consistent state."""

    parsed: ArchiveTable
    quarantine: ArchiveTable


def open_pair(archive: Archive, topic: str) -> TablePair | None:
    """Open the parsed table and the quarantine of a topic. Return None if there are no tables.

    If a run was killed after its commit to the parsed table and before that to the quarantine, the
    second commit is made first. The caller must hold the lease on the topic. Raises
    RequestRefusedError if one table was restored or removed without the other.
    """
    parsed = archive.derived_table(topic, PARSED)
    quarantine = archive.derived_table(topic, QUARANTINE)
    if parsed is None:
        if quarantine is not None and quarantine.note.batch:
            raise RequestRefusedError(
                f"{quarantine.folder} belongs to a parsed table that no longer exists; remove it"
                " as well, to parse all entries again"
            )
        return None
    batch, owed = parsed.note.batch, parsed.note.owed
    if quarantine is None:
        if batch:
            raise RequestRefusedError(
                f"{archive.folder(topic, QUARANTINE)} is missing, and so are the rows that did"
                f" not fit the schema; restore it, or remove {parsed.folder} as well, to parse"
                " all entries again"
            )
        quarantine = archive.derived_table(topic, QUARANTINE, quarantine_columns())
        assert quarantine is not None
    elif quarantine.note.batch != batch:
        if owed is None or owed.derived_batch != quarantine.note.batch:
            raise RequestRefusedError(
                f"{parsed.folder} and {quarantine.folder} are from different times; restore both"
                " to versions of the same time, or remove both, to parse all entries again"
            )
        quarantine.append(owed.files, parsed.positions, batch=batch, replace=owed.replaces)
    return TablePair(parsed, quarantine)


def open_pair_to_replace(archive: Archive, topic: str, columns: pa.Schema) -> TablePair:
    """Open the tables of a topic whose rows will all be replaced, and create missing tables.

    If there is no parsed table, it is created with `columns`.
    """
    parsed = archive.derived_table(topic, PARSED) or archive.derived_table(topic, PARSED, columns)
    quarantine = archive.derived_table(topic, QUARANTINE, quarantine_columns())
    assert parsed is not None
    assert quarantine is not None
    return TablePair(parsed, quarantine)
