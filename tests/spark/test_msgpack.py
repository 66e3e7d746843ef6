"""Payloads in msgpack get the same verdicts, reasons and values as the same payloads in JSON."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from streamqd.config import Pipeline
from streamqd.spark.pipelines import fitting, report_queries
from streamqd.spark.pipelines.derived import QUARANTINE
from streamqd.spark.pipelines.packed import reader
from streamqd.spark.pipelines.reasons import Reasons
from streamqd.spark.pipelines.schemas import read_schema
from streamqd.spark.pipelines.strict import decode
from tests.spark.test_parsed import HOSTILE, NESTED, OUT_OF_RANGE, SCHEMA, case
from tests.spark.test_proofs import COLUMNS, LEAVES, USUAL, compare, raw
from tests.spark.test_reasons import MAPS, NOW_US, shapes
from tests.unit import test_spark_packed
from tests.unit.test_spark_packed import DEEPEST, pack, pack_field, timestamp

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.test_parsed import ParseCase

__all__ = ["case"]


def both_encodings(payloads: Sequence[bytes | None]) -> list[tuple[bytes, bytes]]:
    """Return the value of each JSON payload in JSON and in msgpack, except invalid ones."""
    found = []
    for payload in payloads:
        if not payload or decode(payload)[1] is not None:
            continue
        with suppress(OverflowError, RecursionError, ValueError):  # numbers of more than 64 bits
            value = json.loads(payload, parse_float=short)
            text = json.dumps(value).replace("e+", "e")  # the number as text, in a string column
            found.append((text.encode(), pack(value)))
    return found


def short(number: str) -> float:
    """Return a float, unless its value in msgpack would differ from the text."""
    if len(number) > 100 or Decimal(number) != Decimal(repr(float(number))):
        raise ValueError(number)
    return float(number)


def verdicts(
    spark: SparkSession, schema: str, payloads: Sequence[bytes], codec: str
) -> list[tuple[str | None, Any]]:
    """Return each payload's reason for not fitting, or its columns as Spark converts them."""
    kind = read_schema(schema)
    read = reader(codec, kind)
    rows = spark.createDataFrame(raw(payloads).to_pylist(), COLUMNS)
    judged = fitting.check_rows(rows, kind, "", NOW_US, read=read).toArrow().combine_chunks()
    found: dict[str, tuple[str | None, Any]] = {}
    for batch in judged.to_batches():
        of_batch = Reasons(kind, "", NOW_US, read)(batch)
        both = zip(batch["id"].to_pylist(), of_batch.reasons.to_pylist(), batch["row"], strict=True)
        for each, why, row in both:
            found[each] = (why, None) if why else (None, repr(row.as_py()))
    return [found[f"{at}-0"] for at in range(len(payloads))]


@pytest.mark.parametrize("schema", [SCHEMA, NESTED, MAPS, LEAVES])
def test_msgpack_is_parsed_like_the_equal_json(spark: SparkSession, schema: str) -> None:
    hostile = [each for each, _ in itertools.chain(HOSTILE, OUT_OF_RANGE)]
    both = both_encodings([*hostile, *USUAL, *shapes(schema)])
    assert len(both) > 30
    texts, packed = [each for each, _ in both], [each for _, each in both]
    wanted = verdicts(spark, schema, texts, "json")
    assert verdicts(spark, schema, packed, "msgpack") == wanted
    assert {why is None for why, _ in wanted} == {True, False}
    odd = [each for each, _ in test_spark_packed.HOSTILE]
    compare(spark, schema, "", [*packed, *odd, pack({"x": DEEPEST})], codec="msgpack")


