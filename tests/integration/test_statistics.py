"""The figures of partitions and units, read from a real server."""

from __future__ import annotations

import pytest

from streamqd.errors import RedisRefused
from streamqd.store import retention, spark
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.statistics import (
    QUERIES_MAX,
    Backlog,
    PartitionFigures,
    UnitFigures,
    measure_partition,
    measure_unit,
    partition_figures,
    unit_figures,
)
from streamqd.store.untrusted import INTEGER_MAX
from tests.contract.desk import UNIT, Desk
from tests.support.servers import Server


@pytest.fixture
def desk(link: Connection, keys: Keys) -> Desk:
    return Desk(link, keys)


def of_partition(desk: Desk) -> PartitionFigures:
    return partition_figures(desk.link.run(measure_partition(desk.keys, "access", 0)))


def of_unit(desk: Desk) -> UnitFigures:
    figures = unit_figures(desk.link.run(measure_unit(desk.keys, desk.unit)))
    assert figures is not None
    return figures


def test_figures_of_missing_keys_are_zero(desk: Desk) -> None:
    assert of_partition(desk) == PartitionFigures(0, 0, "", "", 0, 0, "")
    assert unit_figures(desk.link.run(measure_unit(desk.keys, desk.unit))) is None
    desk.groups()
    empty = Backlog(0, "", 0, "", 0)
    assert of_unit(desk) == UnitFigures(empty, empty, 0, None)


def test_figures_of_a_partition_are_complete(desk: Desk, server: Server) -> None:
    desk.groups()
    for number in range(1, 6):
        desk.add(f"{number}-0")
    desk.add("1-0", stream=desk.dlq)
    desk.do("ZADD", desk.scheduled, 9, "send")
    desk.fetch(2)
    desk.do("XACK", desk.stream, UNIT.group, "1-0", "2-0")
    counted = server.version >= (7,)
    whole = PartitionFigures(5, 5, "1-0", "5-0", 1, 1, "", 9, counted=counted)
    assert of_partition(desk) == whole


def test_figures_include_a_spark_query_position(desk: Desk, server: Server) -> None:
    """P7: its position and the time of its last report, next to the partition's figures."""
    for number in range(1, 6):
        desk.add(f"{number}-0")
    desk.groups()
    desk.link.run(spark.query_position(desk.keys, "access", 0, "etl", "2-0", 2, hold=False))
    (query,) = of_partition(desk).queries
    assert (query.group, query.lag) == ("spark:etl", 3 if server.version >= (7, 0) else None)
    assert query.idle_ms is not None
    desk.link.run(spark.query_position(desk.keys, "access", 0, "etl", "5-0", 5, hold=False))
    assert of_partition(desk).queries[0].lag == 0


def test_groups_that_only_look_like_queries_make_no_figures(desk: Desk) -> None:
    """Each would be a series of the metrics, and any client of Redis could create them."""
    desk.add("1-0")
    for name in (b"spark:", b"spark:..", b"spark:a b", b"spark:\xff", b"spark:" + b"x" * 65):
        desk.do("XGROUP", "CREATE", desk.stream, name, "0")
    assert of_partition(desk).queries == ()
    for number in range(QUERIES_MAX + 5):
        desk.do("XGROUP", "CREATE", desk.stream, f"spark:made{number}", "0")
    desk.link.run(spark.query_position(desk.keys, "access", 0, "zzz", "1-0", 1, hold=False))
    shown = of_partition(desk).queries
    assert len(shown) == QUERIES_MAX
    assert "spark:zzz" in {each.group for each in shown}


def test_added_includes_trimmed_entries(desk: Desk, server: Server) -> None:
    """Redis 7 counts them. For older servers, the record of trimming has the number."""
    desk.groups()
    for number in range(1, 6):
        desk.add(f"{number}-0")
    desk.fetch(3)
    desk.do("XACK", desk.stream, UNIT.group, "1-0", "2-0", "3-0")
    trim = retention.trim(
        desk.keys,
        "access",
        0,
        keep_from="",
        max_length=None,
        archive=False,
        limit=100,
        expected=[UNIT.group],
    )
    desk.link.run(trim)
    desk.do("XTRIM", desk.stream, "MINID", "=", "4-0")
    desk.do("HSET", desk.trim, "removed", 3)
    figures = of_partition(desk)
    assert (figures.length, figures.added, figures.first_id) == (2, 5, "4-0")
    assert figures.trimmed_to


def test_figures_of_a_unit_are_complete(desk: Desk) -> None:
    desk.pending("1-0", "2-0")
    desk.add("3-0")
    desk.add("4-0")
    desk.pending_retry("7-0")
    desk.add("8-0", stream=desk.retry)
    desk.do("ZADD", desk.delayed, 1_700_000_000_123, "m:1-0", 1_700_000_000_999, "m:2-0")
    figures = of_unit(desk)
    assert figures.main._replace(unread=None) == Backlog(2, "1-0", None, "3-0", 4)
    assert figures.retry._replace(unread=None) == Backlog(1, "7-0", None, "8-0", 2)
    assert (figures.delayed, figures.next_due_unix_ms) == (2, 1_700_000_000_123)
    assert figures.pending == 3
    assert figures.oldest_unread_unix_ms() == 3
    assert figures.oldest_unix_ms() == 1


def test_lag_is_the_servers_or_unknown(desk: Desk, server: Server) -> None:
    desk.pending("1-0", "2-0")
    assert of_unit(desk).lag == 0
    desk.add("3-0")
    assert of_unit(desk).lag == (1 if server.version >= (7, 0) else None)


def test_lag_is_known_before_the_first_delivery(desk: Desk) -> None:
    desk.groups()
    for number in range(1, 4):
        desk.add(f"{number}-0")
    assert of_unit(desk).lag == 3


def test_group_created_midstream_has_no_lag_until_caught_up(desk: Desk) -> None:
    for number in range(1, 5):
        desk.add(f"{number}-0")
    desk.do("XGROUP", "CREATE", desk.stream, UNIT.group, "2-0")
    assert of_unit(desk).lag is None
    desk.fetch(10)
    assert of_unit(desk).lag == 0


def test_figures_report_a_key_of_a_wrong_type(desk: Desk) -> None:
    desk.do("SET", desk.stream, "no stream")
    for call in (measure_partition(desk.keys, "access", 0), measure_unit(desk.keys, desk.unit)):
        with pytest.raises(RedisRefused) as caught:
            desk.link.run(call)
        assert caught.value.code == "WRONGTYPE"


def test_measuring_changes_nothing_even_when_memory_is_full(desk: Desk) -> None:
    desk.pending("1-0")
    before = desk.dump()
    with desk.full_memory():
        of_partition(desk)
        of_unit(desk)
    assert desk.dump() == before


def test_greatest_id_has_the_latest_time(desk: Desk) -> None:
    """S3: every view can parse the value that the housekeeper publishes."""
    desk.groups()
    desk.add("18446744073709551615-18446744073709551615")
    assert of_unit(desk).oldest_unread_unix_ms() == INTEGER_MAX
