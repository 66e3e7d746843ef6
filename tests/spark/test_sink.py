"""A real Spark writes to topics: plainly, once per id, and once per batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from streamqd import Producer
from tests.spark.conftest import Shop, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write(shop: Shop, frame: DataFrame, **options: object) -> None:
    frame.write.format("streamq").options(**shop.write_options(**options)).mode("append").save()


def test_sink_routes_rows_like_the_producer(shop: Shop) -> None:
    frame = shop.spark.sql(
        "SELECT concat('k', id) AS key, cast(id AS string) AS value,"
        " array(named_struct('key', 'n', 'value', encode('é', 'utf-8'))) AS headers FROM range(50)"
    )
    write(shop, frame, topic="out", partitions=4)
    shop.topic("same", 4)
    with Producer(shop.server.url) as producer:
        for number in range(50):
            producer.send("same", str(number), key=f"k{number}", headers={"n": "é"})

    for partition in range(4):
        both = [
            [
                fields
                for _, fields in shop.link.execute(
                    "XRANGE", shop.keys.stream(t, partition), "-", "+"
                )
            ]
            for t in ("out", "same")
        ]
        assert sorted(both[0]) == sorted(both[1])
    assert shop.link.execute("SISMEMBER", shop.keys.registry(), "out") == 1


def test_rows_with_an_id_are_written_once(shop: Shop) -> None:
    shop.topic("out", 2)
    frame = shop.spark.sql("SELECT id AS uid, cast(id AS string) AS value FROM range(300)")
    for _ in range(2):
        write(shop, frame, topic="out", idColumn="uid", dedupWindow="1h")
    assert shop.payloads("out", 2) == sorted(str(number).encode() for number in range(300))


def test_topic_is_copied_without_loss(shop: Shop) -> None:
    """Keys, headers and unknown fields are copied, and other columns are ignored."""
    shop.topic("access", 1)
    shop.topic("out", 1)
    headers = json.dumps({"a": "b"}, separators=(",", ":")).encode()
    shop.add("access", 0, "5-0", key=b"k", headers=headers, mine=b"\x00\xff")
    rows = shop.read("access", includeHeaders="true", includeFields="true").drop("topic")
    write(shop, rows, topic="out")
    found = shop.link.execute("XRANGE", shop.keys.stream("out", 0), "-", "+")[0][1]
    pairs = dict(zip(found[::2], found[1::2], strict=True))
    assert pairs == {b"payload": b"0:5-0", b"key": b"k", b"headers": headers, b"mine": b"\x00\xff"}


def test_invalid_sink_option_is_one_sentence(shop: Shop) -> None:
    rows = shop.spark.sql("SELECT 1 AS value, 5 AS key")
    with pytest.raises(PySparkException) as caught:
        write(shop, rows, topic="out")
    assert "the column value must be binary or string, not int" in str(caught.value)
    assert "the column key must be binary or string, not int" in str(caught.value)
    texts = shop.spark.sql("SELECT 'x' AS value, 9 AS partition")
    with pytest.raises(PySparkException, match="topic out does not exist"):
        write(shop, texts, topic="out")
    with pytest.raises(PySparkException, match="partition 9 of topic"):
        write(shop, texts, topic="out", partitions=2)
    over = texts.write.format("streamq").options(**shop.write_options(topic="out"))
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        over.mode("overwrite").save()


def test_null_value_is_refused(shop: Shop) -> None:
    """A null value is refused, because it would be an empty message. A null key means no key."""
    rows = shop.spark.sql("SELECT cast(NULL AS string) AS value, cast(NULL AS string) AS key")
    write(shop, rows, topic="out", partitions=1)
    [(_, fields)] = shop.link.execute("XRANGE", shop.keys.stream("out", 0), "-", "+")
    assert fields == [b"payload", b""]
    assert [(row.value, row.key) for row in shop.read("out").collect()] == [(b"", None)]


def test_output_mode_update_is_refused(shop: Shop, tmp_path: Path) -> None:
    """The output mode `update` is refused by Spark itself, for every sink in Python."""
    shop.topic("access", 1)
    shop.topic("out", 1)
    rows = shop.stream("access").select("value")
    writer = rows.writeStream.format("streamq").options(**shop.write_options(topic="out"))
    with pytest.raises(PySparkException, match=r"(?i)update"):
        run(writer.outputMode("update").option("checkpointLocation", str(tmp_path)).start())


def copy(shop: Shop, rows: DataFrame, checkpoint: Path, **options: object) -> None:
    """Write a stream into the topic `out` until the stream has read all entries."""
    writer = rows.writeStream.format("streamq").trigger(availableNow=True)
    writer = writer.options(**shop.write_options(topic="out", **options))
    run(writer.option("checkpointLocation", str(checkpoint)).start())


def staged_streams(shop: Shop) -> list[bytes]:
    """Return those streams of staged rows that are not empty."""
    keys: list[bytes] = shop.link.execute("KEYS", f"{shop.keys.control}:sink:{{out:*")
    return [key for key in keys if shop.link.execute("XLEN", key)]


@pytest.mark.parametrize("source", ["topic", "files"])
def test_stream_is_written_exactly_once(shop: Shop, tmp_path: Path, source: str) -> None:
    """Each row is written once if a commit is interrupted and a batch repeats with other tasks."""
    shop.topic("out", 2)
    expected = sorted(b"%d:%d-0" % (p, n) for p in range(2) for n in range(1, 801))
    lines = tmp_path / "lines"
    lines.mkdir()
    if source == "topic":
        shop.topic("access", 2)
        for partition in range(2):
            shop.fill("access", partition, 1, 800)
    else:
        for number in range(4):
            text = b"\n".join(expected[number::4])
            (lines / f"{number}.txt").write_bytes(text)

    def attempt(tasks: int) -> None:
        if source == "topic":
            rows = shop.stream("access", minPartitions=tasks).select("value")
        else:
            files = shop.spark.readStream.format("text").load(str(lines))
            rows = files.select("value").repartition(tasks)
        copy(shop, rows, tmp_path / "checkpoint", batchRows=50)

    broken = shop.keys.stream("out", 1)
    shop.link.execute("SET", broken, "no stream")
    with pytest.raises(StreamingQueryException, match="WRONGTYPE"):
        attempt(7)
    shop.link.execute("DEL", broken)
    partly = shop.payloads("out", 2)
    assert 0 < len(partly) < len(expected)
    attempt(2)
    assert shop.payloads("out", 2) == expected
    attempt(1)
    assert shop.payloads("out", 2) == expected
    assert staged_streams(shop) == []


def test_failed_batch_writes_nothing(shop: Shop, tmp_path: Path) -> None:
    """A batch writes nothing if one row is too large, even after other rows were staged."""
    shop.topic("access", 2)
    shop.topic("out", 3)
    shop.fill("access", 0, 1, 300)
    shop.add("access", 1, "1-0")
    shop.link.execute("XADD", shop.keys.stream("access", 1), "2-0", "payload", "x" * 2000)
    rows = shop.stream("access").select("key", "value")
    with pytest.raises(StreamingQueryException, match="max_message_bytes"):
        copy(shop, rows, tmp_path, batchRows=50, maxMessageBytes=1000)
    assert shop.payloads("out", 3) == []
    copy(shop, rows, tmp_path)
    assert len(set(shop.payloads("out", 3))) == 302
    assert staged_streams(shop) == []


def test_query_start_removes_rows_of_a_killed_driver(shop: Shop, tmp_path: Path) -> None:
    """When a query starts, it removes the rows that a killed driver staged in an earlier run."""
    shop.topic("access", 1)
    shop.topic("out", 1)
    shop.fill("access", 0, 1, 20)
    rows = shop.stream("access").select("value")
    with pytest.raises(StreamingQueryException, match="maxStagedBytes"):
        copy(shop, rows, tmp_path, maxStagedBytes=100)
    query = json.loads((tmp_path / "metadata").read_text())["id"]
    record, left = shop.keys.sink(query), shop.keys.staged_rows("out", 0, query, "00000000dead")
    shop.link.execute("HSET", record, "attempt:00000000dead:out", 0)
    shop.link.execute("XADD", left, "0-1", "payload", "x")
    with pytest.raises(StreamingQueryException, match="maxStagedBytes"):
        copy(shop, rows, tmp_path, maxStagedBytes=100)
    assert shop.link.execute("EXISTS", left) == 0
    copy(shop, rows, tmp_path)
    assert len(shop.payloads("out", 1)) == 20
