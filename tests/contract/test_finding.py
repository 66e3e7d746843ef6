"""message_find, dead_letters_measure and stream_page read streams, one page at a time."""

from __future__ import annotations

from streamqd.store import statistics, tracing
from streamqd.store.statistics import DeadLetterCount
from tests.contract.harness import Harness

NOTHING = DeadLetterCount()
GREATEST = "18446744073709551615-18446744073709551615"


def find(harness: Harness, begin: str = "0-1") -> tuple[list[tracing.Copy], str]:
    before = harness.dump()
    call = tracing.find(harness.dlq, "1-0", begin)
    harness.expect("message_find", "OK", call)
    found = tracing.parse_copies(harness.link.run(call))
    assert harness.dump() == before
    return found


def count(harness: Harness, known: DeadLetterCount = NOTHING) -> DeadLetterCount:
    before = harness.dump()
    topic, partition, _ = harness.assignment
    call = statistics.count_dead_letters(harness.keys, topic, partition, known)
    harness.expect("dead_letters_measure", "OK", call)
    found = statistics.merge_dead_letter_count(known, harness.link.run(call))
    assert harness.dump() == before
    return found


def write_dead_letters(harness: Harness, *letters: tuple[str, str]) -> None:
    for original, group in letters:
        harness.do("XADD", harness.dlq, "*", "payload", "p", "originalId", original, "group", group)


def test_message_find_returns_copies_without_bodies(harness: Harness) -> None:
    """All copies of a message are found by its first ID, and returned without their bodies."""
    assert find(harness) == ([], "")
    write_dead_letters(harness, ("1-0", "hits"), ("2-0", "hits"), ("1-0", "agents"))
    harness.do("XADD", harness.dlq, "*", "originalId", "1-0", "headers", "h", "traceback", "t")
    copies, after = find(harness)
    assert after == ""
    assert [each.fields for each in copies] == [
        {b"originalId": b"1-0", b"group": b"hits"},
        {b"originalId": b"1-0", b"group": b"agents"},
        {b"originalId": b"1-0"},
    ]
    assert find(harness, copies[-1].id)[0] == copies[-1:], "from an entry on, that entry included"


def test_send_is_found_by_its_send_id(harness: Harness) -> None:
    """The entry of an outbox is found without its body, and no other field matches."""
    harness.do("XADD", harness.dlq, "1-1", "payload", "p", "sendId", "1-0")
    harness.do("XADD", harness.dlq, "1-2", "payload", "p", "originalId", "1-0", "sendId", "a")
    copies, after = tracing.parse_copies(
        harness.link.run(tracing.find_send(harness.dlq, "1-0", "0-1"))
    )
    assert ([each.id for each in copies], after) == (["1-1"], "")
    assert copies[0].fields == {b"sendId": b"1-0"}
    assert tracing.parse_copies(harness.link.run(tracing.find_send(harness.dlq, "1-0", "1-2"))) == (
        [],
        "",
    )


def test_message_find_continues_at_its_cursor(harness: Harness) -> None:
    """One call examines a bounded number of entries and bytes.

    The next one continues at its cursor.
    """
    for number in range(2 * tracing.FIND_AT_ONCE):
        harness.do(
            "XADD", harness.dlq, f"{number + 1}-0", "originalId", "1-0" if number > 990 else "x"
        )
    copies, after = find(harness)
    assert copies == []
    assert int(after.partition("-")[0]) <= tracing.FIND_AT_ONCE + 8
    for _ in range(5):
        found, after = find(harness, after)
        copies += found
        if not after:
            break
    assert len(copies) == 9

    harness.do("DEL", harness.dlq)
    for _ in range(20):
        harness.do("XADD", harness.dlq, "*", "payload", b"x" * 200_000, "originalId", "1-0")
    copies, after = find(harness)
    assert len(copies) == 8
    assert after


def test_message_find_and_count_stop_at_the_greatest_id(harness: Harness) -> None:
    """Finding and counting stop at the greatest ID without an error, because nothing can follow."""
    for number in range(7):
        harness.do("XADD", harness.dlq, f"{number + 1}-0", "originalId", "1-0", "group", "hits")
    harness.do("XADD", harness.dlq, GREATEST, "originalId", "1-0", "group", "hits")
    copies, after = find(harness)
    assert (len(copies), after) == (8, "")
    known = count(harness)
    assert known.get("hits") == 8
    assert count(harness, known).get("hits") == 8


def test_stream_page_returns_entries_within_its_bounds(harness: Harness) -> None:
    """Rows, bounds and order are the same as those of XRANGE and XREVRANGE."""
    for number in range(1, 8):
        harness.add(f"{number}-0", "payload", str(number))

    def ids(first: str, last: str, count: int, *, newest: bool) -> tuple[list[str], int]:
        call = tracing.page(harness.stream, first, last, count, newest=newest)
        entries, more = harness.expect("stream_page", "OK", call)
        assert all(fields == [b"payload", entry_id[:-2]] for entry_id, fields in entries)
        return [entry_id.decode() for entry_id, _ in entries], more

    assert ids("-", "+", 3, newest=False) == (["1-0", "2-0", "3-0"], 1)
    assert ids("(3-0", "6-0", 9, newest=False) == (["4-0", "5-0", "6-0"], 0)
    assert ids("+", "-", 2, newest=True) == (["7-0", "6-0"], 1)
    assert ids("(2-0", "-", 9, newest=True) == (["1-0"], 0)
    harness.do("DEL", harness.stream)
    assert ids("-", "+", 3, newest=False) == ([], 0)


def test_dead_letters_are_counted_per_group_incrementally(harness: Harness) -> None:
    assert count(harness).get("hits") == 0
    write_dead_letters(harness, ("1-0", "hits"), ("1-0", "agents"), ("2-0", "hits"))
    harness.do("XADD", harness.dlq, "*", "payload", "of nobody")
    known = count(harness)
    assert [known.get(each) for each in ("hits", "agents", "")] == [2, 1, 1]
    write_dead_letters(harness, ("3-0", "agents"))
    assert count(harness, known).get("agents") == 2

    known = count(harness, known)
    first = harness.do("XRANGE", harness.dlq, "-", "+", "COUNT", 1)[0][0]
    harness.do("XDEL", harness.dlq, first)
    known = count(harness, known)
    assert known.get("hits") is None, "one has gone: they are counted from the beginning"
    assert count(harness, known).get("hits") == 1


def test_many_dead_letters_are_counted_over_several_calls(harness: Harness) -> None:
    """One call counts a bounded number of dead letters.

    The result is unknown until all of them are counted.
    """
    for at in range(0, statistics.DEAD_LETTERS_AT_ONCE + 100, 100):
        harness.link.pipeline(
            [("XADD", harness.dlq, f"{at + n + 1}-0", "group", "hits") for n in range(100)]
        )
    known = count(harness)
    assert known.get("hits") is None
    known = count(harness, known)
    assert known.get("hits") == statistics.DEAD_LETTERS_AT_ONCE + 100


def test_number_of_counted_groups_is_bounded(harness: Harness) -> None:
    """Foreign entries among the dead letters cost a bounded amount of work."""
    names = [(f"{n}-0", f"g{n}") for n in range(statistics.GROUPS_MAX + 1)]
    write_dead_letters(harness, *names)
    known = DeadLetterCount()
    for _ in range(8):
        known = count(harness, known)
        assert known.get("g1") is None
        assert len(known.by_group) <= statistics.GROUPS_MAX + statistics.DEAD_LETTERS_AT_ONCE
