"""Run `streamqd`, and kill it with SIGKILL at a named point while it archives a batch.

    python -m tests.support.killed_archive POINT BATCH CONFIG pipeline archive …

POINT is one of POINTS or LETTER_POINTS. BATCH is the number of the batch in the run, from 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.pipelines.storage import ArchiveTable

# Maps a point to its step, and to True if the kill comes before the step.
POINTS: dict[str, tuple[type, str, bool]] = {
    "written": (ArchiveTable, "append", True),
    "settled": (ArchiveTable, "settle", False),
    "committed": (ArchiveTable, "append", False),
    "told": (Archiver, "advance", False),
}
# Points of a run that archives dead letters or minutes of the history, but no entries.
LETTER_POINTS: dict[str, tuple[type, str, bool]] = {
    name: POINTS[name] for name in ("written", "settled", "committed")
} | {"told_dead": (Archiver, "advance_dead", False)}


def strike(point: str, batch: int, blow: Callable[[], None]) -> Callable[[], None]:
    """Call `blow` at a point of a batch. Return a function that undoes the change."""
    kind, name, before = (POINTS | LETTER_POINTS)[point]
    done: Any = getattr(kind, name)
    # A run first reports the batches that were archived earlier to Redis.
    left = batch + point.startswith("told")

    def struck(*args: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and before:
            blow()
        returned = done(*args, **named)
        if left == 0:
            blow()
        return returned

    setattr(kind, name, struck)
    return lambda: setattr(kind, name, done)


def main() -> None:
    """Run the command given by the arguments."""
    from streamqd.cli import cli

    point, batch = sys.argv[1], int(sys.argv[2])
    strike(point, batch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    cli.main(args=sys.argv[3:], prog_name="streamqd")


if __name__ == "__main__":
    main()
