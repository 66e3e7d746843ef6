"""Small parts of the command line: tables, ages, escaping, and reading lines."""

from __future__ import annotations

import gzip
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from streamqd import words
from streamqd.cli import output
from streamqd.cli.lines import BadInputError, Lines
from streamqd.errors import RequestRefusedError

# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain \u00e9", "plain \u00e9"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("\x9b31m", "\\x9b31m"),
        ("one\ntwo\tthree\r", "one\\ntwo\\tthree\\r"),
        (None, ""),
    ],
)
def test_printable_escapes_terminal_control_characters(
    given: str | bytes | None, shown: str
) -> None:
    assert output.printable(given) == shown


def test_printable_keeps_line_breaks_on_request() -> None:
    assert output.printable("a\n\tb\x07\rc", lines=True) == "a\n\tb\\x07\\rc"


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (None, "-"),
        (-5, "0.0s"),
        (0, "0.0s"),
        (9_949, "9.9s"),
        (10_000, "10s"),
        (59_999, "59s"),
        (60_000, "1m"),
        (61_000, "1m1s"),
        (3_599_000, "59m59s"),
        (3_600_000, "1h"),
        (11_520_000, "3h12m"),
        (86_400_000, "1d"),
        (90_000_000, "1d1h"),
        (40 * 86_400_000, "40d"),
        (100.5 * 86_400_000, "100d"),
    ],
)
def test_age_is_printed_in_its_largest_unit(milliseconds: float | None, shown: str) -> None:
    assert words.age(milliseconds) == shown


def test_count_uses_singular_and_plural() -> None:
    assert [words.count(n, "letter") for n in (0, 1, 2, 1234)] == [
        "no letters",
        "1 letter",
        "2 letters",
        "1,234 letters",
    ]


def test_table_aligns_numbers_and_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("NAME", "COUNT", "RATE"), [("a\x1b", 7, 0.25), ("bcdef", 12345, None)])

    assert capsys.readouterr().out.splitlines() == [
        "NAME    COUNT  RATE",
        "a\\x1b       7   0.2",
        "bcdef  12,345     -",
    ]


def test_table_is_cut_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ("x" * 30, "y" * 200)
    output.table(("A", "B"), [row])
    assert len(capsys.readouterr().out.splitlines()[1]) == 232
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    output.table(("A", "B"), [row])
    assert len(capsys.readouterr().out.splitlines()[1]) == 100


@dataclass(frozen=True)
class Thing:
    payload: bytes
    tags: dict[str, bytes]
    inner: list[Thing]


def test_bytes_are_printed_as_text_or_base64() -> None:
    thing = Thing(b"\xff", {"a": b"b"}, [Thing("\u00e9".encode(), {}, [])])

    assert json.loads(output.json_text(thing)) == {
        "payload_base64": "/w==",
        "tags": {"a": "b"},
        "inner": [{"payload": "\u00e9", "tags": {}, "inner": []}],
    }


def test_json_holds_no_control_characters() -> None:
    text = output.json_text({"a": "\x1b\x9b\x7f"})

    assert text.isprintable()
    assert json.loads(text) == {"a": "\x1b\x9b\x7f"}


# --- asking ---------------------------------------------------------------------------------------


def test_confirmation_without_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    output.confirm("Delete?", yes=True)
    with pytest.raises(RequestRefusedError, match="--yes"):
        output.confirm("Delete?", yes=False)


# --- lines ----------------------------------------------------------------------------------------


def read_lines(path: Path, max_bytes: int = 100) -> list[bytes]:
    opened = Lines(str(path))
    try:
        return list(opened.read(max_bytes))
    finally:
        opened.close()


CONTENT = b"one\ntwo\r\n\nfour \xff\nlast without end"
EXPECTED = [b"one", b"two", b"", b"four \xff", b"last without end"]


def test_lines_of_strips_only_line_ends(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(CONTENT)
    assert read_lines(tmp_path / "plain") == EXPECTED


def test_gzip_is_recognized_under_any_name(tmp_path: Path) -> None:
    half = len(CONTENT) // 2
    members = gzip.compress(CONTENT[:half]) + gzip.compress(CONTENT[half:])
    (tmp_path / "plain.log").write_bytes(members)

    assert read_lines(tmp_path / "plain.log") == EXPECTED


@pytest.mark.parametrize("content", [b"", b"x", b"\x1f", b"\n"])
def test_lines_of_reads_very_short_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "short").write_bytes(content)
    assert read_lines(tmp_path / "short") == content.splitlines()


def test_damaged_archive_names_the_line(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b"%d\n" % n for n in range(50_000)))
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    opened = Lines(str(tmp_path / "cut.gz"))
    seen: list[bytes] = []

    with pytest.raises(BadInputError, match=r"cut.gz cannot be read after line \d+"):
        seen.extend(opened.read(100))

    assert len(seen) > 1000
    assert seen == [b"%d" % n for n in range(opened.number)]
    opened.close()


def test_lines_of_accepts_a_line_as_long_as_a_message(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 10 + b"\r\n" + b"y" * 10 + b"\n" + b"z" * 11 + b"\n")
    opened = Lines(str(tmp_path / "long"))
    lines = opened.read(10)

    assert [next(lines), next(lines)] == [b"x" * 10, b"y" * 10]
    with pytest.raises(BadInputError, match=r"line 3 of .* is longer than"):
        next(lines)
    opened.close()


def test_lines_of_reports_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="No such file"):
        Lines(str(tmp_path / "missing"))
    with pytest.raises(click.UsageError, match="directory"):
        Lines(str(tmp_path))
