"""growth_start, growth_switch, growth_mark, growth_finish: the phases of a growing topic."""

from __future__ import annotations

from typing import Any

from streamqd.config import Topic
from streamqd.store import growth, topics
from streamqd.store.store import Store
from tests.contract.harness import Harness


def begin(harness: Harness, *, to: int = 4, seen: int = 2, token: str = "t1") -> Any:
    return growth.begin(harness.keys, "access", seen, to, token)


def repeat_start(harness: Harness) -> growth.Growth:
    """Return the answer to a call that is repeated."""
    call = begin(harness, seen=topics.partition_count(harness.store, "access") or 0, token="tx")
    return growth.Growth.parse(harness.link.run(call))


def meta(harness: Harness) -> dict[str, bytes]:
    found = dict(harness.state()[harness.keys.meta("access")])
    for name in ("created", "settings", "growSince"):
        found.pop(name, None)
    return found


def test_growth_passes_through_its_phases(harness: Harness) -> None:
    keys, link = harness.keys, harness.link
    topics.create(Store(link, keys), "access", Topic(partitions=2))

    harness.expect("growth_start", "OK", begin(harness))
    assert repeat_start(harness) == growth.Growth("t1", 2, growth.STARTED, [])
    assert topics.partition_count(Store(link, keys), "access") == 2
    harness.expect("growth_mark", "GONE", growth.mark(keys, "access", "t1", ["1-0", "2-0"]))

    call = growth.switch(keys, "access", "t1", range(2, 4))
    assert harness.expect("growth_switch", "OK", call) == []
    assert repeat_start(harness) == growth.Growth("t1", 2, growth.SWITCHED, [])
    assert topics.partition_count(Store(link, keys), "access") == 4
    assert harness.state()[keys.partitions("access")] == {
        keys.stream("access", number).encode() for number in range(4)
    }

    call = growth.mark(keys, "access", "t1", ["1-0", "2-0"])
    assert harness.expect("growth_mark", "OK", call) == [b"1-0 2-0"]
    assert repeat_start(harness) == growth.Growth("t1", 2, growth.MARKED, ["1-0", "2-0"])
    later = growth.mark(keys, "access", "t1", ["5-0", "6-0"])
    assert harness.expect("growth_mark", "OK", later) == [b"1-0 2-0"]
    under_way = growth.in_progress(Store(link, keys), "access")
    assert under_way is not None
    assert under_way._replace(since_unix_ms=0) == (2, 4, 0, "t1", ["1-0", "2-0"])

    assert harness.expect("growth_finish", "OK", growth.end(keys, "access", "t1")) == []
    assert meta(harness) == {"partitionCount": b"4"}
    assert growth.in_progress(Store(link, keys), "access") is None
    harness.expect("growth_finish", "GONE", growth.end(keys, "access", "t1"))


def test_growth_phase_repeated_changes_nothing(harness: Harness) -> None:
    topics.create(harness.store, "access", Topic(partitions=2))
    calls = [
        begin(harness),
        growth.switch(harness.keys, "access", "t1", range(2, 4)),
        growth.mark(harness.keys, "access", "t1", ["1-0", "2-0"]),
    ]
    for call in calls:
        harness.link.run(call)
    before = harness.state()
    for call in calls:
        assert harness.link.run(call).word == "OK"
    assert harness.state() == before


def test_growth_rejects_invalid_changes(harness: Harness) -> None:
    harness.expect("growth_start", "MISSING", begin(harness))
    topics.create(harness.store, "access", Topic(partitions=2))
    assert harness.expect("growth_start", "CHANGED", begin(harness, seen=1)) == [b"2"]
    harness.expect(
        "growth_switch", "GONE", growth.switch(harness.keys, "access", "t1", range(2, 4))
    )
    harness.expect("growth_finish", "GONE", growth.end(harness.keys, "access", "t1"))
    harness.expect("growth_start", "OK", begin(harness))
    assert harness.expect("growth_start", "OTHER", begin(harness, to=8, token="t2")) == [b"4"]
    harness.expect(
        "growth_switch", "GONE", growth.switch(harness.keys, "access", "t2", range(2, 8))
    )


def test_late_growth_call_changes_nothing(harness: Harness) -> None:
    """A late call changes nothing. The growth has finished, and the topic may have grown again."""
    topics.create(harness.store, "access", Topic(partitions=2))
    calls = [
        begin(harness),
        growth.switch(harness.keys, "access", "t1", range(2, 4)),
        growth.mark(harness.keys, "access", "t1", ["1-0", "2-0"]),
        growth.end(harness.keys, "access", "t1"),
    ]
    for call in calls:
        harness.link.run(call)
    for again in (False, True):
        if again:
            harness.link.run(begin(harness, to=8, seen=4, token="t2"))
        before = harness.dump()
        for call in calls:
            assert harness.link.run(call).word in ("CHANGED", "OTHER", "GONE")
        assert harness.dump() == before


def test_growth_refuses_a_topic_being_deleted(harness: Harness) -> None:
    topics.create(harness.store, "access", Topic(partitions=2))
    harness.link.run(begin(harness))
    harness.link.run(topics.retire_call(harness.keys, "access"))
    harness.expect("growth_start", "MISSING", begin(harness))
    harness.expect(
        "growth_switch", "GONE", growth.switch(harness.keys, "access", "t1", range(2, 4))
    )