def test_quarantine_keeps_msgpack_bytes(case: ParseCase) -> None:
    at = dt.datetime(2025, 11, 20, 10, 0, 0, 123456, tzinfo=dt.UTC)
    odd = [*(each for each, _ in test_spark_packed.HOSTILE), pack({"id": "x"})]
    case.add(pack({"id": 1, "amount": 1.5, "at": at, "raw": b"\xff\x00", "more": {"b": b"hi"}}))
    case.add(b"\x82\xa2id\x02\xa2at" + timestamp(int(at.timestamp()), 123_456_789))
    case.add(b"\x82\xa2id\x03\xa1f\xca\x3d\xcc\xcc\xcd", *odd)
    schema = f"{SCHEMA}, raw binary, f float, note string, money decimal(10,2)"
    settings: dict[str, Any] = {"codec": "msgpack", "extra": ("entry_key", "_rescued")}
    done = case.run(schema, "", **settings)
    assert (done.parsed, done.quarantined) == (3, len(odd))
    rows = {row["id"]: row for row in case.rows()}
    assert rows[1]["amount"] == Decimal("1.50")
    assert [rows[number]["at"] for number in (1, 2, 3)] == [at, at, None]
    assert (rows[1]["raw"], rows[1]["entry_key"]) == (b"\xff\x00", b"k")
    assert (rows[1]["_rescued"], rows[2]["_rescued"]) == ('{"more": {"b":"aGk="}}', None)
    assert rows[3]["f"] == pytest.approx(0.1)
    kept = sorted(case.rows(QUARANTINE), key=lambda row: row["id"])
    assert [row["value"] for row in kept] == [each or b"" for each in odd]
    assert kept[-1]["reason"] == "id is not bigint"
    assert case.reparse(schema, quarantine_only=True, **settings) == (0, len(odd))
    assert case.reparse(schema.replace("id long", "id string"), **settings)[0] > 3


def test_rows_of_another_codec_are_parsed_again(case: ParseCase) -> None:
    case.add(pack({"id": 1}), pack_field(b"\x05"), b'{"id": 2}')
    case.run("id long")
    assert case.ids() == [2]
    assert case.reparse("id long", codec="msgpack", quarantine_only=True) == (2, 0)
    assert sorted(str(row["id"]) for row in case.rows()) == ["1", "2", "None"]


def test_msgpack_values_without_json_fit_their_columns(spark: SparkSession) -> None:
    schema = "day date, at timestamp, note string, all decimal(20,0), f float, d double, id long"
    at = timestamp(1_763_683_195, 123_456_789)
    payloads = [
        b"\x83\xa3day" + at + b"\xa2at" + at + b"\xa4note" + at,
        b"\x82\xa1f\xca\x3d\xcc\xcc\xcd\xa1d\xca\x3d\xcc\xcc\xcd",
        pack({"all": 2**64 - 1}),
        pack({"id": 2**63}),
        b"\x81\xa2id" + at,
    ]
    found = verdicts(spark, schema, payloads, "msgpack")
    assert [why for why, _ in found] == [None] * 3 + ["id is not bigint"] * 2
    for text in ("datetime.date(2025, 11, 20)", "59, 55, 123456", "2025-11-20T23:59:55.123456789Z"):
        assert text in found[0][1]
    assert ("0.10000000149011612" in found[1][1], "18446744073709551615" in found[2][1]) == (1, 1)
    kind = read_schema(schema, ["at milliseconds"])
    rows = spark.createDataFrame(raw(payloads[:1]).to_pylist(), COLUMNS)
    read = reader("msgpack", kind)
    (batch,) = fitting.check_rows(rows, kind, "", NOW_US, read=read).toArrow().to_batches()
    (why,) = Reasons(kind, "", NOW_US, read)(batch).reasons.to_pylist()
    assert why == "at is not timestamp"


def test_report_decodes_msgpack_by_the_codec(spark: SparkSession) -> None:
    rows = spark.createDataFrame(raw([pack({"id": 5}), b'{"id": 5}']).to_pylist(), COLUMNS)
    found = report_queries._fields(rows, Pipeline("id long", codec="msgpack"))
    assert (found["fits"], found["bad"], found["rows"][0]["greatest"]) == (1, 1, "5")
