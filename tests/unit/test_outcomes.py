"""A run has an outcome even if its exception contains hostile code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamqd import handlers
from streamqd.model import DeadAsked, Failed


class NoClass(Exception):  # noqa: N818
    """An exception that raises when its class is read."""

    @property
    def __class__(self) -> Any:
        raise ValueError("no class")


class NoAttributes(Exception):  # noqa: N818
    """An exception that raises SystemExit when an attribute is read."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


def nameless() -> Any:
    """Return an exception class that raises SystemExit when its name is read."""

    class NoName(type):
        def __getattribute__(cls, name: str) -> Any:
            if name in ("__module__", "__name__", "__qualname__"):
                raise SystemExit(name)
            return super().__getattribute__(name)

    return NoName("Nameless", (Exception,), {})


class DeadAndSilent(handlers.Dead):
    """A Dead that raises KeyboardInterrupt when its class is read."""

    @property
    def __class__(self) -> Any:
        raise KeyboardInterrupt


HOSTILE = (NoClass, NoAttributes, nameless(), DeadAndSilent)


def raise_error(kind: Callable[..., BaseException]) -> BaseException:
    try:
        raise kind("no")
    except BaseException as error:  # noqa: BLE001 - it may be any
        return error


@pytest.mark.parametrize("kind", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("detail", ["none", "class", "message", "traceback"])
def test_hostile_exception_still_has_an_outcome(kind: Any, detail: str):
    """A hostile exception still has an outcome.

    Its attributes are user code, which once killed a worker or a lane.
    """
    error = raise_error(kind)
    expected = DeadAsked if kind is DeadAndSilent else Failed
    assert type(handlers.to_outcome(error, detail)) is expected
    assert type(handlers.to_brief_outcome(error, detail)) is expected
    assert handlers.Description(error).place().startswith("test_outcomes.py:")
    assert len(handlers.Description(error).fingerprint("work:handle")) > 8
