"""`on_error = "block"`: strict order, also over failures.

It appends lines to an account's statement. A line that cannot be written now is tried again in its
place, for as long as it takes, and nothing of its partition gets past it.

Run it: `handlers = ["streamqd.examples.statements"]`, then `streamqd produce statements "+ 5.00"`.
"""

from __future__ import annotations

import os
from pathlib import Path

from streamqd import Context, Message, handler

_folder = Path()


def on_start(context: Context) -> None:
    """Know where the statements are."""
    global _folder
    _folder = context.state_dir / "statements"


@handler(
    topic="statements",
    group="print",
    on_error="block",
    max_attempts=0,  # for ever: a line that is missing is worse than one that is late
    backoff={"kind": "exponential", "base": "200ms", "max": "30s"},
    dead_on=["UnicodeDecodeError"],  # what no attempt will mend must not stop the partition
)
def write_line(msg: Message) -> None:
    """Append the line, once: a repeated run finds its own id at the end of the file."""
    line = f"{msg.original_id} {msg.text()}\n"
    path = _folder / f"{msg.partition}.txt"  # the folder may be away, as a mounted one can be
    with path.open("a+") as statement:
        statement.seek(max(0, path.stat().st_size - len(line.encode())))
        if statement.read() != line:
            statement.write(line)
            statement.flush()
            os.fsync(statement.fileno())
