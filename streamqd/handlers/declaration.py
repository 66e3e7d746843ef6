"""The decorators that declare handlers and schedules, and the context of `on_start` hooks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from streamqd.handlers.options import HandlerOptions, ScheduleOptions
from streamqd.model import Assignment, Backoff, RetryPolicy

Function = TypeVar("Function", bound=Callable[..., Any])
Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_OPTIONS = {"max_age": "retry_max_age"}  # fields of RetryPolicy whose setting has another name

declared: list[dict[str, Any]] = []  # @handler declarations in the modules imported so far
scheduled: dict[str, list[dict[str, Any]]] = {}  # @schedule declarations by handler reference


@dataclass(frozen=True, slots=True)
class Context:
    """The argument of `on_start` hooks: the worker's assignment and a directory for its files."""

    __module__ = "streamqd.handlers"

    assignment: Assignment
    """The topic, partition and group of the worker."""
    instance: str
    """The name of the instance, `daemon.instance`."""
    state_dir: Path
    """The directory for files of the hook, `daemon.state_dir`."""


def _by_name(decorator: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Raise a helpful error if `@handler` is written without parentheses.

    Python then passes the function as a positional argument.
    """

    @functools.wraps(decorator)
    def called(*args: Given.args, **options: Given.kwargs) -> Returned:
        if args:
            raise TypeError("@handler needs options; write @handler(topic=..., group=...)")
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

    The options are the settings of a `[[consumers]]` table, such as `max_attempts=5,
    timeout="30s"`. The configuration file overrides them. `retry` sets all options that a
    RetryPolicy contains, except for those that you also pass explicitly. The function itself is
    returned unchanged.

    Raises TypeError for an option that a configuration file cannot contain.
    """
    plain = plain_options(retry, options)
    name = plain_options(None, {"topic": topic, "group": group})

    def declare(function: Function) -> Function:
        reference = f"{function.__module__}:{function.__qualname__}"
        declared.append({**name, "handler": reference, **plain})
        return function

    return declare


def schedule(**options: Unpack[ScheduleOptions]) -> Callable[[Function], Function]:
    """Send a message to the decorated handler's topic on a schedule.

    The options are the settings of a `[[schedules]]` table. Exactly one of `cron`, `every` and `at`
    is required. The name defaults to the function's name in lower case, and the topic to that of
    its `@handler`. A schedule with the same name in the configuration file overrides this one. The
    function itself is returned unchanged, and may have several schedules.

    Raises TypeError for an option that a configuration file cannot contain.
    """
    plain = plain_schedule(options)

    def declare(function: Function) -> Function:
        reference = f"{function.__module__}:{function.__qualname__}"
        named = {"name": function.__name__.lower(), **plain}
        scheduled.setdefault(reference, []).append(named)
        return function

    return declare


def plain_schedule(options: ScheduleOptions) -> dict[str, Any]:
    """Return the options of `schedule` as the settings of a `[[schedules]]` table.

    Raises TypeError for an option that a configuration file cannot contain.
    """
    plain = {name: _to_plain(value, name) for name, value in options.items() if name != "payload"}
    if "payload" in options:
        json.dumps(options["payload"], allow_nan=False)  # raises TypeError or ValueError
        plain["payload"] = options["payload"]
    return plain


def with_schedules() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the declared handlers with their schedules, and the problems with the schedules."""
    found, left = [], dict(scheduled)
    for each in declared:
        tables = left.pop(each["handler"], [])
        timed = [{"topic": each["topic"], **_without_none(table)} for table in tables]
        found.append({**each, "schedules": timed} if timed else dict(each))
    problems = [
        f"{reference} has a @schedule but is not a handler; put @handler(topic=..., group=...)"
        " above it, or write the schedule as [[schedules]]"
        for reference in left
    ]
    return found, problems


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def plain_options(retry: RetryPolicy | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `handler` as the settings of a `[[consumers]]` table.

    Raises TypeError for an option that a configuration file cannot contain.
    """
    if not isinstance(retry, RetryPolicy | None):
        raise TypeError(f"retry must be a RetryPolicy, not {type(retry).__name__}")
    if retry is not None:
        options = {_OPTIONS.get(name, name): value for name, value in _changed_fields(retry)} | {
            **options
        }
    return {name: _to_plain(value, name) for name, value in options.items()}


def _to_plain(value: Any, name: str) -> Any:
    """Return a setting as plain data, because declarations are sent to another process.

    `name` is the name of the option, or of a setting within the option. Raises TypeError if the
    value has a type that no setting has.
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
        return {key: _to_plain(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(each, name) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"{name}: a value of type {type(value).__name__} is not a setting; pass a number, a "
        "string, a timedelta, an exception class, or a list or mapping of those"
    )


def _changed_fields(retry: RetryPolicy) -> list[tuple[str, Any]]:
    """Return the fields of a policy whose values differ from their defaults."""
    pairs = ((each.name, getattr(retry, each.name), each.default) for each in fields(RetryPolicy))
    return [(name, value) for name, value, default in pairs if value != default]
