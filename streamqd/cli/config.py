"""`streamqd config`: print the effective settings and the schema of the file."""

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
    """Show the settings and the schema of the configuration file."""


@config.command()
@answering
def show(session: Session) -> CommandResult:
    """Print all effective settings as TOML, with masked passwords.

    The command line overrides the environment (STREAMQ_SECTION__KEY), which overrides the file,
    which overrides the defaults.
    """
    settings = session.settings
    shown = configuration.as_document(settings)
    lines = [f"# from {settings.source}", *_toml(shown)]
    return CommandResult(shown, lambda: click.echo("\n".join(lines)))


@config.command()
@json_option
def schema(as_json: bool) -> None:  # noqa: ARG001 - accepted as in other commands, but always JSON
    """Print the JSON schema of the configuration file.

    Editors use the schema to complete and check the file.
    """
    emit(configuration.json_schema())


def _toml(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the configuration as TOML."""
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
