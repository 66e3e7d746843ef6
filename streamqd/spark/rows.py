"""Convert entries to Arrow columns. This module does no I/O and does not use Spark.

A batch must have exactly the types that Spark expects. This module therefore describes each column
both in Spark's DDL and as an Arrow type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from streamqd.model import RawEntry, TopicPartition
from streamqd.spark.entries import LONG_MAX, Entries, header_lists, times

_LARGEST_COUNT = (1 << 31) - 1


class Column(NamedTuple):
    """A column of a read.

    `field` is the name of the entry field that holds the column's value. It is b'' if the value
    does not come from a single field.
    """

    name: str
    ddl: str
    field: bytes = b""


COLUMNS = (
    Column("key", "binary", b"key"),
    Column("value", "binary", b"payload"),
    Column("topic", "string"),
    Column("partition", "int"),
    Column("id", "string"),
    Column("id_ms", "bigint"),
    Column("id_seq", "bigint"),
    Column("timestamp", "timestamp"),
)
HEADERS = Column("headers", "array<struct<key:string,value:binary>>", b"headers")
FIELDS = Column("fields", "map<string,binary>")
# Columns for the fields that only dead letters have. The time of the original message is in the
# field `timestamp`, but its column is `original_timestamp`, because `timestamp` is the time of the
# entry.
DEAD_LETTER_COLUMNS = (
    Column("original_topic", "string", b"originalTopic"),
    Column("original_partition", "int", b"originalPartition"),
    Column("original_id", "string", b"originalId"),
    Column("original_timestamp", "timestamp", b"timestamp"),
    Column("failed_at", "timestamp", b"failedAt"),
    Column("group", "string", b"group"),
    Column("instance", "string", b"instance"),
    Column("handler", "string", b"handler"),
    Column("attempts", "int", b"attempts"),
    Column("crashes", "int", b"crashes"),
    Column("replays", "int", b"replayCount"),
    Column("reason", "string", b"reason"),
    Column("error_class", "string", b"errorClass"),
    Column("error_message", "string", b"errorMessage"),
    Column("traceback", "string", b"traceback"),
    Column("fingerprint", "string", b"fingerprint"),
    Column("signal", "string", b"signal"),
    Column("exit_code", "int", b"exitCode"),
    Column("pid", "bigint", b"pid"),
    Column("rss", "bigint", b"rss"),
)
_ARROW = {
    "binary": pa.binary(),
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    HEADERS.ddl: pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    FIELDS.ddl: pa.map_(pa.string(), pa.binary()),
}


def columns(*, dead: bool, headers: bool, fields: bool) -> tuple[Column, ...]:
    """Return the columns of a read, which also include those of dead letters if `dead` is True.

    `headers` adds a column for headers, and `fields` one for all fields that have no column.
    """
    extra = (*((HEADERS,) if headers else ()), *((FIELDS,) if fields else ()))
    return (*COLUMNS, *(DEAD_LETTER_COLUMNS if dead else ()), *extra)


def select_columns(own: Sequence[Column], names: Collection[str]) -> tuple[Column, ...]:
    """Return the columns with these names, in the order of the names.

    Raises ValueError for an unknown name.
    """
    by_name = {column.name: column for column in own}
    for name in names:
        if name not in by_name:
            raise ValueError(f"streamq: the column {name} does not exist; use {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def ddl(chosen: Sequence[Column]) -> str:
    """Return the schema of the columns as Spark's DDL."""
    return ", ".join(f"`{column.name}` {column.ddl}" for column in chosen)


def arrow_schema(chosen: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema that Spark expects for these columns."""
    return pa.schema([pa.field(column.name, _ARROW[column.ddl]) for column in chosen])


class Table:
    """Converts entries of one stream to batches with the chosen columns, in their order.

    `own` contains all columns that the read offers. A field with no column in `own` becomes part of
    the column `fields`.
    """

    def __init__(self, chosen: Sequence[Column], own: Sequence[Column], place: TopicPartition):
        self.schema = arrow_schema(chosen)
        self._chosen = chosen
        self._place = place
        self._taken = {column.field for column in own if column.field}

    def batch(self, entries: Sequence[RawEntry]) -> pa.RecordBatch:
        """Convert entries to one batch. The entries must be in the order of their IDs."""
        source = Entries(entries)
        arrays = [
            self._column(column, source, self.schema.field(column.name).type)
            for column in self._chosen
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, column: Column, source: Entries, kind: pa.DataType) -> pa.Array:
        match column.name:
            case "topic" | "partition":
                value = self._place[column.name == "partition"]
                return pa.repeat(pa.scalar(value, kind), len(source.ids))
            case "id":
                return source.texts
            case "id_ms" | "id_seq":
                return source.halves[column.name == "id_seq"]
            case "timestamp":
                return source.times(kind)
            case "value":
                return source.payloads(column.field, kind)
            case "headers":
                return header_lists(source.headers, kind)
            case "fields":
                return source.other_fields(self._taken, kind)
        raw = source.values(column.field)
        if raw is None:
            return pa.nulls(len(source.ids), kind)
        if column.ddl == "timestamp":
            return times(pa.array([_number(each, LONG_MAX) for each in raw], pa.int64()), kind)
        read = _READERS.get(column.ddl)
        return pa.array(raw if read is None else [read(each) for each in raw], kind)


def _number(raw: bytes | None, most: int) -> int | None:
    """Parse a number from an entry.

    Return None if it is invalid or its absolute value exceeds `most`.

    Invalid values are not an error, because any client can write entries.
    """
    if raw is None or len(raw) > 20:
        return None
    try:
        number = int(raw)
    except ValueError:
        return None
    return number if -most <= number <= most else None


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("utf-8", "replace")


_READERS: dict[str, Callable[[bytes | None], Any]] = {
    "int": lambda raw: _number(raw, _LARGEST_COUNT),
    "bigint": lambda raw: _number(raw, LONG_MAX),
    "string": _text,
}
