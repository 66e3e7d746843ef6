"""A real Spark reads topics in batches."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import spark_partition_id

from streamqd import spark as ours
from streamqd.model import Assignment
from streamqd.store import messages
from tests.spark.conftest import Shop

DAY = 1_795_180_000_000  # a time in 2026, in unix ms


def ids(frame: object) -> list[str]:
    return sorted(f"{row.partition}:{row.id}" for row in frame.select("partition", "id").collect())  # type: ignore[attr-defined]


def expected_rows(partition: int, *numbers: int) -> list[str]:
    return sorted(f"{partition}:{number}-0" for number in numbers)


def test_source_returns_every_column(shop: Shop) -> None:
    shop.topic("access", 3)
    for partition in range(3):
        shop.fill("access", partition, 1, 100)
    trace = json.dumps({"trace": "é"}).encode()
    shop.add("access", 1, f"{DAY}-7", key=b"\x00k", headers=trace, sentAt=b"5")
    frame = shop.read("access", includeHeaders="true", includeFields="true")

    rows = frame.collect()

    assert len(rows) == 301
    assert ids(frame) == sorted(
        [f"{p}:{n}-0" for p in range(3) for n in range(1, 101)] + [f"1:{DAY}-7"]
    )
    full = frame.where(f"id_ms = {DAY}").collect()[0]
    assert full.asDict(recursive=True) == {
        "key": b"\x00k",
        "value": f"1:{DAY}-7".encode(),
        "topic": "access",
        "partition": 1,
        "id": f"{DAY}-7",
        "id_ms": DAY,
        "id_seq": 7,
        "timestamp": datetime.fromtimestamp(DAY / 1000, UTC).astimezone().replace(tzinfo=None),
        "headers": [{"key": "trace", "value": "é".encode()}],
        "fields": {"sentAt": b"5"},
    }


def test_spark_finds_the_source_automatically(shop: Shop) -> None:
    """Spark finds the source without a registration, because it imports modules `pyspark_…`."""
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 5)
    other = shop.spark.newSession()
    other.sql(
        "CREATE TEMPORARY VIEW seen USING streamq"
        f" OPTIONS (subscribe 'access', url '{shop.server.url}')"
    )
    assert other.sql("SELECT max(id_ms) FROM seen").collect()[0][0] == 5


def test_starting_and_ending_offsets_bound_a_read(shop: Shop) -> None:
    shop.topic("access", 2)
    shop.fill("access", 0, 1, 9)
    shop.fill("access", 1, 1, 9)
    assignment = Assignment("access", 0, "hits")
    shop.link.run(messages.ensure_group(shop.keys, assignment, "0"))
    stream = shop.keys.stream("access", 0)
    shop.link.execute("XREADGROUP", "GROUP", "hits", "w", "COUNT", 6, "STREAMS", stream, ">")
    shop.link.execute("XACK", stream, "hits", "1-0", "2-0", "3-0", "5-0", "6-0")
    by_id = {"startingOffsets": '{"access": {"0": "7-0", "1": "latest"}}'}
    until = {"endingOffsets": '{"access": {"0": "2-0", "1": "1-5"}}'}
    times = {"startingTimestamp": 4, "endingTimestamp": 6}
    group = {"assign": '{"access": [0]}', "subscribe": "", "startingOffsets": "group:hits"}

    assert ids(shop.read("access", **by_id)) == expected_rows(0, 8, 9)
    assert ids(shop.read("access", **until)) == sorted(expected_rows(0, 1, 2) + expected_rows(1, 1))
    assert ids(shop.read("access", **times)) == sorted(
        expected_rows(0, 4, 5) + expected_rows(1, 4, 5)
    )
    found = shop.spark.read.format("streamq").options(
        **{name: str(value) for name, value in (shop.write_options() | group).items()}
    )
    assert ids(found.load()) == expected_rows(0, 4, 5, 6, 7, 8, 9)


def test_min_partitions_splits_streams(shop: Shop) -> None:
    shop.topic("access", 2)
    shop.fill("access", 0, 1, 300)
    shop.fill("access", 1, 1, 100)
    whole = shop.read("access")
    by_number = shop.read("access", minPartitions=8)
    by_rows = shop.read("access", maxRecordsPerPartition=90)

    assert whole.rdd.getNumPartitions() == 2
    assert by_number.rdd.getNumPartitions() == 8
    tasks = by_rows.select(spark_partition_id()).collect()
    assert sorted(Counter(tasks).values()) == [10, 30, 90, 90, 90, 90]
    assert ids(whole) == ids(by_number) == ids(by_rows)


def test_filters_are_pushed_down(shop: Shop) -> None:
    shop.topic("access", 3)
    for partition in range(3):
        shop.fill("access", partition, DAY, DAY + 99)
    seen = ours.read_topic(shop.spark, "access", url=shop.server.url)
    time = datetime.fromtimestamp((DAY + 90) / 1000, UTC).isoformat()
    few = seen.where("partition IN (0, 2)").where(f"timestamp >= timestamp'{time}'")

    assert ids(few) == sorted(f"{p}:{n}-0" for p in (0, 2) for n in range(DAY + 90, DAY + 100))
    assert few.rdd.getNumPartitions() == 2
    assert seen.where("partition = 7").count() == 0
    # Without the option, Spark must not refuse the reader for the reason that filters are disabled.
    shop.spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert shop.read("access").where("partition = 1").count() == 100
        with pytest.raises(PySparkException, match=r"filterPushdown\.enabled"):
            shop.read("access", pushdown="true").count()
    finally:
        shop.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_trimmed_start_is_a_data_loss(shop: Shop) -> None:
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 250)
    shop.link.execute("XTRIM", shop.keys.stream("access", 0), "MINID", "200-0")
    start = {"startingOffsets": '{"access": {"0": "5-0"}}'}

    with pytest.raises(PySparkException, match="entries of access partition 0 after 5-0"):
        shop.read("access", **start).count()
    left = shop.read("access", failOnDataLoss="false", **start)
    assert ids(left) == expected_rows(0, *range(200, 251))
    assert shop.read("access").count() == 51


def test_source_reads_dead_letters(shop: Shop) -> None:
    shop.topic("access", 2)
    letter = ("payload", "x", "originalTopic", "access", "originalPartition", 1, "originalId")
    for number, word in enumerate(("ValueError", "KeyError", "ValueError"), 1):
        command = ("XADD", shop.keys.dlq("access", 1), f"{number}-0", *letter, f"{number}-9")
        shop.link.execute(*command, "group", "hits", "errorClass", word, "attempts", 5)

    shop.read("access:dlq").createOrReplaceTempView("dlq_access")
    found = shop.spark.sql(
        "SELECT error_class, count(*), max(attempts), max(original_partition), min(`group`)"
        " FROM dlq_access GROUP BY error_class ORDER BY error_class"
    )
    assert [tuple(row) for row in found.collect()] == [
        ("KeyError", 1, 5, 1, "hits"),
        ("ValueError", 2, 5, 1, "hits"),
    ]


def test_source_accepts_a_subset_schema(shop: Shop) -> None:
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 3)
    few = shop.read("access", "id string, value binary")
    assert few.columns == ["id", "value"]
    assert {row.id for row in few.collect()} == {"1-0", "2-0", "3-0"}
    with pytest.raises(PySparkException, match="the column offset does not exist"):
        shop.read("access", "offset long").count()
    with pytest.raises(PySparkException, match="the column id must be a nullable string"):
        shop.read("access", "id long").count()


def test_selected_columns_are_the_only_columns(shop: Shop, tmp_path: Path) -> None:
    """An option names the columns, because Spark does not pass any to a source in Python."""
    shop.topic("access", 1)
    shop.add("access", 0, "1-0", "2-0", key=b"k", headers=b'{"a": "b"}', more=b"x")
    few = shop.read("access", columns="value, headers")
    assert few.columns == ["value", "headers"]
    assert {bytes(row.headers[0].value) for row in few.collect()} == {b"b"}
    assert shop.take(shop.stream("access", columns="id"), tmp_path) == [[("1-0",), ("2-0",)]]
    one = ours.read_topic(shop.spark, "access", url=shop.server.url, columns="id")
    assert sorted(row.id for row in one.where("id <> '1-0'").collect()) == ["2-0"]
    with pytest.raises(PySparkException, match="the column offset does not exist; use key, value"):
        shop.read("access", columns="id,offset")
    with pytest.raises(PySparkException, match="option columns cannot be used in CREATE TABLE"):
        shop.spark.sql(
            "CREATE TABLE seen USING streamq"
            f" OPTIONS (topic 'access', url '{shop.server.url}', columns 'id')"
        )


def test_source_reads_an_empty_topic(shop: Shop) -> None:
    shop.topic("access", 2)
    assert shop.read("access").count() == 0


def test_invalid_source_option_is_one_sentence(shop: Shop) -> None:
    with pytest.raises(PySparkException, match="did you mean startingOffsets"):
        shop.read("access", startingOffset="latest")
    with pytest.raises(PySparkException, match="topic nowhere does not exist"):
        shop.read("nowhere").count()
