"""Isolation: an unexpected error for one subject, such as an assignment, affects no other subject.

A loop over many subjects calls an `Isolate` for each of them. The supervisor and the housekeeper
have different ones.
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
