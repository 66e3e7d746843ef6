"""What a task of the Spark sink writes, on a real server and without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from streamqd import config
from streamqd.errors import MessageTooLarge, Refused, TopicMissing
from streamqd.policy.partitioning import crc32_partition
from streamqd.spark.options import WriteOptions, write_options
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.spark import ROWS_MAX
from streamqd.store.store import Store
from tests.support.servers import Server

pa = pytest.importorskip("pyarrow")
sink = pytest.importorskip("streamqd.spark.sink")


class Shop:
    """A topic of two partitions, and tasks that write to it."""

    def __init__(self, server: Server, link: Connection, keys: Keys) -> None:
        self.server, self.link, self.keys = server, link, keys
        topics.create(Store(link, keys), "out", config.Topic(partitions=2))

    def options(self, **given: object) -> WriteOptions:
        every = {"url": self.server.url, "topic": "out", "retryIntervalMs": 1} | given
        return write_options({name.lower(): str(value) for name, value in every.items()}, {})

    def exact(self, rows: Any, *, batch: int = 3, number: int = 0, **given: object) -> int:
        task = sink._ExactTask(self.options(batchRows=4, **given), "query", batch, number)
        return int(task.write(rows).rows)

    def written(self, partitions: int = 2) -> list[list[bytes]]:
        keys = [self.keys.stream("out", number) for number in range(partitions)]
        pages = self.link.pipeline([("XRANGE", key, "-", "+") for key in keys])
        return [[fields[1] for _, fields in page] for page in pages]

    def all_written(self) -> list[bytes]:
        return sorted(value for page in self.written() for value in page)

    def grow(self, partitions: int) -> None:
        self.link.execute("HSET", self.keys.meta("out"), "partitionCount", partitions)


@pytest.fixture
def shop(server: Server, link: Connection, keys: Keys) -> Shop:
    return Shop(server, link, keys)


def rows(*values: str, key: bool = True) -> list[Any]:
    """Rows with their value as their key, or without a key."""
    made = []
    for value in values:
        raw = value.encode()
        made.append(sink.Row("out", None, raw if key else None, "", [b"payload", raw]))
    return made


def dying(made: list[Any], after: int) -> Iterator[Any]:
    yield from made[:after]
    raise RuntimeError("the task dies")


LETTERS = [chr(ord("a") + number) for number in range(26)]


@pytest.mark.parametrize("key", [True, False])
def test_a_batch_that_is_done_again_is_written_once(shop: Shop, key: bool) -> None:
    made = rows(*LETTERS, key=key)
    for after in (1, 9, 9, 25):
        with pytest.raises(RuntimeError, match="dies"):
            shop.exact(dying(made, after))
    partial = sum(map(len, shop.written()))
    assert partial == 24
    assert shop.exact(made) == 26
    assert shop.exact(made) == 26
    first, second = shop.written()
    assert sorted(first + second) == [letter.encode() for letter in LETTERS]
    assert first == sorted(first)
    if key:
        assert first == [each for each in first if crc32_partition(each, 2) == 0]
    shop.exact(made, batch=4)
    assert sum(map(len, shop.written())) == 52


def test_what_is_too_much_for_one_script_goes_in_several(shop: Shop) -> None:
    names = [f"{number:04}" for number in range(4 * ROWS_MAX + 50)]
    for _ in range(2):  # the second writes nothing
        task = sink._ExactTask(shop.options(), "query", 3, 0)
        assert task.write(rows(*names, key=False)).rows == len(names)
    for page in shop.written():
        assert len(page) == 2 * ROWS_MAX + 25
        assert page == sorted(page)
    assert shop.all_written() == [name.encode() for name in names]


def test_chunks_need_not_be_those_of_the_first_try(shop: Shop) -> None:
    made = rows(*LETTERS)
    with pytest.raises(RuntimeError):
        shop.exact(dying(made, 11))
    task = sink._ExactTask(shop.options(batchRows=7, batchBytes=30), "query", 3, 0)
    task.write(made)
    assert shop.all_written() == [letter.encode() for letter in LETTERS]


def test_tasks_do_not_meet(shop: Shop) -> None:
    shop.exact(rows("a", "b", key=False), number=0)
    shop.exact(rows("a", "b", key=False), number=1)
    assert shop.written() == [[b"a", b"b"], [b"b", b"a"]]


def test_another_order_is_refused_before_it_can_harm(shop: Shop) -> None:
    made = rows(*LETTERS, key=False)
    with pytest.raises(RuntimeError):
        shop.exact(dying(made, 12))
    before = shop.written()
    with pytest.raises(sink.NotRepeatedError, match='rowOrder="content"'):
        shop.exact(made[::-1])
    assert shop.written() == before
    shop.exact(made)
    assert sum(map(len, shop.written())) == 26


def test_fewer_rows_than_before_are_noticed(shop: Shop) -> None:
    made = rows(*LETTERS)
    shop.exact(made)
    with pytest.raises(sink.NotRepeatedError, match="not those of the first try"):
        shop.exact([])
    with pytest.raises(sink.NotRepeatedError, match="not those of the first try"):
        shop.exact(made[:10])


def test_by_content_the_order_does_not_matter(shop: Shop) -> None:
    made = rows(*LETTERS, key=False)
    shop.exact(made, rowOrder="content")
    shop.exact(made[::-1], rowOrder="content")
    assert sum(map(len, shop.written())) == 26


def test_partitions_that_were_added_in_between_wait_for_the_next_batch(shop: Shop) -> None:
    made = rows(*LETTERS)
    with pytest.raises(RuntimeError):
        shop.exact(dying(made, 12))
    shop.grow(5)
    shop.exact(made)
    assert [len(page) for page in shop.written(5)][2:] == [0, 0, 0]
    assert sum(map(len, shop.written())) == 26
    shop.exact(made, batch=4)
    assert all(page for page in shop.written(5)[2:])


def test_an_old_checkpoint_is_refused(shop: Shop) -> None:
    shop.exact(rows("a"), batch=9)
    with pytest.raises(sink.NotRepeatedError, match="a later batch already"):
        shop.exact(rows("a"), batch=8)


def test_rows_that_redis_lost_fail_the_task_and_come_with_its_next_try(
    shop: Shop, link: Connection, keys: Keys
) -> None:
    made = rows(*LETTERS, key=False)

    def losing() -> Iterator[Any]:
        yield from made[:12]
        link.execute("DEL", keys.stream("out", 0), keys.sink("out", 0))
        yield from made[12:]

    with pytest.raises(sink.NotRepeatedError, match="has lost rows"):
        shop.exact(losing())
    shop.exact(made)
    assert shop.all_written() == [letter.encode() for letter in LETTERS]


def test_an_answer_that_was_lost_does_not_write_twice(shop: Shop, link: Connection) -> None:
    made = rows(*LETTERS)

    def cut_off() -> Iterator[Any]:
        for number, row in enumerate(made):
            if number in (5, 15):
                link.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            yield row

    shop.exact(cut_off())
    assert shop.all_written() == [letter.encode() for letter in LETTERS]


# --- rows -----------------------------------------------------------------------------------------


def batch(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


def test_columns_become_messages(shop: Shop) -> None:
    made = batch(
        value=["é", None],
        key=[b"\x00", None],
        headers=pa.array(
            [[{"key": "a", "value": b"1"}], None],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        ),
        fields=pa.array(
            [[("mine", b"x"), ("payload", b"no")], None], pa.map_(pa.string(), pa.binary())
        ),
        noise=[1, 2],
    )
    first, second = sink.rows_of(made, shop.options())
    assert first.fields == [
        *(b"payload", "é".encode(), b"key", b"\x00"),
        *(b"headers", json.dumps({"a": "1"}, separators=(",", ":")).encode(), b"mine", b"x"),
    ]
    assert second == sink.Row("out", None, None, "", [b"payload", b""])


def test_a_map_of_headers_is_one_too(shop: Shop) -> None:
    kind = pa.map_(pa.string(), pa.string())
    made = batch(value=["v"], headers=pa.array([[("a", "1"), ("b", None)]], kind))
    (row,) = sink.rows_of(made, shop.options())
    assert json.loads(row.fields[3]) == {"a": "1", "b": ""}


def test_rows_that_cannot_be_messages(shop: Shop) -> None:
    with pytest.raises(ValueError, match="a row has no topic"):
        list(sink.rows_of(batch(value=["v"], topic=[None]), shop.options(topic="")))
    with pytest.raises(ValueError, match="a row has nothing in uid"):
        list(sink.rows_of(batch(value=["v"], uid=[None]), shop.options(idColumn="uid")))
    with pytest.raises(MessageTooLarge):
        list(sink.rows_of(batch(value=["v" * 11]), shop.options(maxMessageBytes=10)))


def test_where_rows_go(shop: Shop) -> None:
    found = sink._Topics(shop.options())
    row = rows("v", key=False)[0]
    assert [found.place(row, turn) for turn in range(3)] == [("out", 0), ("out", 1), ("out", 0)]
    assert found.place(row._replace(partition=1), 0) == ("out", 1)
    assert found.place(row._replace(key=b"k"), 0) == ("out", crc32_partition(b"k", 2))
    assert found.place(row._replace(dedup_id="i"), 0) == ("out", crc32_partition(b"i", 2))
    with pytest.raises(Refused, match="there is no 2"):
        found.place(row._replace(partition=2), 0)
    with pytest.raises(TopicMissing, match="option partitions"):
        found.place(row._replace(topic="nowhere"), 0)


def test_a_topic_is_created_when_that_is_asked_for(shop: Shop, store: Store) -> None:
    sink.prepare(shop.options(topic="fresh", partitions=3))
    assert topics.partition_count(store, "fresh") == 3
    sink.prepare(shop.options(topic="fresh", partitions=9))
    assert topics.partition_count(store, "fresh") == 3
    with pytest.raises(TopicMissing):
        sink.prepare(shop.options(topic="nowhere"))


def test_an_id_is_written_once(shop: Shop) -> None:
    made = [
        sink.Row("out", None, None, str(number), [b"payload", b"%d" % number])
        for number in range(10)
    ]
    for _ in range(2):
        sink._DedupTask(shop.options(idColumn="uid"), 0).write(made)
    assert sum(map(len, shop.written())) == 10
