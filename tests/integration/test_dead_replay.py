"""Dead letters can be replayed from Python, with any target and despite every interruption.

The dead letters are real ones, which the daemon's scripts wrote.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from streamqd import config
from streamqd.admin import audit, dead_letters
from streamqd.admin.dead_letters import Target
from streamqd.admin.dead_letters.passes import ReplayPace, parse_exported_fields
from streamqd.admin.dead_letters.selection import pages
from streamqd.admin.messages import MATCH_ALL, MessageFilter
from streamqd.admin.reading import PAGE_MAX, server_unix_ms
from streamqd.errors import RedisUnavailableError, RequestRefusedError, TopicNotFoundError
from streamqd.message import Delivery, Message
from streamqd.model import Assignment
from streamqd.store import archives, directives, topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.integration.test_admin import write_dead_letter
from tests.support.proxy import Fault, FaultProxy
from tests.support.waiting import wait_until

HarnessAt = Callable[..., Harness]
TOPIC = "access"


@pytest.fixture
def harness_at(link: Connection, store: Store, keys: Keys) -> HarnessAt:
    """Return a harness for a partition of access (3 partitions) and a group. `other` has 2."""
    topics.create(store, TOPIC, config.Topic(partitions=3))
    topics.create(store, "other", config.Topic(partitions=2))
    return lambda partition, group="hits", topic=TOPIC: Harness(
        link, keys, Assignment(topic, partition, group)
    )


@pytest.fixture
def proxied_link(proxy: FaultProxy) -> Iterator[Connection]:
    """A connection through the proxy."""
    link = connect(proxy.settings, timeout=1.0, name="test:shaky")
    yield link
    link.close()


def write_dead_letters(
    harness: Harness, count: int, group: str = "hits", **fields: str
) -> list[str]:
    """Write dead letters directly to the stream, at 1-0, 2-0 …, and return their names."""
    harness.groups()
    for number in range(1, count + 1):
        context = {"originalId": f"{number}-0", "group": group, **fields}
        flat = [part for pair in context.items() for part in pair]
        harness.add(f"{number}-0", "payload", f"body {number}", *flat, stream=harness.dlq)
    return [f"{harness.assignment.partition}:{number}-0" for number in range(1, count + 1)]


def messages_in(harness: Harness, stream: str, *, retried: bool = False) -> list[Message]:
    delivery = Delivery(harness.assignment, "west-1", 1)
    return [
        Message(delivery, raw_id, fields, retried=retried)
        for raw_id, fields in harness.do("XRANGE", stream, "-", "+")
    ]


def count_script_calls(link: Connection) -> int:
    found = re.search(rb"cmdstat_evalsha:calls=(\d+)", link.execute("INFO", "commandstats"))
    return int(found[1]) if found else 0


def list_dead_letters(link: Connection, keys: Keys) -> list[str]:
    return sorted(
        row.id for row in dead_letters.messages(Store(link, keys), TOPIC).page(limit=1000).rows
    )


# --- targets --------------------------------------------------------------------------------------


def test_replay_to_all_groups_writes_to_the_partition(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    name = write_dead_letter(harness_at(1), "7-0", headers='{"a":"b"}')

    done = dead_letters.replay(store, TOPIC, MessageFilter((name,)), target=Target(all_groups=True))

    assert (done.replayed, done.target) == (1, "every group")
    again = messages_in(harness_at(1), harness_at(1).stream)[-1]
    assert again.uid == f"{TOPIC}/1/7-0"
    assert again.headers == {"a": "b", "x-replays": "1"}
    assert again.attempt == 1
    assert "group" not in again.fields
    assert list_dead_letters(link, keys) == []


def test_replay_to_another_partition_keeps_group_and_uid(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    name = write_dead_letter(harness_at(0), "7-0")
    harness_at(2).groups()

    done = dead_letters.replay(store, TOPIC, MessageFilter(), target=Target(partition=2))

    assert (done.replayed, done.first_id) == (1, name)
    [again] = messages_in(harness_at(2), harness_at(2).retry, retried=True)
    assert again.uid == f"{TOPIC}/0/7-0"
    assert (again.replay_count, again.attempt, again.key) == (1, 1, b"k1")
    assert harness_at(2).do("XLEN", harness_at(2).stream) == 0
    assert harness_at(0).do("EXISTS", keys.moving(TOPIC, 0)) == 0
    assert list_dead_letters(link, keys) == []


def test_replay_to_another_topic_routes_by_key_or_number(
    store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(2), 1)
    for key in ("a", "b", "c"):
        harness_at(1).groups()
        harness_at(1).add(
            f"{ord(key)}-0", "payload", "x", "key", key, "group", "hits", stream=harness_at(1).dlq
        )

    done = dead_letters.replay(store, TOPIC, MessageFilter(), target=Target(topic="other"))

    assert done.replayed == 4
    found = {
        message.key: number
        for number in range(2)
        for message in messages_in(harness_at(number, topic="other"), keys.stream("other", number))
    }
    # The target is the CRC-32 of the key modulo two. Without a key, partition 2 goes to 2 modulo 2.
    assert found == {b"a": 1, b"b": 1, b"c": 1, None: 0}
    first = messages_in(harness_at(0, topic="other"), keys.stream("other", 0))[0]
    assert first.uid == f"{TOPIC}/2/1-0"


def test_moved_message_keeps_its_uid_as_a_dead_letter(store: Store, harness_at: HarnessAt) -> None:
    write_dead_letters(harness_at(0), 1)
    dead_letters.replay(store, TOPIC, MessageFilter(), target=Target(topic="other"))
    there = harness_at(0, "audit", "other")
    there.groups()
    [message] = messages_in(there, there.stream)
    topic, partition = message.origin
    assert (topic, partition) == (TOPIC, 0)

    # The message is dead-lettered in the other topic, as by a worker, and is replayed from there.
    flat = [part for pair in message.fields.items() for part in pair]
    there.add("9-0", *flat, "group", "audit", "reason", "dead", stream=there.dlq)
    [row] = dead_letters.messages(store, "other").page().rows
    assert (row.uid, row.replays) == (f"{TOPIC}/0/1-0", 1)
    assert dead_letters.replay(store, "other", MessageFilter()).replayed == 1
    [again] = messages_in(there, there.retry, retried=True)
    assert (again.uid, again.replay_count) == (f"{TOPIC}/0/1-0", 2)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target(topic=TOPIC), "is the topic of the dead letters"),
        (Target(partition=3), "partition 3 of topic access not found"),
        (Target(topic="other", partition=2), "partition 2 of topic other not found"),
    ],
)
def test_replay_refuses_a_missing_target(
    store: Store, harness_at: HarnessAt, target: Target, words: str
) -> None:
    write_dead_letters(harness_at(0), 1)
    before = harness_at(0).dump()
    with pytest.raises(RequestRefusedError, match=words):
        dead_letters.replay(store, TOPIC, MessageFilter(), target=target)
    with pytest.raises(TopicNotFoundError, match="did you mean other"):
        dead_letters.replay(store, TOPIC, MessageFilter(), target=Target(topic="othr"))
    assert harness_at(0).dump() == before


def test_replay_refuses_a_partition_without_the_group(
    store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 2)

    done = dead_letters.replay(store, TOPIC, MessageFilter(), target=Target(partition=1))

    assert done.refused == {"its group no longer exists": 2}
    assert harness_at(0).do("EXISTS", keys.moving(TOPIC, 0), harness_at(1).retry) == 0
    # They can still be replayed to their own partition.
    assert dead_letters.replay(store, TOPIC, MessageFilter()).replayed == 2


# --- guards ---------------------------------------------------------------------------------------


def test_replay_loop_stops_at_max_replays(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 1, replayCount="2")
    write_dead_letters(harness_at(1), 1, replayCount="3")
    write_dead_letters(harness_at(2), 1, headers='{"x-replays":"9"}')

    done = dead_letters.replay(store, TOPIC, MessageFilter())

    assert done.replayed == 1
    again = "it was replayed 3 times or more already, and was dead-lettered again"
    assert done.refused == {again: 2}
    assert list_dead_letters(link, keys) == ["1:1-0", "2:1-0"]
    assert dead_letters.replay(store, TOPIC, MessageFilter(), max_replays=10).replayed == 2


def test_replay_ignores_dead_letters_written_during_it(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 150)
    now = server_unix_ms(link)

    def another(_count: int) -> None:
        harness_at(0).do("XADD", harness_at(0).dlq, "*", "payload", "x", "group", "hits")
        harness_at(1).do("XADD", harness_at(1).dlq, "*", "payload", "x", "group", "hits")

    done = dead_letters.replay(store, TOPIC, MessageFilter(), progress=another)

    assert done.replayed == 150
    assert done.started_unix_ms >= now
    assert len(list_dead_letters(link, keys)) == 6, (
        "two for each of the pages of 64, 64 and 22 letters"
    )


def test_replay_limit_counts_replayed_dead_letters(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 3, replayCount="3")
    write_dead_letters(harness_at(1), 120)

    steps: list[int] = []

    done = dead_letters.replay(store, TOPIC, MessageFilter(), limit=110, progress=steps.append)

    assert (done.replayed, done.result) == (110, "limit")
    assert len(list_dead_letters(link, keys)) == 13
    assert sum(steps) == 113, "the last batch, which the limit cut, is counted too"


def test_replay_with_a_rate_is_evenly_paced() -> None:
    times = iter((100.0, 100.0, 103.0, 103.05))
    throttle = ReplayPace(20.0, clock=lambda: next(times))

    assert throttle.batch == 2
    waits = [throttle.take(2) for _ in range(4)]

    # The third message is half a second late. It is sent immediately, and the others keep to the
    # rate.
    assert waits == pytest.approx([0.0, 0.1, 0.0, 0.05])
    assert ReplayPace(3.0).batch == 1
    assert ReplayPace(None).take(100) == 0.0


def test_replay_with_a_rate_uses_small_batches(store: Store, harness_at: HarnessAt) -> None:
    write_dead_letters(harness_at(0), 9)
    steps: list[int] = []
    done = dead_letters.replay(store, TOPIC, MessageFilter(), rate=40.0, progress=steps.append)
    assert (done.replayed, steps) == (9, [4, 4, 1])


# --- choosing -------------------------------------------------------------------------------------


def test_dead_letter_filters_select_matching_dead_letters(
    store: Store, harness_at: HarnessAt
) -> None:
    harness = harness_at(0)
    harness.groups()
    base = {"payload": "x", "group": "hits", "reason": "attempts", "errorClass": "shop.BankError"}
    others: dict[str, dict[str, str]] = {
        "1000-0": {},
        "2000-0": {"group": "agents"},
        "3000-0": {"reason": "dead"},
        "4000-0": {"errorClass": "KeyError"},
        "5000-0": {"key": "k"},
        "6000-0": {"headers": '{"a":"b","c":"d"}'},
        "7000-0": {"fingerprint": "abc"},
        "8000-0": {"headers": "[]"},
    }
    for entry_id, differs in others.items():
        harness.add(
            entry_id, *(p for pair in (base | differs).items() for p in pair), stream=harness.dlq
        )

    def ids(choice: MessageFilter) -> list[str]:
        rows = dead_letters.messages(store, TOPIC).page(choice).rows
        counted = dead_letters.causes(store, TOPIC, choice)
        assert counted.looked_at == dead_letters.count(store, TOPIC, choice) == len(rows)
        return sorted(row.id for row in rows)

    assert ids(MessageFilter(group="agents")) == ["0:2000-0"]
    assert ids(MessageFilter(reason="dead")) == ["0:3000-0"]
    assert ids(MessageFilter(error_class="KeyError")) == ["0:4000-0"]
    assert len(ids(MessageFilter(error_class="BankError"))) == 7
    assert len(ids(MessageFilter(error_class="shop.BankError"))) == 7
    assert ids(MessageFilter(key=b"k")) == ["0:5000-0"]
    assert ids(MessageFilter(headers=(("c", "d"), ("a", "b")))) == ["0:6000-0"]
    assert ids(MessageFilter(headers=(("c", "x"),))) == []
    assert ids(MessageFilter(fingerprint="abc")) == ["0:7000-0"]
    assert ids(MessageFilter(since_unix_ms=6000)) == ["0:6000-0", "0:7000-0", "0:8000-0"]
    assert ids(MessageFilter(until_unix_ms=2000)) == ["0:1000-0"]
    assert ids(MessageFilter(since_unix_ms=2000, until_unix_ms=2001)) == ["0:2000-0"]
    assert ids(MessageFilter(until_unix_ms=0)) == []
    with pytest.raises(RequestRefusedError, match="does not match the filter"):
        dead_letters.count(store, TOPIC, MessageFilter(("0:1000-0",), reason="dead"))


def test_filtered_list_continues_at_its_cursor(store: Store, harness_at: HarnessAt) -> None:
    for number in range(3):
        write_dead_letters(harness_at(number), 40)
        plain_other = harness_at(number)
        for at_ms in range(100, 140):
            plain_other.add(f"{at_ms}-0", "group", "agents", stream=plain_other.dlq)
    choice = MessageFilter(group="hits", until_unix_ms=31)
    seen: list[str] = []
    cursor = ""
    while True:
        page = dead_letters.messages(store, TOPIC).page(choice, limit=7, cursor=cursor)
        seen += [row.id for row in page.rows]
        cursor = page.cursor
        if not cursor:
            break
    assert len(seen) == len(set(seen)) == 90
    assert seen[:3] == ["2:30-0", "1:30-0", "0:30-0"]


# --- interrupted ----------------------------------------------------------------------------------


def assert_all_moved(link: Connection, keys: Keys, harness_at: HarnessAt, count: int) -> None:
    """Check that each message is in the other topic once, and that no dead letter remains."""
    found = [
        message.uid
        for number in range(2)
        for message in messages_in(harness_at(number, topic="other"), keys.stream("other", number))
    ]
    assert sorted(found) == sorted(f"{TOPIC}/0/{n}-0" for n in range(1, count + 1))
    assert list_dead_letters(link, keys) == []
    assert link.execute("EXISTS", keys.moving(TOPIC, 0)) == 0


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.DROP_REPLY, Fault.CUT_REPLY])
@pytest.mark.parametrize("nth", range(1, 10))
def test_interrupted_replay_is_finished_by_the_next_one(
    link: Connection,
    store: Store,
    keys: Keys,
    harness_at: HarnessAt,
    proxy: FaultProxy,
    proxied_link: Connection,
    fault: Fault,
    nth: int,
) -> None:
    # For three dead letters, scripts 1 to 3 mark them, 4 to 6 deliver them, and 7 to 9 delete them.
    write_dead_letters(harness_at(1), 1)
    target = Target(topic="other")
    dead_letters.replay(
        store, TOPIC, MessageFilter(), target=target
    )  # the server now has the scripts
    for number in range(2):
        link.execute("DEL", keys.stream("other", number))
    write_dead_letters(harness_at(0), 3)
    trigger = proxy.arm(fault, command="EVALSHA", nth=nth)

    first = dead_letters.replay(Store(proxied_link, keys), TOPIC, MessageFilter(), target=target)

    assert trigger.hit
    assert first.result == "failed"
    assert first.error
    second = dead_letters.replay(store, TOPIC, MessageFilter(), target=target)
    assert_all_moved(link, keys, harness_at, 3)
    assert (second.result, second.refused, second.missing) == ("done", {}, 0)
    assert first.replayed + second.replayed <= 3 <= first.unknown + second.replayed
    if nth <= 3:
        assert (first.unknown, second.replayed) == (0, 3)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_late_step_of_a_replay_changes_nothing(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt, proxy: FaultProxy, nth: int
) -> None:
    write_dead_letters(harness_at(0), 1)
    target = Target(topic="other")
    impatient = connect(proxy.settings, timeout=1.0, name="test:impatient")
    write_dead_letters(harness_at(1), 1)
    dead_letters.replay(store, TOPIC, MessageFilter(("1:1-0",)), target=target)
    for number in range(2):
        link.execute("DEL", keys.stream("other", number))
    trigger = proxy.arm(Fault.HOLD_REQUEST, command="EVALSHA", nth=nth)

    assert (
        dead_letters.replay(Store(impatient, keys), TOPIC, MessageFilter(), target=target).result
        == "failed"
    )
    dead_letters.replay(store, TOPIC, MessageFilter(), target=target)
    ran = count_script_calls(link)
    trigger.release()
    wait_until(lambda: count_script_calls(link) > ran, what="the late script")
    impatient.close()

    assert_all_moved(link, keys, harness_at, 1)


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.DROP_REPLY])
@pytest.mark.parametrize(("nth", "whole", "page"), [(2, 0, 64), (60, 0, 64), (150, 128, 64)])
def test_replay_reports_its_progress_when_redis_fails(
    link: Connection,
    store: Store,
    keys: Keys,
    harness_at: HarnessAt,
    proxy: FaultProxy,
    proxied_link: Connection,
    fault: Fault,
    nth: int,
    whole: int,
    page: int,
) -> None:
    write_dead_letters(harness_at(1), 1)
    dead_letters.replay(store, TOPIC, MessageFilter())
    write_dead_letters(harness_at(0), 200)
    proxy.arm(fault, command="EVALSHA", nth=nth)

    first = dead_letters.replay(Store(proxied_link, keys), TOPIC, MessageFilter())
    second = dead_letters.replay(store, TOPIC, MessageFilter())

    assert (first.result, first.replayed, first.unknown) == ("failed", whole, page)
    assert first.replayed + second.replayed <= 200 <= whole + page + second.replayed
    uids = [
        message.uid for message in messages_in(harness_at(0), harness_at(0).retry, retried=True)
    ]
    assert len(uids) == len(set(uids)) == 200
    assert list_dead_letters(link, keys) == []


def test_replay_stops_between_two_batches(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 250)
    steps: list[int] = []

    done = dead_letters.replay(
        store, TOPIC, MessageFilter(), stop=lambda: len(steps) == 2, progress=steps.append
    )

    assert (done.replayed, done.unknown, done.result) == (128, 0, "stopped")
    assert (done.first_id, done.last_id) == ("0:1-0", "0:128-0")
    assert len(list_dead_letters(link, keys)) == 250 - 128


def test_dead_letter_in_transit_is_not_replayed_elsewhere(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    [name] = write_dead_letters(harness_at(0), 1)
    moving = keys.moving(TOPIC, 0)
    now = server_unix_ms(link)
    link.execute("HSET", moving, "1-0", f"{now} other/1")

    assert dead_letters.show(store, TOPIC, name).moving_to == "other/1"
    for target in (Target(), Target(all_groups=True), Target(partition=1), Target("", 0, "other")):
        done = dead_letters.replay(store, TOPIC, MessageFilter(), target=target)
        assert done.refused == {"its move to other/1 is not complete; repeat that replay first": 1}
    # A target that was marked stays valid, even if the key or partition number would now choose
    # another partition.
    assert (
        dead_letters.replay(store, TOPIC, MessageFilter(), target=Target(topic="other")).replayed
        == 1
    )
    assert link.execute("XLEN", keys.stream("other", 1)) == 1

    write_dead_letters(harness_at(0), 1) if link.execute("DEL", harness_at(0).dlq) else None
    link.execute("HSET", moving, "1-0", f"{now - 5 * 86_400_000} other/1")
    done = dead_letters.replay(store, TOPIC, MessageFilter(), target=Target(topic="other"))
    [reason] = done.refused
    assert "interrupted 5 days ago; check whether it arrived" in reason
    assert dead_letters.purge(store, TOPIC, MessageFilter()).purged == 1
    assert link.execute("EXISTS", moving) == 0


def test_interrupted_purge_can_be_repeated(
    link: Connection,
    store: Store,
    keys: Keys,
    harness_at: HarnessAt,
    proxy: FaultProxy,
    proxied_link: Connection,
) -> None:
    write_dead_letters(harness_at(1), 1)
    dead_letters.purge(store, TOPIC, MessageFilter())
    write_dead_letters(harness_at(0), 250)
    proxy.arm(Fault.DROP_REPLY, command="EVALSHA", nth=4)  # the fourth call is on the second page

    first = dead_letters.purge(Store(proxied_link, keys), TOPIC, MessageFilter())
    second = dead_letters.purge(store, TOPIC, MessageFilter())

    assert (first.purged, first.unknown, first.result) == (64, 64, "failed")
    assert (second.purged, second.result) == (250 - 128, "done")
    assert list_dead_letters(link, keys) == []


def test_purge_leaves_unarchived_dead_letters_if_required(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 5)
    required = config.Topic(partitions=3, archive="required")
    link.run(archives.advance(keys, TOPIC, 0, "2-0", dead=True))

    first = dead_letters.purge(store, TOPIC, MessageFilter(), configured=required)
    again = dead_letters.purge(store, TOPIC, MessageFilter(("0:4-0",)), configured=required)
    forced = dead_letters.purge(
        store, TOPIC, MessageFilter(("0:4-0",)), configured=required, unarchived=True
    )
    rest = dead_letters.purge(store, TOPIC, MessageFilter())

    found = [(each.purged, each.unarchived, each.missing) for each in (first, again, forced, rest)]
    assert found == [(2, 3, 0), (0, 1, 0), (1, 0, 0), (2, 0, 0)]


# --- causes, plan ---------------------------------------------------------------------------------


def test_similar_dead_letters_have_one_cause(store: Store, harness_at: HarnessAt) -> None:
    trace = 'Traceback (most recent call last):\n  File "/srv/{}.py", line {}, in pay\nE: {}\n'
    for number, (file, line) in enumerate((("bank", 1), ("bank", 99), ("till", 1))):
        write_dead_letter(
            harness_at(number),
            "1-0",
            handler="shop:pay",
            traceback=trace.format(file, line, number),
            instance=f"west-{number}",
            replayCount=str(number),
        )

    found = dead_letters.causes(store, TOPIC)

    assert [(each.count, each.frame, each.instances) for each in found.causes] == [
        (2, "bank.py:pay", ["west-0", "west-1"]),
        (1, "till.py:pay", ["west-2"]),
    ]
    bank = found.causes[0]
    assert (bank.handler, bank.error_class, bank.replayed, bank.replays) == (
        *("shop:pay", "ValueError", 1, 1),
    )
    assert bank.first_unix_ms <= bank.last_unix_ms
    assert dead_letters.show(store, TOPIC, bank.example).frame == "bank.py:pay"
    mine = MessageFilter(fingerprint=bank.fingerprint)
    assert dead_letters.replay(store, TOPIC, mine).replayed == 2
    assert [each.frame for each in dead_letters.causes(store, TOPIC).causes] == ["till.py:pay"]


def test_last_option_counts_only_the_newest_dead_letters(
    store: Store, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 5)
    few = dead_letters.causes(store, TOPIC, last=3)
    assert (few.looked_at, few.complete, few.total) == (3, False, 5)
    assert few.causes[0].example == "0:5-0"
    assert dead_letters.causes(store, TOPIC, last=5).complete


def test_replay_plan_matches_the_replay(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    for number in range(3):
        harness_at(number).groups()
    first = harness_at(0)
    first.own("t1", owner="west-1")
    write_dead_letter(first, "1-0")
    write_dead_letter(harness_at(1), "1-0")
    link.execute("DEL", harness_at(1).fence, harness_at(1).lease)
    harness_at(2).own("t3", owner="west-2")
    link.execute("HDEL", harness_at(2).fence, "since")
    write_dead_letters(harness_at(2), 1, replayCount="3")
    harness_at(1).do("XADD", harness_at(1).dlq, "*", "payload", "x", "group", "gone")
    link.run(directives.change(keys, "default", "pause:access/1/hits", by="me"))
    before = first.dump()

    plan = dead_letters.plan(store, TOPIC, MessageFilter(), fleet="default")

    assert first.dump() == before
    assert (plan.dead_letters, plan.replayed_before) == (2, 0)
    assert plan.refused == {
        "it was replayed 3 times or more already, and was dead-lettered again": 1,
        "its group no longer exists": 1,
    }
    [hits] = plan.receivers
    assert (hits.group, hits.dead_letters, hits.partitions, hits.owned, hits.paused) == (
        *("hits", 2, 2, 1, 1),
    )
    assert (hits.same_worker, hits.owners) == (1, ["west-1"])
    notes = "\n".join(plan.notes)
    assert "the worker that failed still runs on 1 of 2 partitions" in notes
    assert "no instance owns 1 of 2 partitions" in notes
    assert "1 of 2 partitions is paused" in notes
    assert "order of the key is not kept" in notes

    done = dead_letters.replay(store, TOPIC, MessageFilter(until_unix_ms=plan.until_unix_ms))
    assert done.replayed == plan.dead_letters
    assert done.refused == plan.refused


def test_replay_plan_within_a_budget_states_lower_bounds(
    store: Store, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 100)
    write_dead_letters(harness_at(1), 50, reason="dead")
    dead_only = MessageFilter(reason="dead")

    def plan(choice: MessageFilter = MATCH_ALL, **more: object) -> tuple[object, ...]:
        found = dead_letters.plan(store, TOPIC, choice, fleet="default", **more)  # type: ignore[arg-type]
        return found.dead_letters, found.examined, found.total, found.complete

    assert plan() == (150, 150, 150, True)
    assert plan(budget=150) == (150, 150, 150, True)
    assert plan(budget=60) == (60, 60, 150, False)
    assert plan(dead_only, budget=60) == (0, 60, 150, False)
    assert plan(dead_only) == (50, 150, 150, True)
    assert plan(stop=lambda: True) == (0, 0, 150, False)
    assert plan(limit=10, budget=60) == (10, 60, 150, True)


def test_count_within_a_budget_states_a_lower_bound(store: Store, harness_at: HarnessAt) -> None:
    write_dead_letters(harness_at(0), 100)
    write_dead_letters(harness_at(1), 50, reason="dead")
    dead_only = MessageFilter(reason="dead")

    assert dead_letters.count_within(store, TOPIC, MessageFilter(), budget=1) == (
        150,
        150,
        150,
        True,
    )
    assert dead_letters.count_within(store, TOPIC, dead_only, budget=149) == (0, 100, 150, False)
    assert dead_letters.count_within(store, TOPIC, dead_only) == (50, 150, 150, True)
    assert dead_letters.count_within(store, TOPIC, dead_only, stop=lambda: True) == (
        0,
        0,
        150,
        False,
    )


def test_survey_returns_causes_and_the_first_page(store: Store, harness_at: HarnessAt) -> None:
    write_dead_letters(harness_at(0), 100)
    write_dead_letters(harness_at(1), 50, reason="dead")
    every = dead_letters.messages

    def survey(
        limit: int, budget: int | None = None, reason: str | None = None
    ) -> tuple[dead_letters.Causes, list[str]]:
        choice = MessageFilter(reason=reason)
        causes, page = dead_letters.survey(store, TOPIC, choice, limit=limit, budget=budget)
        ids = [row.id for row in page.rows]
        while page.cursor:
            page = every(store, TOPIC).page(choice, limit=limit, cursor=page.cursor, budget=budget)
            ids += [row.id for row in page.rows]
        return causes, ids

    wanted = [row.id for row in every(store, TOPIC).page(limit=200).rows]
    for limit, budget in ((20, None), (200, None), (20, 33), (150, 150), (7, 150)):
        causes, ids = survey(limit, budget)
        assert ids == wanted
        assert causes.complete == (budget is None or budget >= 150)
        assert causes.examined == causes.looked_at == (budget or 150)
    causes, ids = survey(20, 60, "dead")
    assert (causes.examined, causes.looked_at, causes.complete) == (60, 5, False)
    assert sorted(ids) == sorted(f"1:{number}-0" for number in range(1, 51))
    late = dead_letters.survey(store, TOPIC, limit=20, stop=lambda: True)
    assert (late.causes.examined, len(late.page.rows)) == (64, 20), "the first batch is read"


def test_partition_in_the_filter_limits_plan_purge_and_replay(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    here, there = write_dead_letters(harness_at(0), 2), write_dead_letters(harness_at(1), 3)
    second = MessageFilter(partition=1)

    assert dead_letters.plan(store, TOPIC, second, fleet="default").dead_letters == 3
    assert dead_letters.count(store, TOPIC, second) == 3
    with pytest.raises(RequestRefusedError, match="does not match the filter"):
        dead_letters.count(store, TOPIC, MessageFilter((here[0],), partition=1))
    with pytest.raises(RequestRefusedError, match="partition 9"):
        dead_letters.count(store, TOPIC, MessageFilter(partition=9))
    assert dead_letters.replay(store, TOPIC, replace(second, until_unix_ms=3)).replayed == 2
    assert list_dead_letters(link, keys) == [*here, there[2]]
    assert dead_letters.purge(store, TOPIC, second).purged == 1
    assert list_dead_letters(link, keys) == here


def test_replay_reports_examined_dead_letters_and_can_stop(
    store: Store, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 100, reason="dead")
    write_dead_letters(harness_at(1), 5)
    examined: list[int] = []
    choice = MessageFilter(reason="attempts")

    stopped = dead_letters.replay(
        store, TOPIC, choice, stop=lambda: bool(examined), examining=examined.append
    )

    assert (stopped.result, stopped.replayed, sum(examined)) == ("stopped", 0, PAGE_MAX)
    dead_letters.purge(store, TOPIC, MessageFilter(group="none"), examining=examined.append)
    assert sum(examined) == PAGE_MAX + 105


def test_replay_plan_reports_workers_started_since(
    link: Connection, store: Store, harness_at: HarnessAt
) -> None:
    write_dead_letter(harness_at(0), "1-0")
    soon = server_unix_ms(link) + 60_000
    link.execute("HSET", harness_at(0).fence, "since", soon)

    plan = dead_letters.plan(store, TOPIC, MessageFilter(), fleet="default")

    assert plan.receivers[0].same_worker == 0
    assert "started, reloaded or moved after these failures" in plan.notes[0]
    all_groups = dead_letters.plan(
        store, TOPIC, MessageFilter(), fleet="default", target=Target(all_groups=True)
    )
    assert any("including groups that handled them before" in note for note in all_groups.notes)
    other = dead_letters.plan(
        store, TOPIC, MessageFilter(), fleet="default", target=Target(topic="other")
    )
    assert "no group reads the target" in other.notes[0]


# --- export, audit --------------------------------------------------------------------------------


def test_export_preserves_all_bytes(
    link: Connection, store: Store, keys: Keys, harness_at: HarnessAt
) -> None:
    odd = {
        b"payload": b"\x00\xff\n",
        b"key": b"\xfe",
        b"\xffname": b"v",
        b"headers": b'{"a":"\\u00e9"}',
    }
    harness_at(2).do(
        "XADD", harness_at(2).dlq, "5-1", *(part for pair in odd.items() for part in pair)
    )
    names = write_dead_letters(harness_at(0), 150)
    work = dead_letters.Export(store, TOPIC, MessageFilter())

    lines = list(work.lines())
    done = work.finish()

    told = [json.loads(line) for line in lines]
    assert all("\n" not in line for line in lines)
    assert [each["id"] for each in told] == [*names, "2:5-1"]
    assert parse_exported_fields(told[-1]) == odd
    assert told[-1]["fields"][0] == {
        "name": "payload",
        "value": {"base64": base64.b64encode(odd[b"payload"]).decode()},
    }
    assert list(parse_exported_fields(told[0])) == list(read_dead_letter(link, keys, 0, "1-0"))
    assert (done.exported, done.result, done.audited) == (151, "done", True)
    assert len(list_dead_letters(link, keys)) == 151


def read_dead_letter(
    link: Connection, keys: Keys, partition: int, entry_id: str
) -> dict[bytes, bytes]:
    [[_, flat]] = link.execute("XRANGE", keys.dlq(TOPIC, partition), entry_id, entry_id)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def test_export_raises_when_redis_fails(
    link: Connection, keys: Keys, harness_at: HarnessAt, proxy: FaultProxy, proxied_link: Connection
) -> None:
    write_dead_letters(harness_at(0), 250)
    proxy.arm(Fault.CUT_BEFORE, command="EVALSHA", nth=2)
    work = dead_letters.Export(Store(proxied_link, keys), TOPIC, MessageFilter())
    with pytest.raises(RedisUnavailableError):
        list(work.lines())


def test_every_command_is_in_the_audit_log(
    link: Connection, store: Store, harness_at: HarnessAt
) -> None:
    write_dead_letters(harness_at(0), 3)
    write_dead_letters(harness_at(1), 1, replayCount="3")
    before = server_unix_ms(link)
    dead_letters.Export(store, TOPIC, MessageFilter(key=b"\xff")).finish("to f")
    dead_letters.replay(store, TOPIC, MessageFilter(group="hits"))
    dead_letters.purge(store, TOPIC, MessageFilter(("1:1-0",)))

    seen = audit.page(store, TOPIC)

    purge, replay, export = seen.entries
    assert [each.command for each in seen.entries] == ["dlq purge", "dlq replay", "dlq export"]
    assert before <= export.at_unix_ms <= replay.at_unix_ms <= purge.at_unix_ms
    assert "@" in replay.who
    assert replay.arguments == {"group": "hits", "to": "the original group"}
    assert replay.counts == {"replayed": 3, "refused": 1}
    assert (replay.first_id, replay.last_id) == ("0:1-0", "0:3-0")
    assert replay.note == "1: it was replayed 3 times or more already, and was dead-lettered again"
    assert purge.arguments == {"dead_letter_ids": ["1:1-0"]}
    assert export.note == "to f"
    page = audit.page(store, TOPIC, limit=1)
    rest = audit.page(store, TOPIC, limit=5, cursor=page.cursor)
    assert [*page.entries, *rest.entries] == seen.entries
    assert rest.cursor == ""


def test_audit_log_is_bounded_and_reads_invalid_entries(
    link: Connection, store: Store, keys: Keys
) -> None:
    key = keys.audit("any")
    link.execute("XADD", key, "*", "arguments", "[1", "counts", '{"a":"b","c":2}')
    [odd] = audit.page(store, "any").entries
    assert (odd.command, odd.arguments, odd.counts) == ("", {"text": "[1"}, {"c": 2})
    audit.record(store, "any", "pause", arguments={"ids": ["x" * 5_000]})
    assert list(audit.page(store, "any", limit=1).entries[0].arguments) == ["cut"]

    link.pipeline([("XADD", key, "*", "command", "x")] * (audit.ENTRIES_MAX + 500))
    audit.record(store, "any", "pause")
    assert link.execute("XLEN", key) <= audit.ENTRIES_MAX + 100


def test_replay_reports_a_missing_audit_entry(
    link: Connection, keys: Keys, harness_at: HarnessAt, proxy: FaultProxy, proxied_link: Connection
) -> None:
    write_dead_letters(harness_at(0), 1)
    proxy.arm(Fault.CUT_BEFORE, command="XADD")
    done = dead_letters.replay(Store(proxied_link, keys), TOPIC, MessageFilter())
    assert (done.replayed, done.result, done.audited) == (1, "done", False)


def test_dead_letter_filter_lists_its_audit_arguments() -> None:
    assert MessageFilter().audit_arguments() == {}
    assert not MessageFilter().has_filters
    some = MessageFilter(key=b"\xff", headers=(("a", "b"),))
    assert some.audit_arguments() == {"key": "\\xff", "headers": {"a": "b"}}
    assert some.has_filters
    assert not replace(some, key=None, headers=()).has_filters


def test_dead_letter_pages_are_bounded(store: Store, harness_at: HarnessAt) -> None:
    write_dead_letters(harness_at(0), 450)
    alive = [len(page.dead_letters) for page in pages(store, TOPIC, MessageFilter(group="hits"))]
    assert max(alive) == PAGE_MAX
    assert sum(alive) == 450
