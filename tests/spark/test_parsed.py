"""On a real Spark, each entry is in exactly one of two tables, even if faults occur."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamqd import config
from streamqd.config import Pipeline
from streamqd.errors import InvalidRequestError, RequestRefusedError, StreamqdError
from streamqd.spark.pipelines import derived, parsed
from streamqd.spark.pipelines.archive import Archiver, ArchiveResult
from streamqd.spark.pipelines.compact import compact
from streamqd.spark.pipelines.derived import PARSED, QUARANTINE
from streamqd.spark.pipelines.reparse import reparse
from streamqd.spark.pipelines.storage import RAW, Archive, ArchiveTable, TableKind
from tests.support import spark_process
from tests.support.spark_process import QUICK
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.spark.conftest import Shop

deltalake = pytest.importorskip("deltalake")

ROOT = Path(__file__).parents[2]
START = 1_763_683_195_000  # five seconds before midnight, UTC
SCHEMA = "id long, amount decimal(10,2), at timestamp"
FITS = b'{"id": %d, "amount": "1.50", "at": "2025-11-20T10:00:00Z"}'


class KilledError(Exception):
    """Raised instead of SIGKILL where the process must survive."""


class ParseCase:
    """A topic of two partitions, and its archive."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        self.shop, self.folder = shop, folder
        self.settings = replace(config.Settings(), redis=shop.server.settings)
        self.asked = 0
        self._next = START
        shop.topic("orders", 2)

    def add(self, *payloads: bytes | None, partition: int = 0) -> None:
        for payload in payloads:
            self._next += 10_000
            fields = ("other", b"x") if payload is None else ("payload", payload, "key", b"k")
            key = self.shop.keys.stream("orders", partition)
            self.shop.link.execute("XADD", key, f"{self._next}-0", *fields)

    def run(
        self,
        schema: str = SCHEMA,
        event_time: str | None = None,
        extra: tuple[str, ...] = (),
        times: tuple[str, ...] = (),
        codec: str = "json",
        **changes: Any,
    ) -> ArchiveResult:
        pipelines = {"orders": Pipeline(schema or None, event_time, times, extra, codec)}
        settings = replace(self.settings, pipelines=pipelines)

        def ask() -> Any:
            self.asked += 1
            return self.shop.spark

        archiver = Archiver(settings, self.folder, ask, lambda _: None, **changes)
        try:
            done = archiver.run()
            for problem in archiver.problems.values():
                raise problem
            return done[0]
        finally:
            archiver.close()

    def reparse(
        self,
        schema: str = SCHEMA,
        *,
        times: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        codec: str = "json",
        **options: bool,
    ) -> tuple[int, int]:
        """Parse archived entries again. Return how many rows fit, and how many do not."""
        pipelines = {"orders": Pipeline(schema or None, None, times, extra, codec)}
        settings = replace(self.settings, pipelines=pipelines)
        done = reparse(settings, self.folder, "orders", lambda: self.shop.spark, **options)
        return done.parsed, done.quarantined

    def is_archived(self, rows: int) -> bool:
        """Return True if the raw table has this number of rows."""
        table = (
            Archive(self.folder).table("orders")
            if (self.folder / "_archive.json").exists()
            else None
        )
        return table is not None and sum(each.rows for each in table.files()) == rows

    def table(self, kind: TableKind = PARSED) -> Any:
        """Open a table in the same way as an independent reader of Delta tables."""
        return deltalake.DeltaTable(str(Archive(self.folder).folder("orders", kind)))

    def rows(self, kind: TableKind = PARSED) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table(kind).to_pyarrow_table().to_pylist()
        return found

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())

    def reasons(self) -> list[str]:
        return sorted(row["reason"] for row in self.rows(QUARANTINE))


@pytest.fixture
def case(shop: Shop, tmp_path: Path) -> ParseCase:
    return ParseCase(shop, tmp_path / "archive")


def test_parsed_rows_are_partitioned_by_the_event_date(case: ParseCase) -> None:
    case.add(FITS % 1, b'{"id": 2}', b"not JSON")
    case.add(b'{"id": 3, "at": "2025-11-19 23:59:59", "more": [1]}', partition=1)
    done = case.run(event_time="at")
    assert (done.rows, done.parsed, done.quarantined) == (4, 2, 2)
    by_id = {row["id"]: row for row in case.rows()}
    assert by_id[1] == {
        "event_date": dt.date(2025, 11, 20),
        "entry_partition": 0,
        "entry_id": f"{START + 10_000}-0",
        "entry_time": dt.datetime.fromtimestamp(START / 1000 + 10, dt.UTC),
        "id": 1,
        "amount": Decimal("1.50"),
        "at": dt.datetime(2025, 11, 20, 10, tzinfo=dt.UTC),
    }
    assert (by_id[3]["event_date"], by_id[3]["amount"]) == (dt.date(2025, 11, 19), None)
    folders = {Path(each).parent.name for each in case.table().file_uris()}
    assert folders == {"event_date=2025-11-19", "event_date=2025-11-20"}
    assert case.reasons() == ["at is missing", "it is not JSON"]
    first = min(case.rows(QUARANTINE), key=lambda row: row["id"])
    assert (first["partition"], first["id"]) == (0, f"{START + 20_000}-0")
    assert (first["key"], first["value"]) == (b"k", b'{"id": 2}')

    case.add(FITS % 4, partition=1)
    asked = case.asked
    assert case.run(event_time="at").parsed == 1
    assert case.ids() == [1, 3, 4]
    assert case.run(event_time="at").parsed == 0
    assert case.asked == asked + 2, "without anything new Spark is not even asked for"


