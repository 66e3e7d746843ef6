"""The members of a fleet, the summaries that they publish, and the orders of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.admin import published
from streamqd.admin.diagnosis.facts import FleetHealth
from streamqd.admin.diagnosis.reading import TolerantReader
from streamqd.store import directives, members
from streamqd.store.keys import Keys
from streamqd.store.members import Heartbeat


def gather(reader: TolerantReader, keys: Keys, fleet: str) -> FleetHealth:
    """Read what the fleet says of itself."""
    scores, infos, orders = reader.ask(
        [*members.stored(keys, fleet), ("HGETALL", keys.orders(fleet))]
    )
    beats = members.beats(scores, infos)
    asked = [("GET", keys.instance(fleet, beat.instance)) for beat in beats]
    raw = reader.ask(asked)
    summaries: dict[str, Mapping[str, Any]] = {
        beat.instance: published.document(text)
        for beat, text in zip(beats, raw, strict=True)
        if text is not None
    }
    return FleetHealth(beats, summaries, directives.read(orders or ()))


def changed(
    reader: TolerantReader, keys: Keys, fleet: str, beats: Sequence[Heartbeat]
) -> frozenset[str]:
    """Look again: which instances are another run now than they were in `beats`?"""
    (infos,) = reader.ask([("HGETALL", keys.info(fleet))])
    scores = [part for beat in beats for part in (beat.instance.encode(), b"0")]
    now = members.beats(scores, infos)
    return frozenset(
        old.instance
        for old, new in zip(beats, now, strict=True)
        if old.info and new.info and old.info.get("nonce") != new.info.get("nonce")
    )
