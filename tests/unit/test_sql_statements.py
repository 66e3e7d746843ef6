"""Statements are split, and the passwords in them are found."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from streamqd.cli import shell
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.spark.pipelines import standing
from streamqd.spark.pipelines.prompt import Prompt
from streamqd.spark.pipelines.statements import SqlScanner, SqlSplitter, check


def split(text: str) -> tuple[list[str], str]:
    splitter = SqlSplitter()
    done = [each for line in text.splitlines(keepends=True) for each in splitter.add(line)]
    return done, splitter.remainder()


@pytest.mark.parametrize(
    ("text", "statements", "rest"),
    [
        ("select 1; select 2", ["select 1"], "select 2"),
        ("select ';', \";\", `;` -- ; here\n;x", ["select ';', \";\", `;` -- ; here"], "x"),
        ("select 'it''s \\';' ;", ["select 'it''s \\';'"], ""),
        ("select 3 - 1", [], "select 3 - 1"),
        ("select 'no end;\n;", [], "select 'no end;\n;"),
        ("SELECT 1 /* a; b */;", ["SELECT 1 /* a; b */"], ""),
        ("/* don't */ SELECT 1;\nSELECT 2;", ["/* don't */ SELECT 1", "SELECT 2"], ""),
        ("/* a /* b; */ ;\n ; */ SELECT 1;", ["/* a /* b; */ ;\n ; */ SELECT 1"], ""),
        ("SELECT /*+ REPARTITION(1) */ 2; x", ["SELECT /*+ REPARTITION(1) */ 2"], "x"),
        ("SELECT 1; /* the end; */\n-- of it;\n", ["SELECT 1"], ""),
        ("SELECT 1; /* no end;", ["SELECT 1"], "/* no end;"),
        ("SELECT r'\\', R\"\\\"; SELECT 2;", ["SELECT r'\\', R\"\\\"", "SELECT 2"], ""),
        ("SELECT our'\\';' ;", ["SELECT our'\\';'"], ""),
        (";; -- nothing\n;", [], ""),
    ],
)
def test_split_finds_the_end_of_each_statement(text: str, statements: list[str], rest: str) -> None:
    assert split(text) == (statements, rest)


def test_every_line_is_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["SELECT 'one\n", *["and more\n"] * 500, "';\n"]
    scanned: list[str] = []
    pieces = SqlScanner.pieces

    def counted(self: SqlScanner, text: str) -> object:
        scanned.append(text)
        return pieces(self, text)

    monkeypatch.setattr(SqlScanner, "pieces", counted)
    splitter = SqlSplitter()
    assert [each for line in lines for each in splitter.add(line)] == ["".join(lines)[:-2]]
    assert scanned == lines


@pytest.mark.parametrize(
    "literal",
    [
        "'redis://:secret@h'",
        '"rediss://u:secret@h"',
        "'redis://:pa ss@h'",
        r"'redis\u003A//\u003asecret@h'",
        r"'redis\072//:secret\100h'",
        r"'\redis\://:secret@h'",
        "'redis://' ':secret@h'",
        "'redis://:sec' /* and */ \"ret@h\"",
        "'redis://:sec' || 'ret@h'",
        "r'redis://:secret@h'",
        "'redis+sentinel://:secret@h/shop'",
        "'unix://u:secret@/run/redis.sock'",
        "'redis://h?password=secret'",
        "'x') -- redis://:secret@h",
        "'x') /* redis://:secret@h */",
        "'redis://:secret@h",
        "concat('redis://:', 'secret', '@h')",
        "CONCAT ( 'redis://:' /* , */ , 'sec' 'ret@h')",
    ],
)
def test_sql_password_is_refused_in_any_spelling(literal: str) -> None:
    with pytest.raises(RequestRefusedError, match="passwordFile"):
        check(f"CREATE TABLE t USING streamq OPTIONS (topic 't', url {literal})")


@pytest.mark.parametrize(
    "option",
    [
        "url replace('redis://Xsecret@h', 'X', ':')",
        "`url` = u",
        "URL 'redis://' || :password || '@h'",
        "'url' = 'redis://' upper('secret')",
        "url",
    ],
)
def test_table_url_must_be_a_literal(option: str) -> None:
    for options in (f"topic 't', {option}", f"{option} , topic 't'"):
        with pytest.raises(RequestRefusedError, match="write one literal"):
            check(f"CREATE TABLE t USING /* by */ `streamq` OPTIONS ({options})")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE t USING streamq OPTIONS ('url' = 'redis://' 'h:1', topic concat('a', 'b'))",
        "CREATE TABLE t USING streamq OPTIONS (topic 'url', key 'url')",
        "CREATE TABLE t USING csv OPTIONS (url concat('a', 'b'))",
        "SELECT concat(url, 'b') FROM t",
        "INSERT INTO t (key, value) VALUES ('redis://h:6379', 'a@b')",
        "SELECT * FROM t WHERE value LIKE '%http://shop:8080/u@%'",
        "CREATE TABLE t USING streamq OPTIONS (url 'redis://h:6379/0', owner 'me@shop')",
        "SELECT 'redis://h:6379/0' AS url, 'a@b' AS mail -- redis://h:6379 is of me@shop",
        "SELECT 'unix:///run/redis:1@.sock'",
    ],
)
def test_statement_without_a_password_is_allowed(statement: str) -> None:
    check(statement)


def test_statement_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        check(b"SELECT '\xe4'".decode("utf-8", "surrogateescape"))


NO_SPARK: Any = None  # for a refused statement, which is not passed on


def test_no_entry_point_accepts_a_password(tmp_path: Path) -> None:
    query = "SELECT 'redis://:secret@h'"
    with pytest.raises(RequestRefusedError, match="passwordFile"):
        Prompt(NO_SPARK, NO_SPARK, None).ask(query)
    folder, asked = tmp_path / "checkpoint", standing.StandingQuery(query)
    with pytest.raises(RequestRefusedError, match="passwordFile"):
        standing.run(NO_SPARK, NO_SPARK, asked, lambda *_: None, folder)
    assert not folder.exists()


def test_input_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"-- fine\nSELECT '\xe4';\n")))
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        shell.run_from_input(Prompt(NO_SPARK, NO_SPARK, None), "table")


@pytest.mark.parametrize(
    ("statement", "refused"),
    [
        ("CREATE TABLE o (id long) USING streamq OPTIONS (topic 'x')", True),
        (
            "create or replace table if not exists a.`b`(id decimal(3,2)) using streamq",
            True,
        ),
        ("CREATE TABLE o USING streamq OPTIONS (topic 'x')", False),
        ("CREATE TABLE o (id long) USING parquet", False),
        ("SELECT 'CREATE TABLE o (id long) USING streamq'", False),
    ],
)
def test_sql_table_with_explicit_columns_is_refused(statement: str, refused: bool) -> None:
    """A table with explicit columns is refused.

    Spark would accept it, and the first SELECT would fail.
    """
    with pytest.raises(RequestRefusedError, match="without columns") if refused else nullcontext():
        check(statement)
