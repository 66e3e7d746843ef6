"""An event for each of many things that are looked at again and again: once, until it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping

from streamqd.errors import BadValue

LINES_AT_ONCE = 10  # of one look; somebody may have written ten thousand

Log = Callable[..., None]
Fields = Mapping[str, object]


class Once:
    """Logs what a look has found and the look before had not, or had found otherwise."""

    def __init__(self, log: Log, name: str, level: int = logging.WARNING) -> None:
        """`log` is `logs.event`."""
        self._log = log
        self._name = name
        self._level = level
        self._known: dict[Hashable, Fields] = {}

    def look(self, found: Mapping[Hashable, Fields]) -> None:
        """Take all that there is now. A few of what is new get a line, all others one together."""
        fresh = [fields for name, fields in found.items() if self._known.get(name) != fields]
        self._known = dict(found)
        for fields in fresh[:LINES_AT_ONCE]:
            self._log(self._name, self._level, **fields)
        if len(fresh) > LINES_AT_ONCE:
            self._log(self._name, self._level, more=len(fresh) - LINES_AT_ONCE)

    def values(self, found: Iterable[BadValue]) -> None:
        """Take all bad values that there are now."""
        self.look({(each.key, each.field): told(each) for each in found})


def told(error: BadValue) -> Fields:
    """Return what the log says of a bad value."""
    return {
        "key": error.key[:200],
        "field": error.field[:200] or None,
        "found": error.found,
        "wanted": error.wanted,
    }
