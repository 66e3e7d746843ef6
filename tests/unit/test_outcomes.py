"""The end of a run as a value, of exceptions that do what they like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamqd import handlers
from streamqd.model import DeadAsked, Failed


class NoClass(Exception):  # noqa: N818
    """Does not say what it is."""

    @property
    def __class__(self) -> Any:
        raise ValueError("nobody asks me")


class NoAttributes(Exception):  # noqa: N818
    """Ends whoever looks at it."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


def nameless() -> Any:
    """A class that ends whoever asks for its name."""

    class NoName(type):
        def __getattribute__(cls, name: str) -> Any:
            if name in ("__module__", "__name__", "__qualname__"):
                raise SystemExit(name)
            return super().__getattribute__(name)

    return NoName("Nameless", (Exception,), {})


class DeadAndSilent(handlers.Dead):
    """Dead, and does not say so."""

    @property
    def __class__(self) -> Any:
        raise KeyboardInterrupt


HOSTILE = (NoClass, NoAttributes, nameless(), DeadAndSilent)


def raised(kind: Callable[..., BaseException]) -> BaseException:
    try:
        raise kind("no")
    except BaseException as error:  # noqa: BLE001 - it may be any
        return error


@pytest.mark.parametrize("kind", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("detail", ["none", "class", "message", "traceback"])
def test_no_exception_keeps_its_verdict_from_being_found(kind: Any, detail: str):
    """S4: what an exception is asked is the user's code; a worker died of it, or a lane."""
    error = raised(kind)
    expected = DeadAsked if kind is DeadAndSilent else Failed
    assert type(handlers.outcome_of(error, detail)) is expected
    assert type(handlers.brief_of(error, detail)) is expected
    assert handlers.Description(error).place().startswith("test_outcomes.py:")
    assert len(handlers.Description(error).fingerprint("work:handle")) > 8
