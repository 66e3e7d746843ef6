"""Convert rows to messages, and choose the partition of each message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from streamqd import config
from streamqd.errors import RequestRefusedError, TopicNotFoundError
from streamqd.model import TopicPartition
from streamqd.policy.partitioning import crc32_partition, round_robin_partition
from streamqd.producer.encoding import Outgoing, encode_fields
from streamqd.spark.options import WriteOptions
from streamqd.spark.streams import keys_for, persist
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.spark import FIELDS_MAX
from streamqd.store.store import Store

_OWN_FIELDS = frozenset({"payload", "key", "headers"})


class Row(NamedTuple):
    """A message to write. `partition` is None unless the row sets it."""

    topic: str
    partition: int | None
    key: bytes | None
    dedup_id: str
    fields: list[bytes]


Chunk = Mapping[TopicPartition, Sequence[Row]]


def to_messages(batch: pa.RecordBatch, options: WriteOptions) -> Iterator[Row]:
    """Convert each row of a batch to a message. Raises ValueError for an invalid row."""
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
            raise ValueError(f"streamq: a row has no value in {options.id_column}")
        raw_key = key.encode() if isinstance(key, str) else key
        item = Outgoing(b"" if value is None else value, raw_key, _headers(headers))
        fields = encode_fields(item, options.max_message_bytes)
        for extra, raw in more or ():
            if extra not in _OWN_FIELDS:
                fields += (extra.encode(), raw or b"")
        if len(fields) > FIELDS_MAX:
            raise ValueError(f"streamq: a row has more than {FIELDS_MAX // 2:,} fields")
        yield Row(name, partition, raw_key, _text(dedup_id), fields)


def _headers(found: Any) -> Mapping[str, str] | None:
    if not found:
        return None
    pairs = [(each["key"], each["value"]) if isinstance(each, dict) else each for each in found]
    return {name: _text(value or "") for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Targets:
    """Chooses the partitions of rows.

    The number of partitions of each topic is read once per task.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._keys = keys_for(options.connection)
        self.counts: dict[str, int] = {}

    def count(self, topic: str) -> int:
        """Return the number of partitions of a topic.

        If the topic does not exist, it is created if the options request that. Otherwise, raises
        TopicNotFoundError.
        """
        if topic not in self.counts:
            self.counts[topic] = persist(
                self._options.connection, lambda link: self._ask(link, topic)
            )
        return self.counts[topic]

    def _ask(self, link: Connection, topic: str) -> int:
        store, wanted = Store(link, self._keys), self._options.partitions
        found = topics.partition_count(store, topic)
        if found is None and wanted:
            return topics.create(store, topic, config.Topic(partitions=wanted))
        if found is None:
            raise TopicNotFoundError(
                f"topic {topic} does not exist; set the option partitions to create it, or"
                f" run `streamqd topic create {topic}`"
            )
        return found

    def place(self, row: Row, turn: int) -> TopicPartition:
        """Return the partition that a row is written to.

        If the row does not set a partition, its key or, if it has no key, its dedup ID determines
        the partition. A row without either goes to the partition for `turn`, its number in the
        task. Raises RequestRefusedError if the topic does not have the partition that the row sets.
        """
        count = self.count(row.topic)
        if row.partition is not None:
            if not 0 <= row.partition < count:
                raise RequestRefusedError(
                    f"partition {row.partition} of topic {row.topic} not found, as it has {count};"
                    " drop the column partition to route rows by their key"
                )
            return row.topic, row.partition
        if row.key is not None:
            return row.topic, crc32_partition(row.key, count)
        if row.dedup_id:
            return row.topic, crc32_partition(row.dedup_id.encode(), count)
        return row.topic, round_robin_partition(turn, count)


def deliver(
    rows: Iterable[Row], options: WriteOptions, turn: int, send: Callable[[Chunk], object]
) -> Mapping[str, int]:
    """Send rows in chunks, and return the number of partitions of each topic.

    A chunk is sent when it reaches `batchRows` rows or `batchBytes` bytes. Rows without a key or a
    dedup ID are distributed evenly over the partitions, starting with partition `turn`.
    """
    targets = Targets(options)
    held: dict[TopicPartition, list[Row]] = {}
    count = size = 0
    for number, row in enumerate(rows, turn):
        held.setdefault(targets.place(row, number), []).append(row)
        count += 1
        size += sum(map(len, row.fields))
        if size >= options.batch_bytes or count >= options.batch_rows:
            send(held)
            held, count, size = {}, 0, 0
    if held:
        send(held)
    return targets.counts
