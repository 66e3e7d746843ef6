"""The command `streamqd`: parses, calls `admin`, `producer` or the supervisor, and prints.

Each command has its own module. Exit codes: 0 done, 1 problems found (`check`) or a bug of
streamqd, 2 usage, 3 configuration, 4 Redis, 8 refused or not found. For a user's mistake, it prints
one sentence on standard error and no traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamqd.cli import early

if TYPE_CHECKING:
    from streamqd.cli.root import cli

__all__ = ["cli", "main"]


def main() -> None:
    """Run the command with the arguments of the process."""
    early.record_signals()
    __getattr__("cli").main(prog_name="streamqd")


def __getattr__(name: str) -> Any:
    # Imported late, because signals that arrive during this import must already find a handler.
    if name != "cli":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamqd.cli.root import cli as command

    return command
