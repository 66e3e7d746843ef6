"""Options and argument types that several commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from streamqd.config.values import parse_duration, parse_instant, parse_size
from streamqd.paths import local_folder, store_url
from streamqd.policy.fingerprint import LENGTH

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")
_UNIX_MS_MIN = 10**11  # plain numbers from this one on are unix ms, and smaller ones are seconds


def json_option(command: Command) -> Command:
    """Add `--json`, which prints the result as JSON in a form that is stable across versions."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(
        command
    )


def yes_option(command: Command) -> Command:
    """Add `--yes` to a destructive command."""
    return click.option(
        "-y", "--yes", is_flag=True, help="Skip the confirmation. Required without a terminal."
    )(command)


def yes_accepted(command: Command) -> Command:
    """Add a hidden `--yes` that has no effect.

    Scripts pass it to similar commands that do ask for confirmation, and may pass it to this one
    too.
    """
    return click.option(
        "-y", "--yes", is_flag=True, expose_value=False,
        hidden=True,
    )(command)  # fmt: skip


def retired(short: str, instead: str, *, flag: bool = False) -> Callable[[Command], Command]:
    """Add a hidden short option that is refused with a hint to pass `instead`.

    Other commands use the short option for something else.
    """

    def refuse(_ctx: click.Context, _param: click.Parameter, value: object) -> None:
        if value:
            raise click.UsageError(f"{short} is not an option of this command; pass {instead}")

    return click.option(
        short, f"retired_{short[1:]}", is_flag=flag, hidden=True, expose_value=False,
        callback=refuse,
    )  # fmt: skip


def reason_option(command: Command) -> Command:
    """Add `--reason`."""
    return click.option("-r", "--reason", default="", help="The reason, which `status` shows.")(
        command
    )


def dry_run_option(command: Command) -> Command:
    """Add `--dry-run`."""
    command = retired("-n", "--dry-run", flag=True)(command)
    return click.option("--dry-run", is_flag=True, help="Show the effect, but change nothing.")(
        command
    )


def wait_options(command: Command) -> Command:
    """Add `--wait` and `--timeout`."""
    command = retired("-t", "--timeout")(command)
    command = click.option(
        "--timeout",
        type=DURATION,
        default="60s",
        help="The maximum time that --wait waits. Default: 60s.",
    )(command)
    return click.option(
        "-w",
        "--wait",
        is_flag=True,
        help="Wait until the change is applied, or exit with code 1 after --timeout.",
    )(command)


def limit_option(default: int, *more: str, lowest: int = 1) -> Callable[[Command], Command]:
    """Add `-n` and `--limit`, which set the number of rows on a page.

    `more` contains further names of the option, and `lowest` is the smallest value that it accepts.
    """
    return click.option(
        "-n", "--limit", *more, "limit", type=click.IntRange(lowest, 10_000), default=default,
        show_default=True, help="The number of rows per page.",
    )  # fmt: skip


def page_options(default: int) -> Callable[[Command], Command]:
    """Add `--limit` and `--cursor`."""

    def add(command: Command) -> Command:
        cursor = click.option(
            "--cursor", default="", help="Continue after the page that printed this cursor."
        )
        return limit_option(default)(cursor(command))

    return add


class Parsed(click.ParamType[Value]):
    """A parameter type whose values are parsed by a function.

    If the function raises ValueError, the error message is the value followed by the text of the
    error. The text therefore continues a sentence, such as "is not a valid time".
    """

    def __init__(self, name: str, parse: Callable[[Any], Value]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Value:
        """Return the parsed value."""
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)


class FolderPath(click.Path):
    """A parameter type for a local directory, written as a path or as file:///PATH.

    Any other URI raises InvalidRequestError.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the local path."""
        return super().convert(local_folder(value), param, ctx)


class Directory(click.ParamType[Path | str]):
    """A parameter type for a directory that is local or in an object store.

    A local directory is written as a path or as file:///PATH and converted to a Path. The URL of a
    directory in an object store is kept as a string. Any other URI raises InvalidRequestError.
    """

    name = "path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        """Return the local path or the URL."""
        return store_url(value) or FOLDER.convert(value, param, ctx)


def _moment(value: object) -> tuple[float, bool]:
    """Parse a date or time in UTC, unix milliseconds, or an age such as `12h`.

    For an instant, return unix milliseconds and False. For an age, return seconds and True.
    `unix_ms` converts both to unix milliseconds, because an age is relative to the server's clock.
    """
    text = str(value).strip()
    if text.isascii() and text.isdigit() and int(text) >= _UNIX_MS_MIN:
        return float(text), False
    with contextlib.suppress(ValueError):
        return parse_duration(text), True
    try:
        return parse_instant(text) * 1000, False
    except ValueError:
        raise ValueError(
            "is not a valid time; pass an age (12h, 7d) or UTC, such as 2026-11-21T08:30"
        ) from None


def _header(value: object) -> tuple[str, str]:
    name, equals, rest = str(value).partition("=")
    if not name or not equals:
        raise ValueError("is not NAME=VALUE")
    return name, rest


def _rate(value: object) -> float:
    try:
        found = float(str(value).removesuffix("/s"))
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ValueError("is not a valid rate; pass messages per second, such as 50/s")
    return found


def _fingerprint(value: object) -> str:
    text = str(value).strip().lower()
    if len(text) != LENGTH or not set(text) <= set("0123456789abcdef"):
        raise ValueError(
            f"is not a valid fingerprint ({LENGTH} hexadecimal digits); run `streamqd dlq stats` to"
            " list them"
        )
    return text


DURATION = Parsed("duration", parse_duration)  # seconds, written as in the configuration
FOLDER = FolderPath()
DIRECTORY = Directory()
SIZE = Parsed("size", parse_size)  # bytes, written as in the configuration
MOMENT = Parsed("time", _moment)
HEADER = Parsed("header", _header)
RATE = Parsed("rate", _rate)  # messages per second: `50` or `50/s`
FINGERPRINT = Parsed("fingerprint", _fingerprint)


def unix_ms(moment: tuple[float, bool], now_unix_ms: int) -> int:
    """Convert a value of type MOMENT to unix milliseconds. `now_unix_ms` is the server's time."""
    number, ago = moment
    return round(now_unix_ms - number * 1000 if ago else number)
