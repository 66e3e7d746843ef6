"""The condition of an assignment is one word, which is derived from all of its facts."""

from __future__ import annotations

import pytest

from streamqd.admin.condition import condition, describe_condition, severity_rank


@pytest.mark.parametrize(
    ("lease", "worker", "run", "orders", "word"),
    [
        ("owned", "ready", None, "", "ready"),
        ("owned", "ready", 0.4, "", "ready"),
        ("owned", "ready", 12.0, "", "running"),
        ("owned", "ready", 12.0, "paused", "running"),
        ("owned", "ready", 0.0, "paused", "paused"),
        ("owned", "paused", None, "", "paused"),
        ("owned", "halted", None, "", "circuit-open"),
        ("owned", "probing", 3.0, "", "circuit-half-open"),
        ("owned", "full", None, "", "keys-held"),
        ("owned", "broken", None, "", "crash-loop"),
        ("owned", "throttled", None, "", "throttled"),
        ("owned", "recovering", 12.0, "", "recovering"),
        ("owned", "", None, "", "unknown"),
        ("free", "", None, "", "free"),
        ("free", "broken", None, "", "crash-loop"),
        ("expired", "ready", None, "", "expired"),
        ("free", "", None, "stopped", "stopped"),
        ("expired", "", None, "stopped", "stopped"),
        ("owned", "ready", 12.0, "stopped", "running"),
    ],
)
def test_condition_of_an_assignment_is_one_word(
    lease: str, worker: str, run: float | None, orders: str, word: str
) -> None:
    """The word combines the directives, the owner and the worker.

    A worker whose run takes long counts as running, not as ready.
    """
    found = condition(lease, worker, run, paused=orders == "paused", stopped=orders == "stopped")
    assert found == word


def test_group_condition_is_the_worst_of_its_assignments() -> None:
    """A group shows the worst word of its assignments.

    A word of a later version is unknown, but it is still ranked and shown.
    """
    words = ["ready", "running", "circuit-open", "later", "stopped", "crash-loop"]
    ranked = sorted(words, key=severity_rank)
    assert ranked == ["crash-loop", "circuit-open", "stopped", "later", "running", "ready"]
    assert [describe_condition(word) for word in ("circuit-open", "free", "later")] == [
        "circuit open",
        "no owner",
        "later",
    ]
