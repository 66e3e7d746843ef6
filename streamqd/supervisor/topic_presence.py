"""Whether the topics that are consumed are still registered, asked with each look at the fleet.

An operator may delete a topic's entry while everything else stays: senders are refused then, and no
fence is missing that would tell. Or a count that could not be read when this instance began can be
read now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from streamqd import logs
from streamqd.errors import BadValue, StreamqdError
from streamqd.store import topics
from streamqd.store.keys import Keys

LOOK_SECONDS = 2.0

Ask = Callable[[list[tuple[Any, ...]]], list[Any]]


class TopicPresence:
    """The last look at the entries of the topics."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._looked_at = -LOOK_SECONDS
        self._lost = logs.Once(logs.event, "topic.lost", logging.WARNING)
        self._bad = logs.bad_values()

    def look(self, names: Sequence[str], served: Collection[str], ask: Ask) -> bool:
        """Return whether a topic should be registered again. Raises what `ask` raises.

        Asks every two seconds at most. Of `served` this instance knows the partitions.
        """
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        lost: list[str] = []
        found: list[str] = []
        bad: list[BadValue] = []
        replies = ask([topics.presence(self._keys, name) for name in names])
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, StreamqdError):
                continue  # of a node that is silent, or of another type: registering names it
            try:
                count = topics.present(self._keys, name, reply)
            except BadValue as error:
                bad.append(error)
                continue
            if count is None:
                lost.append(name)
            elif name not in served and count:
                found.append(name)
        self._lost.look({name: {"topic": name} for name in lost})
        self._bad.values(bad)
        return bool(lost or found)
