"""The `streamqd` command line, which parses arguments, calls the library, and prints results.

The commands call `admin`, `producer` or the supervisor, and related commands share a module. The
exit codes are 0 (done), 1 (problems found, or an unexpected error), 2 (usage), 3 (configuration), 4
(Redis or a database), and 8 (refused or not found). An error of the user is reported in one
sentence on standard error, without a traceback unless -v is passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamqd.cli import early

if TYPE_CHECKING:
    from streamqd.cli.root import cli

__all__ = ["cli", "main"]


def main() -> None:
    """Run the command line with the arguments of the process."""
    early.record_signals()
    __getattr__("cli").main(prog_name="streamqd")


def __getattr__(name: str) -> Any:
    # Import the command late, so that signals that arrive during the import are already handled.
    if name != "cli":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamqd.cli.root import cli as command

    return command
