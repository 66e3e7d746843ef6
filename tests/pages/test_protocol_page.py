"""The page of the model is of the model that is there."""

from __future__ import annotations

from pathlib import Path

from tests.protocol import page

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "protocol-model.md"


def test_the_figures_are_of_this_model() -> None:
    assert page.digest() in PAGE.read_text(), "the model has changed since: run `make model-full`"
