"""topic_create: absent -> present; and the data that is read of a topic."""

from __future__ import annotations

import pytest

from streamqd.config import Retention, Topic
from streamqd.errors import InvalidValueError, RedisResponseError
from streamqd.store import topics
from streamqd.store.store import Store
from tests.contract.harness import Harness

SETTINGS = b'{"archive":"off","retention":{"max_age":60.0}}'
TOPIC = Topic(partitions=3, retention=Retention(max_age=60.0))


def test_topic_create_registers_the_topic(harness: Harness) -> None:
    with harness.instant() as now:
        assert (
            harness.expect("topic_create", "OK", topics.create_call(harness.keys, "access", TOPIC))
            == []
        )
    state = harness.state()
    meta = state[harness.keys.meta("access")]
    assert now == meta.pop("created")
    streams = {harness.keys.stream("access", number).encode() for number in range(3)}
    assert state == {
        harness.keys.meta("access"): {"partitionCount": b"3", "settings": SETTINGS},
        harness.keys.partitions("access"): streams,
    }


def test_topic_create_repeated_keeps_the_first(harness: Harness) -> None:
    harness.expect("topic_create", "OK", topics.create_call(harness.keys, "access", TOPIC))
    call = topics.create_call(harness.keys, "access", Topic(partitions=5))
    assert harness.expect("topic_create", "EXISTS", call) == [b"3", SETTINGS]
    call = topics.create_call(harness.keys, "access", TOPIC)
    assert harness.expect("topic_create", "EXISTS", call) == [b"3", SETTINGS]


def test_topic_create_accepts_many_partitions(harness: Harness) -> None:
    harness.expect(
        "topic_create", "OK", topics.create_call(harness.keys, "access", Topic(partitions=4096))
    )
    assert harness.do("SCARD", harness.keys.partitions("access")) == 4096


def test_topic_create_returns_the_registered_partition_count(harness: Harness) -> None:
    link, keys = harness.link, harness.keys
    assert topics.partition_count(Store(link, keys), "access") is None
    assert topics.meta(Store(link, keys), "access") is None
    assert topics.create(Store(link, keys), "access", TOPIC) == 3
    assert topics.create(Store(link, keys), "access", Topic(partitions=5)) == 3
    topics.create(Store(link, keys), "about", Topic())
    assert topics.names(Store(link, keys)) == ["about", "access"]
    assert topics.partition_count(Store(link, keys), "access") == 3
    found = topics.meta(Store(link, keys), "access")
    assert found is not None
    assert found[::2] == (
        3,
        {"archive": "off", "retention": {"max_age": 60.0}},
    )
    assert abs(found.created_unix_ms - harness.now_unix_ms()) < 60_000


def test_invalid_partition_count_is_an_error(harness: Harness) -> None:
    for wrong in ("", "0", "-1", "two", "1.5"):
        harness.do("HSET", harness.keys.meta("access"), "partitionCount", wrong)
        with pytest.raises(InvalidValueError, match="access"):
            topics.partition_count(harness.store, "access")


# --- changing and deleting ------------------------------------------------------------------------


def test_topic_configure_refuses_a_concurrent_change(harness: Harness) -> None:
    harness.link.run(topics.create_call(harness.keys, "access", TOPIC))
    seen = topics.read_settings(harness.store, "access")
    call = topics.configure_call(harness.keys, "access", seen, {"archive": "required"})
    before = harness.state()[harness.keys.meta("access")]

    harness.expect("topic_configure", "OK", call)

    after = harness.state()[harness.keys.meta("access")]
    assert after == {**before, "settings": b'{"archive":"required"}'}
    rest = harness.expect("topic_configure", "CHANGED", call)
    assert rest == [b'{"archive":"required"}']


def test_topic_configure_requires_a_partition_count(harness: Harness) -> None:
    harness.expect(
        "topic_configure", "MISSING", topics.configure_call(harness.keys, "access", "", {})
    )
    harness.do("HSET", harness.keys.meta("access"), "partitionCount", "1")
    harness.expect("topic_configure", "OK", topics.configure_call(harness.keys, "access", "", {}))


def test_retired_topic_is_visible_only_to_its_deletion(harness: Harness) -> None:
    call = topics.retire_call(harness.keys, "access")
    harness.expect("topic_retire", "MISSING", call)
    topics.create(harness.store, "access", TOPIC)

    assert harness.expect("topic_retire", "OK", call) == [b"3"]

    assert topics.partition_count(harness.store, "access") is None
    assert topics.meta(harness.store, "access") is None
    assert harness.expect("topic_retire", "OK", call) == [b"3"]
    creation = topics.create_call(harness.keys, "access", TOPIC)
    harness.expect("topic_create", "DELETING", creation)
    with pytest.raises(RedisResponseError, match="topic delete access"):
        topics.create(harness.store, "access", TOPIC)
    harness.expect(
        "topic_configure", "MISSING", topics.configure_call(harness.keys, "access", "", {})
    )


def test_groups_seen_lists_groups_made_by_daemons(harness: Harness) -> None:
    assert topics.known_groups(harness.store, "access") == []
    harness.do(
        "HSET", harness.keys.meta("access"), "created", 5, "group:hits", 3, "group:agents", 3
    )
    assert topics.known_groups(harness.store, "access") == ["agents", "hits"]
