"""`on_error = "block"`: keep the strict order of a partition, even during failures.

The handler appends lines to an account's statement. A line that cannot be written is retried in
place without a limit, and blocks the rest of its partition.

Run it: `handlers = ["streamqd.examples.statements"]`, then `streamqd produce statements "+ 5.00"`.
"""

from __future__ import annotations

import os
from pathlib import Path

from streamqd import Context, Message, handler

_folder = Path()


def on_start(context: Context) -> None:
    """Set the directory of the statements."""
    global _folder
    _folder = context.state_dir / "statements"


@handler(
    topic="statements",
    group="print",
    on_error="block",
    max_attempts=0,  # no limit: a missing line is worse than a late line
    backoff={"kind": "exponential", "base": "200ms", "max": "30s"},
    dead_on=["UnicodeDecodeError"],  # a permanent error must not block the partition
)
def write_line(msg: Message) -> None:
    """Append the line once. A second run finds its own ID at the end of the file."""
    line = f"{msg.original_id} {msg.text()}\n"
    path = _folder / f"{msg.partition}.txt"  # may fail, for example if it is not mounted
    with path.open("a+") as statement:
        statement.seek(max(0, path.stat().st_size - len(line.encode())))
        if statement.read() != line:
            statement.write(line)
            statement.flush()
            os.fsync(statement.fileno())
