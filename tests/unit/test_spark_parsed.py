"""Tables derived from others, without Spark: strict JSON, files by date, and paired tables."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamqd.errors import RequestRefusedError
from streamqd.spark.location import BucketFolder, location
from streamqd.spark.offsets import Position
from streamqd.spark.pipelines import parsed, reparse, storage, strict
from streamqd.spark.pipelines.derived import (
    PARSED,
    QUARANTINE,
    RESULTS,
    open_pair,
    parsed_columns,
    quarantine_columns,
)
from streamqd.spark.pipelines.fitting import ALIKE, CheckingWriter
from streamqd.spark.pipelines.proofs import Prover
from streamqd.spark.pipelines.reasons import CheckedRows
from streamqd.spark.pipelines.schemas import table_columns
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, UnparsedFiles
from streamqd.spark.pipelines.strict import find_fault, forbidden_checks, rescue_fields
from tests.support.quick import examples

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.compute")
deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyspark")

from pyspark.sql.datasource import EqualTo, LessThan  # noqa: E402
from pyspark.sql.pandas.types import from_arrow_schema  # noqa: E402
from pyspark.sql.types import (  # noqa: E402
    ArrayType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructType,
)

from streamqd.spark.pipelines.bucket_files import (  # noqa: E402
    BucketTableReader,
    FilesPartition,
    ListedFile,
)
from streamqd.spark.pipelines.conversion import convert, convert_unit  # noqa: E402
from streamqd.spark.pipelines.parts import DateWriter, WrittenFile, last_id, partition_date  # noqa: E402

DAY = 86_400_000
ZERO = (0, 0)


# --- payloads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"id": 1}', None),
        (b' {"a": {"b": [null, 1e9, "\\ud83d\\ude00", "\\\\ud800"]}}\n', None),
        (b'{"a": [{"b": "\\ud800"}]}', "it contains half of a surrogate pair, such as \\ud800"),
        (b'{"\\uDC00": 1}', "it contains half of a surrogate pair, such as \\ud800"),
        (None, "it has no payload"),
        (b"", "it has no payload"),
        (b'{"a": "\xff"}', "it is not UTF-8"),
        (b"\xef\xbb\xbf{}", "it is not JSON"),
        (b"{} {}", "it is not JSON"),
        (b'{"a": Infinity}', "it is not JSON"),
        (b'{"a": ' * 100_000, "it is not JSON"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "it is not JSON"),
        (b"[{}]", "it is JSON, but not an object"),
        (b'{"a": [{"b": 1, "b": 1}]}', "the name 'b' occurs twice"),
        (b'{"\\n": 1, "\\n": 2}', "the name '\\n' occurs twice"),
    ],
)
def test_payload_must_be_one_strict_json_object(payload: bytes | None, reason: str | None) -> None:
    assert find_fault(payload) == reason


@pytest.mark.parametrize(
    ("value", "huge"),
    [
        ("1e999", False),
        ("-1.5E-999", False),
        ("1e1000", True),
        ('"1,5e+1,0,0,0"', True),
        ('"1e-\\u0661\\u0660\\u0660\\u0660"', True),
        ("9" * 1000, False),
        ("9" * 1001, True),
        ('"' + "9" * 1001 + '"', True),
        ("0." + "0" * 999, True),
        ('"a note"', False),  # Spark itself rejects this as a decimal
        ("[1e1000]", False),
        ("null", False),
    ],
)
def test_huge_decimal_is_rejected_before_spark(value: str, huge: bool) -> None:
    inner = StructType().add("n", DecimalType(3, 0)).add("s", StringType())
    kind = StructType().add("n", DecimalType(10, 2)).add("s", StringType())
    kind = kind.add("m", MapType(StringType(), ArrayType(inner)))
    reason = "n is not decimal(10,2)" if huge else None
    assert find_fault(b'{"n": %s, "s": 1e1000}' % value.encode(), forbidden_checks(kind)) == reason
    within = b'{"m": {"s": [], "x": [null, {"s": 1e1000, "n": %s}]}}' % value.encode()
    said = "m is not map<string,array<struct<n:decimal(3,0),s:string>>>" if huge else None
    assert find_fault(within, forbidden_checks(kind)) == said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@settings(max_examples=examples(100))
@given(st.dictionaries(st.text(), JSON))
def test_json_output_is_accepted(document: dict[str, Any]) -> None:
    assert find_fault(json.dumps(document).encode()) is None


HARD = (
    b'{"a":"\x01"}',
    b'{"a":01}',
    b'{"a":-0}',
    b'{"a":1.}',
    b'{"a":1e}',
    b'{"a":1,}',
    b'{"a":"\\x"}',
    b'{"a":"\\ud800"}',
    b'{"a":"\\ud83d\\ude00"}',
    b'{"a":1}\x00',
    b"\x0b{}",
    b'{"a":"\xed\xa0\x80"}',
    b'{"a":1,"a":2}',
    b'{"a" :1,"a"\n:2}',
    b'{"a":":","a":2}',
    b'{"a":"\\":","a":2}',
    b'{"":{"":1,"":2}}',
    b'{"a":[[{"b":1,"c":2,"b":3}]]}',
    b'{"a":1e5000,"b":' + b"9" * 4301 + b"}",
)
PIECES = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"a"', b'"b"', b'"', b"\\", b"1", b"-", b".", b"e9", b" ",
     b"\n", b"null", b"tru", b"true", b"NaN", b"\\u00e9", b"\\ud83d", b"\xc3\xa9", b"\xff", b"\x00"]
)  # fmt: skip


@settings(max_examples=examples(500))
@given(st.lists(PIECES, max_size=12).map(b"".join) | st.dictionaries(st.text(), JSON).map(
    lambda found: json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")
))  # fmt: skip
def test_fast_reader_agrees_with_the_exact_reader(payload: bytes) -> None:
    """The fast reader returns the same objects as the exact one."""
    for each in (payload, b'{"a": ' + payload + b"}", *HARD):
        found = strict.decode_strict(each)
        if found is not None:
            assert strict._exact(each) == (found, None)


def test_fast_reader_decodes_usual_payloads() -> None:
    for document in ({}, {"a": "b", "c": [1.5, {"d": None}]}, {"at": "10:00:00", "url": "a://b"}):
        for separators in ((",", ":"), (", ", ": "), (" , ", " : ")):
            payload = json.dumps(document, separators=separators).encode()
            assert strict.decode_strict(payload) is not None


@settings(max_examples=examples(200))
@given(st.binary())
def test_payload_check_accepts_any_bytes(payload: bytes) -> None:
    assert find_fault(payload) is None or isinstance(find_fault(payload), str)


# --- files ----------------------------------------------------------------------------------------


def test_date_writer_starts_a_file_when_the_date_changes(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    rows = pa.RecordBatch.from_pydict({"a": [1, 2]}, schema=schema)
    writer = DateWriter(location(tmp_path), "event_date", schema)
    writer.write("2025-01-01", rows.slice(0, 0))
    for date in ("2025-01-01", "2025-01-01", "2025-01-02"):
        writer.write(date, rows)
    files = writer.finish()
    assert [(each.date, each.rows) for each in files] == [("2025-01-01", 4), ("2025-01-02", 2)]
    for each in files:
        assert Path(each.path).parent.as_posix() == f"event_date={each.date}"
        assert (tmp_path / each.path).stat().st_size == each.size
    writer.write("2025-01-03", rows)
    writer.discard()
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_failed_task_removes_its_files(tmp_path: Path) -> None:
    day = dt.date(2025, 1, 1)
    good, bad = parsed_columns().remove(0), quarantine_columns().remove(0)
    good = good.append(pa.field("a", pa.int64()))
    told = pa.array([None, "it is not JSON", None])
    place = location(tmp_path)
    folders = (place.subfolder("parsed"), good), (place.subfolder("quarantine"), bad)
    fitter = CheckingWriter(*folders, lambda rows: CheckedRows(rows, told, undecided=[2]))
    columns = {
        "partition": pa.array([0, 0, 0], pa.int32()),
        "id": pa.array(["1-0", "2-0", "3-0"]),
        "timestamp": pa.array([1, 2, 3], pa.timestamp("us", tz="UTC")),
        "date": pa.array([day, day, day]),
        "key": pa.array([None, None, None], pa.binary()),
        "value": pa.array([b"{}", b"bad", b"odd"]),
        "event_date": pa.array([day, None, None], pa.date32()),
        "row": pa.array([{"a": 1}, None, None], pa.struct([("a", pa.int64())])),
    }
    fitter.write(pa.RecordBatch.from_pydict(columns))
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert [each.parent.parent.name for each in sorted(files)] == ["parsed", *["quarantine"] * 2]
    fitter.discard()
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_field_names_that_differ_in_case_are_reported(tmp_path: Path) -> None:
    """Each column with such names is reported once. Thousands of warnings would fill the memory."""
    kind = StructType().add("amount", LongType()).add("id", LongType())
    place = location(tmp_path)
    columns = pa.schema([*parsed_columns(), *table_columns(kind)]).remove(0)
    folders = (place.subfolder("parsed"), columns), (place.subfolder("bad"), quarantine_columns())
    fitter = CheckingWriter(*folders, Prover(kind, "", 0))
    cases = ["".join(each) for each in itertools.product(*zip("amount", "AMOUNT", strict=True))]
    for names in (cases[1:40], cases[40:]):
        payload = json.dumps(dict.fromkeys(["ID", *names], 1)).encode()
        fitter.write(
            pa.RecordBatch.from_pydict(
                {
                    "partition": pa.array([0], pa.int32()),
                    "id": pa.array(["1-0"]),
                    "timestamp": pa.array([1], pa.timestamp("us", tz="UTC")),
                    "date": pa.array([dt.date(2025, 1, 1)]),
                    "key": pa.nulls(1, pa.binary()),
                    "value": pa.array([payload]),
                }
            )
        )
    rows = fitter.finish().to_pylist()
    assert sorted(row["date"] for row in rows if row["rows_are"] == ALIKE) == ["amount", "id"]


def test_last_id_of_a_date_is_its_last_millisecond() -> None:
    for date in ("1970-01-01", "2025-11-20", "9999-12-30"):
        last, _ = last_id(date)
        assert (partition_date(last), partition_date(last + 1) > date) == (date, True)


def test_rescued_fields_keep_their_exact_text() -> None:
    payload = b'{"a": 1, "b": 1.50, "\\u00fc": {"c" : [1e400]}, "d": null}'
    assert rescue_fields(payload, {"a"}) == '{"b": 1.50, "ü": {"c" : [1e400]}, "d": null}'
    assert rescue_fields(payload, {"a", "b", "ü", "d"}) is None


def test_deeply_nested_payload_is_rescued_whole() -> None:
    """A deeply nested payload is rescued as a whole.

    Spark judges such rows, and if one fit without being divided, the task would always fail.
    """
    payload = b'{"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
    assert rescue_fields(payload, {"b"}) == payload.decode()


def test_struct_without_fields_is_refused() -> None:
    """A struct without fields is refused.

    Otherwise, a table would be created whose files no task can write.
    """
    kind = StructType().add("id", LongType()).add("a", ArrayType(StructType()))
    with pytest.raises(RequestRefusedError, match=r"a\.element is a struct without fields"):
        table_columns(kind)


def test_number_only_for_spark_stays_undecided() -> None:
    """Only Spark can decide if such a text is a number, so it stays undecided."""
    texts = ["free", "see1234", "x" * 1001]
    assert convert(pa.decimal128(10, 2), texts)[1:] == ({0}, {1, 2})
    assert convert_unit(pa.timestamp("us", tz="UTC"), texts, 1000)[1:] == ({0}, {1, 2})


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us", tz="UTC")])
def test_time_only_for_spark_stays_undecided(kind: Any) -> None:
    """Only Spark can decide if such a text is a time. It ignores GMT, so the second text is one."""
    found = convert(kind, ["never", "GMT2025-11-20", "T10:00", None])
    assert (found.wrong, found.undecided) == ({0}, {1, 2})


# --- two tables in step ---------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive", create=True)


def make_pair(archive: Archive) -> tuple[ArchiveTable, ArchiveTable]:
    archive.derived_table("orders", PARSED, parsed_columns())
    pair = open_pair(archive, "orders")
    assert pair is not None
    return pair


def write_unfit(table: ArchiveTable, *ids: str) -> list[WrittenFile]:
    schema = quarantine_columns().remove(0)
    names = [each for each in schema.names if each != "id"]
    columns: dict[str, list[Any]] = {name: [None] * len(ids) for name in names}
    writer = DateWriter(table.folder, "date", schema)
    batch = pa.RecordBatch.from_pydict(columns | {"id": list(ids)}, schema=schema)
    writer.write("2025-01-01", batch)
    return [each._replace(bounds="") for each in writer.finish()]  # without bounds, as in a commit


def ids(archive: Archive) -> list[str]:
    table = deltalake.DeltaTable(str(archive.folder("orders", QUARANTINE)))
    found: list[str] = table.to_pyarrow_table()["id"].to_pylist()
    return sorted(found)


def position_at(ms: int) -> dict[tuple[str, int], Position]:
    return {("orders", 0): Position((ms, 0))}


def test_owed_files_are_committed_on_open(archive: Archive) -> None:
    table, quarantine = make_pair(archive)
    for number in (1, 2):
        files = write_unfit(quarantine, f"{number}-0")
        table.append(
            [], position_at(number), owed=UnparsedFiles(quarantine.note.batch, tuple(files))
        )
        pair = open_pair(archive, "orders")  # after a kill between the two commits
        assert pair is not None
        table, quarantine = pair
        assert table.note.batch == quarantine.note.batch == number
        assert quarantine.positions == position_at(number)
    assert ids(archive) == ["1-0", "2-0"]
    again = open_pair(archive, "orders")
    assert again is not None
    assert again.quarantine.version == quarantine.version, "it is paid once"


def test_column_bounds_are_in_the_table_log(archive: Archive) -> None:
    """The log of the table contains the bounds of columns.

    Without them, every query of a column would read all files.
    """
    moment = dt.datetime(2025, 11, 20, 10, 0, 0, 1_001, dt.UTC)
    values: dict[str, list[Any]] = {
        "entry_partition": [1, 0],
        "entry_id": ["2-0", "1-0"],
        "entry_time": [moment, moment - dt.timedelta(days=1)],
        "amount": [1.5, None],
        "note": ["é" * 33, "a"],
        "who": [{"n": 1}, None],
        "day": [dt.date(2025, 1, 1)] * 2,
        "ok": [True, False],
    }
    columns = [
        *parsed_columns(), pa.field("amount", pa.float64()), pa.field("note", pa.string()),
        pa.field("who", pa.struct([("n", pa.int64())])), pa.field("day", pa.date32()),
        pa.field("ok", pa.bool_()),
    ]  # fmt: skip
    table = archive.derived_table("orders", PARSED, pa.schema(columns))
    assert table is not None
    schema = pa.schema(columns[1:])
    writer = DateWriter(table.folder, "event_date", schema)
    writer.write("2025-11-20", pa.RecordBatch.from_pydict(values, schema=schema))
    table.append(writer.finish(), position_at(1))
    (found,) = pa.table(table.delta.get_add_actions(flatten=True)).to_pylist()
    assert (found["min.entry_id"], found["max.entry_id"]) == ("1-0", "2-0")
    assert (found["min.amount"], found["max.amount"], found["null_count.amount"]) == (1.5, 1.5, 1)
    assert found["min.day"] == found["max.day"] == dt.date(2025, 1, 1)
    assert found["max.entry_time"].replace(tzinfo=dt.UTC) == moment.replace(microsecond=2000)
    assert found.get("max.note") is None, "it is longer than a bound"
    rows = table.delta.to_pyarrow_dataset()
    assert rows.count_rows(filter=pa.compute.field("amount") > 2) == 0
    assert rows.count_rows(filter=pa.compute.field("entry_time") == moment) == 1


def test_column_named_like_the_ids_has_no_bounds(archive: Archive) -> None:
    """A column that is named like the IDs has no bounds.

    A query of a bucket could mistake its values for IDs.
    """
    schema = pa.schema([("id_ms", pa.string()), ("timestamp", pa.timestamp("us", tz="UTC"))])
    table = archive.derived_table("odd", RESULTS, schema)
    assert table is not None
    writer = DateWriter(table.folder, "", schema)
    moment = dt.datetime(2025, 11, 20, tzinfo=dt.UTC)
    columns: dict[str, list[Any]] = {"id_ms": ["b"], "timestamp": [moment]}
    writer.write("", pa.RecordBatch.from_pydict(columns, schema=schema))
    table.append(writer.finish(), {})
    (file,) = table.files()
    listed = ListedFile(file.path, "", 0, file.size, file.first[0], file.last[0])
    folder = location("s3://bucket/archive/results/odd")
    assert isinstance(folder, BucketFolder)
    for condition in (EqualTo(("id_ms",), "b"), LessThan(("timestamp",), moment)):
        reader = BucketTableReader(folder, from_arrow_schema(schema), (), [listed])
        assert list(reader.pushFilters([condition])) == [condition]
        (task,) = reader.partitions()
        assert isinstance(task, FilesPartition)
        assert task.files == (listed,)


@pytest.mark.parametrize(
    ("kind", "values", "bounded"),
    [
        (pa.timestamp("us", tz="UTC"), [0, 253_402_300_799_999_999], False),
        (pa.timestamp("us", tz="UTC"), [0, 253_402_300_799_999_000], True),
        (pa.timestamp("us", tz="UTC"), [0, 253_402_300_800_000_000], False),
        (pa.date32(), [-719_163, 0], False),
        (pa.date32(), [-719_162, 2_932_896], True),
        (pa.float64(), [1.0, float("inf")], False),
        (pa.float32(), [float("-inf"), 1.0], False),
    ],
)
def test_values_without_a_bound_are_stored(
    archive: Archive, kind: Any, values: list[Any], bounded: bool
) -> None:
    """Values that have no bound are written by a task, and other files keep their statistics."""
    schema = pa.schema([("n", pa.int64()), ("x", kind)])
    table = archive.derived_table("odd", RESULTS, schema)
    assert table is not None
    writer = DateWriter(table.folder, "", schema)
    columns = {"n": pa.array([1, 2]), "x": pa.array(values, kind)}
    writer.write("", pa.RecordBatch.from_pydict(columns, schema=schema))
    table.append(writer.finish(), {})
    (file,) = table.files()
    (found,) = pa.table(table.delta.get_add_actions(flatten=True)).to_pylist()
    assert (file.rows, found["max.n"]) == (2, 2)
    assert (found.get("max.x") is not None) == bounded
    assert table.delta.to_pyarrow_table().num_rows == 2


def test_missing_owed_file_is_reported(archive: Archive) -> None:
    table, quarantine = make_pair(archive)
    (file,) = write_unfit(quarantine, "1-0")
    table.append([], position_at(1), owed=UnparsedFiles(0, (file,)))
    (quarantine.folder.path / file.path).unlink()
    with pytest.raises(storage.ArchiveDamagedError, match="is missing"):
        open_pair(archive, "orders")


def test_table_without_its_quarantine_is_refused(archive: Archive) -> None:
    """A table without its quarantine is refused.

    With a new quarantine, the rows of the deleted one would be in neither table.
    """
    table, quarantine = make_pair(archive)
    open_pair(archive, "orders")
    shutil.rmtree(quarantine.folder.path)
    assert open_pair(archive, "orders") is not None, "nothing was committed yet"
    files = write_unfit(quarantine, "1-0")
    table.append([], position_at(1), owed=UnparsedFiles(0, tuple(files)))
    shutil.rmtree(quarantine.folder.path)
    with pytest.raises(
        RequestRefusedError, match="quarantine/orders is missing, and so are the rows"
    ):
        open_pair(archive, "orders")


def test_broken_log_of_a_result_table_is_reported(archive: Archive) -> None:
    table = archive.derived_table("even", RESULTS, pa.schema([("a", pa.int64())]))
    assert table is not None
    table.append([], {}, of=("query", 0))
    commit = table.folder.path / "_delta_log" / f"{1:020d}.json"
    commit.write_text(commit.read_text().replace('"version":0', '"version":"0x"'))
    found = archive.derived_table("even", RESULTS)
    assert found is not None
    with pytest.raises(storage.ArchiveError, match="results/even cannot be read: "):
        found.last_batch("query")


@pytest.mark.parametrize("path", ["../../tables/orders/x.parquet", "/etc/passwd"])
def test_owed_file_must_be_inside_its_table(archive: Archive, path: str) -> None:
    table, _ = make_pair(archive)
    table.append(
        [],
        position_at(1),
        owed=UnparsedFiles(0, (WrittenFile(path, "2025-01-01", 0, 1, 1, ZERO, ZERO),)),
    )
    with pytest.raises(RequestRefusedError, match="is not a path below"):
        open_pair(archive, "orders")


def test_table_schema_grows_but_never_changes(archive: Archive) -> None:
    table, _ = make_pair(archive)
    more = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.struct([("c", pa.string())])))])
    table.grow(more)
    version = table.version
    table.grow(more)
    assert table.version == version
    assert table.has_columns(pa.schema([*parsed_columns(), *more]))
    assert not table.has_columns(parsed_columns())
    for wrong in (("a", pa.string()), ("A", pa.int64()), ("b", pa.list_(pa.string()))):
        with pytest.raises(RequestRefusedError, match="columns can be added, but not changed"):
            table.grow(pa.schema([wrong]))


def test_unparsed_entries_do_not_hide_a_loss(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss is found even if new entries make up for it.

    Old dates of the raw table were deleted, and just as many new entries were added.
    """
    raw = archive.table("orders", create=True)
    table, quarantine = make_pair(archive)
    assert raw is not None
    files = write_unfit(quarantine, "1-0", "2-0")
    table.append([], position_at(2), owed=UnparsedFiles(0, tuple(files)))
    quarantine.append(files, position_at(2), batch=1)
    new, old = (
        WrittenFile("x.parquet", "2025-01-01", 0, 2, 1, first, (first[0] + 1, 0))
        for first in ((3, 0), (1, 0))
    )
    monkeypatch.setattr(raw, "files", lambda: [new])
    with pytest.raises(
        RequestRefusedError, match="2 parsed rows of orders have no archived entry any longer"
    ):
        reparse._check_no_loss(archive, raw)
    monkeypatch.setattr(raw, "files", lambda: [old, new])
    reparse._check_no_loss(archive, raw)


