"""The list of `make verify NAME=mutants` still fits the code. This check is fast."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import DoesNotApply, Mutant, mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name.replace(" ", "-"))
def test_every_mutant_applies(one: Mutant) -> None:
    text = one.applied(ROOT)
    assert text != (ROOT / one.path).read_text()
    assert one.path.startswith(("streamqd/", "lua/")), "tests are not broken on purpose"
    if one.path.endswith(".py"):
        compile(text, one.path, "exec")


def test_mutant_names_are_unique() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)


def test_every_named_test_exists() -> None:
    named = {test.partition("[")[0] for one in MUTANTS for test in (*one.tests, one.guard) if test}
    assert all(one.tests for one in MUTANTS)
    known = {
        f"{path}::{node.name}"
        for path in {test.partition("::")[0] for test in named}
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert named - known == set()


@pytest.mark.parametrize(
    ("path", "old", "said"),
    [
        ("code.py", "three", "0 times `three`, not 1"),
        ("code.py", "one", "2 times `one`, not 1"),
        ("gone.py", "one", "gone.py is gone"),
    ],
)
def test_drifted_mutant_raises(tmp_path: Path, path: str, old: str, said: str) -> None:
    (tmp_path / "code.py").write_text("one\ntwo\none\n")
    drifted = mutant("name", "claim", path, (old, "else"), tests={})
    with pytest.raises(DoesNotApply, match=said):
        drifted.applied(tmp_path)
