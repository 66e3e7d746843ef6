"""Entries as Arrow columns. Pure: pyarrow, no Redis, no Spark.

A batch must have exactly the types that Spark expects, so the columns are described once, here, as
Spark's DDL and as Arrow types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from streamqd.spark import offsets

if TYPE_CHECKING:
    import pyarrow as pa

Entry = list[Any]  # [id, [name, value, …]], as XRANGE answers

LONG_MAX = (1 << 63) - 1
_LAST_UNIX_MS = 253_402_300_799_999  # the end of year 9999, the last that Spark's timestamps know
_LARGEST_COUNT = (1 << 31) - 1


class Column(NamedTuple):
    """A column. `field` is the entry's field that it is made of, b'' when of none."""

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
# What a dead letter says beyond its message. `original_timestamp` is its field `timestamp`.
LETTER_COLUMNS = (
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


def columns(*, dead: bool, headers: bool, fields: bool) -> tuple[Column, ...]:
    """The columns of a read: of dead letters or of messages, with headers, with other fields."""
    extra = (*((HEADERS,) if headers else ()), *((FIELDS,) if fields else ()))
    return (*COLUMNS, *(LETTER_COLUMNS if dead else ()), *extra)


def ddl(chosen: Sequence[Column]) -> str:
    """The schema as Spark reads it."""
    return ", ".join(f"`{column.name}` {column.ddl}" for column in chosen)


def arrow_schema(chosen: Sequence[Column]) -> pa.Schema:
    """The schema as Spark expects it of Arrow."""
    import pyarrow as pa

    return pa.schema([pa.field(column.name, _arrow_type(column.ddl)) for column in chosen])


def _arrow_type(spark_type: str) -> pa.DataType:
    import pyarrow as pa

    simple = {
        "binary": pa.binary(),
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
    if spark_type == HEADERS.ddl:
        return pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    if spark_type == FIELDS.ddl:
        return pa.map_(pa.string(), pa.binary())
    return simple[spark_type]


class Table:
    """Turns entries of one stream into batches with the columns asked for, in their order.

    `own` are all columns of the read: `fields` holds what none of them takes, whichever are asked.
    """

    def __init__(self, chosen: Sequence[Column], own: Sequence[Column], place: offsets.Place):
        self.schema = arrow_schema(chosen)
        self._chosen = chosen
        self._place = place
        self._taken = {column.field for column in own if column.field}

    def batch(self, entries: Sequence[Entry]) -> pa.RecordBatch:
        """One batch of the entries."""
        import pyarrow as pa

        source = _Source(entries)
        arrays = [
            self._column(column, source, self.schema.field(column.name).type)
            for column in self._chosen
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, column: Column, source: _Source, kind: pa.DataType) -> pa.Array:
        import pyarrow as pa

        count = len(source.entries)
        match column.name:
            case "topic":
                return pa.repeat(pa.scalar(self._place[0], kind), count)
            case "partition":
                return pa.repeat(pa.scalar(self._place[1], kind), count)
            case "id":
                return pa.array([entry[0] for entry in source.entries], pa.binary()).cast(kind)
            case "id_ms":
                return pa.array(source.milliseconds, kind)
            case "id_seq":
                return pa.array(source.sequence, kind)
            case "timestamp":
                return _times(source.milliseconds, kind)
            case "fields":
                return pa.array([_others(each[1], self._taken) for each in source.entries], kind)
        raw = source.values(column.field)
        if column.name == "value":
            # A message without a payload has an empty one, here as for a handler.
            return pa.array([b"" if each is None else each for each in raw], kind)
        if column.name == "headers":
            return pa.array([_headers(each) for each in raw], kind)
        if column.ddl == "timestamp":
            return _times([_number(each, LONG_MAX) for each in raw], kind)
        read = _READERS.get(column.ddl)
        return pa.array(raw if read is None else [read(each) for each in raw], kind)


class _Source:
    """Entries by column. Nearly always all of them have the same fields in the same order."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._milliseconds: list[int] = []
        self._sequence: list[int] = []
        self._even: dict[bytes, tuple[bytes, ...]] | None = None
        bodies = [entry[1] for entry in entries]
        if bodies and len(set(map(len, bodies))) == 1:
            turned = list(zip(*bodies, strict=True))
            if all(len(set(names)) == 1 for names in turned[::2]):
                names = [same[0] for same in turned[::2]]
                self._even = dict(zip(names, turned[1::2], strict=True))

    def values(self, name: bytes) -> Sequence[bytes | None]:
        """The values of a field, None where it is missing; of a repeated field the last."""
        if self._even is not None:
            return self._even.get(name) or [None] * len(self.entries)
        return [_paired(entry[1]).get(name) for entry in self.entries]

    @property
    def milliseconds(self) -> list[int]:
        """The first halves of the ids. What does not fit into 63 bits becomes the largest."""
        self._halve()
        return self._milliseconds

    @property
    def sequence(self) -> list[int]:
        """The second halves, likewise."""
        self._halve()
        return self._sequence

    def _halve(self) -> None:
        if self._milliseconds or not self.entries:
            return
        halves = [entry[0].split(b"-") for entry in self.entries]
        self._milliseconds = [min(int(half[0]), LONG_MAX) for half in halves]
        self._sequence = [min(int(half[1]), LONG_MAX) for half in halves]


def _paired(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=False))


def _times(unix_ms: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    micros = [
        each * 1000 if each is not None and each <= _LAST_UNIX_MS else None for each in unix_ms
    ]
    return pa.array(micros, pa.int64()).cast(kind)


def _number(raw: bytes | None, most: int) -> int | None:
    """A count from the wire; anybody can write an entry, so what is none becomes null."""
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


def _headers(raw: bytes | None) -> list[dict[str, Any]] | None:
    """Headers as Kafka has them; null when there are none, or none that can be read."""
    if raw is None:
        return None
    try:
        found = json.loads(raw)
        if not isinstance(found, dict):
            return None
        return [
            {"key": _sound(name), "value": _header_value(value)} for name, value in found.items()
        ]
    except (ValueError, RecursionError):
        return None


def _header_value(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace")


def _sound(text: str) -> str:
    """A text without the half characters that JSON can name and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _others(flat: Sequence[bytes], taken: set[bytes]) -> list[tuple[str, bytes]] | None:
    """The fields that no column takes, and headers that could not be read; null for none."""
    found = {}
    for name, value in _paired(flat).items():
        if name not in taken or (name == HEADERS.field and _headers(value) is None):
            found[name.decode("utf-8", "replace")] = value
    return list(found.items()) or None
