"""Script calls that record the phases in which a topic grows to more partitions.

A growth has the phases `begin`, `switch`, `mark` and `end`. Only `streamqd.admin.growth` uses these
calls, which change the topic's metadata. Between them, the caller prepares the partitions
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store
from streamqd.store.topics import PARTITIONS_MAX

META = "the meta of a topic"  # label for errors if the caller passes no key
STARTED, SWITCHED, MARKED = "started", "switched", "marked"


class Growth(NamedTuple):
    """A growth in progress, as the reply to `begin` describes it.

    `before` is the previous partition count. `barriers` is empty until `mark` is called, and then
    holds the last ID of each old partition.
    """

    token: str
    before: int
    phase: str
    barriers: list[str]

    @classmethod
    def parse(cls, reply: Reply) -> Growth:
        """Parse an OK reply to `begin`. Raises InvalidValueError if a stored value is invalid."""
        token, before, phase, barriers = reply.values
        return cls(
            untrusted.label(token),
            untrusted.integer(before, META, "growFrom", high=PARTITIONS_MAX),
            untrusted.label(phase),
            _barriers(barriers, META),
        )


class GrowthInProgress(NamedTuple):
    """A growth in progress, as views show it.

    `before` and `to` are the previous and the new partition count. `barriers` is empty until `mark`
    is called.
    """

    before: int
    to: int
    since_unix_ms: int
    token: str
    barriers: list[str]


def in_progress(store: Store, topic: str) -> GrowthInProgress | None:
    """Return the growth in progress of a topic, or None if the topic is not growing.

    Raises InvalidValueError if its record cannot be read.
    """
    fields = ("growFrom", "growTo", "growSince", "growToken", "growBarriers")
    key = store.keys.meta(topic)
    before, to, since, token, barriers = store.execute("HMGET", key, *fields)
    if token is None:
        return None
    return GrowthInProgress(
        untrusted.integer(before, key, "growFrom", default=0, high=PARTITIONS_MAX),
        untrusted.integer(to, key, "growTo", default=0, high=PARTITIONS_MAX),
        untrusted.integer(since, key, "growSince", default=0),
        untrusted.label(token),
        _barriers(barriers or b"", key),
    )


def _barriers(raw: bytes, key: str) -> list[str]:
    return [untrusted.entry_id(each, key, "growBarriers") for each in raw.split()]


def begin(keys: Keys, topic: str, seen: int, to: int, token: str) -> Call:
    """Start to grow a topic from `seen` to `to` partitions.

    If a growth to the same count is already in progress, the call starts no other one and returns
    its state, so that the caller can continue it.
    """
    return scripts.build_call("growth_start", keys, (topic,), seen=seen, to=to, token=token)


def switch(keys: Keys, topic: str, token: str, new: Sequence[int]) -> Call:
    """Switch producers to the new partition count.

    `new` holds the numbers of the added partitions, whose streams are registered in the same step.
    """
    streams = [keys.stream(topic, number) for number in new]
    return scripts.build_call("growth_switch", keys, (topic,), token=token, streams=streams)


def mark(keys: Keys, topic: str, token: str, barriers: Sequence[str]) -> Call:
    """Store the barriers of a growth, which are the last IDs of the old partitions.

    Groups may read the new partitions only after they have settled the old ones up to the barriers.
    Read the IDs after `switch`, so that no later entry was routed by the old count. If barriers are
    already stored, the call keeps and returns them.
    """
    return scripts.build_call(
        "growth_mark", keys, (topic,), token=token, barriers=" ".join(barriers)
    )


def end(keys: Keys, topic: str, token: str) -> Call:
    """Delete the record of a finished growth."""
    return scripts.build_call("growth_finish", keys, (topic,), token=token)