def test_parsed_rows_are_partitioned_by_the_entry_date(case: ParseCase) -> None:
    case.add(FITS % 1)  # 5 s after midnight, although the event happened before midnight
    case.run()
    assert [row["event_date"] for row in case.rows()] == [dt.date(2025, 11, 21)]


HOSTILE = [
    (None, "it has no payload"),
    (b"", "it has no payload"),
    (b" ", "it is not JSON"),
    (b'\xff{"id": 1}', "it is not UTF-8"),
    (b'{"id": 1, "note": "\xff"}', "it is not UTF-8"),
    (b'{"id": 1} {"id": 2}', "it is not JSON"),
    (b'{"id": 1}, {"id": 2}', "it is not JSON"),
    (b'{"id": 1}]', "it is not JSON"),
    (b"{'id': 1}", "it is not JSON"),
    (b'{"amount": NaN}', "it is not JSON"),
    (b"[" * 100_000, "it is not JSON"),
    (b'{"id": ' + b"9" * 10_000 + b"}", "it is not JSON"),
    (b'[{"id": 1}]', "it is JSON, but not an object"),
    (b"null", "it is JSON, but not an object"),
    (b'{"id": 1, "id": 2}', "the name 'id' occurs twice"),
    (b'{"x": {"' + b"n" * 500 + b'": 1, "' + b"n" * 500 + b'": 2}}', f"the name '{'n' * 99} occ"),
    (b'{"id": "1"}', "id is not bigint"),
    (b'{"id": 99999999999999999999}', "id is not bigint"),
    (b'{"id": 1.5, "amount": "x", "at": 1}', "id is not bigint; amount is not decimal(10,2)"),
    (b'{"amount": 123456789012}', "amount is not decimal(10,2)"),
    (b'{"at": "yesterday"}', "at is not timestamp"),
    (b'{"at": "290000-01-01T00:00:00Z"}', "at is outside the years 1 to 9999"),
    (b'{"__does_not_fit": "x", "id": true}', "id is not bigint"),
    (b'{"amount": 1e500000000}', "amount is not decimal(10,2)"),
    (b'{"amount": 1.5E-500000000}', "amount is not decimal(10,2)"),
    (b'{"amount": "1e500000000"}', "amount is not decimal(10,2)"),
    (b'{"amount": "1\\u0065500000000"}', "amount is not decimal(10,2)"),
    (b'{"amount": "1e,5,00000000"}', "amount is not decimal(10,2)"),
    (
        '{"amount": "1e\u0665\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660"}'.encode(),
        "amount is not decimal(10,2)",
    ),
    (b'{"amount": "' + b"9" * 1_000_000 + b'"}', "amount is not decimal(10,2)"),
    (b'{"amount": 0.' + b"0" * 1_000_000 + b"}", "amount is not decimal(10,2)"),
    (b'{"amount": ' + b"9" * 1_001 + b"}", "amount is not decimal(10,2)"),
    (b'{"id": "\\ud800"}', "it contains half of a surrogate pair, such as \\ud800"),
    (b'{"at": "-290308-12-21T20:00:00Z"}', "at is outside the years 1 to 9999"),
    (b'{"at": -9223372036854}', "at is outside the years 1 to 9999"),
    (b'{"at": 9223372036854}', "at is outside the years 1 to 9999"),
    (b'{"at": 1763683195000000}', "at is outside the years 1 to 9999"),  # microseconds
]


def test_rows_that_do_not_fit_are_quarantined_with_a_reason(case: ParseCase) -> None:
    case.add(*(payload for payload, _ in HOSTILE), b'{"__does_not_fit": "x", "id": 7}')
    done = case.run()
    assert (done.parsed, done.quarantined) == (1, len(HOSTILE))
    assert case.ids() == [7]
    kept = sorted(case.rows(QUARANTINE), key=lambda row: row["id"])
    assert [row["value"] for row in kept] == [payload or b"" for payload, _ in HOSTILE]
    for row, (payload, reason) in zip(kept, HOSTILE, strict=True):
        assert row["reason"].startswith(reason), payload


