"""A schedule script either writes a tick and advances the due time, or does neither."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamqd.model import Assignment
from streamqd.store import messages
from streamqd.store import schedules as calls
from streamqd.store.schedules import FILE, OPERATOR, ORPHAN_MS, ORPHANED, PAUSED, DueTick
from streamqd.store.scripts import Call
from tests.contract.harness import Harness
from tests.contract.scenarios import TICK, store_schedule, tick

PLACE = ("access", 0)


def due_ticks(harness: Harness) -> dict[str, int]:
    return harness.state().get(harness.keys.schedules_due(*PLACE), {})


def last(harness: Harness, part: str) -> bytes | None:
    found: bytes | None = harness.do("HGET", harness.keys.schedules_last(*PLACE), f"tick:{part}")
    return found


def field(harness: Harness, part: str) -> bytes | None:
    found: bytes | None = harness.do("HGET", harness.keys.schedules(*PLACE), f"tick:{part}")
    return found


def entries(harness: Harness) -> list[dict[str, bytes]]:
    found = harness.state().get("stream")
    return list(found.entries.values()) if found else []


def fire(
    harness: Harness, *ticks: DueTick, group: str = "", partitions: int | None = None
) -> list[str]:
    """Fire, and return the words. Check that a refused tick has written nothing."""
    before = harness.dump()
    call = calls.fire(harness.keys, PLACE, ticks, group=group, partitions=partitions)
    words, _now = harness.expect("schedule_fire", "OK", call)
    told = [each.decode() for each in words]
    if not {"FIRED", "SKIPPED", "SENT", "OVERLAP"} & {*told}:
        assert harness.dump() == before
    return told


def declare(harness: Harness, digest: str = "h1", **changed: object) -> Call:
    given: dict[str, object] = {"origin": FILE, "since_unix_ms": 1, "next_unix_ms": TICK}
    return calls.declare(harness.keys, PLACE, "tick", digest, "{}", **{**given, **changed})  # type: ignore[arg-type]


# --- firing ---------------------------------------------------------------------------------------


def test_schedule_fire_writes_a_tick_and_advances(harness: Harness) -> None:
    store_schedule(harness)
    assert fire(harness, tick()) == ["FIRED"]
    assert entries(harness) == [{"payload": b"x"}]
    assert due_ticks(harness) == {"tick": TICK + 1_000}
    assert last(harness, "tick") == str(TICK).encode()
    assert last(harness, "fired") == b"1"
    assert int(last(harness, "late") or 0) > 0


def test_schedule_fire_repeated_fires_once(harness: Harness) -> None:
    store_schedule(harness)
    assert fire(harness, tick()) == ["FIRED"]
    assert fire(harness, tick()) == ["STALE"]
    assert len(entries(harness)) == 1


@pytest.mark.parametrize("later", [0, 1_000])
def test_schedule_fire_does_not_repeat_a_sent_tick(harness: Harness, later: int) -> None:
    """An edit computed the due time before the tick was sent, and writes it only afterwards.

    The tick is not repeated.
    """
    store_schedule(harness)
    assert fire(harness, tick(TICK, TICK + 5_000)) == ["FIRED"]
    harness.do("HSET", harness.keys.schedules_last(*PLACE), "tick:tick", TICK + later)
    harness.link.run(declare(harness, "h2", since_unix_ms=2, next_unix_ms=TICK))
    again = tick(hash="h2", skipped=3)
    assert fire(harness, again, tick(TICK + 1_000, TICK + 2_000, hash="h2")) == [
        "SENT",
        "SENT" if later else "FIRED",
    ]
    assert len(entries(harness)) == (1 if later else 2)
    assert (due_ticks(harness), last(harness, "skipped")) == ({"tick": TICK + 2_000}, b"3")


@pytest.mark.parametrize("sent", ["", "soon", "-5", "1e300"])
def test_schedule_fire_ignores_an_invalid_last_tick(harness: Harness, sent: str) -> None:
    store_schedule(harness)
    harness.do("HSET", harness.keys.schedules_last(*PLACE), "tick:tick", sent)
    assert fire(harness, tick()) == ["FIRED"]


def test_schedule_fire_of_the_last_tick_leaves_nothing_due(harness: Harness) -> None:
    store_schedule(harness)
    assert fire(harness, tick(following=None), tick()) == ["FIRED", "STALE"]
    assert due_ticks(harness) == {}
    assert field(harness, "hash") == b"h1"


def test_schedule_fire_fires_consecutive_ticks(harness: Harness) -> None:
    store_schedule(harness)
    chain = [tick(TICK + at * 1_000, TICK + (at + 1) * 1_000) for at in range(3)]
    assert fire(harness, *chain) == ["FIRED"] * 3
    assert due_ticks(harness) == {"tick": TICK + 3_000}
    assert last(harness, "fired") == b"3"


def test_schedule_fire_stops_at_a_gap_between_ticks(harness: Harness) -> None:
    store_schedule(harness)
    chain = [tick(), tick(TICK + 2_000, TICK + 3_000)]
    assert fire(harness, *chain) == ["FIRED", "STALE"]


def test_schedule_fire_counts_a_skipped_tick(harness: Harness) -> None:
    store_schedule(harness)
    assert fire(harness, tick(tick=None, skipped=20, fields=[])) == ["SKIPPED"]
    assert entries(harness) == []
    assert last(harness, "skipped") == b"20"
    assert due_ticks(harness) == {"tick": TICK + 1_000}


def test_schedule_fire_refuses_another_specification(harness: Harness) -> None:
    store_schedule(harness)
    assert fire(harness, tick(hash="h2")) == ["CHANGED"]


def test_schedule_fire_uses_the_server_clock(harness: Harness) -> None:
    """The script uses the server's clock, so a host whose clock runs ahead fires nothing early."""
    at = harness.now_unix_ms() + 60_000
    store_schedule(harness, at)
    assert fire(harness, tick(at, at + 1_000)) == ["EARLY"]


