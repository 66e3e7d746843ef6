"""What a report makes of counts: buckets, balance, advice, text; and its tables. No Spark."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.spark.pipelines import report_figures as figures
from streamqd.spark.pipelines.report_document import document
from streamqd.spark.pipelines.report_tables import TABLES, Counts, summed, tables, widths

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
IDS = st.integers(0, (1 << 63) - 1)


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "width"),
    [
        (0, SECOND),
        (95 * SECOND, SECOND),
        (96 * SECOND, 2 * SECOND),
        (HOUR, MINUTE),
        (DAY - 1, 900_000),
    ],
)
def test_the_width_of_buckets_grows_with_the_span(span: int, width: int) -> None:
    assert figures.bucket_ms(0, span) == width


@given(IDS, IDS)
def test_buckets_hold_all_entries_and_are_never_too_many(one: int, other: int) -> None:
    first, last = sorted((one, other))
    width = figures.bucket_ms(first, last)
    found = figures.filled({last // width * width: (3, 7)}, width, first, last)
    assert len(found) <= figures.BUCKETS_MAX
    assert found[0][0] <= first
    assert found[-1][0] <= last < found[-1][0] + width
    assert found[-1][1:] == (3, 7)
    assert all(at % width == 0 for at, _, _ in found)


def test_buckets_without_entries_are_there_too() -> None:
    assert figures.filled({2000: (5, 50)}, 1000, 1500, 3200) == [
        (1000, 0, 0),
        (2000, 5, 50),
        (3000, 0, 0),
    ]


def test_hours_are_put_together_where_they_would_be_too_many() -> None:
    assert figures.hours([(2 * HOUR, 1), (0, 4)]) == (HOUR, [(0, 4), (HOUR, 0), (2 * HOUR, 1)])
    width, counts = figures.hours([(at * HOUR, 1) for at in range(200)])
    assert width == 3 * HOUR
    assert sum(number for _, number in counts) == 200


def test_times_are_texts_and_back() -> None:
    assert figures.iso(1_763_632_805_042) == "2025-11-20T10:00:05.042Z"
    assert figures.unix_ms("2025-11-20T10:00:05.042Z") == 1_763_632_805_042
    assert figures.iso((1 << 63) - 1) is None
    assert figures.iso(None) is None


# --- balance and advice ---------------------------------------------------------------------------


def test_balance_is_the_fullest_over_the_mean() -> None:
    found = figures.balance([10, 30, 0, 0], [5, 5, 0, 0])
    assert (found.rows, found.size, found.fullest, found.share) == (3.0, 2.0, 1, 0.75)
    assert figures.balance([0, 0], [0, 0]).rows is None
    assert figures.balance([2], [0]).size is None


def placed(keys: dict[bytes, int], count: int) -> list[int]:
    rows = [0] * count
    for key, number in keys.items():
        rows[zlib.crc32(key) % count] += number
    return rows


def test_foreseen_goes_by_the_hash_of_the_keys() -> None:
    keys = {b"k%d" % n: 10 + n for n in range(20)}
    for count in (1, 3, 8):
        rows = placed(keys, count)
        assert figures.foreseen(sum(rows), keys.items(), count) == max(rows) / sum(rows)
    assert figures.foreseen(100, [], 4) == 0.25


def advice(keys: dict[bytes, int], count: int, shown: int = 50) -> str:
    heavy = sorted(keys.items(), key=lambda pair: -pair[1])[:shown]
    return figures.advice(placed(keys, count), heavy, len(keys))


def test_one_hot_key_is_not_helped_by_more_partitions() -> None:
    keys = {b"hot": 600} | {b"k%d" % n: 4 for n in range(100)}
    text = advice(keys, 4)
    assert "would not help, because one key holds 60 % of the entries" in text


def test_many_even_keys_are_helped() -> None:
    text = advice({b"k%d" % n: 10 for n in range(400)}, 4)
    assert text.startswith("The 4 partitions are even")
    assert "more partitions would help" in text
    assert "of 8 the fullest would hold about" in text


def test_keys_that_are_too_few_cannot_be_spread() -> None:
    # All keys meet in one partition, of four and of eight.
    meeting = [key for key in (b"a%d" % n for n in range(99)) if zlib.crc32(key) % 8 == 3][:4]
    text = advice(dict.fromkeys(meeting, 25), 4)
    assert "only about 4 keys" in text


def test_a_topic_that_has_grown_is_told_from_skewed_keys() -> None:
    keys = {b"k%d" % n: 10 for n in range(400)}
    heavy = list(keys.items())[:50]
    text = figures.advice([*placed(keys, 2), 0, 0], heavy, 400)
    assert "the topic has grown" in text


def test_one_partition_and_none_at_all() -> None:
    assert advice({b"k": 5, b"l": 5, b"m": 5, b"n": 5}, 1).startswith("There is one partition;")
    assert figures.advice([0, 0], [], 0).startswith("No entries")


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=9),
    st.lists(st.tuples(st.binary(max_size=3), st.integers(1, 50)), max_size=9),
)
def test_advice_is_one_sentence_whatever_the_figures(
    rows: list[int], heavy: list[tuple[bytes, int]]
) -> None:
    rows = [*rows, sum(number for _, number in heavy)]
    text = figures.advice(rows, sorted(heavy, key=lambda pair: -pair[1]), len(heavy))
    assert text.endswith(".")
    assert text.count(". ") == 0


# --- text -----------------------------------------------------------------------------------------


def test_text_cannot_harm_a_reader() -> None:
    assert figures.safe_text(b"\xff\x00\x1b[31m") == "\\xff\\x00\\x1b[31m"
    assert figures.safe_text("a\u202eb\nc") == "a\\u202eb\\nc"
    assert figures.safe_text("ü" * 300, 10) == "ü" * 9 + "…"
    assert figures.safe_text(None) == ""
    assert figures.safe_text("x\ud800") == "x\\ud800"


@given(st.one_of(st.binary(), st.text()))
def test_text_is_always_printable_and_short(raw: bytes | str) -> None:
    shown = figures.safe_text(raw, 40)
    assert shown.isprintable()
    assert len(shown) <= 40
    shown.encode()


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.0004, "under 0.1 %"), (0.034, "3.4 %"), (0.41, "41 %"), (1.0, "100 %")],
)
def test_shares(share: float, text: str) -> None:
    assert figures.percent(share) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        *((None, "no data"), (0, "0 ms"), (999, "999 ms"), (4200, "4.2 s"), (30_000, "30 s")),
        *((59_960, "1 min"), (185_000, "3 min 5 s"), (7_800_000, "2 h 10 min"), (DAY, "1 d")),
    ],
)
def test_durations(milliseconds: int | None, text: str) -> None:
    assert figures.duration(milliseconds) == text


def test_sizes() -> None:
    assert [figures.size(n) for n in (0, 1023, 1536, 1 << 31)] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "2.0 GiB",
    ]


# --- tables ---------------------------------------------------------------------------------------


def cause(**given: Any) -> dict[str, Any]:
    return {
        "topic": "t",
        "fingerprint": "f1",
        "error_class": "E",
        "place": "a.py:f",
        "group": "g",
        "handler": "a:f",
        "at": None,
        "letters": 1,
        "first_ms": 5,
        "last_ms": 5,
        "newest": "0:5-0",
        "reason": "attempts",
        "error_message": "m",
        **given,
    }


def place(number: int | None, rows: int, first: int, last: int) -> dict[str, Any]:
    return {
        "topic": "t",
        "partition": number,
        "rows": rows,
        "bytes": 10 * rows,
        "first_ms": first,
        "last_ms": last,
        "keyed": rows,
        "keys": 2,
    }


COUNTS = Counts(
    {"t": 3, "nothing": 2},
    places=[place(0, 6, 1000, 4000), place(2, 2, 2000, 2500), place(None, 8, 1000, 4000)],
    keys=[{"topic": "t", "rank": 1, "key": b"\xff<k>", "rows": 6, "bytes": 60}],
    throughput=[{"topic": "t", "at": 1000, "rows": 8, "bytes": 80}],
    latency=[],
    deaths=[
        cause(letters=3, last_ms=9, newest="0:9-0"),
        cause(letters=2, group="h", last_ms=7),
        cause(fingerprint=None, error_class=None, group=None, handler=None, at=0, letters=5),
    ],
)


def test_causes_are_put_together_and_the_newest_speaks_for_them() -> None:
    rows = [cause(last_ms=4, first_ms=1, newest="a"), cause(last_ms=9, newest="b", letters=2)]
    (found,) = summed([*rows, cause(last_ms=7, newest="c")], "error_class")
    assert (found["letters"], found["first"], found["last"], found["newest"]) == (4, 1, 9, "b")


def test_tables_have_empty_partitions_and_topics() -> None:
    found = tables(COUNTS)
    assert {name: set(rows[0]) for name, rows in found.items() if rows} == {
        name: set(TABLES[name]) for name, rows in found.items() if rows
    }
    assert [(row["topic"], row["partition"], row["rows"]) for row in found["partitions"]] == [
        ("t", 0, 6), ("t", 1, 0), ("t", 2, 2), ("nothing", 0, 0), ("nothing", 1, 0),
    ]  # fmt: skip
    topic, nothing = found["topics"]
    assert (topic["rows"], topic["letters"], topic["hottest_key_share"]) == (8, 5, 0.75)
    assert topic["rows_max_over_mean"] == 6 * 3 / 8
    assert (nothing["rows"], nothing["first"], nothing["rows_max_over_mean"]) == (0, None, None)
    assert [row["rows"] for row in found["throughput"]] == [8, 0, 0, 0]
    assert widths(COUNTS) == {"t": 1000}
    assert [row["letters"] for row in found["dead_by_class"]] == [5]
    assert [(row["group"], row["letters"]) for row in found["dead_by_handler"]] == [
        ("g", 3),
        ("h", 2),
    ]


def test_the_document_is_json_and_keeps_bytes_of_keys() -> None:
    made = document({"made": "now"}, tables(COUNTS), [])
    topic = json.loads(json.dumps(made))["topics"][0]
    assert (topic["keys"][0]["key"], topic["keys"][0]["key_hex"]) == ("\\xff<k>", "ff3c6b3e")
    assert topic["partitions"][1]["first"] is None
    assert topic["dead_by_hour"] == [{"at": "1970-01-01T00:00:00.000Z", "letters": 5}]
