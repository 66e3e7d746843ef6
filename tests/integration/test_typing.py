"""What people type and what a terminal of theirs shows: wrong words, short options, colours."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamqd.letter import REASONS
from streamqd.store.client import Link
from tests.integration.test_admin import bury
from tests.support.terminal import Terminal
from tests.support.verbs import At, Run

ROOT = Path(__file__).parents[2]
Typed = Callable[..., Terminal]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def typed(file: Path, tmp_path: Path) -> Typed:
    """Run the command in a terminal of 80 columns; `keys` are typed when `until` is shown."""

    def invoke(*args: str, code: int = 0, until: str = "", keys: str = "", **env: str) -> Terminal:
        command = [sys.executable, "-m", "streamqd", "--config", str(file), *args]
        clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        whole = clean | {"TERM": "xterm", "PYTHONPATH": str(ROOT)} | env
        with Terminal(command, columns=80, lines=60, cwd=tmp_path, env=whole) as terminal:
            if until:
                terminal.wait_text(until, 60)
                terminal.type(keys)
            assert terminal.wait_end(60) == code, terminal.shown
        return terminal

    return invoke


# --- words that cannot match ----------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["list", "stats", "replay", "purge", "export"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--reason", "nope"), REASONS),
        (("--fingerprint", "nope"), ["12 hexadecimal digits"]),
        (("--since", "1h", "--until", "2h"), ["--since is not before --until"]),
    ],
)
def test_a_filter_that_cannot_match_is_a_mistake(
    run: Run, at: At, verb: str, words: tuple[str, ...], told: list[str]
) -> None:
    """U9: a word that can match no dead letter is wrong usage, and the right words are named."""
    bury(at(0), "1-0")
    result = run("dlq", verb, "access", *words, code=2)
    assert all(word in result.stderr for word in told)
    assert not result.stdout


def test_every_reason_is_on_the_page_and_can_be_asked_for(run: Run, at: At) -> None:
    """U9: the words that --reason takes are those that the wire format names."""
    page = (ROOT / "docs" / "reference" / "wire-format.md").read_text()
    table = page.partition("| Reason |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == sorted(REASONS)
    for reason in REASONS:
        assert run("dlq", "list", "access", "--reason", reason).stdout == "nothing matches\n"


def test_a_narrow_terminal_shows_what_a_message_died_of(typed: Typed, at: At) -> None:
    """U9: at 80 columns the message of the error is not cut away, and no module stands before."""
    text = "the invoice 4711 of customer 17 has no positions, so there is no sum"
    bury(at(1), "1763640000000-0", errorClass="shop.billing.errors.InvoiceError", errorMessage=text)
    bury(at(1), "1763640000001-0", errorClass="shop.billing.errors.Short", errorMessage="no sum")

    shown = COLOUR.sub("", typed("dlq", "list", "access").raw).replace("\r\n", "\n")

    assert f"\n    {text}\n" in shown  # both do not fit: the message wins
    assert "\n    Short: no sum\n" in shown
    assert all(len(line) <= 80 for line in shown.split("\n"))


def test_tries_count_runs_that_ended_with_their_process(run: Run, at: At) -> None:
    """U9: a dead letter that took down two processes and failed once was tried three times."""
    bury(at(0), "1-0", reason="crashes", attempts="1", crashes="2", errorMessage="signal SIGSEGV")
    head, row = run("dlq", "list", "access").stdout.splitlines()
    at_ = head.index("TRIES")
    assert row[at_ : at_ + 5].strip() == "3"


@pytest.mark.parametrize(
    "words",
    [
        ("tail", "no name!"),
        ("produce", "no name!", "x"),
        ("topic", "create", "no name!"),
        ("dlq", "list", "no name!"),
        ("dlq", "show", "access", "nope"),
        ("dlq", "list", "access", "--cursor", "nope"),
        ("retry", "list", "access", "hits", "--cursor", "nope"),
        ("retry", "now", "access", "hits", "nope"),
        ("pending", "access", "--group", "hits", "--cursor", "nope"),
        ("group", "reset", "access", "hits", "--to", "nope"),
        ("doctor", "--only", "nope"),
        ("why", "nope"),
        ("pause", "a/b/c/d"),
        ("move", "nope", "--to", "x"),
    ],
)
def test_what_cannot_be_read_ends_alike_everywhere(
    run: Run, at: At, words: tuple[str, ...]
) -> None:
    """U9: malformed input is wrong usage, exit code 2, whichever verb reads it."""
    at(0).groups()
    result = run(*words, code=2)
    assert "Error: " in result.stderr


def test_without_a_terminal_the_word_is_named(run: Run, at: At, link: Link) -> None:
    """U9: what would ask says which option answers."""
    bury(at(0), "1-0")
    assert "not a terminal; pass --yes" in run("dlq", "purge", "access", "--all", code=8).stderr
    assert link.execute("XLEN", at(0).dlq) == 1