def test_schedule_fire_refuses_an_orphan(harness: Harness) -> None:
    store_schedule(harness)
    seen = harness.now_unix_ms() - ORPHAN_MS - 1
    harness.do("HSET", harness.keys.schedules(*PLACE), "tick:seen", seen)
    assert fire(harness, tick()) == ["ORPHANED"]


def test_schedule_added_by_an_operator_is_never_orphaned(harness: Harness) -> None:
    store_schedule(harness, origin=OPERATOR)
    assert field(harness, "seen") is None
    assert fire(harness, tick()) == ["FIRED"]


@pytest.mark.parametrize("count", ["4", None])
def test_schedule_fire_refuses_a_changed_partition_count(
    harness: Harness, count: str | None
) -> None:
    store_schedule(harness)
    if count:
        harness.do("HSET", harness.keys.meta("access"), "partitionCount", count)
    call = calls.fire(harness.keys, PLACE, [tick()], partitions=3)
    assert harness.expect("schedule_fire", "MOVED", call) == [(count or "0").encode()]


def test_schedule_fire_accepts_the_expected_partition_count(harness: Harness) -> None:
    store_schedule(harness)
    harness.do("HSET", harness.keys.meta("access"), "partitionCount", "3")
    assert fire(harness, tick(), partitions=3) == ["FIRED"]


@pytest.mark.parametrize("score", ["inf", "-inf", "1.5", "9007199254740993"])
def test_schedule_fire_refuses_an_invalid_due_time(harness: Harness, score: str) -> None:
    store_schedule(harness)
    harness.do("ZADD", harness.keys.schedules_due(*PLACE), score, "tick")
    assert fire(harness, tick()) == ["STALE"]


