"""Writes to topics by a real Spark: plainly, once by an id, once by the batch."""

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


def test_rows_go_where_the_producer_would_send_them(shop: Shop) -> None:
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


def test_a_topic_is_copied_without_loss(shop: Shop) -> None:
    """Keys, headers and fields that nobody knows come along; other columns do not matter."""
    shop.topic("access", 1)
    shop.topic("out", 1)
    headers = json.dumps({"a": "b"}, separators=(",", ":")).encode()
    shop.add("access", 0, "5-0", key=b"k", headers=headers, mine=b"\x00\xff")
    rows = shop.read("access", includeHeaders="true", includeFields="true").drop("topic")
    write(shop, rows, topic="out")
    found = shop.link.execute("XRANGE", shop.keys.stream("out", 0), "-", "+")[0][1]
    pairs = dict(zip(found[::2], found[1::2], strict=True))
    assert pairs == {b"payload": b"0:5-0", b"key": b"k", b"headers": headers, b"mine": b"\x00\xff"}


def test_what_is_wrong_is_said(shop: Shop) -> None:
    rows = shop.spark.sql("SELECT 1 AS value, 5 AS key")
    with pytest.raises(PySparkException) as caught:
        write(shop, rows, topic="out")
    assert "the column value must be binary or string, not int" in str(caught.value)
    assert "the column key must be binary or string, not int" in str(caught.value)
    texts = shop.spark.sql("SELECT 'x' AS value, 9 AS partition")
    with pytest.raises(PySparkException, match="the topic out does not exist"):
        write(shop, texts, topic="out")
    with pytest.raises(PySparkException, match="there is no 9"):
        write(shop, texts, topic="out", partitions=2)
    over = texts.write.format("streamq").options(**shop.write_options(topic="out"))
    with pytest.raises(PySparkException, match="never overwritten"):
        over.mode("overwrite").save()


def test_a_stream_is_written_exactly_once(shop: Shop, tmp_path: Path) -> None:
    """A task dies in the middle of a batch, twice; the batch is done again over what it wrote."""
    shop.topic("access", 2)
    shop.topic("out", 3)
    bodies = {}
    for partition in range(2):
        for number in range(1, 801):
            # Too large for the first try, and for the second.
            size = {(0, 300): 2000, (1, 600): 3000}.get((partition, number), 10)
            bodies[partition, number] = f"{partition}:{number}:".encode().ljust(size, b".")
    for (partition, number), body in bodies.items():
        key = shop.keys.stream("access", partition)
        shop.link.execute("XADD", key, f"{number}-0", "payload", body, "key", b"%d" % number)
    rows = shop.stream("access").select("key", "value")

    def attempt(max_message_bytes: int) -> None:
        writer = rows.writeStream.format("streamq").trigger(availableNow=True)
        options = shop.write_options(topic="out", batchRows=50, maxMessageBytes=max_message_bytes)
        checkpoint = str(tmp_path / "checkpoint")
        run(writer.options(**options).option("checkpointLocation", checkpoint).start())

    for limit in (1000, 2500):
        with pytest.raises(StreamingQueryException, match="max_message_bytes"):
            attempt(limit)
        found = shop.payloads("out", 3)
        # How much of the other task was written when the query stopped is chance.
        assert 0 < len(found) < len(bodies)
        assert len(set(found)) == len(found)
    attempt(10_000)
    assert shop.payloads("out", 3) == sorted(bodies.values())
    shop.add("access", 0, "900-0")
    attempt(10_000)
    assert shop.payloads("out", 3) == sorted([*bodies.values(), b"0:900-0"])
