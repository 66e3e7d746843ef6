"""`streamqd config`: what the configuration is, and what it could be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from streamqd import config as configuration
from streamqd.cli.arguments import json_option
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import emit
from streamqd.cli.session import Session


@click.group()
def config() -> None:
    """Show the configuration in effect, and the schema of its file."""


@config.command()
@answering
def show(session: Session) -> CommandResult:
    """Print every setting in effect, as TOML. Passwords are masked.

    The command line counts before STREAMQ_SECTION__KEY, that before the file, that before the
    defaults.
    """
    settings = session.settings
    shown = configuration.shown(settings)
    lines = [f"# from {settings.source}", *_toml(shown)]
    return CommandResult(shown, lambda: click.echo("\n".join(lines)))


@config.command()
@json_option
def schema(as_json: bool) -> None:  # noqa: ARG001 - every command takes --json; this one always is
    """Print the JSON schema of the file, for editors that complete and check TOML."""
    emit(configuration.json_schema())


def _toml(document: dict[str, Any]) -> Iterator[str]:
    """Write the tables of the configuration."""
    for name, content in document.items():
        if isinstance(content, list):
            for each in content:
                yield from ("", f"[[{name}]]", *_pairs(each))
        elif content and all(isinstance(each, dict) for each in content.values()):
            for inner, each in content.items():
                yield from ("", f"[{name}.{_key(inner)}]", *_pairs(each))
        elif content:
            yield from ("", f"[{name}]", *_pairs(content))


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in table.items()]


def _key(name: str) -> str:
    bare = name.replace("_", "").replace("-", "")
    return name if bare.isascii() and bare.isalnum() else _value(name)


def _value(value: Any) -> str:
    match value:
        case dict():
            inner = ", ".join(f"{_key(name)} = {_value(each)}" for name, each in value.items())
            return f"{{ {inner} }}"
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return json.dumps(value, ensure_ascii=False)