@pytest.mark.parametrize("seen", ["", "soon", "-5", "1e300"])
def test_schedule_fire_treats_an_invalid_stamp_as_old(harness: Harness, seen: str) -> None:
    store_schedule(harness)
    harness.do("HSET", harness.keys.schedules(*PLACE), "tick:seen", seen)
    assert fire(harness, tick()) == ["ORPHANED"]


def test_schedule_fire_restarts_invalid_counts(harness: Harness) -> None:
    store_schedule(harness)
    harness.do(
        "HSET", harness.keys.schedules_last(*PLACE), "tick:fired", "many", "tick:skipped", "x"
    )
    assert fire(harness, tick(skipped=2)) == ["FIRED"]
    assert (last(harness, "fired"), last(harness, "skipped")) == (b"1", b"2")


def test_schedule_fire_answers_each_tick_separately(harness: Harness) -> None:
    """If one call fires several schedules, each of them gets its own answer."""
    at = harness.now_unix_ms() + 60_000
    place = PLACE
    for name in ("a", "b", "c", "d", "e", "f", "g", "h"):
        call = calls.declare(
            harness.keys, place, name, "h1", "{}", origin=FILE, since_unix_ms=1, next_unix_ms=TICK
        )
        harness.link.run(call)
    harness.groups()
    table, scores = harness.keys.schedules(*place), harness.keys.schedules_due(*place)
    harness.do("HSET", table, "d:hash", "h2", "f:seen", "1")
    harness.do("ZADD", scores, at, "e", TICK + 1, "c")
    harness.do("HSET", harness.keys.schedules_last(*place), "g:id", harness.add("5-0").decode()[2:])
    harness.do("HSET", harness.keys.schedules_last(*place), "h:tick", TICK)
    ticks = [tick(name=name) for name in ("a", "b", "c", "d", "e", "f", "g", "h")]
    ticks[1] = ticks[1]._replace(tick=None, fields=[])
    ticks[4] = ticks[4]._replace(due_unix_ms=at)
    harness.expect_words(
        "schedule_fire",
        ["FIRED", "SKIPPED", "STALE", "CHANGED", "EARLY", "ORPHANED", "OVERLAP", "SENT"],
        calls.fire(harness.keys, place, ticks, group="hits"),
    )


# --- overlap --------------------------------------------------------------------------------------


def fire_message(harness: Harness, *, read: bool) -> str:
    """Fire a message that the group then reads, or not. Return its ID."""
    store_schedule(harness)
    harness.groups()
    assert fire(harness, tick(), group="hits") == ["FIRED"]
    if read:
        assert len(harness.fetch()) == 1
    return (last(harness, "id") or b"").decode()


SECOND = tick(TICK + 1_000, TICK + 2_000)


@pytest.mark.parametrize("read", [False, True])
def test_overlap_skips_a_tick_while_a_message_is_unfinished(harness: Harness, read: bool) -> None:
    fire_message(harness, read=read)
    assert fire(harness, SECOND, group="hits") == ["OVERLAP"]
    assert last(harness, "skipped") == b"1"
    assert due_ticks(harness) == {"tick": TICK + 2_000}
    assert len(entries(harness)) == 1


def test_overlap_allows_a_tick_after_a_finished_message(harness: Harness) -> None:
    done = fire_message(harness, read=True)
    harness.do("XACK", harness.stream, "hits", done)
    assert fire(harness, SECOND, group="hits") == ["FIRED"]


def test_overlap_waits_for_a_delayed_retry(harness: Harness) -> None:
    entry = fire_message(harness, read=True)
    harness.own()
    settle_retry(harness, [f"m:{entry}"], entry)
    assert fire(harness, SECOND, group="hits") == ["OVERLAP"]


