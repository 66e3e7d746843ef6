"""Streaming reads of topics by a real Spark: each entry is in exactly one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from streamqd.admin import topics_deletion
from streamqd.model import Assignment
from streamqd.store import messages, retention
from tests.spark.conftest import Shop, run
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def places(batches: list[list[tuple[Any, ...]]]) -> list[str]:
    return sorted(f"{partition}:{entry_id}" for rows in batches for partition, entry_id in rows)


def expected_rows(partition: int, first: int, last: int) -> list[str]:
    return [f"{partition}:{number}-0" for number in range(first, last + 1)]


def select_places(frame: DataFrame) -> DataFrame:
    return frame.select("partition", "id")


def test_query_continues_from_its_checkpoint(shop: Shop, tmp_path: Path) -> None:
    """A query continues across restarts and new partitions, in batches divided by backlog."""
    shop.topic("access", 2)
    shop.fill("access", 0, 1, 300)
    shop.fill("access", 1, 1, 100)
    frame = select_places(shop.stream("access", maxOffsetsPerTrigger=200))

    first = shop.take(frame, tmp_path)
    assert [len(rows) for rows in first] == [200, 200]
    shares = [sum(partition == 0 for partition, _ in rows) for rows in first]
    assert shares == [150, 150]
    assert places(first) == sorted(expected_rows(0, 1, 300) + expected_rows(1, 1, 100))

    shop.grow("access", 3)
    shop.fill("access", 2, 1, 50)
    shop.fill("access", 0, 301, 320)
    again = shop.take(frame, tmp_path)
    assert places(again) == sorted(expected_rows(2, 1, 50) + expected_rows(0, 301, 320))

    assert shop.take(frame, tmp_path) == []
    offsets = sorted(int(path.name) for path in (tmp_path / "offsets").glob("[0-9]*"))
    last = json.loads((tmp_path / "offsets" / str(offsets[-1])).read_text().splitlines()[2])
    assert last == {
        "access": {"0": "320-0", "1": "100-0", "2": "50-0"},
        "#": {"access": {"0": 320, "1": 100, "2": 50}},
    }


def test_trimming_during_a_stream_fails_the_query(shop: Shop, tmp_path: Path) -> None:
    """Unread trimmed entries fail the query. With failOnDataLoss=false, the query continues."""
    shop.topic("access", 1)
    assignment = Assignment("access", 0, "hits")
    stream = shop.keys.stream("access", 0)
    shop.link.run(messages.ensure_group(shop.keys, assignment, "0"))

    def settle_and_trim() -> int:
        read = ("XREADGROUP", "GROUP", "hits", "w", "COUNT", 10_000, "STREAMS", stream, ">")
        entries = shop.link.execute(*read)[0][1]
        shop.link.execute("XACK", stream, "hits", *(entry[0] for entry in entries))
        call = retention.trim(
            *(shop.keys, "access", 0),
            keep_from="",
            max_length=None,
            archive=False,
            limit=10_000,
            expected=["hits"],
        )
        return retention.Trimmed.parse(shop.link.run(call)).removed

    shop.fill("access", 0, 1, 300)
    strict = select_places(shop.stream("access"))
    assert len(places(shop.take(strict, tmp_path))) == 300
    assert settle_and_trim() == 300
    shop.fill("access", 0, 301, 400)
    # Only entries that were read are gone, which is not a loss.
    assert places(shop.take(strict, tmp_path)) == sorted(expected_rows(0, 301, 400))

    shop.fill("access", 0, 401, 650)
    assert settle_and_trim() == 350
    shop.fill("access", 0, 651, 660)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="250 entries of access partition 0"):
            shop.take(strict, tmp_path)
    lenient = select_places(shop.stream("access", failOnDataLoss="false"))
    assert places(shop.take(lenient, tmp_path)) == sorted(expected_rows(0, 651, 660))
    assert shop.take(strict, tmp_path) == []


def test_running_query_reads_new_entries(shop: Shop, tmp_path: Path) -> None:
    """A running query starts with new entries, reads a new partition, and reports its lag."""
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 10)
    seen: list[str] = []
    frame = select_places(shop.stream("access", startingOffsets="latest"))
    writer = frame.writeStream.option("checkpointLocation", str(tmp_path))
    query = writer.foreachBatch(
        lambda batch, _: seen.extend(places([[tuple(row) for row in batch.collect()]]))
    ).trigger(processingTime="200 milliseconds")
    running = query.start()
    try:
        wait_until(lambda: running.recentProgress, timeout=60, what="the first look")
        shop.fill("access", 0, 11, 15)
        wait_until(lambda: len(seen) == 5, timeout=60, what="five entries")
        shop.grow("access", 2)
        shop.fill("access", 1, 1, 3)
        wait_until(lambda: len(seen) == 8, timeout=60, what="entries of the new partition")
        wait_until(
            lambda: '"1": "3-0"' in str(running.lastProgress["sources"][0]["latestOffset"]),
            timeout=60,
            what="the reported position",
        )
        progress = running.lastProgress["sources"][0]
        assert json.loads(progress["latestOffset"])["#lag"] == {"total": 0, "max": 0, "avg": 0.0}
    finally:
        running.stop()
    assert sorted(seen) == sorted(expected_rows(0, 11, 15) + expected_rows(1, 1, 3))


def test_dead_letters_can_be_streamed(shop: Shop, tmp_path: Path) -> None:
    shop.topic("access", 1)
    dlq = shop.keys.dlq("access", 0)
    shop.link.pipeline([("XADD", dlq, f"{n}-0", "payload", "x", "reason", "dead") for n in (1, 2)])
    frame = shop.stream("access:dlq").select("id", "reason")
    assert shop.take(frame, tmp_path) == [[("1-0", "dead"), ("2-0", "dead")]]
    # A replayed dead letter is not a loss.
    shop.link.execute("XDEL", dlq, "1-0", "2-0")
    shop.link.execute("XADD", dlq, "3-0", "payload", "x", "reason", "attempts")
    assert shop.take(frame, tmp_path) == [[("3-0", "attempts")]]


def test_deleted_topic_and_recreated_stream_are_losses(shop: Shop, tmp_path: Path) -> None:
    """The query fails and keeps its checkpoint. With failOnDataLoss=false, it continues."""
    for name in ("hits-a", "hits-b"):
        shop.topic(name, 1)
        shop.fill(name, 0, 1, 100)

    def stream(**options: object) -> DataFrame:
        return select_places(shop.stream("", subscribePattern="hits-.*", **options))

    assert len(places(shop.take(stream(), tmp_path))) == 200
    shop.fill("hits-a", 0, 101, 600)
    topics_deletion.delete(shop.store, "hits-a", force=True)
    shop.link.execute("DEL", shop.keys.stream("hits-b", 0))
    shop.fill("hits-b", 0, 201, 450)
    strict = stream()
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="hits-a partition 0 after 100-0 no long"):
            shop.take(strict, tmp_path)
    lenient = stream(failOnDataLoss="false")
    assert places(shop.take(lenient, tmp_path)) == sorted(expected_rows(0, 201, 450))
    shop.topic("hits-a", 1)
    shop.fill("hits-a", 0, 1, 3)
    assert places(shop.take(strict, tmp_path)) == expected_rows(0, 1, 3)


def test_query_publishes_its_position(shop: Shop, tmp_path: Path) -> None:
    """The position is a group with a lag. On request, the group retains entries that are unread."""
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 30)
    stream = shop.keys.stream("access", 0)
    frame = select_places(shop.stream("access", group="etl", holdRetention="true"))
    assert len(places(shop.take(frame, tmp_path))) == 30
    shop.fill("access", 0, 31, 35)

    (flat,) = shop.link.execute("XINFO", "GROUPS", stream)
    group = dict(zip(flat[::2], flat[1::2], strict=True))
    assert (group[b"name"], group[b"last-delivered-id"]) == (b"spark:etl", b"30-0")
    assert group.get(b"lag", 5) == 5
    assert shop.link.execute("HGET", shop.keys.trim("access", 0), "holds:spark:etl") == b"1"

    frame = select_places(shop.stream("access", group="etl", startingOffsets="group:spark:etl"))
    assert places(shop.take(frame, tmp_path / "another")) == expected_rows(0, 31, 35)
    assert shop.link.execute("HGET", shop.keys.trim("access", 0), "holds:spark:etl") is None


def test_query_reports_its_lag(shop: Shop, tmp_path: Path) -> None:
    """The progress of each batch contains the lag."""
    shop.topic("access", 2)
    shop.fill("access", 0, 1, 30)
    shop.fill("access", 1, 1, 10)
    writer = select_places(shop.stream("access", maxOffsetsPerTrigger=20)).writeStream.format(
        "noop"
    )
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    run(query)
    found = [json.loads(each["sources"][0]["latestOffset"]) for each in query.recentProgress]
    assert [each["#lag"]["total"] for each in found][:2] == [20, 0]
    assert found[0]["#lag"] == {"total": 20, "max": 15, "avg": 10.0}
