"""Reduce the examples, repetitions and slow tests of `pytest --quick`, and so of `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

FULL, QUICK = 100, 20  # number of examples of a property


def set_profile(*, few: bool) -> None:
    """Set how properties run in this process. Call this before tests are imported.

    Properties get few examples if `few` is True, and all of them otherwise. No example fails
    because it takes too long, as a busy machine may pause for any length of time.
    """
    hypothesis.settings.register_profile(
        "ours",
        max_examples=QUICK if few else FULL,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("ours")


def examples(full: int) -> int:
    """Return the number of examples to run for a property that has `full` in a full run."""
    return max(1, full * hypothesis.settings().max_examples // FULL)


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters for all values, and mark all except the first `count` as slow."""
    return [
        value if at < count else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]