def test_overlap_waits_for_a_copy_in_the_retry_stream(harness: Harness) -> None:
    """The overlap lasts until the copy is acknowledged.

    Before that, it may be unread, pending or delayed.
    """
    entry = fire_message(harness, read=True)
    harness.own()
    settle_retry(harness, [f"m:{entry}"], entry)
    due_at, words = TICK + 1_000, []

    def again() -> None:
        nonlocal due_at
        words.extend(fire(harness, tick(due_at, due_at + 1_000), group="hits"))
        due_at += 1_000

    harness.link.run(messages.promote_retries(harness.keys, harness.assignment, 10))
    again()
    [copy] = harness.fetch(stream=harness.retry)
    again()
    settle_retry(harness, [f"r:{copy.decode()}"], entry)
    again()
    harness.link.run(messages.promote_retries(harness.keys, harness.assignment, 10))
    [copy] = harness.fetch(stream=harness.retry)
    harness.do("XACK", harness.retry, "hits", copy)
    again()
    assert words == ["OVERLAP", "OVERLAP", "OVERLAP", "FIRED"]


def settle_retry(harness: Harness, places: Sequence[str], original: str) -> None:
    changed = {b"originalId": original.encode(), b"retryCount": b"1"}
    entries_ = [(place.encode(), 0.0, changed) for place in places]
    harness.link.run(messages.retry(harness.keys, harness.leased("t1"), entries_))


@pytest.mark.parametrize("group", ["hits", "none-of-that-name"])
def test_overlap_ignores_a_missing_group(harness: Harness, group: str) -> None:
    store_schedule(harness)
    assert fire(harness, tick(), group=group) == ["FIRED"]
    assert fire(harness, SECOND, group=group) == ["FIRED"]


def test_overlap_treats_a_trimmed_message_as_finished(harness: Harness) -> None:
    fire_message(harness, read=False)
    harness.do("XTRIM", harness.stream, "MAXLEN", 0)
    assert fire(harness, SECOND, group="hits") == ["FIRED"]


def test_overlap_applies_to_ticks_of_one_call(harness: Harness) -> None:
    store_schedule(harness)
    harness.groups()
    assert fire(harness, tick(), SECOND, group="hits") == ["FIRED", "OVERLAP"]


def test_overlap_ignores_an_invalid_id(harness: Harness) -> None:
    store_schedule(harness)
    harness.groups()
    harness.do("HSET", harness.keys.schedules_last(*PLACE), "tick:id", "- + x")
    assert fire(harness, tick(), group="hits") == ["FIRED"]


# --- pages ----------------------------------------------------------------------------------------


def test_schedule_page_has_due_ticks_and_the_next_due_time(harness: Harness) -> None:
    store_schedule(harness)
    later = harness.now_unix_ms() + 60_000
    harness.do(
        "ZADD", harness.keys.schedules_due(*PLACE), later, "later", TICK - 1, "no specification"
    )
    with harness.instant() as now:
        rest = harness.expect("schedule_page", "OK", calls.page(harness.keys, PLACE, 10))
    assert now == int(rest[0])
    assert rest[1] == [
        *(b"no specification", str(TICK - 1).encode(), b""),
        *(b"tick", str(TICK).encode(), b"h1"),
    ]
    assert rest[2] == str(later).encode()


def test_schedule_page_of_an_empty_partition_is_empty(harness: Harness) -> None:
    assert harness.expect("schedule_page", "OK", calls.page(harness.keys, PLACE, 10))[1:] == [
        [],
        b"",
    ]


# --- declaring ------------------------------------------------------------------------------------


def test_schedule_declare_makes_a_new_schedule_due(harness: Harness) -> None:
    with harness.instant() as now:
        harness.expect("schedule_declare", "ADDED", declare(harness))
    assert due_ticks(harness) == {"tick": TICK}
    assert field(harness, "origin") == b"file"
    assert now == int(field(harness, "seen") or 0)


def test_schedule_declare_repeated_changes_nothing(harness: Harness) -> None:
    store_schedule(harness)
    call = declare(harness, next_unix_ms=TICK + 5, since_unix_ms=99)
    harness.expect("schedule_declare", "SAME", call)


