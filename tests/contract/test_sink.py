"""sink_start, sink_publish, sink_finish: a batch is decided and published exactly once."""

from __future__ import annotations

import pytest

from streamqd.store import spark
from streamqd.store.scripts import Call
from tests.contract.harness import Harness

QUERY = "4f5a"
PLAN = {"a": {"access": [0, 2]}, "b": {"access": [0]}}
TTL = 60.0


def begin(harness: Harness, batch: int, plan: spark.Plan = PLAN) -> Call:
    return spark.begin(harness.keys, QUERY, batch, plan, TTL, 7)


def end(harness: Harness, batch: int) -> Call:
    return spark.end(harness.keys, QUERY, batch, TTL)


def publish(harness: Harness, attempt: str = "a") -> Call:
    return spark.publish(harness.keys, "access", 0, QUERY, attempt, TTL)


def stage(harness: Harness, *texts: bytes, attempt: str = "a") -> str:
    key = harness.keys.staged_rows("access", 0, QUERY, attempt)
    for number, text in enumerate(texts, 1):
        harness.do("XADD", key, f"0-{number}", "payload", text, "key", b"\x00\xff")
    return key


def published_rows(harness: Harness) -> list[bytes]:
    return [fields[1] for _, fields in harness.do("XRANGE", harness.stream, "-", "+")]


def expires(harness: Harness, key: str) -> bool:
    return 0 < harness.do("PTTL", key) <= TTL * 1000


# --- the decision ---------------------------------------------------------------------------------


def test_sink_start_keeps_the_first_decision(harness: Harness) -> None:
    """A repeated batch with other tasks gets the IDs of those tasks that count."""
    assert harness.expect("sink_start", "OK", begin(harness, 0)) == [b""]
    assert expires(harness, harness.keys.sink(QUERY))
    at, raw = harness.expect("sink_start", "STARTED", begin(harness, 0, {"c": {"access": [1]}}))
    assert (at, spark.read_plan(raw)) == (b"0", PLAN)
    harness.expect("sink_finish", "OK", end(harness, 0))
    assert harness.expect("sink_start", "DONE", begin(harness, 0)) == [b"7", b"access"]
    harness.do("HDEL", harness.keys.sink(QUERY), "rows", "topics")  # as an older version wrote it
    assert harness.expect("sink_start", "DONE", begin(harness, 0)) == [b"", b""]


def test_sink_start_waits_for_the_previous_batch(harness: Harness) -> None:
    harness.expect("sink_start", "OK", begin(harness, 9))
    assert harness.expect("sink_start", "STARTED", begin(harness, 10, {}))[0] == b"9"
    harness.expect("sink_finish", "OK", end(harness, 9))
    assert harness.expect("sink_start", "OK", begin(harness, 10, {})) == [b"9"]
    assert harness.expect("sink_start", "PAST", begin(harness, 9)) == [b"10"]


def test_sink_finish_refuses_an_older_driver(harness: Harness) -> None:
    harness.expect("sink_finish", "OTHER", end(harness, 3))
    harness.expect("sink_start", "OK", begin(harness, 4))
    harness.expect("sink_finish", "OTHER", end(harness, 3))
    assert harness.expect("sink_start", "STARTED", begin(harness, 4))[0] == b"4"


def test_sink_finish_repeated_changes_nothing(harness: Harness) -> None:
    harness.expect("sink_start", "OK", begin(harness, 4))
    harness.expect("sink_finish", "OK", end(harness, 4))
    before = harness.dump()
    harness.expect("sink_finish", "OK", end(harness, 4))
    assert harness.dump() == before


# --- moving rows ----------------------------------------------------------------------------------


def test_sink_publish_moves_rows_in_order(harness: Harness) -> None:
    key = stage(harness, b"a", b"b", b"c")
    assert harness.expect("sink_publish", "OK", publish(harness)) == [3, 0]
    assert [fields for _, fields in harness.do("XRANGE", harness.stream, "-", "+")] == [
        [b"payload", text, b"key", b"\x00\xff"] for text in (b"a", b"b", b"c")
    ]
    assert harness.do("XLEN", key) == 0
    assert expires(harness, key)


def test_sink_publish_repeated_finds_the_emptied_stream(harness: Harness) -> None:
    """If a call is repeated, it finds the emptied stream and writes nothing.

    Without that stream, the outcome would be unknown.
    """
    key = stage(harness, b"a")
    harness.expect("sink_publish", "OK", publish(harness))
    assert harness.expect("sink_publish", "OK", publish(harness)) == [0, 0]
    assert published_rows(harness) == [b"a"]
    harness.do("DEL", key)
    harness.expect("sink_publish", "GONE", publish(harness))


def test_sink_publish_moves_many_rows_in_parts(harness: Harness) -> None:
    stage(harness, *(b"%d" % number for number in range(spark.ROWS_MAX + 7)))
    assert harness.expect("sink_publish", "OK", publish(harness)) == [spark.ROWS_MAX, 7]
    assert harness.expect("sink_publish", "OK", publish(harness)) == [7, 0]
    assert published_rows(harness) == [b"%d" % number for number in range(spark.ROWS_MAX + 7)]


def test_sink_publish_bounds_parts_by_bytes(harness: Harness) -> None:
    stage(harness, *(b"%d" % number * 300_000 for number in range(5)))
    lefts = [harness.expect("sink_publish", "OK", publish(harness))[1] for _ in range(3)]
    assert lefts == [3, 1, 0]
    assert [text[:1] for text in published_rows(harness)] == [b"0", b"1", b"2", b"3", b"4"]


def test_sink_publish_moves_a_wide_row(harness: Harness) -> None:
    key = harness.keys.staged_rows("access", 0, QUERY, "a")
    harness.do("XADD", key, "0-1", *[b"n"] * spark.FIELDS_MAX)
    assert harness.expect("sink_publish", "OK", publish(harness)) == [1, 0]


def test_sink_publish_moves_only_the_rows_that_fit(harness: Harness) -> None:
    """Only as many rows are moved as fit. A partition with one free ID gets one of two rows."""
    key = stage(harness, b"a", b"b")
    last = 2**64 - 1
    harness.do("XADD", harness.stream, f"{last}-{last - 1}", "payload", "x")
    with pytest.raises(Exception, match=r"last possible ID|exhausted"):
        harness.link.run(publish(harness))
    assert published_rows(harness) == [b"x", b"a"]
    assert [fields[1] for _, fields in harness.do("XRANGE", key, "-", "+")] == [b"b"]
