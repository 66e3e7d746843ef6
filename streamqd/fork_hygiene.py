"""Control what a forked child inherits: the supervisor's memory pages, and the environment.

Parent and child share a page of memory until one of them writes to it. In Python, even reading an
object writes to its page, because the page contains the reference count. How much memory a child
uses therefore depends on how its parent was prepared before the fork.
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

    The collector is also made to run less often, unless the program has changed its threshold. The
    environment for children is computed now, so later changes have no effect.

    Garbage is frozen as well. If it were collected first, it would leave gaps between the shared
    objects. Each child would put its own objects into these gaps, and so copy the pages.
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
    """Remove the supervisor's own variables from the environment.

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
