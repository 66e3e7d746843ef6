"""message_reclaim: in-flight at a foreign client -> in-flight at the owner."""

from __future__ import annotations

import pytest

from streamqd.store import messages
from streamqd.store.messages import BEGIN, Cursor, Reclaimed
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk

LOOKED_MAX = 512  # the limit in the script


def reclaim(
    desk: Desk, source: str = "m", idle: float = 0.0, count: int = 10, page: Cursor = BEGIN
) -> Call:
    return messages.reclaim(desk.keys, desk.leased("t1"), "s1", source, idle, count, page)


def own(desk: Desk, token: str = "t1", session: str = "s1") -> None:
    desk.own(token)
    desk.do("HSET", desk.fence, "session", session)


def left_by(desk: Desk, consumer: str, *ids: str, stream: str = "") -> None:
    for entry_id in ids:
        desk.add(entry_id, stream=stream)
    desk.fetch(len(ids), consumer, stream)


def held_by(desk: Desk, consumer: str, count: int) -> None:
    """Give a consumer a number of new pending entries, 1-1 and so on."""
    desk.link.pipeline([("XADD", desk.stream, f"1-{n + 1}", "payload", "x") for n in range(count)])
    desk.fetch(count, consumer)


def pages(desk: Desk, idle: float, count: int = 10) -> list[Reclaimed]:
    """Call until the end. Return the pages."""
    found = [reclaimed(desk, reclaim(desk, idle=idle, count=count))]
    while found[-1].next:
        found.append(reclaimed(desk, reclaim(desk, idle=idle, count=count, page=found[-1].next)))
    return found


def reclaimed(desk: Desk, call: Call) -> Reclaimed:
    return Reclaimed.parse(Reply("OK", desk.expect("message_reclaim", "OK", call)))


def test_message_reclaim_takes_entries_of_other_clients(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "w", "1-0")
    left_by(desk, "foreign-b", "2-0")
    left_by(desk, "foreign-a", "3-0")
    own(desk)
    before = desk.state()
    found = reclaimed(desk, reclaim(desk))
    assert found.missing_entries == 0
    assert sorted(found.entries) == [
        (b"2-0", [b"payload", b"body of 2-0"]),
        (b"3-0", [b"payload", b"body of 3-0"]),
    ]
    changed = desk.changes(before)
    assert list(changed) == ["stream"]
    assert changed["stream"].groups["hits"] == ("3-0", {"1-0": "w", "2-0": "w", "3-0": "w"})


def test_leaves_the_owners_own_entries(desk: Desk) -> None:
    """T5: they are idle too, but a handler is working on them."""
    desk.pending("1-0")
    own(desk)
    before = desk.dump()
    assert reclaimed(desk, reclaim(desk)) == ([], 0, None)
    assert desk.dump() == before


def test_message_reclaim_leaves_entries_that_are_not_idle(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk)
    before = desk.dump()
    assert reclaimed(desk, reclaim(desk, idle=600.0)) == ([], 0, None)
    assert desk.dump() == before


