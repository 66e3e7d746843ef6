"""What a forked child inherits: the pages of the supervisor's memory, and its environment.

A page is shared until one of both writes to it, and in Python whoever looks at an object writes to
it: its references are counted there. So what is done around a fork decides what a child costs.
"""

from __future__ import annotations

import gc
import os
import sys

from streamqd import config

_SUPERVISOR_ONLY = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")

# The collector looks for circles after so many new objects. A worker holds thousands of messages,
# coroutines and tasks for a moment: with Python's 700 a fifth of its time went into the looks.
YOUNG_OBJECTS = 5_000
_PYTHONS = (700, 2_000)  # what it is when nobody has set it: 2,000 since Python 3.13

_at_freeze: dict[str, str | None] | None = None


def freeze() -> None:
    """Move all objects out of the collector's sight before forking, so pages stay shared.

    It looks at new ones less often, unless somebody has set how often. From here on the environment
    is taken to stay as it is.
    """
    global _at_freeze
    _at_freeze = _changes()
    first, *others = gc.get_threshold()
    if first in _PYTHONS:
        gc.set_threshold(YOUNG_OBJECTS, *others)
    gc.collect()
    gc.freeze()


def before_fork() -> None:
    """Empty the interpreter's cache of the names of attributes.

    What a child looks up replaces what was looked up before it, and counts down the references to
    those names: each of them lies on another page, of which the child would get its own copy.
    """
    if sys.version_info < (3, 12):  # names are immortal since then
        sys._clear_type_cache()  # noqa: SLF001 - documented, and meant to be called


def limit_environment() -> None:
    """In a child: take out what is the supervisor's alone, for user code is about to run."""
    changes = _changes() if _at_freeze is None else _at_freeze
    for name, text in changes.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def volunteer() -> None:
    """In a child: let the kernel choose it before the supervisor when memory runs out.

    Raises OSError. `pathlib` would cost each child a copy of the pages on which it lies.
    """
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    try:
        os.write(descriptor, b"500")
    finally:
        os.close(descriptor)


def _changes() -> dict[str, str | None]:
    """Variables of which children see another text, or, where it is None, nothing."""
    shown = dict(os.environ)
    config.scrub(shown)
    changed = {name: text for name, text in shown.items() if text != os.environ[name]}
    return changed | {name: None for name in _SUPERVISOR_ONLY if name in shown}
