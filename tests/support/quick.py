"""What `pytest --quick`, and so `make test`, runs less of: examples, repetitions, slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

FULL, QUICK = 100, 20  # examples of a property


def choose() -> None:
    """Make few examples of each property in this process. Called before tests are imported."""
    hypothesis.settings.register_profile("quick", max_examples=QUICK)
    hypothesis.settings.load_profile("quick")


def examples(full: int) -> int:
    """How many examples a property gets that has `full` of them in a full run."""
    return max(1, full * hypothesis.settings().max_examples // FULL)


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters for all `values`; all but the first `count` are slow."""
    return [
        value if at < count else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]
