"""Compare payload parsing with Spark's `from_json` into Parquet: `make bench NAME=spark_parsing`.

Each round reads the same raw Parquet files, parses them with one schema and writes Parquet. Our
code also validates each payload, names each wrong column and writes the quarantine. The rounds of
both alternate. The benchmark prints a table of ratios.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet

from streamqd import spark as streamq
from streamqd.spark.location import location
from streamqd.spark.pipelines import derived, fitting, schemas

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WIDTHS = {6: 200_000, 60: 40_000, 220: 12_000}  # leaves -> rows
SHARES = (0.0, 0.1, 1.0)  # shares of rows whose first column has a value of another type
FILES = 4
_GROUP = 10  # number of leaves in a struct
_LEAVES: tuple[tuple[str, Callable[[int], Any]], ...] = (
    ("long", lambda n: n * 7919),
    ("string", lambda n: f"a text of some length, number {n}"),
    ("double", lambda n: n / 8),
    ("timestamp", lambda n: f"2025-11-20T10:{n % 60:02d}:00.{n % 1000:03d}Z"),
    ("decimal(12,2)", lambda n: n / 4),
    ("boolean", lambda n: n % 2 == 0),
)


def make_schema(leaves: int) -> str:
    """Return a schema. Half of the leaves are columns, and the others are in structs of ten."""
    kinds = [f"c{n} {_LEAVES[n % len(_LEAVES)][0]}" for n in range(leaves)]
    flat = kinds if leaves <= _GROUP else kinds[: leaves // 2]
    rest = [each.replace(" ", ": ", 1) for each in kinds[len(flat) :]]
    groups = [rest[at : at + _GROUP] for at in range(0, len(rest), _GROUP)]
    return ", ".join([*flat, *(f"s{n} struct<{', '.join(g)}>" for n, g in enumerate(groups))])


def payload(leaves: int, row: int, *, wrong: bool) -> bytes:
    """Return the payload of a row. If it is wrong, its first column contains text."""
    values = [(f"c{n}", _LEAVES[n % len(_LEAVES)][1](row + n)) for n in range(leaves)]
    flat = leaves if leaves <= _GROUP else leaves // 2
    found: dict[str, Any] = dict(values[:flat])
    for number, at in enumerate(range(flat, leaves, _GROUP)):
        found[f"s{number}"] = dict(values[at : at + _GROUP])
    if wrong:
        found["c0"] = f"number {row}"
    return json.dumps(found).encode()


def write_raw(folder: Path, leaves: int, rows: int, share: float) -> None:
    """Write files like those of a raw table, but with only the required columns."""
    every = round(1 / share) if share else 0
    for file in range(FILES):
        numbers = range(file, rows, FILES)
        bodies = [
            payload(leaves, n, wrong=bool(every) and (n // FILES) % every == 0) for n in numbers
        ]
        count = len(bodies)
        moment = pa.array([1_763_683_200_000_000] * count, pa.timestamp("us", "UTC"))
        parquet.write_table(
            pa.table(
                {
                    "partition": pa.array([file] * count, pa.int32()),
                    "id": pa.array([f"1763683200000-{n}" for n in numbers]),
                    "timestamp": moment,
                    "date": pa.array([dt.date(2025, 11, 21)] * count),
                    "key": pa.array([b"k"] * count),
                    "value": pa.array(bodies, pa.binary()),
                }
            ),
            folder / f"{file}.parquet",
            compression="zstd",
        )


def parse_as_archive(frame: DataFrame, schema: str, out: Path) -> tuple[int, int]:
    """Parse as the archive does. Return how many rows fit, and how many do not."""
    kind = schemas.read_schema(schema)
    columns = pa.schema([*derived.parsed_columns(), *schemas.table_columns(kind)])
    into = fitting.PairFolders(
        (location(out / "parsed"), columns.remove(0)),
        (location(out / "quarantine"), derived.quarantine_columns().remove(0)),
        lambda files: frame.sparkSession.read.parquet(
            *(str(out / "quarantine" / each.path) for each in files)
        ),
    )
    fit, unfit, *_ = fitting.fit_rows(frame, kind, "", 1_763_700_000_000_000, into)
    return sum(each.rows for each in fit), sum(each.rows for each in unfit)


def parse_with_spark(frame: DataFrame, schema: str, out: Path) -> None:
    """Parse with Spark alone, which is lenient and gives no reasons."""
    from pyspark.sql import functions as f

    row = f.from_json(f.col("value").cast("string"), schema).alias("row")
    rows = frame.select("partition", "id", "timestamp", row)
    rows.select("partition", "id", "timestamp", "row.*").write.parquet(str(out / "plain"))


def measure(spark: SparkSession, leaves: int, rows: int, share: float, rounds: int) -> list[Any]:
    """Return one line of the table."""
    schema = make_schema(leaves)
    times: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="streamqd-parsing-") as name:
        raw = Path(name, "raw")
        raw.mkdir()
        write_raw(raw, leaves, rows, share)
        for number in range(rounds + 1):  # the first round only warms up
            frame = spark.read.parquet(str(raw))
            out = Path(name, str(number))
            for of, work in enumerate((parse_with_spark, parse_as_archive)):
                began = time.monotonic()
                counts = work(frame, schema, out)
                if number:
                    times[of].append(time.monotonic() - began)
        assert counts is not None
        assert sum(counts) == rows
        assert counts[1] == (rows if share == 1 else counts[1])
    first, second = (statistics.median(each) for each in times)
    return [leaves, f"{share:.0%}", f"{rows:,}", f"{first:.2f}", f"{second:.2f}",
            f"{second / first:.2f}"]  # fmt: skip


def table(rows: Iterator[list[Any]]) -> None:
    """Print the lines of a Markdown table as they arrive."""
    print("| Leaves | Wrong rows | Rows | `from_json`, s | streamqd, s | Ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for each in rows:
        print("|", " | ".join(map(str, each)), "|", flush=True)


def main() -> None:
    """Measure all widths and all shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--shares", type=float, nargs="*", default=list(SHARES))
    given = parser.parse_args()
    spark = streamq.session("parsing", "local[2]", {"spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        table(
            measure(spark, leaves, round(WIDTHS[leaves] * given.scale), share, given.rounds)
            for leaves in given.widths
            for share in given.shares
        )
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
