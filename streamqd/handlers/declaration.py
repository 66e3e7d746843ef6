"""How user code declares handlers, and what it is told at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from streamqd.model import Backoff, RetryPolicy, Unit

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {"max_age": "retry_max_age"}  # of a RetryPolicy, where the setting is named otherwise

declared: list[dict[str, Any]] = []  # by the modules that this process has imported


@dataclass(frozen=True, slots=True)
class Context:
    """What `on_start` hooks get: which unit this worker handles, and where it may keep files."""

    __module__ = "streamqd.handlers"

    unit: Unit
    instance: str
    state_dir: Path


def handler(
    *, topic: str, group: str, retry: RetryPolicy | None = None, **options: Any
) -> Callable[[Function], Function]:
    """Declare the decorated function as the handler of a topic for a group.

    Options are the settings of a `[[consumers]]` table, as `max_attempts=5, timeout="30s"`; the
    configuration file overrides them. `retry` gives those of them that a RetryPolicy has, and an
    option that is written out wins over it. The function itself is returned unchanged.
    """
    if retry is not None:
        options = {_OPTIONS.get(name, name): value for name, value in _stated(retry)} | options

    def declare(function: Function) -> Function:
        reference = f"{function.__module__}:{function.__qualname__}"
        plain = {name: _plain(value) for name, value in options.items()}
        declared.append({"topic": topic, "group": group, "handler": reference, **plain})
        return function

    return declare


def _plain(value: Any) -> Any:
    """A setting as a document holds it: what is declared is told to another process."""
    if isinstance(value, Backoff):
        return asdict(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, type):
        module = value.__module__
        return value.__qualname__ if module == "builtins" else f"{module}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value


def _stated(retry: RetryPolicy) -> list[tuple[str, Any]]:
    """What a policy says beyond the defaults. What it leaves open stays open."""
    pairs = ((each.name, getattr(retry, each.name), each.default) for each in fields(RetryPolicy))
    return [(name, value) for name, value, default in pairs if value != default]
