"""Tables of pipelines are queried by name, and standing queries write each row once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamqd import config
from streamqd.config import Pipeline
from streamqd.errors import RequestRefusedError
from streamqd.spark.pipelines import results, standing
from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.pipelines.compact import compact
from streamqd.spark.pipelines.derived import RESULTS
from streamqd.spark.pipelines.prompt import Prompt
from streamqd.spark.pipelines.standing import StandingQuery
from streamqd.spark.pipelines.storage import Archive, ArchiveError, ArchiveTable

if TYPE_CHECKING:
    from tests.spark.conftest import Shop

deltalake = pytest.importorskip("deltalake")
pa = pytest.importorskip("pyarrow")

QUERY = "SELECT id, string(value) AS line, key FROM topic_orders WHERE id_ms % 2 = 0"


class KilledError(Exception):
    """Raised instead of SIGKILL where the process must survive."""


class QueryCase:
    """A topic of one partition, its archive, and standing queries that write to the archive."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        self.shop, self.folder = shop, folder
        self.settings = replace(config.Settings(), redis=shop.server.settings)
        self.archive = Archive(folder / "archive", create=True)
        shop.topic("orders", 1)

    def into(self, table: str, query: str = QUERY, checkpoint: str = "checkpoint") -> None:
        asked = StandingQuery(query, into=table, archive=self.archive)
        where = self.folder / checkpoint
        standing.run(self.shop.spark, self.settings, asked, lambda *_: None, where)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return Prompt(self.shop.spark, self.settings, self.archive).ask(query).rows


@pytest.fixture
def case(shop: Shop, tmp_path: Path) -> QueryCase:
    return QueryCase(shop, tmp_path)


@pytest.mark.parametrize("before", [True, False])
def test_stream_writes_each_row_once_into_a_table(
    case: QueryCase, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    case.shop.fill("orders", 0, 1, 6)
    case.into("even")
    case.shop.fill("orders", 0, 7, 9)
    done = ArchiveTable.append

    def append(self: ArchiveTable, *args: Any, **more: Any) -> None:
        if not before:
            done(self, *args, **more)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveTable, "append", append)
        with pytest.raises(KilledError):
            case.into("even")
    case.shop.fill("orders", 0, 10, 12)
    case.into("even")
    case.into("even")  # there are no new rows
    expected = [(f"{each}-0", f"0:{each}-0") for each in (10, 12, 2, 4, 6, 8)]
    assert case.ask("SELECT id, line FROM table_even ORDER BY id") == expected
    table = deltalake.DeltaTable(str(case.archive.folder("even", RESULTS)))
    assert sorted(table.to_pyarrow_table()["id"].to_pylist()) == [each[0] for each in expected]

    with pytest.raises(RequestRefusedError, match="the columns of table even are id, line"):
        case.into("even", "SELECT id, 1 AS line, key FROM topic_orders", "other")
    with pytest.raises(
        RequestRefusedError, match="is the checkpoint of another query, whose target is"
    ):
        case.into("odd")
    assert case.archive.names(RESULTS) == ["even"]


def test_invalid_table_name_error_is_one_sentence(case: QueryCase) -> None:
    case.shop.fill("orders", 0, 1, 2)
    for name in ("..", "../even", "", "a b", "a/b"):
        asked = StandingQuery(QUERY, into=name or " ", archive=case.archive)
        with pytest.raises(RequestRefusedError, match="is not a valid name of a topic or table"):
            standing.run(
                *(case.shop.spark, case.settings, asked, lambda *_: None, case.folder / "names")
            )
    for column, said in (("NULL AS a", "a is a void"), ("1 AS `a b`", "'a b' does not have a")):
        with pytest.raises(RequestRefusedError, match=said):
            case.into("even", f"SELECT {column} FROM topic_orders", said)
    with (
        results.lease_results(case.settings, case.archive, "even"),
        pytest.raises(RequestRefusedError, match="table even is being written by process"),
    ):
        case.into("even")
    asked = StandingQuery(QUERY, into="even", archive=case.archive)
    with pytest.raises(RequestRefusedError, match="requires a directory for the checkpoint"):
        standing.run(case.shop.spark, case.settings, asked, lambda *_: None)
    assert case.archive.names(RESULTS) == []


def test_result_tables_are_listed_and_compacted(case: QueryCase) -> None:
    pipelines = {"orders": Pipeline("id long")}
    settings = replace(case.settings, pipelines=pipelines)
    for number in range(3):
        case.shop.add("orders", 0, f"{number + 1}-0")  # the payload is not JSON
        key = case.shop.keys.stream("orders", 0)
        case.shop.link.execute("XADD", key, f"{number + 1}-1", "payload", b'{"id": %d}' % number)
        archiver = Archiver(settings, case.archive.root, lambda: case.shop.spark, lambda _: None)
        archiver.run()
        archiver.close()
        case.into("even")
    asked = (
        "SELECT p.id, string(t.value) FROM parsed_orders p JOIN topic_orders t"
        " ON p.entry_partition = t.partition AND p.entry_id = t.id ORDER BY 1"
    )
    rows = [(number, f'{{"id": {number}}}') for number in range(3)]
    bad = "SELECT string(value), reason FROM quarantine_orders ORDER BY 1"
    unfit = [(f"0:{number}-0", "it is not JSON") for number in (1, 2, 3)]
    assert (case.ask(asked), case.ask(bad)) == (rows, unfit)
    done = {each.topic: each for each in compact(case.settings, case.archive.root)[0]}
    assert list(done) == ["orders", "parsed/orders", "quarantine/orders", "results/even"]
    for name in ("orders", "parsed/orders", "quarantine/orders"):
        assert (done[name].files_before, done[name].files_after) == (3, 1)
    assert (case.ask(asked), case.ask(bad)) == (rows, unfit)
    assert case.ask("SELECT count(*) FROM table_even") == [(2,)]


def test_rows_with_nan_are_found_by_their_values(case: QueryCase) -> None:
    """Rows with NaN are found, although bounds omit NaN, which Spark orders above all numbers."""
    case.shop.fill("orders", 0, 1, 4)
    value = "IF(id_ms = 2, double('NaN'), double(id_ms))"
    query = f"SELECT id, {value} AS v, named_struct('v', float({value})) AS s FROM topic_orders"
    case.into("values", query)
    case.shop.fill("orders", 0, 5, 6)
    case.into("values", query)
    for _ in range(2):
        for where in ("v > 10", "s.v > 10"):
            assert case.ask(f"SELECT id FROM table_values WHERE {where}") == [("2-0",)], where
        table = deltalake.DeltaTable(str(case.archive.folder("values", RESULTS)))
        for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            assert (action["max.v"], action["max.s.v"]) == (None, None)
            assert action["max.id"] is not None
        compact(case.settings, case.archive.root)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_checkpoint_without_a_query_id_is_refused(case: QueryCase, text: str | None) -> None:
    if text is not None:
        (case.folder / "metadata").write_text(text)
    frame = case.shop.spark.range(3)
    store = results.ResultWriter(case.archive, "ids", frame, case.folder)
    with pytest.raises(ArchiveError, match="metadata does not contain the id of the query"):
        store(frame, 0)
