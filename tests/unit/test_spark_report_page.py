"""A report's page and folder: what strangers wrote does no harm, nothing is half written."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from streamqd.errors import Refused
from streamqd.spark.pipelines import report_files as files
from streamqd.spark.pipelines import report_plots as plots
from streamqd.spark.pipelines.report_document import document
from streamqd.spark.pipelines.report_page import page
from streamqd.spark.pipelines.report_tables import TABLES, Counts, tables
from tests.unit.test_spark_report_figures import COUNTS, cause, place

EVIL = "\"'><script>alert(1)</script><img src=http://example.com/x>\x1b[31m\u202e&amp;"
MADE = {
    "made": "2025-11-20T10:00:00.000Z",
    "version": "1",
    "archive": EVIL,
    "seconds": 1.0,
    "window": {"from": None, "to": "2025-11-20T10:00:00.000Z"},
}
VOID = {"meta", "br", "wbr"}


class Reader(HTMLParser):
    """Collects what a page is made of; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def evil_counts() -> Counts:
    """Counts in which every text is a stranger's."""
    died = dict.fromkeys(("fingerprint", "error_class", "place", "group", "handler"), EVIL)
    said = dict.fromkeys(("newest", "reason", "error_message"), EVIL)
    latency = {
        "topic": EVIL,
        "measure": EVIL,
        "of": EVIL,
        "count": 0,
        "p50_ms": None,
        "p90_ms": None,
        "p99_ms": None,
        "max_ms": None,
        "skipped": 2,
    }
    return Counts(
        {EVIL: 20},
        places=[
            {**place(number, 8, 1000, 900_000), "topic": EVIL} for number in (*range(20), None)
        ],
        keys=[{"topic": EVIL, "rank": 1, "key": EVIL.encode() + b"\xff", "rows": 6, "bytes": 60}],
        throughput=[{"topic": EVIL, "at": 0, "rows": 8, "bytes": 80}],
        latency=[latency],
        deaths=[
            cause(topic=EVIL, **died, **said),
            cause(topic=EVIL, at=0, fingerprint=None, letters=1),
            cause(topic=EVIL, at=7_200_000, fingerprint=None, letters=1),
        ],
    )


def test_the_page_escapes_everything_and_asks_for_nothing() -> None:
    counts = evil_counts()
    text = page(document(MADE, tables(counts), [EVIL]))
    read = Reader(text)
    assert not {"script", "img", "link", "iframe", "object", "base"} & set(read.tags)
    names = {name for name, _ in read.attributes}
    assert not {name for name in names if name.startswith("on")} | ({"src", "srcset"} & names)
    links = [value for name, value in read.attributes if name in ("href", "action")]
    assert links == ["#t0"]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "alert(1)" in read.words
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "no data" in read.words


def test_the_page_of_ordinary_counts_says_what_they_are() -> None:
    read = Reader(page(document(MADE, tables(COUNTS), [])))
    for words in (
        "\\xff<k>",
        "75 %",
        "No entries, so nothing",
        "No data",
        "None.",
        "Entries per 1 s",
    ):
        assert words in read.words
    assert read.tags.count("svg") == 2 + 3 + 1 + 1 + 2
    assert read.tags.count("section") == 3


def test_the_page_without_topics() -> None:
    assert "There are no topics" in Reader(page(document(MADE, tables(Counts({})), []))).words


def test_columns_are_in_proportion_and_little_is_still_seen() -> None:
    text = plots.columns([0, 50, 100, 0.001], ["a", "b", "<c>", "d"], "it's <so>")
    heights = [part.split('"')[0] for part in text.split(' height="')[1:]]
    assert heights == ["50.00", "100.00", "1.00"]
    assert "<title>&lt;c&gt;</title>" in text
    assert 'aria-label="it&#x27;s &lt;so&gt;"' in text
    assert "<rect" not in plots.columns([], [], "none")
    assert 'width="40.00"' in plots.bar(0.4, "x")
    assert plots.bar(0, "x").count("<rect") == 1
    assert 'width="100.00"' in plots.bar(7, "x")


# --- the folder -----------------------------------------------------------------------------------


def write(out: Path, **options: Any) -> None:
    found = tables(COUNTS)
    files.write(out, document(MADE, found, []), found, "<p>page</p>", **options)


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    write(out, overwrite=False)
    assert {each.name for each in out.iterdir()} == {
        *("report.json", "report.html"),
        *(f"{name}.parquet" for name in TABLES),
    }
    assert [each.name for each in out.parent.iterdir()] == ["out"]
    keys = parquet.read_table(out / "keys.parquet").to_pylist()
    assert keys[0]["key"] == b"\xff<k>"
    topics = parquet.read_table(out / "topics.parquet")
    assert [str(topics.schema.field(name).type) for name in ("rows", "first")] == [
        "int64",
        "timestamp[ms, tz=UTC]",
    ]
    assert parquet.read_table(out / "latency.parquet").num_rows == 0


def test_a_report_is_replaced_only_when_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, overwrite=False)
    (out / "mine").touch()
    with pytest.raises(Refused, match="--overwrite"):
        write(out, overwrite=False)
    assert (out / "mine").exists()
    write(out, overwrite=True)
    assert not (out / "mine").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": "another"}'])
def test_what_is_no_report_is_never_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(Refused, match="something else than a report"):
        write(tmp_path, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_where_a_report_may_go(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", overwrite=False)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("file", "link"):
        with pytest.raises(Refused, match="not a folder"):
            write(tmp_path / name, overwrite=True)
    with pytest.raises(Refused, match="cannot be written"):
        write(tmp_path / "file" / "below", overwrite=False)


def test_nothing_stays_of_a_report_that_could_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        files.write(tmp_path / "out", {"made": object()}, {}, "", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_the_document_on_disk_is_the_document(tmp_path: Path) -> None:
    write(tmp_path / "out", overwrite=False)
    assert json.loads((tmp_path / "out" / "report.json").read_bytes()) == json.loads(
        json.dumps(document(MADE, tables(COUNTS), []))
    )
