"""topic_create: absent -> present; and what is read of a topic."""

from __future__ import annotations

import pytest

from streamqd.config import Retention, Topic
from streamqd.errors import ContractError
from streamqd.store import topics
from tests.contract.desk import Desk

SETTINGS = b'{"archive":"off","retention":{"max_age":60.0,"max_length":null}}'
TOPIC = Topic(partitions=3, retention=Retention(max_age=60.0))


def test_creates(desk: Desk) -> None:
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


def test_the_first_wins(desk: Desk) -> None:
    desk.expect("topic_create", "OK", topics.creation(desk.keys, "access", TOPIC))
    call = topics.creation(desk.keys, "access", Topic(partitions=5))
    assert desk.expect("topic_create", "EXISTS", call) == [b"3", SETTINGS]
    call = topics.creation(desk.keys, "access", TOPIC)
    assert desk.expect("topic_create", "EXISTS", call) == [b"3", SETTINGS]


def test_a_topic_with_many_partitions(desk: Desk) -> None:
    desk.expect("topic_create", "OK", topics.creation(desk.keys, "access", Topic(partitions=4096)))
    assert desk.do("SCARD", desk.keys.partitions("access")) == 4096


def test_create_registers_and_tells_the_count_that_holds(desk: Desk) -> None:
    link, keys = desk.link, desk.keys
    assert topics.partition_count(link, keys, "access") is None
    assert topics.meta(link, keys, "access") is None
    assert topics.create(link, keys, "access", TOPIC) == 3
    assert topics.create(link, keys, "access", Topic(partitions=5)) == 3
    topics.create(link, keys, "about", Topic())
    assert topics.registered(link, keys) == ["about", "access"]
    assert topics.partition_count(link, keys, "access") == 3
    found = topics.meta(link, keys, "access")
    assert found is not None
    assert found[::2] == (
        3,
        {"archive": "off", "retention": {"max_age": 60.0, "max_length": None}},
    )
    assert abs(found.created_unix_ms - desk.now_unix_ms()) < 60_000


def test_a_count_that_is_none_is_not_guessed(desk: Desk) -> None:
    for wrong in ("", "0", "-1", "two", "1.5"):
        desk.do("HSET", desk.keys.meta("access"), "partitionCount", wrong)
        with pytest.raises(ContractError, match="access"):
            topics.partition_count(desk.link, desk.keys, "access")