NESTED = """
    f float, d double, times array<timestamp>, money map<string,array<decimal(10,2)>>,
    deep struct<day:date, more:map<string,struct<f:float, note:string>>>
"""
OUT_OF_RANGE = [
    (b'{"f": 1e39}', "f has a value out of range"),
    (b'{"d": -1e400}', "d has a value out of range"),
    (b'{"times": [null, 1, "0000-12-31T00:00:00Z"]}', "times has a value out of range"),
    (b'{"times": ["+10000-01-01T00:00:00Z"]}', "times has a value out of range"),
    (b'{"times": [1763683195000000]}', "times has a value out of range"),
    (b'{"deep": {"day": "+10000-01-01"}}', "deep has a value out of range"),
    (b'{"deep": {"more": {"a": {"f": 1}, "b": {"f": 1e39}}}}', "deep has a value out of range"),
    (b'{"money": {"a": [1], "b": ["1e500000000"]}}', "money is not map<string,array<decimal(10,"),
]


def test_nested_values_out_of_range_are_quarantined(case: ParseCase) -> None:
    case.add(*(payload for payload, _ in OUT_OF_RANGE))
    case.add(
        b'{"f": 1e38, "d": 1e308, "times": [null, 1], "money": {"a": ["1e2", null]},'
        b' "deep": {"day": "9999-12-31", "more": {"a": null, "b": {"note": "1e500000000"}}}}'
    )
    done = case.run(NESTED)
    assert (done.parsed, done.quarantined) == (1, len(OUT_OF_RANGE))
    kept = sorted(case.rows(QUARANTINE), key=lambda row: row["id"])
    for row, (payload, reason) in zip(kept, OUT_OF_RANGE, strict=True):
        assert row["reason"].startswith(reason), payload
    (row,) = case.rows()
    assert row["money"] == [("a", [Decimal(100), None])]
    assert row["deep"]["more"][1] == ("b", {"f": None, "note": "1e500000000"})


def test_implausible_event_date_is_quarantined(case: ParseCase) -> None:
    """Payloads cannot create folders without limit, although each date needs a folder."""
    case.add(b'{"at": "1969-12-31T23:59:59Z"}', b'{"at": "9999-01-01"}', b'{"at": "1970-01-01"}')
    case.run("at date NOT NULL", "at")
    assert [row["event_date"] for row in case.rows()] == [dt.date(1970, 1, 1)]
    case.add(b'{"at": null}', b'{"at": "never"}')
    case.run("at date NOT NULL", "at")
    assert case.reasons() == [
        *("at is before 1970", "at is in the future", "at is missing", "at is not date")
    ]


def test_nested_columns_are_read_by_every_engine(case: ParseCase) -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    schema = "user-id string, items array<struct<n:int, at:timestamp>>, tags map<string,double>"
    schema = schema.replace("user-id", "`user-id`") + ", raw binary, ok boolean, f float, day date"
    items = [{"n": 1, "at": "2025-11-20T10:00:00Z"}, {"n": None}]
    payload = {"user-id": "ü", "items": items, "tags": {"a": 1.5}, "raw": "aGk=", "ok": True}
    case.add(
        json.dumps(payload | {"f": 0.5, "day": "2025-11-20"}).encode(), b'{"items": [{"n": "x"}]}'
    )
    case.run(schema)
    at = dt.datetime(2025, 11, 20, 10, tzinfo=dt.UTC)
    (row,) = case.rows()
    assert row["items"] == [{"n": 1, "at": at}, {"n": None, "at": None}]
    assert (row["user-id"], row["tags"], row["raw"]) == ("ü", [("a", 1.5)], b"hi")
    assert (row["ok"], row["f"], row["day"]) == (True, 0.5, dt.date(2025, 11, 20))
    assert case.reasons() == ["items is not array<struct<n:int,at:timestamp>>"]
    folder = str(Archive(case.folder).folder("orders", PARSED))
    assert polars.read_delta(folder)["user-id"].to_list() == ["ü"]
    rows = deltalake.DeltaTable(folder).to_pyarrow_dataset()
    assert rows.count_rows() == 1
    found = duckdb.sql("SELECT items[1].n, event_date FROM rows").fetchall()
    assert found == [(1, dt.date(2025, 11, 21))]
    assert len(deltalake.DeltaTable(folder).to_pandas()) == 1


