"""Writing rows to topics: exactly once from a streaming query, at least once from a batch.

A streaming query writes through a script that remembers, for each task and partition, how many
rows of which batch are there; a batch that is done again skips those. A batch write adds its rows
plainly, or each under the id that a column holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from streamqd import config
from streamqd.errors import RedisRefused, Refused, StreamqdError, TopicMissing
from streamqd.policy.partitioning import crc32_partition, round_robin_partition
from streamqd.producer.encoding import Outgoing, fields_of
from streamqd.spark.options import WriteOptions
from streamqd.spark.streams import keys_for, persist
from streamqd.store import publishing, topics
from streamqd.store import spark as store
from streamqd.store.spark import Marker, SinkRow
from streamqd.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

Place = tuple[str, int]

# Column -> the types that it may have.
_TYPES = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int", "bigint"),
    "headers": (
        "array<struct<key:string,value:binary>>",
        "array<struct<key:string,value:string>>",
        "map<string,string>",
    ),
    "fields": ("map<string,binary>",),
}
_OWN_FIELDS = frozenset({"payload", "key", "headers"})


class NotRepeatedError(StreamqdError):
    """A batch came again with other rows, or cannot be told from a later one."""


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task wrote."""

    rows: int


class Row(NamedTuple):
    """A message to be written: where to, as far as the row says it, and its fields."""

    topic: str
    partition: int | None
    key: bytes | None
    dedup_id: str
    fields: list[bytes]


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """Raise ValueError naming all that is wrong with the columns. Others are not looked at."""
    found = {each.name: each.dataType.simpleString() for each in schema.fields}
    problems = [
        f"the column {name} must be {' or '.join(types)}, not {found[name]}"
        for name, types in _TYPES.items()
        if name in found and found[name] not in types
    ]
    if "value" not in found:
        problems.append("there is no column value")
    if not options.topic and "topic" not in found:
        problems.append("name the target by the option topic or a column topic")
    if options.id_column and options.id_column not in found:
        problems.append(f"there is no column {options.id_column}, which idColumn names")
    if problems:
        raise ValueError("streamq: " + "; ".join(problems))


def prepare(options: WriteOptions) -> None:
    """Create the target when that is asked for, or see that it is there. Raises TopicMissing."""
    if options.topic:
        _Topics(options).count(options.topic)


# --- rows -----------------------------------------------------------------------------------------


def rows_of(batch: pa.RecordBatch, options: WriteOptions) -> Iterator[Row]:
    """The messages of a batch of rows. Raises ValueError for a row that cannot be one."""
    names = set(batch.schema.names)

    def column(name: str) -> Sequence[Any]:
        return batch.column(name).to_pylist() if name in names else [None] * batch.num_rows

    topic = [options.topic] * batch.num_rows if options.topic else column("topic")
    ids = column(options.id_column) if options.id_column else [""] * batch.num_rows
    parts = (column("key"), column("value"), column("headers"), column("fields"))
    for name, partition, dedup_id, key, value, headers, more in zip(
        topic, column("partition"), ids, *parts, strict=True
    ):
        if not name:
            raise ValueError("streamq: a row has no topic")
        if dedup_id is None or (options.id_column and dedup_id in ("", b"")):
            raise ValueError(f"streamq: a row has nothing in {options.id_column}")
        raw_key = key.encode() if isinstance(key, str) else key
        item = Outgoing(b"" if value is None else value, raw_key, _headers(headers))
        fields = fields_of(item, options.max_message_bytes)
        for extra, raw in more or ():
            if extra not in _OWN_FIELDS:
                fields += (extra.encode(), raw or b"")
        yield Row(name, partition, raw_key, _text(dedup_id), fields)


