"""Prepares the memory and the environment that forked children inherit from the supervisor.

Parent and child share a memory page until one process writes to it. In Python, even reading an
object writes to its page, because the reference count is stored there. Good preparation before the
fork therefore reduces the memory that each child uses.
"""

from __future__ import annotations

import gc
import os
import sys

from streamqd import config

_SUPERVISOR_ONLY = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")

# Number of new objects after which the garbage collector runs. A worker holds thousands of
# short-lived messages, coroutines and tasks, so with Python's default of 700, it would spend a
# fifth of its time in the collector.
YOUNG_OBJECTS = 5_000
_PYTHONS = (700, 2_000)  # Python's defaults: 700, and 2,000 since Python 3.13

_at_freeze: dict[str, str | None] | None = None


def freeze() -> None:
    """Exclude all objects from garbage collection before forking, so that pages stay shared.

    If the collector's threshold is still Python's default, it is also raised, so that the collector
    runs less often on new objects. The changes that `limit_environment` makes to the environment
    are computed here, so it ignores variables that are set later.

    Garbage is not collected first, but frozen too. Otherwise, it would leave gaps between the
    shared objects, and each child would copy pages by putting its own objects into these gaps.
    """
    global _at_freeze
    _at_freeze = _environment_changes()
    first, *others = gc.get_threshold()
    if first in _PYTHONS:
        gc.set_threshold(YOUNG_OBJECTS, *others)
    gc.freeze()


def before_fork() -> None:
    """Clear the interpreter's type attribute cache.

    Otherwise, each lookup in a child would replace an older name in the cache, and decrement the
    reference count of that name. These names are spread over many pages, all of which the child
    would have to copy.
    """
    if sys.version_info < (3, 12):  # since 3.12, names are immortal
        sys._clear_type_cache()  # noqa: SLF001 - documented, and meant to be called


def limit_environment() -> None:
    """Remove passwords and the supervisor's own variables from the environment.

    Call this in a child before it runs any user code.
    """
    changes = _environment_changes() if _at_freeze is None else _at_freeze
    for name, text in changes.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def prefer_as_oom_victim() -> None:
    """Make the kernel kill this process before the supervisor if memory runs out.

    Call this in a child. It does not use `pathlib`, because the child would have to copy the pages
    of that module. Raises OSError.
    """
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    try:
        os.write(descriptor, b"500")
    finally:
        os.close(descriptor)


def _environment_changes() -> dict[str, str | None]:
    """Return the variables to change for children: their new values, or None to remove them."""
    shown = dict(os.environ)
    config.scrub(shown)
    changed = {name: shown.get(name) for name in os.environ if shown.get(name) != os.environ[name]}
    return changed | {name: None for name in _SUPERVISOR_ONLY if name in shown}