def test_schedule_declare_by_a_later_file_replaces(harness: Harness) -> None:
    store_schedule(harness)
    call = declare(harness, "h2", since_unix_ms=2, next_unix_ms=TICK + 5)
    harness.expect("schedule_declare", "REPLACED", call)
    assert (field(harness, "hash"), due_ticks(harness)) == (b"h2", {"tick": TICK + 5})


def test_schedule_declare_by_an_earlier_file_is_refused(harness: Harness) -> None:
    store_schedule(harness)
    call = declare(harness, "h2")
    assert harness.expect("schedule_declare", "OTHER", call) == [b"h1"]


def test_schedule_declare_replaces_a_rolled_back_release(harness: Harness) -> None:
    """A rollback replaces the later release, although its own file was read earlier.

    No instance declares the later release at this time.
    """
    store_schedule(harness)
    old = harness.now_unix_ms() - calls.TAKEOVER_MS - 1
    harness.do("HSET", harness.keys.schedules(*PLACE), "tick:seen", old)
    harness.expect("schedule_declare", "REPLACED", declare(harness, "h2", since_unix_ms=0))


def test_schedule_declare_keeps_an_operators_schedule(harness: Harness) -> None:
    store_schedule(harness, origin=OPERATOR)
    harness.expect("schedule_declare", "OPERATOR", declare(harness, "h2", since_unix_ms=99))


def test_schedule_declare_with_force_replaces(harness: Harness) -> None:
    store_schedule(harness, origin=OPERATOR)
    call = declare(harness, "h2", origin=OPERATOR, force=True, next_unix_ms=None)
    harness.expect("schedule_declare", "REPLACED", call)
    assert due_ticks(harness) == {}


def test_schedule_declare_keeps_a_pause(harness: Harness) -> None:
    store_schedule(harness)
    harness.link.run(calls.hold(harness.keys, PLACE, "tick", PAUSED))
    call = declare(harness, "h2", since_unix_ms=2, next_unix_ms=TICK + 5)
    harness.expect("schedule_declare", "REPLACED", call)
    assert (due_ticks(harness), field(harness, "held")) == ({}, f"paused {TICK + 5}".encode())


def test_schedule_declare_replaces_an_unreadable_schedule(harness: Harness) -> None:
    store_schedule(harness)
    harness.link.run(calls.hold(harness.keys, PLACE, "tick", calls.UNREADABLE))
    harness.expect_words(
        "schedule_stamp", ["OTHER"], calls.stamp(harness.keys, PLACE, [("tick", "h1")])
    )
    harness.expect("schedule_declare", "REPLACED", declare(harness))
    assert (due_ticks(harness), field(harness, "held")) == ({"tick": TICK}, None)


def test_schedule_stamp_reports_each_schedule(harness: Harness) -> None:
    store_schedule(harness)
    harness.do("HSET", harness.keys.schedules(*PLACE), "tick:seen", "5")
    pairs = [("tick", "h1"), ("tick", "h2"), ("none", "h1")]
    stamp = calls.stamp(harness.keys, PLACE, pairs)
    harness.expect_words("schedule_stamp", ["SAME", "OTHER", "MISSING"], stamp)
    assert int(field(harness, "seen") or 0) > 5
    assert due_ticks(harness) == {"tick": TICK}


def test_schedule_stamp_revives_an_orphan_with_its_due_time(harness: Harness) -> None:
    store_schedule(harness)
    harness.link.run(calls.hold(harness.keys, PLACE, "tick", ORPHANED))
    harness.expect("schedule_stamp", "OK", calls.stamp(harness.keys, PLACE, [("tick", "h1")]))
    assert (due_ticks(harness), field(harness, "held")) == ({"tick": TICK}, None)


def test_schedule_stamp_keeps_a_pause(harness: Harness) -> None:
    store_schedule(harness)
    harness.link.run(calls.hold(harness.keys, PLACE, "tick", PAUSED))
    harness.expect("schedule_stamp", "OK", calls.stamp(harness.keys, PLACE, [("tick", "h1")]))
    assert (due_ticks(harness), field(harness, "held")) == ({}, f"paused {TICK}".encode())


