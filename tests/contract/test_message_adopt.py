"""message_adopt: in-flight at foreign clients -> in-flight at streamqd, without an owner."""

from __future__ import annotations

from streamqd.store import adoption, leases
from streamqd.store.adoption import Adopted
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk


def adopt(desk: Desk, source: str = "m", cursor: str = "0-0", count: int = 10) -> Call:
    return adoption.adopt(desk.keys, desk.unit, source, cursor, count)


def adopted(desk: Desk, call: Call) -> Adopted:
    return Adopted.parse(Reply("OK", desk.expect("message_adopt", "OK", call)))


def read_by(desk: Desk, consumer: str, *ids: str, stream: str = "") -> None:
    for entry_id in ids:
        desk.add(entry_id, stream=stream)
    desk.fetch(len(ids), consumer, stream)


def pending(desk: Desk, stream: str = "stream") -> dict[str, str]:
    return desk.state()[stream].groups["hits"][1]


def test_message_adopt_takes_entries_of_any_idle_time(desk: Desk) -> None:
    desk.groups()
    read_by(desk, "celery-1", "1-0", "2-0")
    read_by(desk, "celery-2", "3-0")
    desk.add("4-0")
    before = desk.state()
    assert adopted(desk, adopt(desk)) == ("0-0", 3)
    changes = desk.changes(before)
    assert list(changes) == ["stream"]
    assert changes["stream"].groups["hits"] == ("3-0", dict.fromkeys(("1-0", "2-0", "3-0"), "w"))


def test_message_adopt_continues_page_by_page(desk: Desk) -> None:
    desk.groups()
    read_by(desk, "celery-1", *(f"{number}-0" for number in range(1, 8)))
    cursor, pages = "0-0", []
    while True:
        cursor, count = adopted(desk, adopt(desk, cursor=cursor, count=3))
        pages.append(count)
        if cursor == "0-0":
            break
    assert pages == [3, 3, 1]
    assert set(pending(desk).values()) == {"w"}


def test_message_adopt_takes_the_retry_stream(desk: Desk) -> None:
    desk.groups()
    read_by(desk, "celery-1", "1-0", stream=desk.retry)
    assert adopted(desk, adopt(desk, "r")).entries == 1
    assert pending(desk, "retry") == {"1-0": "w"}


def test_message_adopt_refuses_an_owned_unit(desk: Desk) -> None:
    desk.groups()
    read_by(desk, "celery-1", "1-0")
    desk.own("t1", owner="east-1")
    assert desk.expect("message_adopt", "HELD", adopt(desk))[1] == b"east-1"
    desk.do("DEL", desk.lease)  # it may still be renewed
    desk.expect("message_adopt", "HELD", adopt(desk))
    desk.link.run(leases.release(desk.keys, desk.leased("t1")))
    assert adopted(desk, adopt(desk)).entries == 1


def test_message_adopt_reports_a_missing_group(desk: Desk) -> None:
    desk.expect_error("NOGROUP", adopt(desk))
