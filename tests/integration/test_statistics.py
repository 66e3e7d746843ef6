"""The figures of partitions and assignments are read from a real server."""

from __future__ import annotations

import pytest

from streamqd.errors import RedisResponseError
from streamqd.store import retention, spark
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.statistics import (
    QUERIES_MAX,
    AssignmentFigures,
    Backlog,
    PartitionFigures,
    assignment_figures,
    measure_assignment,
    measure_partition,
    partition_figures,
)
from streamqd.store.untrusted import INTEGER_MAX
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.servers import Server


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


def measure_partition_figures(harness: Harness) -> PartitionFigures:
    return partition_figures(harness.link.run(measure_partition(harness.keys, "access", 0)))


def measure_assignment_figures(harness: Harness) -> AssignmentFigures:
    figures = assignment_figures(
        harness.link.run(measure_assignment(harness.keys, harness.assignment))
    )
    assert figures is not None
    return figures


def test_figures_of_missing_keys_are_zero(harness: Harness) -> None:
    assert measure_partition_figures(harness) == PartitionFigures(0, 0, "", "", 0, 0, "")
    assert (
        assignment_figures(harness.link.run(measure_assignment(harness.keys, harness.assignment)))
        is None
    )
    harness.groups()
    empty = Backlog(0, "", 0, "", 0)
    assert measure_assignment_figures(harness) == AssignmentFigures(empty, empty, 0, None)


def test_figures_of_a_partition_are_complete(harness: Harness, server: Server) -> None:
    harness.groups()
    for number in range(1, 6):
        harness.add(f"{number}-0")
    harness.add("1-0", stream=harness.dlq)
    harness.do("ZADD", harness.delayed_sends, 9, "send")
    harness.fetch(2)
    harness.do("XACK", harness.stream, ASSIGNMENT.group, "1-0", "2-0")
    counted = server.version >= (7,)
    whole = PartitionFigures(5, 5, "1-0", "5-0", 1, 1, "", 9, counted=counted)
    assert measure_partition_figures(harness) == whole


def test_figures_include_a_spark_query_position(harness: Harness, server: Server) -> None:
    """A partition's figures include a Spark query's position and the time of its last report."""
    for number in range(1, 6):
        harness.add(f"{number}-0")
    harness.groups()
    harness.link.run(spark.query_position(harness.keys, "access", 0, "etl", "2-0", 2, hold=False))
    (query,) = measure_partition_figures(harness).queries
    assert (query.group, query.lag) == ("spark:etl", 3 if server.version >= (7, 0) else None)
    assert query.idle_ms is not None
    harness.link.run(spark.query_position(harness.keys, "access", 0, "etl", "5-0", 5, hold=False))
    assert measure_partition_figures(harness).queries[0].lag == 0


def test_groups_named_like_queries_have_no_query_figures(harness: Harness) -> None:
    """A group whose name looks like a query has no figures of queries.

    Otherwise, any client of Redis could create series of metrics.
    """
    harness.add("1-0")
    for name in (b"spark:", b"spark:..", b"spark:a b", b"spark:\xff", b"spark:" + b"x" * 65):
        harness.do("XGROUP", "CREATE", harness.stream, name, "0")
    assert measure_partition_figures(harness).queries == ()
    for number in range(QUERIES_MAX + 5):
        harness.do("XGROUP", "CREATE", harness.stream, f"spark:made{number}", "0")
    harness.link.run(spark.query_position(harness.keys, "access", 0, "zzz", "1-0", 1, hold=False))
    shown = measure_partition_figures(harness).queries
    assert len(shown) == QUERIES_MAX
    assert "spark:zzz" in {each.group for each in shown}


def test_added_includes_trimmed_entries(harness: Harness, server: Server) -> None:
    """Trimmed entries are included.

    Redis 7 counts them, and for older servers, the record of trimming contains their number.
    """
    harness.groups()
    for number in range(1, 6):
        harness.add(f"{number}-0")
    harness.fetch(3)
    harness.do("XACK", harness.stream, ASSIGNMENT.group, "1-0", "2-0", "3-0")
    trim = retention.trim(
        harness.keys,
        "access",
        0,
        keep_from="",
        max_length=None,
        archive=False,
        limit=100,
        expected=[ASSIGNMENT.group],
    )
    harness.link.run(trim)
    harness.do("XTRIM", harness.stream, "MINID", "=", "4-0")
    harness.do("HSET", harness.trim, "removed", 3)
    figures = measure_partition_figures(harness)
    assert (figures.length, figures.added, figures.first_id) == (2, 5, "4-0")
    assert figures.trimmed_to


def test_figures_of_an_assignment_are_complete(harness: Harness) -> None:
    harness.pending("1-0", "2-0")
    harness.add("3-0")
    harness.add("4-0")
    harness.pending_retry("7-0")
    harness.add("8-0", stream=harness.retry)
    harness.do("ZADD", harness.delayed, 1_700_000_000_123, "m:1-0", 1_700_000_000_999, "m:2-0")
    figures = measure_assignment_figures(harness)
    assert figures.main._replace(unread=None) == Backlog(2, "1-0", None, "3-0", 4)
    assert figures.retry._replace(unread=None) == Backlog(1, "7-0", None, "8-0", 2)
    assert (figures.waiting_retries, figures.next_due_unix_ms) == (2, 1_700_000_000_123)
    assert figures.pending == 3
    assert figures.oldest_unread_unix_ms() == 3
    assert figures.oldest_unix_ms() == 1


def test_lag_is_taken_from_the_server_or_unknown(harness: Harness, server: Server) -> None:
    harness.pending("1-0", "2-0")
    assert measure_assignment_figures(harness).lag == 0
    harness.add("3-0")
    assert measure_assignment_figures(harness).lag == (1 if server.version >= (7, 0) else None)


def test_lag_is_known_before_the_first_delivery(harness: Harness) -> None:
    harness.groups()
    for number in range(1, 4):
        harness.add(f"{number}-0")
    assert measure_assignment_figures(harness).lag == 3


def test_lag_of_a_midstream_group_is_unknown_until_caught_up(harness: Harness) -> None:
    for number in range(1, 5):
        harness.add(f"{number}-0")
    harness.do("XGROUP", "CREATE", harness.stream, ASSIGNMENT.group, "2-0")
    assert measure_assignment_figures(harness).lag is None
    harness.fetch(10)
    assert measure_assignment_figures(harness).lag == 0


def test_figures_report_a_key_of_a_wrong_type(harness: Harness) -> None:
    harness.do("SET", harness.stream, "no stream")
    for call in (
        measure_partition(harness.keys, "access", 0),
        measure_assignment(harness.keys, harness.assignment),
    ):
        with pytest.raises(RedisResponseError) as caught:
            harness.link.run(call)
        assert caught.value.code == "WRONGTYPE"


def test_measuring_with_full_memory_changes_nothing(harness: Harness) -> None:
    harness.pending("1-0")
    before = harness.dump()
    with harness.full_memory():
        measure_partition_figures(harness)
        measure_assignment_figures(harness)
    assert harness.dump() == before


def test_greatest_id_has_the_latest_time(harness: Harness) -> None:
    """The housekeeper publishes the latest time that every view can parse."""
    harness.groups()
    harness.add("18446744073709551615-18446744073709551615")
    assert measure_assignment_figures(harness).oldest_unread_unix_ms() == INTEGER_MAX
