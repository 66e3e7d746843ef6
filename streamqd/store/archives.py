"""What pipelines write to Redis: how far a partition is archived, and which run may work.

Called by `streamqd.spark.pipelines`. The archive itself is Delta tables.
"""

from __future__ import annotations

from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call


def advance(keys: Keys, topic: str, partition: int, entry_id: str) -> Call:
    """Note that a partition is stored up to this entry, with all before it."""
    return scripts.on("archive_advance", keys, (topic, partition), id=entry_id)


def take_lease(
    keys: Keys, topic: str, name: str, token: str, ttl: float, dead_token: str = ""
) -> Call:
    """Take the lease of a pipeline on a topic. `ttl` in seconds.

    `dead_token` is that of a run whose process is known to have ended: its lease counts as free.
    """
    return scripts.get("pipeline_lease_take").call(
        {"lease": keys.pipeline(topic, name)}, token=token, ttl_ms=_ms(ttl), dead=dead_token
    )


def keep_lease(keys: Keys, topic: str, name: str, token: str, ttl: float) -> Call:
    """Give the lease another `ttl` seconds."""
    return scripts.get("pipeline_lease_keep").call(
        {"lease": keys.pipeline(topic, name)}, token=token, ttl_ms=_ms(ttl)
    )


def drop_lease(keys: Keys, topic: str, name: str, token: str) -> Call:
    """Give the lease back."""
    return scripts.get("pipeline_lease_drop").call(
        {"lease": keys.pipeline(topic, name)}, token=token
    )


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
