"""growth_start, growth_switch, growth_mark, growth_finish: the phases of a topic that grows."""

from __future__ import annotations

from typing import Any

from streamqd.config import Topic
from streamqd.store import growth, topics
from streamqd.store.store import Store
from tests.contract.desk import Desk


def begin(desk: Desk, *, to: int = 4, seen: int = 2, token: str = "t1") -> Any:
    return growth.begin(desk.keys, "access", seen, to, token)


def started(desk: Desk) -> growth.Growth:
    """Return the answer to a repeated call."""
    call = begin(desk, seen=topics.partition_count(desk.store, "access") or 0, token="tx")
    return growth.Growth.parse(desk.link.run(call))


def meta(desk: Desk) -> dict[str, bytes]:
    found = dict(desk.state()[desk.keys.meta("access")])
    for name in ("created", "settings", "growSince"):
        found.pop(name, None)
    return found


def test_growth_passes_through_its_phases(desk: Desk) -> None:
    keys, link = desk.keys, desk.link
    topics.create(Store(link, keys), "access", Topic(partitions=2))

    desk.expect("growth_start", "OK", begin(desk))
    assert started(desk) == growth.Growth("t1", 2, growth.STARTED, [])
    assert topics.partition_count(Store(link, keys), "access") == 2
    desk.expect("growth_mark", "GONE", growth.mark(keys, "access", "t1", ["1-0", "2-0"]))

    call = growth.switch(keys, "access", "t1", range(2, 4))
    assert desk.expect("growth_switch", "OK", call) == []
    assert started(desk) == growth.Growth("t1", 2, growth.SWITCHED, [])
    assert topics.partition_count(Store(link, keys), "access") == 4
    assert desk.state()[keys.partitions("access")] == {
        keys.stream("access", number).encode() for number in range(4)
    }

    call = growth.mark(keys, "access", "t1", ["1-0", "2-0"])
    assert desk.expect("growth_mark", "OK", call) == [b"1-0 2-0"]
    assert started(desk) == growth.Growth("t1", 2, growth.MARKED, ["1-0", "2-0"])
    later = growth.mark(keys, "access", "t1", ["5-0", "6-0"])
    assert desk.expect("growth_mark", "OK", later) == [b"1-0 2-0"]
    under_way = growth.under_way(Store(link, keys), "access")
    assert under_way is not None
    assert under_way._replace(since_unix_ms=0) == (2, 4, 0, "t1", ["1-0", "2-0"])

    assert desk.expect("growth_finish", "OK", growth.end(keys, "access", "t1")) == []
    assert meta(desk) == {"partitionCount": b"4"}
    assert growth.under_way(Store(link, keys), "access") is None
    desk.expect("growth_finish", "GONE", growth.end(keys, "access", "t1"))


def test_repeated_phases_change_nothing(desk: Desk) -> None:
    topics.create(desk.store, "access", Topic(partitions=2))
    calls = [
        begin(desk),
        growth.switch(desk.keys, "access", "t1", range(2, 4)),
        growth.mark(desk.keys, "access", "t1", ["1-0", "2-0"]),
    ]
    for call in calls:
        desk.link.run(call)
    before = desk.state()
    for call in calls:
        assert desk.link.run(call).word == "OK"
    assert desk.state() == before


def test_growth_rejects_invalid_changes(desk: Desk) -> None:
    desk.expect("growth_start", "MISSING", begin(desk))
    topics.create(desk.store, "access", Topic(partitions=2))
    assert desk.expect("growth_start", "CHANGED", begin(desk, seen=1)) == [b"2"]
    desk.expect("growth_switch", "GONE", growth.switch(desk.keys, "access", "t1", range(2, 4)))
    desk.expect("growth_finish", "GONE", growth.end(desk.keys, "access", "t1"))
    desk.expect("growth_start", "OK", begin(desk))
    assert desk.expect("growth_start", "OTHER", begin(desk, to=8, token="t2")) == [b"4"]
    desk.expect("growth_switch", "GONE", growth.switch(desk.keys, "access", "t2", range(2, 8)))


def test_late_copies_change_nothing(desk: Desk) -> None:
    """Of a growth that is over, also when the topic has grown again since."""
    topics.create(desk.store, "access", Topic(partitions=2))
    calls = [
        begin(desk),
        growth.switch(desk.keys, "access", "t1", range(2, 4)),
        growth.mark(desk.keys, "access", "t1", ["1-0", "2-0"]),
        growth.end(desk.keys, "access", "t1"),
    ]
    for call in calls:
        desk.link.run(call)
    for again in (False, True):
        if again:
            desk.link.run(begin(desk, to=8, seen=4, token="t2"))
        before = desk.dump()
        for call in calls:
            assert desk.link.run(call).word in ("CHANGED", "OTHER", "GONE")
        assert desk.dump() == before


def test_growth_refuses_a_topic_being_deleted(desk: Desk) -> None:
    topics.create(desk.store, "access", Topic(partitions=2))
    desk.link.run(begin(desk))
    desk.link.run(topics.retirement(desk.keys, "access"))
    desk.expect("growth_start", "MISSING", begin(desk))
    desk.expect("growth_switch", "GONE", growth.switch(desk.keys, "access", "t1", range(2, 4)))
