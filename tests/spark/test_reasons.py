"""The single pass gives the same reasons as the slow judge, for all shapes of payloads."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from streamqd.spark.pipelines import fitting
from streamqd.spark.pipelines.reasons import Reasons
from streamqd.spark.pipelines.schemas import read_schema
from tests.spark.test_parsed import HOSTILE, NESTED, OUT_OF_RANGE, SCHEMA
from tests.support import exact_judge

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


NOW_US = 1_763_683_195_000_000
DEEP = """
    id long NOT NULL, day date, at timestamp, f float, d double, n smallint, ok boolean,
    raw binary, note string, money decimal(5,2), many array<int>, grid array<array<int>>,
    who struct<name:string, born:date, at:array<timestamp>>, what array<struct<n:int, s:string>>
"""
MAPS = (
    "id long, tags map<string,int>, b int, deep struct<m:map<string,date>, n:int>, c int NOT NULL"
)
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 7, 40_000, 3_000_000_000, 1 << 70, 1.5, 1e39, 1e300, "", " ", "x", "7",
    "1.50", "NaN", "2025-11-20", "2025-11-20T10:00:00Z", "2026", "2026-10-01T00:30:00GMT+3",
    "9999-12-31T23:59:59Z", "+10000-01-01", "aGk=", "true", [], [1, None, 2], [1, "x", 3],
    ["2025-11-20", "x"], [[1], [2, "x"]], [[1, 2], None], [None], {}, {"name": 1},
    {"name": "x", "born": "x"}, {"born": "2025-11-20", "at": [1, "x"]},
    {"at": ["2025-11-20", None]},
    [{"n": 1, "s": 2}, {"n": "x"}], [{"n": None}], [{"n": 1}, 5], {"a": 1}, {"a": "x", "b": 3},
    {"m": {"a": "2025-11-20"}, "n": 1},
    {"m": {"c": "x"}, "n": "x"}, {"m": None, "n": 1.0},
)  # fmt: skip


def shapes(schema: str) -> list[bytes]:
    """Yield payloads that have each value in each column, and in two columns at once."""
    names = read_schema(schema).names
    found: list[dict[str, Any]] = [{name: value} for name in names for value in VALUES]
    chance = random.Random(7)
    for _ in range(600):
        some = chance.sample(names, chance.randint(2, min(4, len(names))))
        found.append({name: chance.choice(VALUES) for name in some})
    return [json.dumps(each).encode() for each in found]


def judge(spark: SparkSession, schema: str, event_time: str, payloads: list[Any]) -> list[Any]:
    """Return each payload for which the two reasons differ, with both reasons."""
    kind = read_schema(schema)
    moment = dt.datetime(2025, 11, 20, tzinfo=dt.UTC)
    rows = spark.createDataFrame(
        [(0, f"{n}-0", moment, moment.date(), None, each) for n, each in enumerate(payloads)],
        "partition int, id string, timestamp timestamp, date date, key binary, value binary",
    )
    exact = exact_judge.judge_rows(rows, kind, event_time, NOW_US).select("id", "reason").collect()
    told = {row["id"]: row["reason"] for row in exact}
    reasons = Reasons(kind, event_time, NOW_US)
    found = {}
    for batch in fitting.check_rows(rows, kind, event_time, NOW_US).toArrow().to_batches():
        told_now = reasons(batch).reasons.to_pylist()
        found.update(zip(batch["id"].to_pylist(), told_now, strict=True))
    assert found.keys() == told.keys()
    return [
        (payloads[int(each.partition("-")[0])], found[each], told[each])
        for each in told
        if found[each] != told[each]
    ]


@pytest.mark.parametrize(
    ("schema", "event_time"),
    [(SCHEMA, ""), (SCHEMA, "at"), (NESTED, ""), (DEEP, "day"), (MAPS, "")],
)
def test_quarantine_reasons_equal_those_of_the_exact_parser(
    spark: SparkSession, schema: str, event_time: str
) -> None:
    hostile = [each for each, _ in itertools.chain(HOSTILE, OUT_OF_RANGE)]
    payloads = [*hostile, *shapes(schema)]
    differing = judge(spark, schema, event_time, payloads)
    for payload, found, exact in differing:
        assert found == exact, payload[:200]
