"""message_adopt: in-flight at foreign clients -> in-flight at streamqd, without an owner."""

from __future__ import annotations

from streamqd.store import adoption, leases
from streamqd.store.adoption import Adopted
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import Harness


def adopt(harness: Harness, source: str = "m", cursor: str = "0-0", count: int = 10) -> Call:
    return adoption.adopt(harness.keys, harness.assignment, source, cursor, count)


def run_adopt(harness: Harness, call: Call) -> Adopted:
    return Adopted.parse(Reply("OK", harness.expect("message_adopt", "OK", call)))


def add_pending(harness: Harness, consumer: str, *ids: str, stream: str = "") -> None:
    for entry_id in ids:
        harness.add(entry_id, stream=stream)
    harness.fetch(len(ids), consumer, stream)


def pending(harness: Harness, stream: str = "stream") -> dict[str, str]:
    return harness.state()[stream].groups["hits"][1]


def test_message_adopt_takes_entries_of_any_idle_time(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "celery-1", "1-0", "2-0")
    add_pending(harness, "celery-2", "3-0")
    harness.add("4-0")
    before = harness.state()
    assert run_adopt(harness, adopt(harness)) == ("0-0", 3)
    changes = harness.changes(before)
    assert list(changes) == ["stream"]
    assert changes["stream"].groups["hits"] == ("3-0", dict.fromkeys(("1-0", "2-0", "3-0"), "w"))


def test_message_adopt_continues_page_by_page(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "celery-1", *(f"{number}-0" for number in range(1, 8)))
    cursor, pages = "0-0", []
    while True:
        cursor, count = run_adopt(harness, adopt(harness, cursor=cursor, count=3))
        pages.append(count)
        if cursor == "0-0":
            break
    assert pages == [3, 3, 1]
    assert set(pending(harness).values()) == {"w"}


def test_message_adopt_takes_the_retry_stream(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "celery-1", "1-0", stream=harness.retry)
    assert run_adopt(harness, adopt(harness, "r")).entries == 1
    assert pending(harness, "retry") == {"1-0": "w"}


def test_message_adopt_refuses_an_owned_assignment(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "celery-1", "1-0")
    harness.own("t1", owner="east-1")
    assert harness.expect("message_adopt", "HELD", adopt(harness))[1] == b"east-1"
    harness.do("DEL", harness.lease)  # it may still be renewed
    harness.expect("message_adopt", "HELD", adopt(harness))
    harness.link.run(leases.release(harness.keys, harness.leased("t1")))
    assert run_adopt(harness, adopt(harness)).entries == 1


def test_message_adopt_reports_a_missing_group(harness: Harness) -> None:
    harness.expect_error("NOGROUP", adopt(harness))