def test_added_column_rewrites_no_file(case: ParseCase) -> None:
    case.add(b'{"id": 1, "who": "eve"}')
    case.run("id long")
    (first,) = case.table().file_uris()
    case.add(b'{"id": 2, "who": "bob"}')
    case.run("who string, id long, items array<int>")
    assert first in case.table().file_uris()
    found = {row["id"]: (row["who"], row["items"]) for row in case.rows()}
    assert found == {1: (None, None), 2: ("bob", None)}
    case.add(b'{"id": 3, "who": "joe"}')
    case.run("id long")  # a removed column stays in the table, and is null
    assert {row["id"]: row["who"] for row in case.rows()} == {1: None, 2: "bob", 3: None}


def test_column_comments_and_name_case_are_respected(case: ParseCase) -> None:
    """A field in another case, such as `"ID"` for `id`, causes a warning and a null column."""
    said: list[str] = []
    case.add(b'{"ID": 1, "amount": 2}')
    case.run("id long, amount int COMMENT 'in cents'", warn=said.append)
    (warning,) = said
    assert warning.startswith(
        "pipelines.orders: payloads have the name 'ID', and the schema has id"
    )
    case.add(b'{"id": 2}')
    case.run("id long COMMENT 'the number', amount int COMMENT 'in cents'")
    comments = {each.name: each.metadata.get("comment") for each in case.table().schema().fields}
    assert (comments["id"], comments["amount"]) == ("the number", "in cents")
    assert [row["id"] for row in sorted(case.rows(), key=lambda row: row["entry_id"])] == [None, 2]


def test_key_and_rescued_fields_are_optional_columns(case: ParseCase) -> None:
    """The table contains the message key and the unknown fields only on request."""
    case.add(b'{"id": 1, "who": {"n": 1.50}}', b'{"id": 2}')
    case.add(b'{"id": 3, "tags": {"a": 1}, "more": 5}', b'{"id": "x", "more": 5}')
    case.run("id long, tags map<string,int>", extra=("entry_key", "_rescued"))
    found = {row["id"]: (row["entry_key"], row["_rescued"]) for row in case.rows()}
    assert found == {
        1: (b"k", '{"who": {"n": 1.50}}'),
        2: (b"k", None),
        3: (b"k", '{"more": 5}'),
    }
    case.add(b'{"id": 4, "more": 5}')
    case.run("id long, tags map<string,int>")
    assert [row["_rescued"] for row in case.rows() if row["id"] == 4] == [None]


def test_headers_are_an_optional_column(case: ParseCase) -> None:
    """The optional column has the headers of converted, undecided and quarantined rows."""
    case.add(b'{"id": 1}')
    case.run("id long")
    payloads = (b'{"id": 2}', b'{"id": 3, "tags": {"a": 1}}', b'{"id": "4"}')
    for number, payload in enumerate(payloads):
        fields = ("payload", payload, "headers", f'{{"h": "{number}"}}')
        key = case.shop.keys.stream("orders", 1)
        case.shop.link.execute("XADD", key, f"{START + number}-0", *fields)
    case.add(b'{"id": "five"}')
    schema, extra = "id long, tags map<string,int>", ("entry_headers",)
    case.run(schema, extra=extra)

    def headers() -> dict[Any, list[bytes] | None]:
        rows = {row["id"]: row["entry_headers"] for row in case.rows()}
        return {number: each and [one["value"] for one in each] for number, each in rows.items()}

    assert headers() == {1: None, 2: [b"0"], 3: [b"1"]}
    assert case.reparse("id string, tags map<string,int>", extra=extra) == (5, 0)
    assert headers()["4"] == [b"2"]


def test_quarantined_row_keeps_its_headers(case: ParseCase) -> None:
    key, extra = case.shop.keys.stream("orders", 1), ("entry_headers",)
    fields = ("payload", b'{"at": 1763683195123}', "headers", '{"h": "x"}')
    case.shop.link.execute("XADD", key, f"{START}-0", *fields)
    case.run("at timestamp", extra=extra)
    assert case.reasons() == ["at is outside the years 1 to 9999"]
    case.add(b'{"at": "not"}')
    case.run("at timestamp")  # without the column in the schema, the quarantine keeps its own
    times = ("at milliseconds",)
    kept = case.reparse("at timestamp", times=times, extra=extra, quarantine_only=True)
    assert kept == (1, 1)
    assert [row["entry_headers"] for row in case.rows()] == [[{"key": "h", "value": b"x"}]]


