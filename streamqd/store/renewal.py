"""Moving a partition to a fresh stream, step by step. Called by `streamqd.admin.renewal` only.

Needed where a client has written an id that leaves no room for later ones. Each function builds a
call on the keys of one partition; every step may be repeated.
"""

from __future__ import annotations

from streamqd.model import TOPIC_GROW, Unit
from streamqd.store import scripts
from streamqd.store.groups import KEPT_SECONDS
from streamqd.store.keys import Keys
from streamqd.store.messages import ITEMS_MAX
from streamqd.store.scripts import Call

AHEAD_SECONDS = 86_400.0  # of the server's clock, beyond which an id is not kept
PENDING_MAX = 2_000  # entries in hand of one group that can go along


def copy(keys: Keys, topic: str, partition: int, *, ahead: float = AHEAD_SECONDS) -> Call:
    """Copy the next entries; ids more than `ahead` seconds ahead of the clock get new ones."""
    return scripts.get("renewal_copy").call(
        _keys(keys, topic, partition), ahead_ms=round(ahead * 1000), count=ITEMS_MAX
    )


def group(keys: Keys, unit: Unit, *, force: bool, token: str) -> Call:
    """Give a group its place on the fresh stream, and keep the partition from its owners.

    With `force` an owner loses the partition. `token` is new, one for the whole renewal.
    """
    return scripts.get("renewal_group").call(
        {
            "fence": keys.fence(*unit),
            "lease": keys.lease(*unit),
            "attempts": keys.attempts(*unit),
            **_keys(keys, unit.topic, unit.partition),
        },
        group=unit.group,
        force=force,
        keeper=TOPIC_GROW,
        token=token,
        ttl_ms=round(KEPT_SECONDS * 1000),
        at_once=PENDING_MAX,
    )


def swap(keys: Keys, topic: str, partition: int) -> Call:
    """Put the fresh stream in the place of the partition."""
    return scripts.get("renewal_swap").call(
        {**_keys(keys, topic, partition), "trim": keys.trim(topic, partition)}, count=ITEMS_MAX
    )


def _keys(keys: Keys, topic: str, partition: int) -> dict[str, str]:
    return {
        "stream": keys.stream(topic, partition),
        "fresh": keys.fresh(topic, partition),
        "renewal": keys.renewal(topic, partition),
    }
