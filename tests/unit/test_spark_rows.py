"""Entries become Arrow columns, with the right types and layouts, even those of other clients."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import RawEntry
from streamqd.spark import rows

pytest.importorskip("pyarrow")


def table(
    entries: list[RawEntry], *names: str, dead: bool = False, place: Any = ("access", 3)
) -> list[dict[str, Any]]:
    own = rows.columns(dead=dead, headers=True, fields=True)
    chosen = [next(each for each in own if each.name == name) for name in names] or own
    batch = rows.Table(chosen, own, place).batch(entries)
    batch.validate(full=True)
    return list(batch.to_pylist())


def entry(entry_id: str, **fields: bytes) -> RawEntry:
    flat: list[bytes] = []
    for name, value in fields.items():
        flat += (name.encode(), value)
    return [entry_id.encode(), flat]


def test_message_entry_is_converted_to_columns() -> None:
    headers = json.dumps({"trace": "é", "n": 1}).encode()
    found = table([entry("1795180481132-7", payload=b"\x00\xff", key=b"k", headers=headers)])
    assert found == [
        {
            "key": b"k",
            "value": b"\x00\xff",
            "topic": "access",
            "partition": 3,
            "id": "1795180481132-7",
            "id_ms": 1795180481132,
            "id_seq": 7,
            "timestamp": datetime(2026, 11, 20, 13, 14, 41, 132000, UTC),
            "headers": [
                {"key": "trace", "value": "é".encode()},
                {"key": "n", "value": b"1"},
            ],
            "fields": None,
        }
    ]


def test_empty_entry_is_converted_to_nulls() -> None:
    found = table([[b"1-0", []]], "key", "value", "headers", "fields")
    assert found == [{"key": None, "value": b"", "headers": None, "fields": None}]


def test_columns_have_the_requested_order() -> None:
    found = table([entry("5-6", payload=b"v")], "id", "value")
    assert [*found[0].items()] == [("id", "5-6"), ("value", b"v")]


def test_batch_may_be_empty() -> None:
    assert table([]) == []


def test_dead_letter_entry_is_converted_to_columns() -> None:
    letter = entry(
        "9-0",
        payload=b"v",
        key=b"k",
        originalTopic=b"access",
        originalPartition=b"3",
        originalId=b"5-1",
        timestamp=b"1795180481132",
        group=b"hits",
        instance=b"web-1",
        handler=b"weblog:count",
        attempts=b"5",
        crashes=b"0",
        reason=b"attempts",
        errorClass=b"ValueError",
        errorMessage=b"bad \xff",
        traceback=b"t",
        fingerprint=b"f",
        exitCode=b"-9",
        rss=b"5000000000",
        failedAt=b"1795180481133",
        mine=b"x",
    )
    found = table([letter], dead=True, place=("access:dlq", 3))[0]
    assert (found["topic"], found["original_topic"], found["original_partition"]) == (
        *("access:dlq", "access"),
        3,
    )
    assert found["original_timestamp"] == datetime(2026, 11, 20, 13, 14, 41, 132000, UTC)
    assert found["failed_at"] == datetime(2026, 11, 20, 13, 14, 41, 133000, UTC)
    assert (found["attempts"], found["crashes"], found["exit_code"]) == (5, 0, -9)
    assert (found["rss"], found["pid"], found["signal"]) == (5_000_000_000, None, None)
    assert (found["reason"], found["error_message"]) == (
        "attempts",
        "bad \N{REPLACEMENT CHARACTER}",
    )
    assert found["fields"] == [("mine", b"x")]


@pytest.mark.parametrize("raw", [b"{", b"[]", b"1", b"\xff", b"[" * 100_000])
def test_unreadable_headers_are_kept_as_a_field(raw: bytes) -> None:
    found = table([entry("1-0", payload=b"", headers=raw)], "headers", "fields")
    assert found == [{"headers": None, "fields": [("headers", raw)]}]


def test_surrogates_in_headers_are_replaced() -> None:
    found = table([entry("1-0", headers=b'{"\\ud800": "\\ud800"}')], "headers")
    assert found == [{"headers": [{"key": "?", "value": b"?"}]}]


@pytest.mark.parametrize("raw", [b"", b"x", b"1.5", b"9" * 400, b"3000000000", b"\xff"])
def test_invalid_counts_become_null(raw: bytes) -> None:
    assert table([entry("1-0", attempts=raw)], "attempts", dead=True) == [{"attempts": None}]


def test_largest_entry_id_has_no_timestamp() -> None:
    largest = "18446744073709551615-18446744073709551615"
    found = table([entry(largest)], "id", "id_ms", "id_seq", "timestamp")
    most = (1 << 63) - 1
    assert found == [{"id": largest, "id_ms": most, "id_seq": most, "timestamp": None}]


FLAT = st.lists(
    st.tuples(st.sampled_from([b"payload", b"key", b"mine", b"headers"]), st.binary(max_size=4)),
    max_size=5,
).map(lambda pairs: [part for pair in pairs for part in pair])


@given(st.lists(FLAT, max_size=8))
def test_entry_columns_are_independent_of_neighbors(bodies: list[list[bytes]]) -> None:
    """The columns of an entry do not depend on the order of fields in neighboring entries."""
    entries = [[b"%d-0" % number, body] for number, body in enumerate(bodies)]
    together = table(entries)
    assert together == [row for one in entries for row in table([one])]
    for row, body in zip(together, bodies, strict=True):
        fields = dict(zip(body[::2], body[1::2], strict=True))
        assert row["value"] == fields.get(b"payload", b"")
        assert row["key"] == fields.get(b"key")
        assert dict(row["fields"] or ()).get("mine") == fields.get(b"mine")


HALF = st.one_of(st.integers(10**12, 10**13 - 1), st.integers(0, 2**64 - 1), st.integers(0, 3))


@given(st.lists(st.tuples(HALF, HALF), max_size=6))
def test_ids_of_every_length_are_parsed(ids: list[tuple[int, int]]) -> None:
    ids.sort()
    found = table([[b"%d-%d" % each, []] for each in ids], "id", "id_ms", "id_seq", "timestamp")
    most = (1 << 63) - 1
    for row, (ms, seq) in zip(found, ids, strict=True):
        assert row["id"] == f"{ms}-{seq}"
        assert (row["id_ms"], row["id_seq"]) == (min(ms, most), min(seq, most))
        known = ms <= 253_402_300_799_999
        assert (row["timestamp"] is not None) == known
        if known:
            wanted = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
            assert row["timestamp"] == wanted


@pytest.mark.parametrize("raw", [b"253402300800000", b"-62135596800001", b"%d" % -(2**63 - 1)])
def test_times_beyond_the_calendar_are_null(raw: bytes) -> None:
    found = table([entry("1-0", failedAt=raw), entry("2-0", failedAt=b"0")], "failed_at", dead=True)
    assert [each["failed_at"] for each in found] == [None, datetime(1970, 1, 1, tzinfo=UTC)]


def test_headers_are_read_if_only_some_entries_have_them() -> None:
    entries = [entry("1-0", headers=b'{"a":"1"}'), entry("2-0"), entry("3-0", headers=b"{}")]
    found = table([*entries, entry("4-0", headers=b"no")], "headers", "fields")
    assert [each["headers"] for each in found] == [[{"key": "a", "value": b"1"}], None, [], None]
    assert [each["fields"] for each in found] == [None, None, None, [("headers", b"no")]]


def test_batch_has_the_column_types_of_spark() -> None:
    """A batch has the columns that Spark expects.

    Spark refuses any other type, order or nullability.
    """
    types = pytest.importorskip("pyspark.sql.types")
    pandas_types = pytest.importorskip("pyspark.sql.pandas.types")
    simple = {
        "binary": types.BinaryType(),
        "string": types.StringType(),
        "int": types.IntegerType(),
        "bigint": types.LongType(),
        "timestamp": types.TimestampType(),
        rows.FIELDS.ddl: types.MapType(types.StringType(), types.BinaryType()),
        rows.HEADERS.ddl: types.ArrayType(
            types.StructType().add("key", types.StringType()).add("value", types.BinaryType())
        ),
    }
    own = rows.columns(dead=True, headers=True, fields=True)
    schema = types.StructType([types.StructField(each.name, simple[each.ddl]) for each in own])
    assert rows.arrow_schema(own) == pandas_types.to_arrow_schema(schema, timezone="UTC")
    assert [field.dataType.simpleString() for field in schema] == [each.ddl for each in own]
