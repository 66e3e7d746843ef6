"""The keys of a partition share a hash slot, so a script may use them together on a cluster."""

from __future__ import annotations

import pytest
from redis.crc import key_slot

from streamqd.store import scripts
from streamqd.store.keys import Keys


def _sample(pattern: str) -> str:
    """Return a key as a script's header describes it, with a name in place of each letter."""
    samples = {"{T:p:i}": "{access:p:3}", "{T}": "{access}", "{fleet}": "{default}"}
    for letter, name in samples.items():
        pattern = pattern.replace(letter, name)
    return pattern.replace("<run>", "9c41").replace("G", "hits")


@pytest.mark.parametrize("name", sorted(scripts.load()))
def test_keys_of_a_script_share_a_cluster_slot(name: str) -> None:
    keys = scripts.load()[name].keys
    # Keys that the script uses only outside a cluster are skipped, because they may be in another
    # slot.
    patterns = [key.pattern for key in keys if "not on a cluster" not in key.pattern]
    slots = {key_slot(_sample(pattern).encode()) for pattern in patterns}
    assert len(slots) == 1, patterns


def test_partitions_of_a_topic_spread_over_slots() -> None:
    slots = {key_slot(Keys().stream("access", partition).encode()) for partition in range(64)}
    assert len(slots) > 60
