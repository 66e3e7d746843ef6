"""Find the rows that each test is marked with. They are read from the sources, without a server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def rows_of_tests() -> dict[str, tuple[str, ...]]:
    """Return the rows of each test, in the order of the files. Test ids have no parameters."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "mark.fault(" in text:
            inside = str(path.relative_to(TESTS.parent))
            found |= {f"{inside}::{name}": rows for name, rows in _marked(ast.parse(text))}
    return found


def _marked(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    of_all = [row for node in tree.body for row in _rows_of_module(node)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = [row for decorator in node.decorator_list for row in _rows(decorator)]
            if node.name.startswith("test_") and (rows := [*of_all, *own]):
                yield node.name, tuple(rows)


def _rows_of_module(node: ast.stmt) -> list[str]:
    """Return the rows in `pytestmark = pytest.mark.fault(...)`, which is one mark or a list."""
    if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "pytestmark":
        return []
    marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return [row for mark in marks for row in _rows(mark)]


def _rows(decorator: ast.expr) -> list[str]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []
