"""Write rows to topics: exactly once from a streaming query, and at least once from a batch.

The tasks of a streaming query stage their rows, and the commit publishes them. A batch write
appends its rows directly. If a column contains dedup IDs, duplicates of rows are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from streamqd.spark.options import WriteOptions
from streamqd.spark.outgoing import Chunk, Row, Targets, deliver, to_messages
from streamqd.spark.staging import NotPublishedError, Publisher, Stage, Staged
from streamqd.spark.streams import keys_for, persist
from streamqd.store import publishing
from streamqd.store.replies import check_replies

# The Spark types that each column to write may have.
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


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """Raise ValueError if the columns of the rows cannot be written. The error lists all problems.

    Columns that have no meaning for a write are ignored.
    """
    found = {each.name: each.dataType.simpleString() for each in schema.fields}
    problems = [
        f"the column {name} must be {' or '.join(types)}, not {found[name]}"
        for name, types in _TYPES.items()
        if name in found and found[name] not in types
    ]
    if "value" not in found:
        problems.append("the column value is missing")
    if not options.topic and "topic" not in found:
        problems.append("the target is missing; set the option topic, or add a column topic")
    if options.id_column and options.id_column not in found:
        problems.append(f"the column {options.id_column}, which idColumn names, is missing")
    if problems:
        raise ValueError("streamq: " + "; ".join(problems))


def prepare(options: WriteOptions) -> None:
    """Check that the target topic exists, or create it if the options request that.

    Nothing is checked if each row names its own topic. Raises TopicNotFoundError.
    """
    if options.topic:
        Targets(options).count(options.topic)


def append(options: WriteOptions, chunk: Chunk) -> int:
    """Append rows to their partitions, and return the number of rows that were written.

    A row is skipped if its dedup ID was already used within the dedup window.
    """
    keys, connection = keys_for(options.connection), options.connection
    rows = [(place, row) for place, of_place in chunk.items() for row in of_place]
    if options.id_column:
        calls = [
            publishing.publish(keys, *place, row.fields, row.dedup_id, options.dedup_window)
            for place, row in rows
        ]
        replies = check_replies(persist(connection, lambda link: link.run_many(calls)))
        return sum(reply.word == "OK" for reply in replies)
    commands = [("XADD", keys.stream(*place), "*", *row.fields) for place, row in rows]
    return len(check_replies(persist(connection, lambda link: link.pipeline(commands))))


class TopicWriter(DataSourceArrowWriter):
    """A batch write, which appends each row at least once."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = _rows(iterator, self.options)
        deliver(rows, self.options, _task().partitionId(), partial(append, self.options))
        return WriterCommitMessage()


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write, whose tasks stage rows that the commit publishes.

    If rows have dedup IDs, or the option `idempotent` is false, tasks append rows directly instead.
    """

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context, options = _task(), self.options
        turn = context.partitionId()
        rows = _rows(iterator, options)
        if options.id_column or not options.idempotent:
            deliver(rows, options, turn, partial(append, options))
            return WriterCommitMessage()
        batch = context.getLocalProperty("streaming.sql.batchId")
        query = context.getLocalProperty("sql.streaming.queryId")
        if batch is None or query is None:
            raise NotPublishedError(
                "Spark reports no batch number; set idempotent=false to write at least once"
            )
        run = context.getLocalProperty("spark.jobGroup.id") or ""
        stage = Stage(options, query, int(batch), run)
        if run and not turn:
            stage.clear()
        try:
            counts = deliver(rows, options, turn, stage.send)
        except BaseException:
            stage.drop()
            raise
        return stage.message(counts)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish the staged rows of a batch.

        Spark creates a new writer for the commit, so this writer learns only from the messages
        which query it belongs to.
        """
        parts = [each for each in messages if isinstance(each, Staged)]
        if parts:
            Publisher(self.options, parts[0].query).commit(batchId, parts)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        """Remove the staged rows of a failed batch. Spark also calls this if the commit failed."""
        parts = [each for each in messages if isinstance(each, Staged)]
        if parts:
            Publisher(self.options, parts[0].query).abort(parts)


def _rows(batches: Iterable[pa.RecordBatch], options: WriteOptions) -> Iterator[Row]:
    return chain.from_iterable(to_messages(batch, options) for batch in batches)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "called outside a task"
    return context
