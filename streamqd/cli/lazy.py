"""A group of verbs of which each is imported when it is used: a command line should start fast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from streamqd.cli.completion import equip


class LazyGroup(click.Group):
    """`places` says where each verb is, as `module:name`."""

    def __init__(self, *args: Any, places: dict[str, str], **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.places = places

    def list_commands(self, _ctx: click.Context | None = None) -> list[str]:
        """The names, without importing anything."""
        return sorted(self.places)

    def get_command(self, _ctx: click.Context | None, name: str) -> click.Command | None:
        """Import a verb. None: there is none of this name."""
        if name not in self.places:
            return None
        module, _, attribute = self.places[name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return equip(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that the arguments begin with; of a mistyped one, name the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(
                error.command_name, possibilities=self.list_commands(ctx), ctx=ctx
            ) from None