# --- holding, by hand, removing -------------------------------------------------------------------


def test_schedule_hold_keeps_the_due_time(harness: Harness) -> None:
    store_schedule(harness)
    for reason in (ORPHANED, PAUSED):
        call = calls.hold(harness.keys, PLACE, "tick", reason)
        assert harness.expect("schedule_hold", "OK", call) == [str(TICK).encode()]
    assert fire(harness, tick()) == ["STALE"]
    call = calls.release(harness.keys, PLACE, "tick")
    assert harness.expect("schedule_release", "OK", call) == [str(TICK).encode()]
    assert (due_ticks(harness), field(harness, "held")) == ({"tick": TICK}, None)
    harness.expect("schedule_release", "GONE", call)


@pytest.mark.parametrize("raw", ["paused", "paused 12x", "\x00\xff", "PAUSED 5"])
def test_schedule_release_without_a_due_time_works(harness: Harness, raw: str) -> None:
    store_schedule(harness)
    harness.do("ZREM", harness.keys.schedules_due(*PLACE), "tick")
    harness.do("HSET", harness.keys.schedules(*PLACE), "tick:held", raw)
    harness.expect("schedule_release", "OK", calls.release(harness.keys, PLACE, "tick"))
    assert (due_ticks(harness), field(harness, "held")) == ({}, None)


def test_schedule_hold_reports_a_missing_schedule(harness: Harness) -> None:
    harness.expect("schedule_hold", "GONE", calls.hold(harness.keys, PLACE, "tick", PAUSED))


def test_schedule_run_writes_a_message_and_keeps_the_due_time(harness: Harness) -> None:
    store_schedule(harness)
    call = calls.run(harness.keys, PLACE, "tick", "h1", TICK + 5, ["payload", "now"])
    [entry] = harness.expect("schedule_run", "OK", call)
    assert entries(harness) == [{"payload": b"now"}]
    assert (due_ticks(harness), last(harness, "id")) == ({"tick": TICK}, entry)
    harness.expect("schedule_run", "AGAIN", call)


def test_schedule_run_refuses_the_instant_of_a_tick(harness: Harness) -> None:
    store_schedule(harness)
    assert fire(harness, tick()) == ["FIRED"]
    call = calls.run(harness.keys, PLACE, "tick", "h1", TICK, ["payload", "now"])
    harness.expect("schedule_run", "AGAIN", call)


def test_schedule_run_refuses_a_changed_schedule(harness: Harness) -> None:
    store_schedule(harness)
    call = calls.run(harness.keys, PLACE, "tick", "h2", TICK, ["payload", "now"])
    harness.expect("schedule_run", "CHANGED", call)
    call = calls.run(harness.keys, PLACE, "tick", "h1", TICK, ["payload", "now"], 3)
    assert harness.expect("schedule_run", "MOVED", call) == [b"0"]


def test_schedule_drop_leaves_nothing(harness: Harness) -> None:
    before = harness.dump()
    store_schedule(harness)
    call = calls.drop(harness.keys, PLACE, "tick")
    harness.expect("schedule_drop", "OK", call)
    assert harness.dump() == before
    harness.expect("schedule_drop", "GONE", call)


def test_schedule_fires_after_drop_and_immediate_declare(harness: Harness) -> None:
    store_schedule(harness)
    harness.link.run(calls.drop(harness.keys, PLACE, "tick"))
    store_schedule(harness)
    assert fire(harness, tick()) == ["FIRED"]


def test_schedule_fire_with_overlap_names_the_groups_keys(harness: Harness) -> None:
    call = calls.fire(harness.keys, PLACE, [tick()], group="hits")
    assignment = Assignment(*PLACE, "hits")
    assert harness.keys.retry(*assignment) in call.argv
    assert harness.keys.retry_items(*assignment) in call.argv
