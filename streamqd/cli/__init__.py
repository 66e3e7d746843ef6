"""The command `streamqd`: parses, calls `admin`, `producer` or the supervisor, and prints.

One module per command. Exit codes: 0 done, 1 problems found (`check`) or an error of our own,
2 usage, 3 configuration, 4 Redis, 8 refused or not found. A user's mistake is one sentence on
standard error, never a traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamqd.cli import early

if TYPE_CHECKING:
    from streamqd.cli.root import cli

__all__ = ["cli", "main"]


def main() -> None:
    """Run the command with the arguments of the process."""
    early.listen()
    __getattr__("cli").main(prog_name="streamqd")


def __getattr__(name: str) -> Any:
    # Imported late: a signal that comes while the commands are being loaded must find a listener.
    if name != "cli":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamqd.cli.root import cli as command

    return command
