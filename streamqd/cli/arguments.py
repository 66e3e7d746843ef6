"""Options and argument types that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from streamqd.config.values import parse_duration, parse_size

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(command: Command) -> Command:
    """Give a verb `--json`: the result as JSON, in a form that stays the same over versions."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(
        command
    )


def yes_option(command: Command) -> Command:
    """Give a destructive verb `--yes`."""
    return click.option(
        "-y", "--yes", is_flag=True, help="Do not ask. Needed where there is no terminal."
    )(command)


class Duration(click.ParamType[float]):
    """A duration in seconds, written as in the configuration."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read `30s`, `1m30s`, `24h` or a number of seconds."""
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)


class Size(click.ParamType[int]):
    """A size in bytes, written as in the configuration."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read `64MiB` or a number of bytes."""
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
