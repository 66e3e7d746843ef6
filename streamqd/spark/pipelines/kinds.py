"""Describe two kinds of tables in an archive: dead letters and the history."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from streamqd.spark.pipelines.storage import RAW, TableKind, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

COUNTS = {"handled": "acked"} | {
    name: name for name in ("added", "failed", "retried", "dead_lettered", "expired")
}  # maps a column of the history to the name of the count in an entry in Redis
QUANTILES = {"handling_p50": 0.5, "handling_p95": 0.95, "handling_p99": 0.99}
DELAY_QUANTILES = {"delay_p50": 0.5, "delay_p95": 0.95, "delay_p99": 0.99}


def minute_columns() -> pa.Schema:
    """Return the columns of a history table."""
    import pyarrow as pa

    return pa.schema(
        [
            *first_minute_columns(),
            *((name, pa.float64()) for name in DELAY_QUANTILES),
            ("delay", pa.map_(pa.float64(), pa.int64())),
        ]
    )


def first_minute_columns() -> pa.Schema:
    """Return the columns that every history table has, even one from an older version."""
    import pyarrow as pa

    return pa.schema(
        [
            *(("date", pa.date32()), ("minute", pa.timestamp("us", tz="UTC"))),
            *((name, pa.string()) for name in ("instance", "topic", "group")),
            *(("partition", pa.int32()), ("handler", pa.string())),
            *((name, pa.int64()) for name in COUNTS),
            *(("lag", pa.int64()), ("oldest_seconds", pa.float64())),
            *((name, pa.float64()) for name in QUANTILES),
            ("handling", pa.map_(pa.float64(), pa.int64())),
            *(("covered_seconds", pa.float64()), ("entry", pa.string())),
        ]
    )


DEAD = RAW._replace(folder="dead_letters", columns=partial(arrow_schema, dead=True))
HISTORY = TableKind("history", ("date",), first_minute_columns, "minute,topic,group,partition")
