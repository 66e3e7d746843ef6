"""Isolate subjects, such as assignments, so that an error for one of them affects no other.

In a loop over many subjects, the caller runs its function for each of them through an `Isolate`,
which catches unexpected errors. The supervisor and the housekeeper each have their own `Isolate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Subject = TypeVar("Subject", contravariant=True)


class Isolate(Protocol[Subject]):
    """Runs a function for one subject."""

    def __call__(
        self, subject: Subject, do: Callable[P, T], /, *args: P.args, **named: P.kwargs
    ) -> T | None:
        """Return `do(...)`, or None if an unexpected error occurred."""


def run_directly(
    subject: object, do: Callable[P, T], /, *args: P.args, **named: P.kwargs
) -> T | None:
    """Return `do(...)` without isolation, so that any error reaches the caller."""
    del subject
    return do(*args, **named)
