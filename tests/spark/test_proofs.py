"""Verdicts that need no Spark equal those of the slow judge, and values those of Spark."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import types

from streamqd.spark.pipelines import fitting, proofs
from streamqd.spark.pipelines.packed import reader
from streamqd.spark.pipelines.proofs import Prover
from streamqd.spark.pipelines.schemas import read_schema
from tests.benchmarks import spark_parsing
from tests.spark.test_parsed import HOSTILE, NESTED, OUT_OF_RANGE, SCHEMA
from tests.spark.test_reasons import DEEP, MAPS, NOW_US, shapes
from tests.support import exact_judge
from tests.support.any_payload import AnyPayload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAVES = """
    id long NOT NULL, n int, s smallint, d double, f float, ok boolean, note string, day date,
    at timestamp, money decimal(10,2), fine decimal(38,18), all decimal(3,0), part decimal(2,2),
    many array<double>, times array<timestamp>, who struct<name:string, at:timestamp, n:long,
    deep:struct<amount:decimal(12,2), days:array<date>>>, lines array<struct<sku:string, n:int>>
"""
KEPT = ["id", "event_date", "row"]
COLUMNS = "partition int, id string, timestamp timestamp, date date, key binary, value binary"


def raw(payloads: Sequence[bytes | None]) -> pa.RecordBatch:
    """Return the payloads as rows of a raw table."""
    moment = dt.datetime(2025, 11, 20, tzinfo=dt.UTC)
    count = len(payloads)
    columns = {
        "partition": pa.array([0] * count, pa.int32()),
        "id": pa.array([f"{n}-0" for n in range(count)]),
        "timestamp": pa.array([moment] * count, pa.timestamp("us", "UTC")),
        "date": pa.array([moment.date()] * count),
        "key": pa.nulls(count, pa.binary()),
        "value": pa.array(payloads, pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)


def compare(
    spark: SparkSession,
    schema: str,
    event_time: str,
    payloads: Sequence[bytes | None],
    times: Sequence[str] = (),
    codec: str = "json",
) -> list[bytes | None]:
    """Compare verdict, reason, value and date of each payload. Return the undecided ones."""
    kind, batch = read_schema(schema, times), raw(payloads)
    read = reader(codec, kind)
    found = Prover(kind, event_time, NOW_US, read)(batch)
    rows = spark.createDataFrame(batch.to_pylist(), COLUMNS)
    judged = exact_judge.judge_rows(rows, kind, event_time, NOW_US, read)
    exact = judged.select("id", "reason").collect()
    reasons = {row["id"]: row["reason"] for row in exact}
    decided = sorted(set(range(len(payloads))).difference(found.undecided))
    for at in decided:
        assert found.reasons[at].as_py() == reasons[f"{at}-0"], payloads[at]
    fitting_rows = [at for at in decided if not found.reasons[at].is_valid]
    converted = fitting.check_rows(rows, kind, event_time, NOW_US, read=read)
    table = converted.select("id", "event_date", "row").toArrow()
    places = {each: at for at, each in enumerate(table["id"].to_pylist())}
    wanted = _take_rows(table, [places[f"{at}-0"] for at in fitting_rows])
    ours = _take_rows(found.rows.select(KEPT), fitting_rows)
    for at, one, other in zip(fitting_rows, ours, wanted, strict=True):
        assert one["event_date"] == other["event_date"], payloads[at]
        for name in kind.names:
            assert repr(one["row"][name]) == repr(other["row"][name]), (name, payloads[at])
    return [payloads[at] for at in found.undecided]


def _take_rows(rows: Any, some: list[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.take(pa.array(some, pa.int64())).to_pylist()
    return found


@pytest.mark.parametrize(
    ("schema", "event_time"),
    [(SCHEMA, ""), (SCHEMA, "at"), (NESTED, ""), (DEEP, "day"), (MAPS, ""), (LEAVES, "at")],
)
def test_fast_verdicts_equal_those_of_the_exact_parser(
    spark: SparkSession, schema: str, event_time: str
) -> None:
    hostile = [each for each, _ in itertools.chain(HOSTILE, OUT_OF_RANGE)]
    compare(spark, schema, event_time, [*hostile, *shapes(schema)])


USUAL = [
    b'{"id": 1, "at": "2025-11-20T10:00:00Z", "money": 12.5, "d": 1, "note": "a \\u00fc"}',
    b'{"id": 1, "at": "2024-02-29 10:00:00.123456+01:00", "money": "12.50", "d": 1.5e3}',
    b'{"id": 1, "at": "2025-11-20T10:00:00", "day": "2025-11-20", "note": "\\ud83d\\ude00"}',
    b'{"id": 1, "at": "2025-11-20T10:00:00.123456789Z", "note": 5, "ok": true, "n": -5}',
    b'{"id": 1, "at": 1763683195, "many": [1, null, 2.5], "who": {"n": 1}, "other": {"x": 1}}',
    b'{"id": 1, "lines": [{"sku": "a", "n": 1}], "times": ["2025-11-20T10:00:00Z"], "at": 0}',
    b'{"id": "x"}', b'{"id": 1, "at": 1.5}', b'{"id": 1, "who": 5}', b'{"id": 1, "id": 2}',
    b'{"id": 1, "money": "free"}', b'{"id": 1, "lines": [{"n": "x"}]}', b"", b"no", b"[]",
]  # fmt: skip


def test_usual_payloads_are_parsed_without_spark(spark: SparkSession) -> None:
    assert compare(spark, LEAVES, "at", USUAL) == []
    for leaves in spark_parsing.WIDTHS:
        payloads = [spark_parsing.payload(leaves, n, wrong=n % 2 == 1) for n in range(40)]
        assert compare(spark, spark_parsing.make_schema(leaves), "", payloads) == []


def test_unit_times_have_the_verdict_of_the_exact_parser(spark: SparkSession) -> None:
    schema = "id long, s timestamp, m timestamp, u timestamp, p timestamp, d date"
    times = ["s seconds", "m milliseconds", "u microseconds", "p dd/MM/yyyy HH:mm", "d yyyyMMdd"]
    usual = [
        b'{"id": 1, "s": 1763683195.123456, "m": 1763683195123, "u": 1763683195123456}',
        b'{"s": "1763683195", "m": "1763683195123.5", "u": -1}',
        b'{"s": null, "m": true}',
        b'{"s": "now"}',
        b'{"s": [1]}',
    ]
    assert compare(spark, schema, "m", usual, times) == []
    texts = ("20/11/2025 10:00", "2025-11-20T10:00:00Z", "20251120", "7", "", "20251350", "1e9")
    numbers = (
        *("0", "-0", "1.5", "-1.9999999999", "1.9999999", "1e3", "1763683195000000", "9" * 17),
        *("9" * 18, "9" * 19, "9" * 40, "253402300799.9", "-62135596801", "20251120"),
    )
    values = [*map(json.dumps, texts), *numbers, *map(json.dumps, numbers), "true", "{}", "null"]
    odd = [f'{{"{name}": {each}}}'.encode() for name in "smupd" for each in values]
    compare(spark, schema, "", odd, times)


def test_values_at_spark_limits_are_left_to_spark(spark: SparkSession) -> None:
    """A payload is left to Spark if Spark rejects it for a value that is in no column."""
    limits = [
        b'{"x": ' + b"9" * 1001 + b"}", b'{"x": 0.' + b"1" * 1001 + b"}",
        b'{"x": "' + b"9" * 1001 + b'"}', b'{"' + b"n" * 50_001 + b'": 1}',
        b'{"x": ' + b"[" * 995 + b"1" + b"]" * 995 + b"}",
        b'{"x": ' + b"[" * 1001 + b"1" + b"]" * 1001 + b"}", b'{"x": [' + b"{}," * 2000 + b"1]}",
        b'{"x": "a\x01b"}', b'{"x": "a\x7fb"}', b'{"x": 01}', b'{"x": 1.}', b'{"x": -}',
        b'{"x": "\\x"}', b'{"x": "\\u12"}', b'\xef\xbb\xbf{"x": 1}', b'{"x": 1}\x00', b"{\xc2\xa0}",
    ]  # fmt: skip
    compare(spark, "id long, note string", "", limits)
    for name in ("note", "id"):
        there = [each.replace(b'"x"', b'"%s"' % name.encode(), 1) for each in limits]
        compare(spark, "id long, note string", "", there)


def test_rows_of_many_dates_are_sorted_by_spark() -> None:
    days = [b'{"id": 1, "day": "2025-11-%02d"}' % (1 + n) for n in range(proofs.DATES_MAX)]
    kind = types.StructType().add("id", types.LongType()).add("day", types.DateType())
    prover = Prover(kind, "day", NOW_US)
    assert list(prover(raw(days)).undecided) == []
    assert len(prover(raw([*days, b'{"day": "2025-10-01"}', b"no"])).undecided) == 18


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "event_time"),
    [(LEAVES, "at"), (LEAVES.replace(" NOT NULL", ""), ""), (DEEP.replace(" NOT NULL", ""), "")],
)
@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 1 << 32))
def test_any_payload_has_the_verdict_of_the_exact_parser(
    spark: SparkSession, schema: str, event_time: str, seed: int
) -> None:
    kind, some = read_schema(schema), AnyPayload(seed)
    payloads = [some.payload(kind) for _ in range(2000)]
    undecided = compare(spark, schema, event_time, payloads)
    assert len(undecided) < len(payloads)
