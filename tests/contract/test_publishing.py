"""message_publish: nothing -> ready; message_schedule: nothing -> delayed for every group."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import publishing
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.desk import Desk, Stream

FIELDS = [b"payload", b"\x00\xff\r\n", b"key", b"k"]
BODY = {"payload": b"\x00\xff\r\n", "key": b"k"}


def publish(desk: Desk, dedup_id: str = "order-1", max_backlog: int | None = None) -> Call:
    return publishing.publish(desk.keys, "access", 0, FIELDS, dedup_id, 60.0, max_backlog)


def schedule(desk: Desk, send_id: str = "send-1", dedup_id: str = "") -> Call:
    return publishing.schedule(desk.keys, "access", 0, 30.0, send_id, FIELDS, dedup_id, 60.0)


def test_writes_and_remembers(desk: Desk) -> None:
    entry_id = desk.expect("message_publish", "OK", publish(desk))[0]
    dedup = desk.keys.dedup("access", 0, "order-1")
    assert desk.state() == {"stream": Stream({entry_id.decode(): BODY}, {}), dedup: entry_id}
    assert 59_000 < desk.do("PTTL", dedup) <= 60_000


def test_the_same_dedup_id_is_written_once(desk: Desk) -> None:
    entry_id = desk.expect("message_publish", "OK", publish(desk))[0]
    assert desk.expect("message_publish", "DUP", publish(desk)) == [entry_id]
    desk.expect("message_publish", "OK", publish(desk, "order-2"))


def test_forgets_when_the_window_ends(desk: Desk) -> None:
    desk.expect("message_publish", "OK", publish(desk))
    desk.do("DEL", desk.keys.dedup("access", 0, "order-1"))
    desk.expect("message_publish", "OK", publish(desk))
    assert len(desk.state()["stream"].entries) == 2


def test_refuses_when_too_many_wait(desk: Desk) -> None:
    desk.do("HSET", desk.trim, "backlog", 10)
    assert desk.expect("message_publish", "FULL", publish(desk, max_backlog=10)) == [10]
    desk.expect("message_publish", "OK", publish(desk, max_backlog=11))
    desk.expect("message_publish", "DUP", publish(desk, max_backlog=10))


def test_an_unknown_backlog_is_none(desk: Desk) -> None:
    desk.expect("message_publish", "OK", publish(desk, "", max_backlog=1))
    assert len(desk.state()["stream"].entries) == 1


def test_without_a_dedup_id_each_is_written(desk: Desk) -> None:
    for _ in range(2):
        desk.expect("message_publish", "OK", publish(desk, ""))
    state = desk.state()
    assert list(state) == ["stream"]
    assert list(state["stream"].entries.values()) == [BODY, BODY]


def test_names_no_key_that_it_does_not_need(desk: Desk) -> None:
    assert publish(desk, "").argv[:3] == (desk.stream,) * 3
    dedup = desk.keys.dedup("access", 0, "order-1")
    assert publish(desk).argv[:3] == (desk.stream, dedup, desk.stream)
    assert publish(desk, "", 5).argv[:3] == (desk.stream, desk.stream, desk.trim)


def test_schedules(desk: Desk) -> None:
    with desk.instant() as now:
        due = int(desk.expect("message_schedule", "OK", schedule(desk))[0])
    assert now + 30_000 == due
    state = desk.state()
    assert now == state["scheduled_items"]["send-1"].pop("sentAt")
    assert state == {"scheduled": {"send-1": due}, "scheduled_items": {"send-1": BODY}}


def test_the_same_send_again_is_scheduled_once(desk: Desk) -> None:
    due = desk.expect("message_schedule", "OK", schedule(desk))
    before = desk.dump()
    assert desk.expect("message_schedule", "OK", schedule(desk)) == due
    assert desk.dump() == before


def test_without_a_dedup_id_each_is_scheduled(desk: Desk) -> None:
    for send_id in ("send-1", "send-2"):
        desk.expect("message_schedule", "OK", schedule(desk, send_id))
    state = desk.state()
    assert sorted(state) == ["scheduled", "scheduled_items"]
    assert sorted(state["scheduled"]) == sorted(state["scheduled_items"]) == ["send-1", "send-2"]


def test_a_dedup_id_is_scheduled_once(desk: Desk) -> None:
    due = desk.expect("message_schedule", "OK", schedule(desk, "send-1", "order-1"))
    dedup = desk.keys.dedup("access", 0, "order-1")
    assert desk.state()[dedup] == b"send-1"
    assert 59_000 < desk.do("PTTL", dedup) <= 60_000
    assert desk.expect("message_schedule", "DUP", schedule(desk, "send-2", "order-1")) == [
        b"send-1"
    ]
    # A repetition of the very same send is told when it is due, not that it was late.
    assert desk.expect("message_schedule", "OK", schedule(desk, "send-1", "order-1")) == due


def test_a_dedup_id_holds_for_sends_and_scheduled_sends_together(desk: Desk) -> None:
    entry_id = desk.expect("message_publish", "OK", publish(desk))[0]
    assert desk.expect("message_schedule", "DUP", schedule(desk, "s", "order-1")) == [entry_id]


def test_what_cannot_be_sent_is_refused_here() -> None:
    keys = Keys()
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [b"payload"])
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, [])
    with pytest.raises(ContractError):
        publishing.publish(keys, "access", 0, FIELDS, "order-1", 0.0)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, 1.0, "", FIELDS)
    with pytest.raises(ContractError):
        publishing.schedule(keys, "access", 0, -1.0, "send-1", FIELDS)
