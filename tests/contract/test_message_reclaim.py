"""message_reclaim: in-flight at a foreign client -> in-flight at the owner."""

from __future__ import annotations

import pytest

from streamqd.store import messages
from streamqd.store.messages import BEGIN, Cursor, Reclaimed
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import Harness

LOOKED_MAX = 512  # the limit in the script


def reclaim(
    harness: Harness, source: str = "m", idle: float = 0.0, count: int = 10, page: Cursor = BEGIN
) -> Call:
    return messages.reclaim(harness.keys, harness.leased("t1"), "s1", source, idle, count, page)


def own(harness: Harness, token: str = "t1", session: str = "s1") -> None:
    harness.own(token)
    harness.do("HSET", harness.fence, "session", session)


def add_pending(harness: Harness, consumer: str, *ids: str, stream: str = "") -> None:
    for entry_id in ids:
        harness.add(entry_id, stream=stream)
    harness.fetch(len(ids), consumer, stream)


def add_many_pending(harness: Harness, consumer: str, count: int) -> None:
    """Give a consumer this many new pending entries, whose IDs are 1-1 and so on."""
    harness.link.pipeline(
        [("XADD", harness.stream, f"1-{n + 1}", "payload", "x") for n in range(count)]
    )
    harness.fetch(count, consumer)


def collect_pages(harness: Harness, idle: float, count: int = 10) -> list[Reclaimed]:
    """Call the script until it reports the end. Return the pages."""
    found = [run_reclaim(harness, reclaim(harness, idle=idle, count=count))]
    while found[-1].next:
        found.append(
            run_reclaim(harness, reclaim(harness, idle=idle, count=count, page=found[-1].next))
        )
    return found


def run_reclaim(harness: Harness, call: Call) -> Reclaimed:
    return Reclaimed.parse(Reply("OK", harness.expect("message_reclaim", "OK", call)))


def test_message_reclaim_takes_entries_of_other_clients(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "w", "1-0")
    add_pending(harness, "foreign-b", "2-0")
    add_pending(harness, "foreign-a", "3-0")
    own(harness)
    before = harness.state()
    found = run_reclaim(harness, reclaim(harness))
    assert found.missing_entries == 0
    assert sorted(found.entries) == [
        (b"2-0", [b"payload", b"body of 2-0"]),
        (b"3-0", [b"payload", b"body of 3-0"]),
    ]
    changed = harness.changes(before)
    assert list(changed) == ["stream"]
    assert changed["stream"].groups["hits"] == ("3-0", {"1-0": "w", "2-0": "w", "3-0": "w"})


def test_message_reclaim_leaves_entries_of_the_owner(harness: Harness) -> None:
    """Entries of the owner also count as idle, but stay, because a handler is working on them."""
    harness.pending("1-0")
    own(harness)
    before = harness.dump()
    assert run_reclaim(harness, reclaim(harness)) == ([], 0, None)
    assert harness.dump() == before


def test_message_reclaim_leaves_entries_that_are_not_idle(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "foreign", "1-0")
    own(harness)
    before = harness.dump()
    assert run_reclaim(harness, reclaim(harness, idle=600.0)) == ([], 0, None)
    assert harness.dump() == before


def test_message_reclaim_works_in_batches(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "foreign-a", "1-0", "2-0")
    add_pending(harness, "foreign-b", "3-0", "4-0")
    own(harness)
    assert len(run_reclaim(harness, reclaim(harness, count=3)).entries) == 3
    assert len(run_reclaim(harness, reclaim(harness, count=3)).entries) == 1
    assert run_reclaim(harness, reclaim(harness, count=3)) == ([], 0, None)


def test_message_reclaim_finds_an_idle_entry_after_fresh_pages(harness: Harness) -> None:
    """Later calls find the idle entry. One call that examined all would block the server."""
    harness.groups()
    add_many_pending(harness, "foreign-a", 3 * LOOKED_MAX)
    own(harness)
    last = f"1-{3 * LOOKED_MAX}"
    harness.do("XCLAIM", harness.stream, "hits", "foreign-a", 0, last, "IDLE", 700_000, "JUSTID")
    found = collect_pages(harness, idle=600.0)
    assert [page.next for page in found] == [
        (b"foreign-a", b"1-512"),
        (b"foreign-a", b"1-1024"),
        (b"foreign-a", last.encode()),
        None,
    ]
    assert [[entry for entry, _ in page.entries] for page in found] == [[], [], [last.encode()], []]


def test_message_reclaim_page_skips_the_owner(harness: Harness) -> None:
    harness.groups()
    for at, consumer in enumerate(("a", "w", "z")):
        for number in range(3):
            add_pending(harness, consumer, f"{3 * at + number + 1}-0")
    own(harness)
    found = collect_pages(harness, idle=0.0, count=2)
    assert [[entry for entry, _ in page.entries] for page in found] == [
        [b"1-0", b"2-0"],
        [b"3-0", b"7-0"],
        [b"8-0", b"9-0"],
    ]
    assert [page.next for page in found] == [(b"a", b"2-0"), (b"z", b"7-0"), None]


