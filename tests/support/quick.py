"""What `pytest --quick`, and so `make test`, runs less of: examples, repetitions, slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

FULL, QUICK = 100, 20  # examples of a property


def choose(*, few: bool) -> None:
    """Say how properties run in this process. Called before tests are imported.

    Each gets few examples or all, and no example fails for the time that it takes: beside other
    work a machine has pauses of any length.
    """
    hypothesis.settings.register_profile(
        "ours",
        max_examples=QUICK if few else FULL,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("ours")


def examples(full: int) -> int:
    """How many examples a property gets that has `full` of them in a full run."""
    return max(1, full * hypothesis.settings().max_examples // FULL)


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters for all `values`; all but the first `count` are slow."""
    return [
        value if at < count else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]