def _headers(found: Any) -> Mapping[str, str] | None:
    if not found:
        return None
    pairs = [(each["key"], each["value"]) if isinstance(each, dict) else each for each in found]
    return {name: _text(value or "") for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- where rows go --------------------------------------------------------------------------------


class _Topics:
    """Partition counts, each asked for once in the life of a task."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._keys = keys_for(options.connection)
        self.counts: dict[str, int] = {}

    def count(self, topic: str) -> int:
        if topic not in self.counts:
            self.counts[topic] = self._ask(topic)
        return self.counts[topic]

    def _ask(self, topic: str) -> int:
        connection, wanted = self._options.connection, self._options.partitions
        found = persist(
            connection, lambda link: topics.partition_count(Store(link, self._keys), topic)
        )
        if found is None and wanted:
            settings = config.Topic(partitions=wanted)
            return persist(
                connection, lambda link: topics.create(Store(link, self._keys), topic, settings)
            )
        if found is None:
            raise TopicMissing(
                f"the topic {topic} does not exist: give the option partitions to create it, or"
                f" use `streamqd topic create {topic}`"
            )
        return found

    def place(self, row: Row, turn: int) -> Place:
        """The partition of a row: its own, that of its key, of its id, or the next in turn."""
        count = self.count(row.topic)
        if row.partition is not None:
            if not 0 <= row.partition < count:
                raise Refused(
                    f"the topic {row.topic} has {count} partitions: there is no {row.partition};"
                    " drop the column partition to have rows go by their key"
                )
            return row.topic, row.partition
        if row.key is not None:
            return row.topic, crc32_partition(row.key, count)
        if row.dedup_id:
            return row.topic, crc32_partition(row.dedup_id.encode(), count)
        return row.topic, round_robin_partition(turn, count)


# --- writing --------------------------------------------------------------------------------------


class _StagedTask:
    """Collects the rows of one task and writes them a chunk at a time. This one plainly."""

    def __init__(self, options: WriteOptions, number: int) -> None:
        self.options = options
        self.keys = keys_for(options.connection)
        self.topics = _Topics(options)
        self._turn = number  # tasks begin at different partitions, each always at the same
        self._held: dict[Place, list[Row]] = {}
        self._count = 0
        self._bytes = 0
        self.rows = 0

    def write(self, rows: Iterable[Row]) -> Written:
        for row in rows:
            place = self.topics.place(row, self._turn)
            self._turn += 1
            self._held.setdefault(place, []).append(row)
            self._count += 1
            self._bytes += sum(map(len, row.fields))
            full = self._bytes >= self.options.batch_bytes
            if full or self._count >= self.options.batch_rows:
                self._flush()
        self._flush()
        self.finish()
        return Written(self.rows)

    def _flush(self) -> None:
        if self._held:
            self.send(self._held)
        self.rows += self._count
        self._held, self._count, self._bytes = {}, 0, 0

    def send(self, held: Mapping[Place, Sequence[Row]]) -> None:
        """Write one chunk."""
        commands = [
            ("XADD", self.keys.stream(*place), "*", *row.fields)
            for place, rows in held.items()
            for row in rows
        ]
        _checked(persist(self.options.connection, lambda link: link.pipeline(commands)))

    def finish(self) -> None:
        """See that all is well at the end."""


class _DedupTask(_StagedTask):
    """Writes each row under its id, unless that was used within the window."""

    def send(self, held: Mapping[Place, Sequence[Row]]) -> None:
        window = self.options.dedup_window
        calls = [
            publishing.publish(self.keys, *place, row.fields, row.dedup_id, window)
            for place, rows in held.items()
            for row in rows
        ]
        _checked(persist(self.options.connection, lambda link: link.run_many(calls)))


@dataclass
class _Sent:
    """How many rows of the task a partition has got, and the digest of all of them."""

    rows: int = 0
    digest: int = 0
    before: Marker | None = field(default=None)


class _ExactTask(_StagedTask):
    """Writes the rows of a batch of a streaming query once, however often the batch is done."""

    def __init__(self, options: WriteOptions, query: str, batch: int, number: int) -> None:
        super().__init__(options, number)
        self._writer = f"{query}:{number}"
        self._batch = batch
        self._sent: dict[Place, _Sent] = {}
        self._known: set[str] = set()

    def write(self, rows: Iterable[Row]) -> Written:
        if self.options.row_order == "content":
            rows = sorted(rows, key=lambda row: (row.topic, row.key or b"", row.fields))
        return super().write(self._introduced(rows))

    def _introduced(self, rows: Iterable[Row]) -> Iterator[Row]:
        # Also when no row comes: there may have been some at the first try.
        self._meet(self.options.topic)
        for row in rows:
            self._meet(row.topic)
            yield row

    def _meet(self, topic: str) -> None:
        if topic and topic not in self._known:
            self._known.add(topic)
            self._look_back(topic)

    def _look_back(self, topic: str) -> None:
        """Find what an earlier try of this batch wrote, and to how many partitions it did so.

        The same number is used again: were the topic's partitions grown in between, rows would go
        elsewhere than at the first try.
        """
        count = self.topics.count(topic)
        commands = [("HGET", self.keys.sink(topic, n), self._writer) for n in range(count)]
        found = _checked(persist(self.options.connection, lambda link: link.pipeline(commands)))
        for number, raw in enumerate(found):
            marker = Marker.parse(raw, self.keys.sink(topic, number), self._writer)
            if marker is not None and marker.batch == self._batch:
                self._sent[topic, number] = _Sent(before=marker)
                self.topics.counts[topic] = int(marker.digest.partition("p")[2])

    def send(self, held: Mapping[Place, Sequence[Row]]) -> None:
        places, calls = [], []
        for place, rows in held.items():
            sent = self._sent.setdefault(place, _Sent())
            for start in range(0, len(rows), store.ROWS_MAX):
                first, part = sent.rows, rows[start : start + store.ROWS_MAX]
                marked = [SinkRow(self._digest(place[0], sent, row), row.fields) for row in part]
                call = store.append(self.keys, *place, self._writer, self._batch, first, marked)
                calls.append(call)
                places.append(place)
        replies = persist(self.options.connection, lambda link: link.run_many(calls))
        for place, reply in zip(places, _checked(replies), strict=True):
            if reply.word != "OK":
                raise self._refusal(place, reply.word)

    def _digest(self, topic: str, sent: _Sent, row: Row) -> str:
        """The digest of a row and all before it on its partition, with the partition count."""
        sent.rows += 1
        for each in row.fields:
            sent.digest = zlib.crc32(each, zlib.crc32(b"%d " % len(each), sent.digest))
        return f"{sent.digest:08x}p{self.topics.counts[topic]}"

    def finish(self) -> None:
        for place, sent in self._sent.items():
            if sent.before is not None and sent.before.rows > sent.rows:
                raise self._refusal(place, "OTHER")

    def _refusal(self, place: Place, word: str) -> StreamqdError:
        what = f"batch {self._batch} to {place[0]} partition {place[1]}"
        if word == "PAST":
            return NotRepeatedError(
                f"{what}: this query has written a later batch already; an old checkpoint cannot"
                " be brought back, start it with a new one"
            )
        if word == "GAP":
            return NotRepeatedError(f"{what}: Redis has lost rows of this task; do it again")
        return NotRepeatedError(
            f"{what}: the rows are not those of the first try, or in another order, so what is"
            ' written already cannot be skipped. After a shuffle use the option rowOrder="content"'
            " from the query's first batch on; idempotent=false writes at least once"
        )


def _checked(replies: Sequence[Any]) -> Sequence[Any]:
    for reply in replies:
        if isinstance(reply, RedisRefused):
            raise reply
    return replies


# --- what Spark calls -----------------------------------------------------------------------------


class _Writing:
    """What both writers have in common."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
        for batch in batches:
            yield from rows_of(batch, self.options)


class TopicWriter(_Writing, DataSourceArrowWriter):
    """A batch write."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        kind = _DedupTask if self.options.id_column else _StagedTask
        return kind(self.options, _task().partitionId()).write(self._rows(iterator))


class TopicStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """A streaming write. Nothing is done at a commit: what is written is written."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _task()
        number = context.partitionId()
        rows = self._rows(iterator)
        if self.options.id_column:
            return _DedupTask(self.options, number).write(rows)
        if not self.options.idempotent:
            return _StagedTask(self.options, number).write(rows)
        batch = context.getLocalProperty("streaming.sql.batchId")
        query = context.getLocalProperty("sql.streaming.queryId")
        if batch is None or query is None:
            raise NotRepeatedError(
                "Spark does not say which batch this is: idempotent=false writes at least once"
            )
        return _ExactTask(self.options, query, int(batch), number).write(rows)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "called outside a task"
    return context
