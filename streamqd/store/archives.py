"""Script calls of archive pipelines: record the archived position, and lease a topic to one run.

`streamqd.spark.pipelines` uses them. The archive itself consists of Delta tables.
"""

from __future__ import annotations

from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call


def advance(keys: Keys, topic: str, partition: int, entry_id: str, *, dead: bool = False) -> Call:
    """Record that a partition is archived up to and including this entry, or this dead letter."""
    return scripts.build_call("archive_advance", keys, (topic, partition), id=entry_id, dead=dead)


def acquire_lease(
    keys: Keys, topic: str, name: str, token: str, ttl: float, dead_token: str = ""
) -> Call:
    """Acquire the lease of a pipeline on a topic. `ttl` is in seconds.

    `dead_token` is the token of a run whose process has exited, so its lease counts as free.
    """
    return scripts.get("pipeline_lease_acquire").call(
        {"lease": keys.pipeline(topic, name)}, token=token, ttl_ms=_ms(ttl), dead=dead_token
    )


def renew_lease(keys: Keys, topic: str, name: str, token: str, ttl: float) -> Call:
    """Extend the lease to `ttl` seconds from now."""
    return scripts.get("pipeline_lease_renew").call(
        {"lease": keys.pipeline(topic, name)}, token=token, ttl_ms=_ms(ttl)
    )


def release_lease(keys: Keys, topic: str, name: str, token: str) -> Call:
    """Release the lease."""
    return scripts.get("pipeline_lease_release").call(
        {"lease": keys.pipeline(topic, name)}, token=token
    )


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