def test_time_patterns_are_in_utc_in_every_session(case: ParseCase) -> None:
    """Times are read in UTC, even if clocks in the session's zone skip the hour."""
    schema = "id int, at timestamp, day date, zoned date"
    times = ("at dd/MM/yyyy HH:mm", "day dd.MM.yyyy", "zoned yyyy-MM-dd HH:mm xxx")
    case.add(
        b'{"id": 1, "at": "10/03/2024 02:30", "day": "10.03.2024"}',
        b'{"id": 2, "at": "10/03/2024"}',
        b'{"id": 3, "zoned": "2024-03-10 23:30 -05:00"}',
        b'{"id": 4, "day": "2024-03-10"}',
    )
    conf = case.shop.spark.conf
    before = conf.get("spark.sql.session.timeZone")
    conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        case.run(schema, times=times)
    finally:
        conf.set("spark.sql.session.timeZone", before)
    found = {row["id"]: (row["at"], row["day"], row["zoned"]) for row in case.rows()}
    assert found == {
        1: (dt.datetime(2024, 3, 10, 2, 30, tzinfo=dt.UTC), dt.date(2024, 3, 10), None),
        3: (None, None, dt.date(2024, 3, 11)),
    }
    assert case.reasons() == ["at is not timestamp", "day is not date"]


UNFIT: list[tuple[str, str | None, type[StreamqdError], str]] = [
    (
        "id string",
        None,
        RequestRefusedError,
        "has the column id as long, not id as string; columns can",
    ),
    ("ID long", None, RequestRefusedError, "has the column id as long, not ID as long"),
    (
        "id long, id2 variant",
        None,
        RequestRefusedError,
        "id2 is a variant, which tables do not support",
    ),
    (
        "id long, Id int",
        None,
        RequestRefusedError,
        "the column Id occurs twice, because case is ignored",
    ),
    ("`a b` int", None, RequestRefusedError, "'a b' does not have a valid name; use up to"),
    ("entry_id int", None, RequestRefusedError, "a column entry_id, but every parsed table"),
    (
        "id long, n tinyint",
        None,
        RequestRefusedError,
        "n is a tinyint, which turns 200 into -56; use smallint",
    ),
    ("id long, s array<struct<n:byte>>", None, RequestRefusedError, "s.element.n is a tinyint"),
    (
        "id long, s struct<n:int NOT NULL>",
        None,
        RequestRefusedError,
        "s.n is NOT NULL, which only a top-level",
    ),
    (
        "id long, m map<int,int>",
        None,
        RequestRefusedError,
        "the map m has keys of int, but JSON has only",
    ),
    ("id long, __DOES_NOT_FIT int", None, InvalidRequestError, "is not valid; write unique names"),
    ("id long,", None, InvalidRequestError, "the schema 'id long,' is not valid"),
    ("at timestamp(3)", None, InvalidRequestError, "the schema 'at timestamp(3)' is not valid"),
    ("id long", "at", RequestRefusedError, "event_time is at, which is not a timestamp or date"),
    ("id long", "id", RequestRefusedError, "event_time is id, which is not a timestamp or date"),
]


def test_invalid_schema_is_refused_and_entries_are_archived(case: ParseCase) -> None:
    case.shop.topic("other", 1)
    case.add(b'{"id": 1}')
    case.run("id long")
    case.add(b'{"id": 2}')
    case.shop.fill("other", 0, 1, 3)
    for schema, event_time, kind, said in UNFIT:
        with pytest.raises(kind) as caught:
            case.run(schema, event_time)
        assert str(caught.value).startswith("pipelines.orders: ")
        assert said in str(caught.value)
    archive = Archive(case.folder)
    tables = [archive.table(topic) for topic in ("orders", "other")]
    assert [table and sum(each.rows for each in table.files()) for table in tables] == [2, 3]
    case.run("id long")
    assert case.ids() == [1, 2]


def test_types_named_by_a_schema_error_are_accepted(shop: Shop) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        parsed.read_columns(Pipeline("id long, v variant"))
    simple = str(caught.value).partition(" support; use ")[2].partition(", array")[0].split(", ")
    schema = ", ".join(f"c{number} {each}" for number, each in enumerate(simple))
    assert [each.dataType.simpleString() for each in parsed.read_columns(Pipeline(schema))[0]] == [
        "decimal(10,0)" if each == "decimal" else each for each in simple
    ]


def test_invalid_schema_is_reported_before_the_first_batch(case: ParseCase) -> None:
    """An invalid schema is reported before the archive runs, even if the topic is empty."""
    case.shop.topic("later", 1)
    case.add(b'{"id": 1}')
    pipelines = {"orders": Pipeline("id long"), "later": Pipeline("id lng")}
    archive, told = Archive(case.folder, create=True), []

    def warn(text: str) -> None:
        table = archive.table("orders")
        told.append((text, table and table.positions))

    settings = replace(case.settings, pipelines=pipelines)
    archiver = Archiver(settings, case.folder, lambda: case.shop.spark, print, warn=warn)
    with contextlib.closing(archiver):
        for parsed_now in (1, 0):
            done = {each.topic: each for each in archiver.run()}
            assert done["orders"].parsed == parsed_now
    ((text, positions),) = told
    assert text.startswith("pipelines.later: the schema 'id lng' is not valid")
    assert positions == {}


