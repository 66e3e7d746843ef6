"""The command `streamqd`: parses, calls `admin`, `producer` or the supervisor, and prints.

One module per verb. Exit codes of verbs: 0 done, 1 problems found (`check`) or an error of our own,
2 usage, 3 configuration, 4 Redis, 8 refused or not found. A user's mistake is one sentence on
standard error, never a traceback.
"""

from __future__ import annotations

from streamqd.cli.root import cli


def main() -> None:
    """Run the command with the arguments of the process."""
    cli.main(prog_name="streamqd")


__all__ = ["cli", "main"]
