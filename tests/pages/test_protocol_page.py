"""The page about the protocol model describes the current model."""

from __future__ import annotations

from pathlib import Path

from tests.protocol import page

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "protocol-model.md"


def test_protocol_page_matches_the_current_model() -> None:
    assert page.digest() in PAGE.read_text(), "old: run `make verify NAME=model-full`"