def test_restarted_table_keeps_no_rows(archive: Archive) -> None:
    """A restarted table keeps no rows.

    If its run is killed between the two commits, the quarantine is left to the next run.
    """
    table, quarantine = make_pair(archive)
    files = write_unfit(quarantine, "1-0", "2-0")
    table.append([], position_at(2), owed=UnparsedFiles(0, tuple(files)))
    quarantine.append(files, position_at(2), batch=1)
    new = write_unfit(quarantine, "3-0")
    columns = pa.schema([*PARSED.columns(), ("id", pa.string())])
    owed = UnparsedFiles(1, tuple(new), replaces=True)
    table.append([], {("orders", 1): Position((1, 0))}, owed=owed, batch=2, columns=columns)
    assert ids(archive) == ["1-0", "2-0"]
    pair = open_pair(archive, "orders")
    assert pair is not None
    assert ids(archive) == ["3-0"]
    assert pair.parsed.positions == {("orders", 1): Position((1, 0))}
    assert pair.parsed.has_columns(columns)


def test_chunks_advance_in_every_partition(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that is far ahead of the dates in a chunk keeps its position."""
    monkeypatch.setattr(parsed, "CHUNK", 1)
    raw = archive.table("orders", create=True)
    assert raw is not None
    table, _ = make_pair(archive)

    def raw_files(partition: int, *days: int) -> list[WrittenFile]:
        found = []
        for day in days:
            name = f"date={partition_date(day * DAY)}/partition={partition}/{day}.parquet"
            place = (partition_date(day * DAY), partition, 1, 1)
            found.append(WrittenFile(name, *place, (day * DAY, 0), (day * DAY + 5, 0)))
        return found

    files = raw_files(0, 1, 2, 3) + raw_files(1, 3, 4)
    ends = {("orders", 0): Position((3 * DAY + 5, 0)), ("orders", 1): Position((4 * DAY + 5, 0))}
    monkeypatch.setattr(raw, "files", lambda: files)
    raw.append([], ends)
    table.append([], {("orders", 1): Position((3 * DAY + 5, 9))})
    known = dict(table.positions)
    seen: list[str] = []
    for taken, reached in parsed._chunks(raw, table):
        for place, position in reached.items():
            assert position.id >= known.get(place, Position(ZERO)).id
            known[place] = position
        seen += [each.path for each in taken]
    assert len(seen) == len(set(seen)) >= 4
    assert {place: each.id for place, each in known.items()} == {
        place: each.id for place, each in ends.items()
    }
    assert list(parsed._chunks(raw, raw)) == []


def test_empty_recreated_partition_does_not_stop_others(archive: Archive) -> None:
    raw = archive.table("orders", create=True)
    assert raw is not None
    table, _ = make_pair(archive)
    table.append([], {("orders", 0): Position((9, 0)), ("orders", 1): Position((9, 0))})
    raw.append([], {("orders", 0): Position(ZERO, 0), ("orders", 1): Position((10, 0))})
    assert [reached for _, reached in parsed._chunks(raw, table)] == [
        {("orders", 1): Position((10, 0))}
    ]
    raw.append([], {("orders", 0): Position((8, 0))})
    with pytest.raises(
        RequestRefusedError, match="was restored to a version older than its parsed rows"
    ):
        list(parsed._chunks(raw, table))
