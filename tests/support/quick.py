"""Reduce the examples, repetitions and slow tests of `pytest --quick`, and so of `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

FULL, QUICK = 100, 20  # examples of a property


def set_profile(*, few: bool) -> None:
    """Set how properties run in this process. Called before tests are imported.

    Each gets few examples or all. No example fails for the time that it takes, because a busy
    machine has pauses of any length.
    """
    hypothesis.settings.register_profile(
        "ours",
        max_examples=QUICK if few else FULL,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("ours")


def examples(full: int) -> int:
    """Return the number of examples of a property that has `full` examples in a full run."""
    return max(1, full * hypothesis.settings().max_examples // FULL)


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters for all `values`; all except the first `count` are slow."""
    return [
        value if at < count else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]