def kill_around_commit(
    monkeypatch: pytest.MonkeyPatch, kind: TableKind, *, before: bool
) -> Callable[[], None]:
    """Kill the run just before or after its commit to a table of this kind.

    Return a function that undoes this.
    """
    done = ArchiveTable.append

    def append(self: ArchiveTable, *args: Any, **more: Any) -> None:
        if self.kind is kind and before:
            raise KilledError
        done(self, *args, **more)
        if self.kind is kind:
            raise KilledError

    monkeypatch.setattr(ArchiveTable, "append", append)
    return monkeypatch.undo


@pytest.mark.parametrize(
    ("kind", "before", "again"),
    [
        (PARSED, True, "the same"),
        (PARSED, False, "the same"),
        (QUARANTINE, True, "another schema"),
        (QUARANTINE, True, "no schema meanwhile"),
        (QUARANTINE, False, "the same"),
    ],
)
def test_parsed_table_is_exact_after_a_kill_around_a_commit(
    case: ParseCase, monkeypatch: pytest.MonkeyPatch, kind: TableKind, before: bool, again: str
) -> None:
    case.add(FITS % 1, b"bad 1")
    case.run()
    case.add(FITS % 2, b"bad 2", b'{"id": 3, "amount": 1, "note": 7}')
    end = kill_around_commit(monkeypatch, kind, before=before)
    with pytest.raises(KilledError):
        case.run()
    end()
    case.add(FITS % 4, b"bad 4", partition=1)
    if again == "no schema meanwhile":
        case.run("")
    # A row that moves from one table to the other must not be lost.
    case.run(SCHEMA + (", note int NOT NULL" if again == "another schema" else ""))
    entries = [row["entry_id"] for row in case.rows()]
    entries += [row["id"] for row in case.rows(QUARANTINE)]
    assert sorted(entries) == sorted(f"{START + each * 10_000}-0" for each in range(1, 8))
    if again != "another schema":
        assert case.ids() == [1, 2, 3, 4]
    assert case.run().parsed == 0
    pair = derived.open_pair(Archive(case.folder), "orders")
    assert pair is not None
    assert pair.parsed.note.batch == pair.quarantine.note.batch


@pytest.mark.parametrize("kind", [PARSED, QUARANTINE])
def test_concurrent_parse_runs_write_each_row_once(
    case: ParseCase, monkeypatch: pytest.MonkeyPatch, kind: TableKind
) -> None:
    """Two parse runs write each row once, even if one works just before the other commits.

    The lease is disabled in this test.
    """
    case.add(FITS % 1, b"bad 1")
    case.run()
    case.add(FITS % 2, b"bad 2", FITS % 3)
    case.run("")  # this run only archives
    archive, done = Archive(case.folder), ArchiveTable.append

    def parse() -> parsed.ParseCounts:
        raw = archive.table("orders")
        assert raw is not None
        return parsed.parse(archive, raw, Pipeline(SCHEMA), lambda: case.shop.spark, lambda: None)

    def append(self: ArchiveTable, *args: Any, **more: Any) -> None:
        if self.kind is kind:
            monkeypatch.setattr(ArchiveTable, "append", done)
            other.append(parse())
        done(self, *args, **more)

    other: list[parsed.ParseCounts] = []
    monkeypatch.setattr(ArchiveTable, "append", append)
    with pytest.raises(RequestRefusedError, match="another run wrote to"):
        parse()
    assert [each.rows for each in other] == [2 if kind is PARSED else 0]
    assert case.ids() == [1, 2, 3]
    assert sorted(row["value"] for row in case.rows(QUARANTINE)) == [b"bad 1", b"bad 2"]
    assert parse().batches == 0


def test_table_and_quarantine_of_two_states_are_refused(case: ParseCase) -> None:
    """A table without a matching quarantine is refused, as it would silently lack rows."""
    archive = Archive(case.folder, create=True)
    case.add(FITS % 1, b"bad")
    case.run()
    case.add(FITS % 2, b"worse")
    case.run()
    folder = archive.folder("orders", QUARANTINE).path
    case.table(QUARANTINE).restore(0)
    case.add(FITS % 3)
    with pytest.raises(RequestRefusedError, match="are from different times; restore both"):
        case.run()
    case.table().restore(0)
    case.run()  # this run parses the rows that the restored versions lack
    assert case.ids() == [1, 2, 3]
    assert sorted(row["value"] for row in case.rows(QUARANTINE)) == [b"bad", b"worse"]

    folder.rename(case.folder / "elsewhere")
    case.add(FITS % 4, b"worst")
    with pytest.raises(
        RequestRefusedError, match="and so are the rows that did not fit the schema; restore"
    ):
        case.run()
    (case.folder / "elsewhere").rename(folder)
    case.run()
    assert case.ids() == [1, 2, 3, 4]
    assert len(case.rows(QUARANTINE)) == 3
    archive.folder("orders", PARSED).path.rename(case.folder / "too")
    with pytest.raises(
        RequestRefusedError, match="a parsed table that no longer exists; remove it as well"
    ):
        case.run()
    folder.rename(case.folder / "three")
    case.run()
    assert (case.ids(), len(case.rows(QUARANTINE))) == ([1, 2, 3, 4], 3)


