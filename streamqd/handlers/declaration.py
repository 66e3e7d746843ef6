"""How user code declares handlers, and the context that it gets at its start."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from streamqd.handlers.options import HandlerOptions, ScheduleOptions
from streamqd.model import Backoff, RetryPolicy, Unit

Function = TypeVar("Function", bound=Callable[..., Any])
Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_OPTIONS = {"max_age": "retry_max_age"}  # of a RetryPolicy, where the setting is named otherwise

declared: list[dict[str, Any]] = []  # by the modules that this process has imported
scheduled: dict[str, list[dict[str, Any]]] = {}  # the same of @schedule, by the handler's reference


@dataclass(frozen=True, slots=True)
class Context:
    """What `on_start` hooks get: which unit this worker handles, and where it may keep files."""

    __module__ = "streamqd.handlers"

    unit: Unit
    instance: str
    state_dir: Path


def _by_name(decorator: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Explain `@handler` without parentheses, which passes the function as an argument."""

    @functools.wraps(decorator)
    def called(*args: Given.args, **options: Given.kwargs) -> Returned:
        if args:
            raise TypeError("@handler lacks its options; write @handler(topic=..., group=...)")
        return decorator(*args, **options)

    return called


@_by_name
def handler(
    *,
    topic: str,
    group: str,
    retry: RetryPolicy | None = None,
    **options: Unpack[HandlerOptions],
) -> Callable[[Function], Function]:
    """Declare the decorated function as the handler of a topic for a group.

    Options are the settings of a `[[consumers]]` table, as `max_attempts=5, timeout="30s"`; the
    configuration file overrides them. `retry` gives those of them that a RetryPolicy has, and an
    option that is written out wins over it. The function itself is returned unchanged.

    Raises TypeError for an option that is nothing a configuration file could say.
    """
    plain = plain_options(retry, options)
    name = plain_options(None, {"topic": topic, "group": group})

    def declare(function: Function) -> Function:
        reference = f"{function.__module__}:{function.__qualname__}"
        declared.append({**name, "handler": reference, **plain})
        return function

    return declare


def schedule(**options: Unpack[ScheduleOptions]) -> Callable[[Function], Function]:
    """Send a message to the decorated handler's topic by the clock.

    Options are the settings of a `[[schedules]]` table, of which `cron`, `every` or `at` must be
    there; a schedule of this name in the configuration file overrides it. Without them the name is
    that of the function, in lower case, and the topic is that of its `@handler`. The function
    itself is returned unchanged; several schedules may stand above one.

    Raises TypeError for an option that is nothing a configuration file could say.
    """
    plain = plain_schedule(options)

    def declare(function: Function) -> Function:
        reference = f"{function.__module__}:{function.__qualname__}"
        named = {"name": function.__name__.lower(), **plain}
        scheduled.setdefault(reference, []).append(named)
        return function

    return declare


def plain_schedule(options: ScheduleOptions) -> dict[str, Any]:
    """Return options of `schedule` as the settings of a `[[schedules]]` table.

    Raises TypeError for an option that a configuration file cannot contain.
    """
    plain = {name: _plain(value, name) for name, value in options.items() if name != "payload"}
    if "payload" in options:
        json.dumps(options["payload"], allow_nan=False)  # raises what the docstring says
        plain["payload"] = options["payload"]
    return plain


def with_schedules() -> tuple[list[dict[str, Any]], list[str]]:
    """Return what was declared, each handler with its schedules, and what is wrong with those."""
    found, left = [], dict(scheduled)
    for each in declared:
        tables = left.pop(each["handler"], [])
        timed = [{"topic": each["topic"], **_given(table)} for table in tables]
        found.append({**each, "schedules": timed} if timed else dict(each))
    problems = [
        f"{reference} has a @schedule and is no handler; put @handler(topic=..., group=...) above"
        " it, or write the schedule as [[schedules]]"
        for reference in left
    ]
    return found, problems


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def plain_options(retry: RetryPolicy | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `handler` as a document has the settings of a `[[consumers]]` table.

    Raises TypeError for one that no document could hold.
    """
    if not isinstance(retry, RetryPolicy | None):
        raise TypeError(f"retry is a RetryPolicy, not {type(retry).__name__}")
    if retry is not None:
        options = {_OPTIONS.get(name, name): value for name, value in _stated(retry)} | {**options}
    return {name: _plain(value, name) for name, value in options.items()}


def _plain(value: Any, name: str) -> Any:
    """A setting as a document holds it: declarations are sent to another process.

    `name` is that of the option, or of the setting within it.
    """
    if isinstance(value, Backoff):
        return asdict(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, type):
        module = value.__module__
        return value.__qualname__ if module == "builtins" else f"{module}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return {key: _plain(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, name) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"{name}: a value of type {type(value).__name__} is no setting; write a number, a text, "
        "a timedelta, an exception class, or a list or mapping of those"
    )


def _stated(retry: RetryPolicy) -> list[tuple[str, Any]]:
    """What a policy says beyond the defaults. What it leaves open stays open."""
    pairs = ((each.name, getattr(retry, each.name), each.default) for each in fields(RetryPolicy))
    return [(name, value) for name, value, default in pairs if value != default]
