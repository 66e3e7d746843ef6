"""Script calls that record the phases of a topic's growth. Only `streamqd.admin.growth` uses them.

Each call uses the topic's meta key. The caller changes the partitions between the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store
from streamqd.store.topics import PARTITIONS_MAX

META = "the meta of a topic"  # label in errors if the caller passes no key
STARTED, SWITCHED, MARKED = "started", "switched", "marked"


class Growth(NamedTuple):
    """A growth in progress. `barriers` are the last IDs of the old partitions, once marked."""

    token: str
    before: int
    phase: str
    barriers: list[str]

    @classmethod
    def parse(cls, reply: Reply) -> Growth:
        """Parse the reply OK of `begin`. Raises InvalidValueError."""
        token, before, phase, barriers = reply.values
        return cls(
            untrusted.label(token),
            untrusted.integer(before, META, "growFrom", high=PARTITIONS_MAX),
            untrusted.label(phase),
            _barriers(barriers, META),
        )


class GrowthInProgress(NamedTuple):
    """A growth in progress, for views. `barriers` is empty until `mark` was called."""

    before: int
    to: int
    since_unix_ms: int
    token: str
    barriers: list[str]


def in_progress(store: Store, topic: str) -> GrowthInProgress | None:
    """Return the growth in progress of a topic, or None. Raises InvalidValueError."""
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
    """Start a growth, or return the progress of one to the same count."""
    return scripts.build_call("growth_start", keys, (topic,), seen=seen, to=to, token=token)


def switch(keys: Keys, topic: str, token: str, new: Sequence[int]) -> Call:
    """Change the partition count that producers use. `new` are the new partitions."""
    streams = [keys.stream(topic, number) for number in new]
    return scripts.build_call("growth_switch", keys, (topic,), token=token, streams=streams)


def mark(keys: Keys, topic: str, token: str, barriers: Sequence[str]) -> Call:
    """Store the last IDs of the old partitions, read after the switch. The first call wins."""
    return scripts.build_call(
        "growth_mark", keys, (topic,), token=token, barriers=" ".join(barriers)
    )


def end(keys: Keys, topic: str, token: str) -> Call:
    """Delete the record of the growth."""
    return scripts.build_call("growth_finish", keys, (topic,), token=token)