def test_message_reclaim_works_in_batches(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign-a", "1-0", "2-0")
    left_by(desk, "foreign-b", "3-0", "4-0")
    own(desk)
    assert len(reclaimed(desk, reclaim(desk, count=3)).entries) == 3
    assert len(reclaimed(desk, reclaim(desk, count=3)).entries) == 1
    assert reclaimed(desk, reclaim(desk, count=3)) == ([], 0, None)


def test_message_reclaim_finds_an_idle_entry_after_fresh_pages(desk: Desk) -> None:
    """Looking at all of them at once would block the server."""
    desk.groups()
    held_by(desk, "foreign-a", 3 * LOOKED_MAX)
    own(desk)
    last = f"1-{3 * LOOKED_MAX}"
    desk.do("XCLAIM", desk.stream, "hits", "foreign-a", 0, last, "IDLE", 700_000, "JUSTID")
    found = pages(desk, idle=600.0)
    assert [page.next for page in found] == [
        (b"foreign-a", b"1-512"),
        (b"foreign-a", b"1-1024"),
        (b"foreign-a", last.encode()),
        None,
    ]
    assert [[entry for entry, _ in page.entries] for page in found] == [[], [], [last.encode()], []]


def test_message_reclaim_page_skips_the_owner(desk: Desk) -> None:
    desk.groups()
    for at, consumer in enumerate(("a", "w", "z")):
        for number in range(3):
            left_by(desk, consumer, f"{3 * at + number + 1}-0")
    own(desk)
    found = pages(desk, idle=0.0, count=2)
    assert [[entry for entry, _ in page.entries] for page in found] == [
        [b"1-0", b"2-0"],
        [b"3-0", b"7-0"],
        [b"8-0", b"9-0"],
    ]
    assert [page.next for page in found] == [(b"a", b"2-0"), (b"z", b"7-0"), None]


def test_many_consumers_make_several_pages(desk: Desk) -> None:
    """At least one entry of each is examined, and the pages come to an end."""
    desk.groups()
    count = LOOKED_MAX + 40
    desk.link.pipeline([("XADD", desk.stream, f"{n + 1}-0", "payload", "x") for n in range(count)])
    for number in range(count):
        desk.fetch(1, f"foreign-{number:03}")
    own(desk)
    assert [page.entries for page in pages(desk, idle=600.0)] == [[], [], []]
    taken = [entry for page in pages(desk, idle=0.0, count=256) for entry, _ in page.entries]
    assert taken == [f"{n + 1}-0".encode() for n in range(count)]


def test_message_reclaim_stops_at_a_missing_consumer(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk)
    gone = reclaimed(desk, reclaim(desk, page=(b"deleted", b"1-0")))
    assert gone == ([], 0, None), "the next look begins anew"


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_message_reclaim_settles_missing_entries(desk: Desk, how: str) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0", "2-0")
    if how == "trimmed":
        desk.do("XTRIM", desk.stream, "MINID", "2-0")
    else:
        desk.do("XDEL", desk.stream, "1-0")
    own(desk)
    found = reclaimed(desk, reclaim(desk))
    assert [entry_id for entry_id, _ in found.entries] == [b"2-0"]
    assert found.missing_entries == 1
    assert desk.state()["stream"].groups["hits"] == ("2-0", {"2-0": "w"})


def test_takes_from_the_retry_stream(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0", stream=desk.retry)
    left_by(desk, "foreign", "1-0")
    own(desk)
    found = reclaimed(desk, reclaim(desk, "r"))
    assert [entry_id for entry_id, _ in found.entries] == [b"1-0"]
    assert desk.state()["retry"].groups["hits"] == ("1-0", {"1-0": "w"})
    assert desk.state()["stream"].groups["hits"] == ("1-0", {"1-0": "foreign"})


def test_does_not_count_as_a_delivery(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk)
    reclaimed(desk, reclaim(desk))
    assert desk.do("XPENDING", desk.stream, "hits", "-", "+", 1)[0][3] == 1


def test_message_reclaim_refuses_another_token(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk, "t2")
    desk.expect("message_reclaim", "FENCED", reclaim(desk))


def test_message_reclaim_refuses_another_session(desk: Desk) -> None:
    """A late copy would take entries that no listing finds any more, so they would be stuck."""
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk, session="s2")
    desk.expect("message_reclaim", "SESSION", reclaim(desk))


def test_message_reclaim_reports_a_missing_group(desk: Desk) -> None:
    own(desk)
    desk.expect_error("NOGROUP", reclaim(desk))


# --- entries without a consumer -------------------------------------------------------------------


def give_up(desk: Desk, *ids: str) -> None:
    """Give entries to the consumer '', as XNACK of Redis 8.8 does (no server here has that)."""
    desk.do("XCLAIM", desk.stream, "hits", "", 0, *ids, "JUSTID")


def test_message_reclaim_takes_entries_without_a_consumer(desk: Desk) -> None:
    """S11: such an entry counts as idle regardless of its idle time, and our own entries stay."""
    desk.groups()
    left_by(desk, "w", "1-0", "2-0", "3-0")
    give_up(desk, "2-0")
    own(desk)
    before = desk.state()
    found = pages(desk, idle=3600)
    assert [entry[0] for each in found for entry in each.entries] == [b"2-0"]
    assert desk.changes(before)["stream"].groups["hits"][1] == dict.fromkeys(
        ("1-0", "2-0", "3-0"), "w"
    )
    assert [each.entries for each in pages(desk, idle=3600)] == [[]]


def test_message_reclaim_finds_ownerless_entries_after_ours(desk: Desk) -> None:
    """S11: a page examines a bounded number of entries, and the next page continues there."""
    desk.groups()
    held_by(desk, "w", 3 * LOOKED_MAX)
    give_up(desk, "1-5", f"1-{3 * LOOKED_MAX - 1}", f"1-{3 * LOOKED_MAX}")
    desk.do("XDEL", desk.stream, f"1-{3 * LOOKED_MAX}")
    left_by(desk, "foreign", "2-0")
    own(desk)
    found = pages(desk, idle=3600)
    taken = [entry[0].decode() for each in found for entry in each.entries]
    assert taken == ["1-5", f"1-{3 * LOOKED_MAX - 1}"]
    assert sum(each.missing_entries for each in found) == 1
    assert len(found) >= 3
    assert pages(desk, idle=3600, count=1)[-1].next is None
