"""Rows of Spark are printed as tables, JSON and CSV. Errors may quote the content of a message."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from streamqd.cli import answers
from streamqd.cli.root import cli
from streamqd.errors import RequestRefusedError
from tests.support.optional import need

TITLE = "\x1b]0;owned\x07"  # changes the title of a terminal


def test_two_columns_with_one_name_keep_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    answers.show(["a", "a"], [(1, 2)], "table")
    assert capsys.readouterr().out.split() == ["A", "A", "1", "2"]
    answers.show(["a", "a"], [(1, 2)], "csv")
    assert capsys.readouterr().out.splitlines() == ["a,a", "1,2"]
    with pytest.raises(RequestRefusedError, match="two columns are named a; rename one with AS"):
        answers.show(["a", "a"], [(1, 2)], "json")


def test_nested_rows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    row = pytest.importorskip("pyspark.sql").Row
    answers.show(["at"], [([row(x=1, y=b"z")],)], "json")
    assert json.loads(capsys.readouterr().out) == {"at": [{"x": 1, "y": "z"}]}
    with pytest.raises(RequestRefusedError, match="named x"):
        answers.show(["at"], [(row("x", "x")(1, 2),)], "json")


def test_csv_output_escapes_terminal_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = [(TITLE,)]
    answers.show(["a"], rows, "csv")
    assert TITLE in capsys.readouterr().out, "a program gets what there is"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answers.show([TITLE], rows, "csv")
    out = capsys.readouterr().out
    assert out.count("owned") == 2
    assert out.replace("\r\n", "").isprintable()


@need("pyspark", "pyarrow")
@pytest.mark.parametrize("verbose", [True, False])
def test_error_text_escapes_terminal_control_characters(
    verbose: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-v"] if verbose else []
    with pytest.raises(SystemExit):
        cli.main([*options, "--config", f"/{TITLE}", "pipeline", "sql", "SELECT 1"])
    err = capsys.readouterr().err
    assert "owned" in err
    assert ("Traceback" in err) == verbose
    assert err.replace("\n", "").isprintable()


@need("pyspark", "pyarrow")
@pytest.mark.parametrize(
    "words",
    [
        ("archive", "-a", "."),
        ("replay", "access"),
        ("report", "-o", "."),
        ("run", "job:work", "--checkpoints", "."),
        ("shell",),
        ("sql", "SELECT 1"),
    ],
)
def test_bad_settings_are_reported_before_java_starts(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("streamqd.spark.session", lambda *_, **__: pytest.fail("Java is started"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--config", "absent.toml", "pipeline", *words])
    assert ended.value.code == 3
    assert "absent.toml: file not found" in capsys.readouterr().err


@need("pyspark", "pyarrow")
@pytest.mark.parametrize("words", [("sql", "SELECT 1"), ("shell",), ("replay", "access")])
def test_missing_package_error_is_one_sentence(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "deltalake" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    (tmp_path / "streamq.toml").write_text("")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--config", f"{tmp_path}/streamq.toml", "pipeline", *words, "-a", str(tmp_path)])
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("Error: deltalake cannot be imported")
