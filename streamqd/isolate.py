"""How what is done for one subject (an assignment, a partition) is kept from harming the others.

Whoever goes through many subjects runs what it does for each through an `Isolate`. The supervisor
and the housekeeper each have one of their own.
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
        """Return `do(...)`, or None after an unexpected error."""


def directly(subject: object, do: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T | None:
    """Return `do(...)`, without isolation: an error is the caller's."""
    del subject
    return do(*args, **named)
