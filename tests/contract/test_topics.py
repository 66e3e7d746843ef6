"""topic_create: absent -> present; and the data that is read of a topic."""

from __future__ import annotations

import pytest

from streamqd.config import Retention, Topic
from streamqd.errors import BadValue, RedisRefused
from streamqd.store import topics
from streamqd.store.store import Store
from tests.contract.desk import Desk

SETTINGS = b'{"archive":"off","retention":{"max_age":60.0}}'
TOPIC = Topic(partitions=3, retention=Retention(max_age=60.0))


def test_topic_create_registers_the_topic(desk: Desk) -> None:
    with desk.instant() as now:
        assert desk.expect("topic_create", "OK", topics.creation(desk.keys, "access", TOPIC)) == []
    state = desk.state()
    meta = state[desk.keys.meta("access")]
    assert now == meta.pop("created")
    streams = {desk.keys.stream("access", number).encode() for number in range(3)}
    assert state == {
        desk.keys.meta("access"): {"partitionCount": b"3", "settings": SETTINGS},
        desk.keys.partitions("access"): streams,
    }


def test_topic_create_repeated_keeps_the_first(desk: Desk) -> None:
    desk.expect("topic_create", "OK", topics.creation(desk.keys, "access", TOPIC))
    call = topics.creation(desk.keys, "access", Topic(partitions=5))
    assert desk.expect("topic_create", "EXISTS", call) == [b"3", SETTINGS]
    call = topics.creation(desk.keys, "access", TOPIC)
    assert desk.expect("topic_create", "EXISTS", call) == [b"3", SETTINGS]


def test_topic_create_accepts_many_partitions(desk: Desk) -> None:
    desk.expect("topic_create", "OK", topics.creation(desk.keys, "access", Topic(partitions=4096)))
    assert desk.do("SCARD", desk.keys.partitions("access")) == 4096


def test_topic_create_returns_the_registered_partition_count(desk: Desk) -> None:
    link, keys = desk.link, desk.keys
    assert topics.partition_count(Store(link, keys), "access") is None
    assert topics.meta(Store(link, keys), "access") is None
    assert topics.create(Store(link, keys), "access", TOPIC) == 3
    assert topics.create(Store(link, keys), "access", Topic(partitions=5)) == 3
    topics.create(Store(link, keys), "about", Topic())
    assert topics.registered(Store(link, keys)) == ["about", "access"]
    assert topics.partition_count(Store(link, keys), "access") == 3
    found = topics.meta(Store(link, keys), "access")
    assert found is not None
    assert found[::2] == (
        3,
        {"archive": "off", "retention": {"max_age": 60.0}},
    )
    assert abs(found.created_unix_ms - desk.now_unix_ms()) < 60_000


def test_invalid_partition_count_is_an_error(desk: Desk) -> None:
    for wrong in ("", "0", "-1", "two", "1.5"):
        desk.do("HSET", desk.keys.meta("access"), "partitionCount", wrong)
        with pytest.raises(BadValue, match="access"):
            topics.partition_count(desk.store, "access")


# --- changing and deleting ------------------------------------------------------------------------


def test_topic_configure_refuses_a_concurrent_change(desk: Desk) -> None:
    desk.link.run(topics.creation(desk.keys, "access", TOPIC))
    seen = topics.stored(desk.store, "access")
    call = topics.configuration(desk.keys, "access", seen, {"archive": "required"})
    before = desk.state()[desk.keys.meta("access")]

    desk.expect("topic_configure", "OK", call)

    after = desk.state()[desk.keys.meta("access")]
    assert after == {**before, "settings": b'{"archive":"required"}'}
    rest = desk.expect("topic_configure", "CHANGED", call)
    assert rest == [b'{"archive":"required"}']


def test_settings_of_a_topic_that_has_none(desk: Desk) -> None:
    desk.expect("topic_configure", "MISSING", topics.configuration(desk.keys, "access", "", {}))
    desk.do("HSET", desk.keys.meta("access"), "partitionCount", "1")
    desk.expect("topic_configure", "OK", topics.configuration(desk.keys, "access", "", {}))


def test_retired_topic_is_visible_only_to_its_deletion(desk: Desk) -> None:
    call = topics.retirement(desk.keys, "access")
    desk.expect("topic_retire", "MISSING", call)
    topics.create(desk.store, "access", TOPIC)

    assert desk.expect("topic_retire", "OK", call) == [b"3"]

    assert topics.partition_count(desk.store, "access") is None
    assert topics.meta(desk.store, "access") is None
    assert desk.expect("topic_retire", "OK", call) == [b"3"]
    creation = topics.creation(desk.keys, "access", TOPIC)
    desk.expect("topic_create", "DELETING", creation)
    with pytest.raises(RedisRefused, match="topic delete access"):
        topics.create(desk.store, "access", TOPIC)
    desk.expect("topic_configure", "MISSING", topics.configuration(desk.keys, "access", "", {}))


def test_groups_seen_lists_groups_made_by_daemons(desk: Desk) -> None:
    assert topics.groups_seen(desk.store, "access") == []
    desk.do("HSET", desk.keys.meta("access"), "created", 5, "group:hits", 3, "group:agents", 3)
    assert topics.groups_seen(desk.store, "access") == ["agents", "hits"]