def test_message_reclaim_pages_over_many_consumers(harness: Harness) -> None:
    """Each page examines at least one entry of each consumer, and the pages come to an end."""
    harness.groups()
    count = LOOKED_MAX + 40
    harness.link.pipeline(
        [("XADD", harness.stream, f"{n + 1}-0", "payload", "x") for n in range(count)]
    )
    for number in range(count):
        harness.fetch(1, f"foreign-{number:03}")
    own(harness)
    assert [page.entries for page in collect_pages(harness, idle=600.0)] == [[], [], []]
    taken = [
        entry for page in collect_pages(harness, idle=0.0, count=256) for entry, _ in page.entries
    ]
    assert taken == [f"{n + 1}-0".encode() for n in range(count)]


def test_message_reclaim_stops_at_a_missing_consumer(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "foreign", "1-0")
    own(harness)
    gone = run_reclaim(harness, reclaim(harness, page=(b"deleted", b"1-0")))
    assert gone == ([], 0, None), "the next look begins anew"


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_message_reclaim_settles_missing_entries(harness: Harness, how: str) -> None:
    harness.groups()
    add_pending(harness, "foreign", "1-0", "2-0")
    if how == "trimmed":
        harness.do("XTRIM", harness.stream, "MINID", "2-0")
    else:
        harness.do("XDEL", harness.stream, "1-0")
    own(harness)
    found = run_reclaim(harness, reclaim(harness))
    assert [entry_id for entry_id, _ in found.entries] == [b"2-0"]
    assert found.missing_entries == 1
    assert harness.state()["stream"].groups["hits"] == ("2-0", {"2-0": "w"})


def test_message_reclaim_takes_retry_stream_entries(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "foreign", "1-0", stream=harness.retry)
    add_pending(harness, "foreign", "1-0")
    own(harness)
    found = run_reclaim(harness, reclaim(harness, "r"))
    assert [entry_id for entry_id, _ in found.entries] == [b"1-0"]
    assert harness.state()["retry"].groups["hits"] == ("1-0", {"1-0": "w"})
    assert harness.state()["stream"].groups["hits"] == ("1-0", {"1-0": "foreign"})


def test_message_reclaim_does_not_count_as_a_delivery(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "foreign", "1-0")
    own(harness)
    run_reclaim(harness, reclaim(harness))
    assert harness.do("XPENDING", harness.stream, "hits", "-", "+", 1)[0][3] == 1


def test_message_reclaim_refuses_another_token(harness: Harness) -> None:
    harness.groups()
    add_pending(harness, "foreign", "1-0")
    own(harness, "t2")
    harness.expect("message_reclaim", "FENCED", reclaim(harness))


def test_message_reclaim_refuses_another_session(harness: Harness) -> None:
    """A call from another session is refused.

    A late copy would take entries that no later listing finds, so they would be stuck.
    """
    harness.groups()
    add_pending(harness, "foreign", "1-0")
    own(harness, session="s2")
    harness.expect("message_reclaim", "SESSION", reclaim(harness))


def test_message_reclaim_reports_a_missing_group(harness: Harness) -> None:
    own(harness)
    harness.expect_error("NOGROUP", reclaim(harness))


# --- entries without a consumer -------------------------------------------------------------------


def release_to_no_consumer(harness: Harness, *ids: str) -> None:
    """Give entries to the consumer '', like XNACK of Redis 8.8, which no server here has."""
    harness.do("XCLAIM", harness.stream, "hits", "", 0, *ids, "JUSTID")


def test_message_reclaim_takes_entries_without_a_consumer(harness: Harness) -> None:
    """An entry without a consumer counts as idle, whatever its idle time. Our own entries stay."""
    harness.groups()
    add_pending(harness, "w", "1-0", "2-0", "3-0")
    release_to_no_consumer(harness, "2-0")
    own(harness)
    before = harness.state()
    found = collect_pages(harness, idle=3600)
    assert [entry[0] for each in found for entry in each.entries] == [b"2-0"]
    assert harness.changes(before)["stream"].groups["hits"][1] == dict.fromkeys(
        ("1-0", "2-0", "3-0"), "w"
    )
    assert [each.entries for each in collect_pages(harness, idle=3600)] == [[]]


def test_message_reclaim_finds_ownerless_entries_after_ours(harness: Harness) -> None:
    """A page examines a bounded number of entries, and the next page continues from there."""
    harness.groups()
    add_many_pending(harness, "w", 3 * LOOKED_MAX)
    release_to_no_consumer(harness, "1-5", f"1-{3 * LOOKED_MAX - 1}", f"1-{3 * LOOKED_MAX}")
    harness.do("XDEL", harness.stream, f"1-{3 * LOOKED_MAX}")
    add_pending(harness, "foreign", "2-0")
    own(harness)
    found = collect_pages(harness, idle=3600)
    taken = [entry[0].decode() for each in found for entry in each.entries]
    assert taken == ["1-5", f"1-{3 * LOOKED_MAX - 1}"]
    assert sum(each.missing_entries for each in found) == 1
    assert len(found) >= 3
    assert collect_pages(harness, idle=3600, count=1)[-1].next is None