def test_archive_without_a_schema_is_parsed_later(
    case: ParseCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is parsed date by date, even if compacted, and resumes after a kill."""
    for number in range(1, 10):
        case.add(FITS % number, partition=number % 2)
        case._next += 40_000_000
        case.run("")
    monkeypatch.setattr(parsed, "CHUNK", 1)
    done = ArchiveTable.append
    left = [3]

    def append(self: ArchiveTable, *args: Any, **more: Any) -> None:
        left[0] -= self.kind is PARSED
        if not left[0]:
            raise KilledError
        done(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveTable, "append", append)
        with pytest.raises(KilledError):
            case.run()
    some = case.ids()
    assert 1 < len(some) < 9
    case.run()
    assert case.ids() == [*range(1, 10)]
    table = Archive(case.folder).table("orders")
    assert table is not None
    found = Archive(case.folder).derived_table("orders", PARSED)
    assert found is not None
    assert {place: each.id for place, each in found.positions.items()} == {
        place: each.id for place, each in table.positions.items()
    }


def test_quarantine_is_parsed_again_with_a_fixed_schema(case: ParseCase) -> None:
    """Only the quarantine is parsed again, so rows of trimmed dates are kept."""
    case.add(FITS % 1, b'{"id": 2, "at": 1763683195123}', b"bad", b'{"id": "three"}')
    case.run()
    assert (case.ids(), len(case.reasons())) == ([1], 3)
    raw = deltalake.DeltaTable(str(Archive(case.folder).folder("orders")))
    raw.delete()
    times = ("at milliseconds",)
    assert case.reparse(times=times, quarantine_only=True) == (1, 2)
    assert case.ids() == [1, 2]
    at = dt.datetime.fromtimestamp(1763683195.123, dt.UTC)
    assert at in [row["at"] for row in case.rows()]
    assert case.reasons() == ["id is not bigint", "it is not JSON"]
    assert case.reparse(times=times, quarantine_only=True) == (0, 2)


def test_half_replaced_quarantine_is_completed(
    case: ParseCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.add(FITS % 1, b'{"id": 2, "at": 1763683195123}', b"bad")
    case.run()
    for kind, before in ((PARSED, True), (QUARANTINE, True), (QUARANTINE, False)):
        end = kill_around_commit(monkeypatch, kind, before=before)
        with pytest.raises(KilledError):
            case.reparse(times=("at milliseconds",), quarantine_only=True)
        end()
        case.add(b"worse")
        case.run()
        entries = [row["entry_id"] for row in case.rows()]
        entries += [row["id"] for row in case.rows(QUARANTINE)]
        assert len(entries) == len(set(entries))
        assert case.ids() == ([1] if kind is PARSED else [1, 2])


@pytest.mark.parametrize(
    ("kind", "before"), [(PARSED, True), (PARSED, False), (QUARANTINE, True), (QUARANTINE, False)]
)
def test_kill_during_a_full_reparse_loses_no_row(
    case: ParseCase, monkeypatch: pytest.MonkeyPatch, kind: TableKind, before: bool
) -> None:
    """A run continues after a kill between two chunks, or another reparse starts over."""
    monkeypatch.setattr(parsed, "CHUNK", 1)
    case.add(*(FITS % number for number in range(1, 7)), b"bad", b'{"id": "eight"}')
    case.run()
    end = kill_around_commit(monkeypatch, kind, before=before)
    with pytest.raises(KilledError):
        case.reparse("id string")
    end()
    if kind is not PARSED or not before:
        case.run("id string")
        entries = [row["entry_id"] for row in case.rows()]
        entries += [row["id"] for row in case.rows(QUARANTINE)]
        assert len(entries) == len(set(entries)) == 8
        assert len(case.reasons()) == 1
    monkeypatch.setattr(parsed, "CHUNK", 1)
    assert case.reparse("id string") == (7, 1)
    assert sorted(row["id"] for row in case.rows()) == [*"123456", "eight"]


def test_reparse_accepts_columns_of_other_types(case: ParseCase) -> None:
    case.add(FITS % 1, b'{"id": "two"}', b"bad")
    case.run()
    assert case.reparse("id string, at string") == (2, 1)
    assert sorted(row["id"] for row in case.rows()) == ["1", "two"]
    assert case.run("id string, at string").parsed == 0
    raw = deltalake.DeltaTable(str(Archive(case.folder).folder("orders")))
    raw.delete()
    with pytest.raises(
        RequestRefusedError, match="3 parsed rows of orders have no archived entry any longer"
    ):
        case.reparse("id string")
    assert case.reparse("id string", allow_loss=True) == (0, 0)
    with pytest.raises(RequestRefusedError, match="schema is not set"):
        case.reparse("")


def test_unparsed_rows_of_a_compacted_file_replace_no_row(case: ParseCase) -> None:
    """A compacted file may contain entries on both sides of the parsed position."""
    case.add(FITS % 1, FITS % 2)
    case.run()
    case.add(FITS % 3)
    case.run("")
    compact(case.settings, case.folder)
    (raw,) = case.table(RAW).file_uris()
    assert raw.endswith(".parquet")
    case.table(RAW).delete(f"id = '{START + 10_000}-0'")
    with pytest.raises(
        RequestRefusedError, match="1 parsed rows of orders have no archived entry any longer"
    ):
        case.reparse()
    assert case.ids() == [1, 2]
    assert case.reparse(allow_loss=True) == (2, 0)


def test_restored_raw_table_is_reported(case: ParseCase) -> None:
    case.add(FITS % 1)
    case.run()
    case.add(FITS % 2)
    case.run()
    table = deltalake.DeltaTable(str(Archive(case.folder).folder("orders")))
    table.restore(1)
    case.run()  # the entry is archived again, but it has been parsed already
    assert case.ids() == [1, 2]
    table.update_incremental()
    table.restore(1)
    archive = Archive(case.folder)
    raw = archive.table("orders")
    assert raw is not None
    with pytest.raises(
        RequestRefusedError, match="was restored to a version older than its parsed rows; remove"
    ):
        parsed.parse(archive, raw, Pipeline(SCHEMA), lambda: case.shop.spark, lambda: None)


def test_deleted_rows_stay_deleted(case: ParseCase) -> None:
    case.add(FITS % 1, FITS % 2, b"bad 3", b"bad 4")
    case.run()
    places = (("tables", "", 1), ("parsed", "entry_", 1), ("tables", "", 3), ("quarantine", "", 3))
    for name, of, number in places:
        table = deltalake.DeltaTable(str(case.folder / name / "orders"))
        table.delete(f"{of}partition = 0 AND {of}id = '{START + number * 10_000}-0'")
    case.add(FITS % 5)
    case.run()
    assert case.ids() == [2, 5]
    assert [row["value"] for row in case.rows(QUARANTINE)] == [b"bad 4"]


@pytest.mark.slow
def test_parsed_table_is_exact_after_sigkill(case: ParseCase, tmp_path: Path) -> None:
    """No row is lost or doubled by a SIGKILL. The next run commits missing rows first."""
    (tmp_path / "streamq.toml").write_text(
        f'[redis]\nurl = "{case.shop.server.url}"\n[pipelines.orders]\nschema = "{SCHEMA}"\n'
    )
    for number, (point, commit) in enumerate((("committed", 2), ("written", 4))):
        case.add(FITS % (2 * number), b"bad", FITS % (2 * number + 1))
        command = [sys.executable, "-m", "tests.support.killed_archive", point, str(commit)]
        command += ["--config", str(tmp_path / "streamq.toml"), "pipeline", "archive"]
        command += ["--archive", str(case.folder), "--master", "local[1]", *QUICK]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert (case.ids(), len(case.reasons())) == ([0, 1, 2, 3], 1)
    case.run()
    assert (case.ids(), len(case.reasons())) == ([0, 1, 2, 3], 2)


@pytest.mark.slow
def test_invalid_schema_is_reported_by_each_periodic_run(case: ParseCase, tmp_path: Path) -> None:
    """Each run reports the schema and archives entries until Ctrl-C stops the command."""
    file = tmp_path / "streamq.toml"
    file.write_text(
        f'[redis]\nurl = "{case.shop.server.url}"\n[pipelines.orders]\nschema = "id lng"\n'
    )
    again = ("archive", "--archive", str(case.folder), "--every", "1s", "--master", "local[1]")

    def told(level: str) -> int:
        said = spark_process.read_output(tmp_path)
        return said.count(f"{level}: pipelines.orders: the schema 'id lng' is not valid")

    with spark_process.pipeline(tmp_path, file, *again, *QUICK) as running:
        for rounds in (1, 2, 3):
            case.add(FITS % rounds)
            wait_until(partial(case.is_archived, rounds), timeout=200)
            wait_until(lambda least=rounds: told("Error") >= least, timeout=60)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    assert told("Warning") == 1
    assert "Traceback" not in spark_process.read_output(tmp_path)
