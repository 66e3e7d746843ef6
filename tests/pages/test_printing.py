"""The output of an example about a message cannot be taken for a log line.

The standard output of a handler is passed on unchanged. If readers copy an example, it must not
allow senders to write to the terminal and the journal.
"""

from __future__ import annotations

import ast
import json
import linecache
from collections.abc import Callable
from typing import Any

import pytest

from streamqd import handlers, testing
from streamqd.cli.init import HANDLER
from streamqd.handlers import declaration
from tests.pages.test_snippets import ROOT, blocks

FORGED = (
    "2026-01-01 ready\nmessage.dead_lettered 12:00:00.000 ERROR worker[1] forged\x1b[2J\r\u2028x"
)
PAYLOADS = [
    FORGED,
    f'{FORGED} \x1b[2J\x1b[2J\x1b[2J\x1b[2J\x1b[2J\x1b[2J\x1b[2J a\x1b[2Jb "',
    " ".join(["\x1b[2J"] * 9) + ' "',
    json.dumps({"id": FORGED, "price": "1"}),
]


def is_handler(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        "handler" in ast.unparse(each) for each in node.decorator_list
    )


def prints(code: str) -> bool:
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) == "print" for call in calls)


SOURCES = {
    "streamqd init": HANDLER,
    **{place: each.text for place, each in blocks("python") if "@handler" in each.text},
    **{
        str(path.relative_to(ROOT)): path.read_text()
        for path in sorted(ROOT.glob("streamqd/examples/*.py"))
        if "@handler" in path.read_text()
    },
}
# These examples import other files of their page, so they are parsed but not run.
PARTS = {
    place: code
    for place, code in SOURCES.items()
    if prints(code) and place.startswith("docs/how-to/use-with-")
}
PRINTING = {place: code for place, code in SOURCES.items() if prints(code) and place not in PARTS}


def functions(code: str, place: str) -> list[Callable[..., Any]]:
    module: dict[str, Any] = {"__name__": "printed"}
    linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
    exec(compile(code, place, "exec"), module)
    named = [node.name for node in ast.parse(code).body if is_handler(node)]  # type: ignore[attr-defined]
    return [module[name] for name in named]


@pytest.mark.parametrize("place", PRINTING)
def test_examples_print_messages_as_one_line(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each example prints a message as one line.

    If an example did not, its copies would allow senders to forge lines of the log.
    """
    declared: list[dict[str, Any]] = []
    for module in (handlers, declaration):
        monkeypatch.setattr(module, "declared", declared)
    lines = []
    for function in functions(PRINTING[place], place):
        for payload in PAYLOADS:
            testing.run(function, payload, key="k")
            out = capsys.readouterr().out
            assert out.count("\n") <= 1
            assert out.removesuffix("\n").isprintable(), repr(out)
            lines += out.splitlines()
    assert lines, "no payload made it print: add one"


@pytest.mark.parametrize("place", PARTS)
def test_project_files_print_text_as_repr(place: str) -> None:
    """A program in a project may print text only with repr, but numbers without it."""
    calls = (node for node in ast.walk(ast.parse(PARTS[place])) if isinstance(node, ast.Call))
    for call in calls:
        if ast.unparse(call.func) == "print":
            for shown in (each for arg in call.args for each in ast.walk(arg)):
                if isinstance(shown, ast.FormattedValue) and shown.conversion != ord("r"):
                    assert ast.unparse(shown.value) == "order.id"


def test_printing_checks_cover_enough_examples() -> None:
    assert len(PARTS) == 3, sorted(PARTS)
    assert len(PRINTING) >= 7, sorted(PRINTING)
