"""sink_start, sink_publish, sink_finish: a batch of a query is decided and published once."""

from __future__ import annotations

import pytest

from streamqd.store import spark
from streamqd.store.scripts import Call
from tests.contract.desk import Desk

QUERY = "4f5a"
PLAN = {"a": {"access": [0, 2]}, "b": {"access": [0]}}
TTL = 60.0


def begin(desk: Desk, batch: int, plan: spark.Plan = PLAN) -> Call:
    return spark.begin(desk.keys, QUERY, batch, plan, TTL, 7)


def end(desk: Desk, batch: int) -> Call:
    return spark.end(desk.keys, QUERY, batch, TTL)


def publish(desk: Desk, attempt: str = "a") -> Call:
    return spark.publish(desk.keys, "access", 0, QUERY, attempt, TTL)


def stage(desk: Desk, *texts: bytes, attempt: str = "a") -> str:
    key = desk.keys.staged("access", 0, QUERY, attempt)
    for number, text in enumerate(texts, 1):
        desk.do("XADD", key, f"0-{number}", "payload", text, "key", b"\x00\xff")
    return key


def published(desk: Desk) -> list[bytes]:
    return [fields[1] for _, fields in desk.do("XRANGE", desk.stream, "-", "+")]


def expires(desk: Desk, key: str) -> bool:
    return 0 < desk.do("PTTL", key) <= TTL * 1000


# --- the decision ---------------------------------------------------------------------------------


def test_sink_start_keeps_the_first_decision(desk: Desk) -> None:
    """P1: a repeated batch with other tasks gets the ids of the tasks that count."""
    assert desk.expect("sink_start", "OK", begin(desk, 0)) == [b""]
    assert expires(desk, desk.keys.sink(QUERY))
    at, raw = desk.expect("sink_start", "STARTED", begin(desk, 0, {"c": {"access": [1]}}))
    assert (at, spark.read_plan(raw)) == (b"0", PLAN)
    desk.expect("sink_finish", "OK", end(desk, 0))
    assert desk.expect("sink_start", "DONE", begin(desk, 0)) == [b"7", b"access"]
    desk.do("HDEL", desk.keys.sink(QUERY), "rows", "topics")  # as of an older version
    assert desk.expect("sink_start", "DONE", begin(desk, 0)) == [b"", b""]


def test_sink_start_waits_for_the_previous_batch(desk: Desk) -> None:
    desk.expect("sink_start", "OK", begin(desk, 9))
    assert desk.expect("sink_start", "STARTED", begin(desk, 10, {}))[0] == b"9"
    desk.expect("sink_finish", "OK", end(desk, 9))
    assert desk.expect("sink_start", "OK", begin(desk, 10, {})) == [b"9"]
    assert desk.expect("sink_start", "PAST", begin(desk, 9)) == [b"10"]


def test_sink_finish_refuses_an_older_driver(desk: Desk) -> None:
    desk.expect("sink_finish", "OTHER", end(desk, 3))
    desk.expect("sink_start", "OK", begin(desk, 4))
    desk.expect("sink_finish", "OTHER", end(desk, 3))
    assert desk.expect("sink_start", "STARTED", begin(desk, 4))[0] == b"4"


def test_ending_twice_is_ending_once(desk: Desk) -> None:
    desk.expect("sink_start", "OK", begin(desk, 4))
    desk.expect("sink_finish", "OK", end(desk, 4))
    before = desk.dump()
    desk.expect("sink_finish", "OK", end(desk, 4))
    assert desk.dump() == before


# --- moving rows ----------------------------------------------------------------------------------


def test_rows_are_moved_in_their_order(desk: Desk) -> None:
    key = stage(desk, b"a", b"b", b"c")
    assert desk.expect("sink_publish", "OK", publish(desk)) == [3, 0]
    assert [fields for _, fields in desk.do("XRANGE", desk.stream, "-", "+")] == [
        [b"payload", text, b"key", b"\x00\xff"] for text in (b"a", b"b", b"c")
    ]
    assert desk.do("XLEN", key) == 0
    assert expires(desk, key)


def test_sink_publish_repeated_finds_the_emptied_stream(desk: Desk) -> None:
    """A repeated call finds it and writes nothing. Without it, the outcome would be unknown."""
    key = stage(desk, b"a")
    desk.expect("sink_publish", "OK", publish(desk))
    assert desk.expect("sink_publish", "OK", publish(desk)) == [0, 0]
    assert published(desk) == [b"a"]
    desk.do("DEL", key)
    desk.expect("sink_publish", "GONE", publish(desk))


def test_many_rows_go_in_pieces(desk: Desk) -> None:
    stage(desk, *(b"%d" % number for number in range(spark.ROWS_MAX + 7)))
    assert desk.expect("sink_publish", "OK", publish(desk)) == [spark.ROWS_MAX, 7]
    assert desk.expect("sink_publish", "OK", publish(desk)) == [7, 0]
    assert published(desk) == [b"%d" % number for number in range(spark.ROWS_MAX + 7)]


def test_large_rows_go_a_few_at_a_time(desk: Desk) -> None:
    stage(desk, *(b"%d" % number * 300_000 for number in range(5)))
    lefts = [desk.expect("sink_publish", "OK", publish(desk))[1] for _ in range(3)]
    assert lefts == [3, 1, 0]
    assert [text[:1] for text in published(desk)] == [b"0", b"1", b"2", b"3", b"4"]


def test_sink_publish_moves_a_wide_row(desk: Desk) -> None:
    key = desk.keys.staged("access", 0, QUERY, "a")
    desk.do("XADD", key, "0-1", *[b"n"] * spark.FIELDS_MAX)
    assert desk.expect("sink_publish", "OK", publish(desk)) == [1, 0]


def test_sink_publish_moves_only_the_rows_that_fit(desk: Desk) -> None:
    """S3: a partition with one free id."""
    key = stage(desk, b"a", b"b")
    last = 2**64 - 1
    desk.do("XADD", desk.stream, f"{last}-{last - 1}", "payload", "x")
    with pytest.raises(Exception, match=r"last possible ID|exhausted"):
        desk.link.run(publish(desk))
    assert published(desk) == [b"x", b"a"]
    assert [fields[1] for _, fields in desk.do("XRANGE", key, "-", "+")] == [b"b"]
