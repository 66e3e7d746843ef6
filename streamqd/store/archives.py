"""Script calls that record the progress of archive pipelines, and lease a topic to one run.

Only `streamqd.spark.pipelines` uses these calls. The archive itself is stored in Delta tables.
"""

from __future__ import annotations

from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call


def advance(keys: Keys, topic: str, partition: int, entry_id: str, *, dead: bool = False) -> Call:
    """Record that a partition is archived up to and including the entry with this ID.

    If `dead` is True, the ID is that of a dead letter, and the call records the progress of the
    partition's dead letters instead.
    """
    return scripts.build_call("archive_advance", keys, (topic, partition), id=entry_id, dead=dead)


def acquire_lease(
    keys: Keys, topic: str, name: str, token: str, ttl: float, dead_token: str = ""
) -> Call:
    """Acquire the lease of a pipeline on a topic for `ttl` seconds.

    If the process of an earlier run has exited, pass the token of that run as `dead_token`, so that
    its lease can be taken over before it expires.
    """
    return scripts.get("pipeline_lease_acquire").call(
        {"lease": keys.pipeline(topic, name)}, token=token, ttl_ms=_ms(ttl), dead=dead_token
    )


def renew_lease(keys: Keys, topic: str, name: str, token: str, ttl: float) -> Call:
    """Extend the lease of a pipeline on a topic to `ttl` seconds from now."""
    return scripts.get("pipeline_lease_renew").call(
        {"lease": keys.pipeline(topic, name)}, token=token, ttl_ms=_ms(ttl)
    )


def release_lease(keys: Keys, topic: str, name: str, token: str) -> Call:
    """Release the lease of a pipeline on a topic."""
    return scripts.get("pipeline_lease_release").call(
        {"lease": keys.pipeline(topic, name)}, token=token
    )


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
