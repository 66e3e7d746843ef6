"""The scripts of schedules: a tick is written and the due time advanced in one step, or neither."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamqd.model import Unit
from streamqd.store import messages
from streamqd.store import schedules as calls
from streamqd.store.schedules import FILE, OPERATOR, ORPHAN_MS, ORPHANED, PAUSED, DueTick
from streamqd.store.scripts import Call
from tests.contract.desk import Desk
from tests.contract.scenarios import TICK, kept_schedule, tick

PLACE = ("access", 0)


def due(desk: Desk) -> dict[str, int]:
    return desk.state().get(desk.keys.schedules_due(*PLACE), {})


def last(desk: Desk, part: str) -> bytes | None:
    found: bytes | None = desk.do("HGET", desk.keys.schedules_last(*PLACE), f"tick:{part}")
    return found


def field(desk: Desk, part: str) -> bytes | None:
    found: bytes | None = desk.do("HGET", desk.keys.schedules(*PLACE), f"tick:{part}")
    return found


def entries(desk: Desk) -> list[dict[str, bytes]]:
    found = desk.state().get("stream")
    return list(found.entries.values()) if found else []


def fire(desk: Desk, *ticks: DueTick, group: str = "", partitions: int | None = None) -> list[str]:
    """Fire and return the words. Check that a refused tick writes nothing."""
    before = desk.dump()
    call = calls.fire(desk.keys, PLACE, ticks, group=group, partitions=partitions)
    words, _now = desk.expect("schedule_fire", "OK", call)
    told = [each.decode() for each in words]
    if not {"FIRED", "SKIPPED", "SENT", "OVERLAP"} & {*told}:
        assert desk.dump() == before
    return told


def declare(desk: Desk, digest: str = "h1", **changed: object) -> Call:
    given: dict[str, object] = {"origin": FILE, "since_unix_ms": 1, "next_unix_ms": TICK}
    return calls.declare(desk.keys, PLACE, "tick", digest, "{}", **{**given, **changed})  # type: ignore[arg-type]


# --- firing ---------------------------------------------------------------------------------------


def test_schedule_fire_writes_a_tick_and_advances(desk: Desk) -> None:
    kept_schedule(desk)
    assert fire(desk, tick()) == ["FIRED"]
    assert entries(desk) == [{"payload": b"x"}]
    assert due(desk) == {"tick": TICK + 1_000}
    assert last(desk, "tick") == str(TICK).encode()
    assert last(desk, "fired") == b"1"
    assert int(last(desk, "late") or 0) > 0


def test_schedule_fire_repeated_fires_once(desk: Desk) -> None:
    kept_schedule(desk)
    assert fire(desk, tick()) == ["FIRED"]
    assert fire(desk, tick()) == ["STALE"]
    assert len(entries(desk)) == 1


@pytest.mark.parametrize("later", [0, 1_000])
def test_schedule_fire_does_not_repeat_a_sent_tick(desk: Desk, later: int) -> None:
    """An edit computed its due time before it was sent, and wrote it after."""
    kept_schedule(desk)
    assert fire(desk, tick(TICK, TICK + 5_000)) == ["FIRED"]
    desk.do("HSET", desk.keys.schedules_last(*PLACE), "tick:tick", TICK + later)
    desk.link.run(declare(desk, "h2", since_unix_ms=2, next_unix_ms=TICK))
    again = tick(hash="h2", skipped=3)
    assert fire(desk, again, tick(TICK + 1_000, TICK + 2_000, hash="h2")) == [
        "SENT",
        "SENT" if later else "FIRED",
    ]
    assert len(entries(desk)) == (1 if later else 2)
    assert (due(desk), last(desk, "skipped")) == ({"tick": TICK + 2_000}, b"3")


@pytest.mark.parametrize("sent", ["", "soon", "-5", "1e300"])
def test_schedule_fire_ignores_an_invalid_last_tick(desk: Desk, sent: str) -> None:
    kept_schedule(desk)
    desk.do("HSET", desk.keys.schedules_last(*PLACE), "tick:tick", sent)
    assert fire(desk, tick()) == ["FIRED"]


def test_schedule_fire_of_the_last_tick_leaves_nothing_due(desk: Desk) -> None:
    kept_schedule(desk)
    assert fire(desk, tick(following=None), tick()) == ["FIRED", "STALE"]
    assert due(desk) == {}
    assert field(desk, "hash") == b"h1"


def test_schedule_fire_fires_consecutive_ticks(desk: Desk) -> None:
    kept_schedule(desk)
    chain = [tick(TICK + at * 1_000, TICK + (at + 1) * 1_000) for at in range(3)]
    assert fire(desk, *chain) == ["FIRED"] * 3
    assert due(desk) == {"tick": TICK + 3_000}
    assert last(desk, "fired") == b"3"


def test_schedule_fire_stops_at_a_gap_between_ticks(desk: Desk) -> None:
    kept_schedule(desk)
    chain = [tick(), tick(TICK + 2_000, TICK + 3_000)]
    assert fire(desk, *chain) == ["FIRED", "STALE"]


def test_schedule_fire_counts_a_skipped_tick(desk: Desk) -> None:
    kept_schedule(desk)
    assert fire(desk, tick(tick=None, skipped=20, fields=[])) == ["SKIPPED"]
    assert entries(desk) == []
    assert last(desk, "skipped") == b"20"
    assert due(desk) == {"tick": TICK + 1_000}


def test_schedule_fire_refuses_another_specification(desk: Desk) -> None:
    kept_schedule(desk)
    assert fire(desk, tick(hash="h2")) == ["CHANGED"]


def test_schedule_fire_uses_the_server_clock(desk: Desk) -> None:
    """A host clock that runs ahead fires nothing early."""
    at = desk.now_unix_ms() + 60_000
    kept_schedule(desk, at)
    assert fire(desk, tick(at, at + 1_000)) == ["EARLY"]


def test_schedule_fire_refuses_an_orphan(desk: Desk) -> None:
    kept_schedule(desk)
    seen = desk.now_unix_ms() - ORPHAN_MS - 1
    desk.do("HSET", desk.keys.schedules(*PLACE), "tick:seen", seen)
    assert fire(desk, tick()) == ["ORPHANED"]


def test_schedule_added_by_an_operator_is_never_orphaned(desk: Desk) -> None:
    kept_schedule(desk, origin=OPERATOR)
    assert field(desk, "seen") is None
    assert fire(desk, tick()) == ["FIRED"]


@pytest.mark.parametrize("count", ["4", None])
def test_schedule_fire_refuses_a_changed_partition_count(desk: Desk, count: str | None) -> None:
    kept_schedule(desk)
    if count:
        desk.do("HSET", desk.keys.meta("access"), "partitionCount", count)
    call = calls.fire(desk.keys, PLACE, [tick()], partitions=3)
    assert desk.expect("schedule_fire", "MOVED", call) == [(count or "0").encode()]


def test_schedule_fire_accepts_the_expected_partition_count(desk: Desk) -> None:
    kept_schedule(desk)
    desk.do("HSET", desk.keys.meta("access"), "partitionCount", "3")
    assert fire(desk, tick(), partitions=3) == ["FIRED"]


@pytest.mark.parametrize("score", ["inf", "-inf", "1.5", "9007199254740993"])
def test_schedule_fire_refuses_an_invalid_due_time(desk: Desk, score: str) -> None:
    kept_schedule(desk)
    desk.do("ZADD", desk.keys.schedules_due(*PLACE), score, "tick")
    assert fire(desk, tick()) == ["STALE"]


@pytest.mark.parametrize("seen", ["", "soon", "-5", "1e300"])
def test_schedule_fire_treats_an_invalid_stamp_as_old(desk: Desk, seen: str) -> None:
    kept_schedule(desk)
    desk.do("HSET", desk.keys.schedules(*PLACE), "tick:seen", seen)
    assert fire(desk, tick()) == ["ORPHANED"]


def test_schedule_fire_restarts_invalid_counts(desk: Desk) -> None:
    kept_schedule(desk)
    desk.do("HSET", desk.keys.schedules_last(*PLACE), "tick:fired", "many", "tick:skipped", "x")
    assert fire(desk, tick(skipped=2)) == ["FIRED"]
    assert (last(desk, "fired"), last(desk, "skipped")) == (b"1", b"2")


def test_schedule_fire_answers_each_tick_separately(desk: Desk) -> None:
    """Several schedules in one call are judged separately."""
    at = desk.now_unix_ms() + 60_000
    place = PLACE
    for name in ("a", "b", "c", "d", "e", "f", "g", "h"):
        call = calls.declare(
            desk.keys, place, name, "h1", "{}", origin=FILE, since_unix_ms=1, next_unix_ms=TICK
        )
        desk.link.run(call)
    desk.groups()
    table, scores = desk.keys.schedules(*place), desk.keys.schedules_due(*place)
    desk.do("HSET", table, "d:hash", "h2", "f:seen", "1")
    desk.do("ZADD", scores, at, "e", TICK + 1, "c")
    desk.do("HSET", desk.keys.schedules_last(*place), "g:id", desk.add("5-0").decode()[2:])
    desk.do("HSET", desk.keys.schedules_last(*place), "h:tick", TICK)
    ticks = [tick(name=name) for name in ("a", "b", "c", "d", "e", "f", "g", "h")]
    ticks[1] = ticks[1]._replace(tick=None, fields=[])
    ticks[4] = ticks[4]._replace(due_unix_ms=at)
    desk.expect_words(
        "schedule_fire",
        ["FIRED", "SKIPPED", "STALE", "CHANGED", "EARLY", "ORPHANED", "OVERLAP", "SENT"],
        calls.fire(desk.keys, place, ticks, group="hits"),
    )


# --- overlap --------------------------------------------------------------------------------------


def fired_before(desk: Desk, *, read: bool) -> str:
    """Fire a message, and let the group read it or not. Return its id."""
    kept_schedule(desk)
    desk.groups()
    assert fire(desk, tick(), group="hits") == ["FIRED"]
    if read:
        assert len(desk.fetch()) == 1
    return (last(desk, "id") or b"").decode()


SECOND = tick(TICK + 1_000, TICK + 2_000)


@pytest.mark.parametrize("read", [False, True])
def test_overlap_skips_a_tick_while_a_message_is_unfinished(desk: Desk, read: bool) -> None:
    fired_before(desk, read=read)
    assert fire(desk, SECOND, group="hits") == ["OVERLAP"]
    assert last(desk, "skipped") == b"1"
    assert due(desk) == {"tick": TICK + 2_000}
    assert len(entries(desk)) == 1


def test_overlap_allows_a_tick_after_a_finished_message(desk: Desk) -> None:
    done = fired_before(desk, read=True)
    desk.do("XACK", desk.stream, "hits", done)
    assert fire(desk, SECOND, group="hits") == ["FIRED"]


def test_overlap_waits_for_a_delayed_retry(desk: Desk) -> None:
    entry = fired_before(desk, read=True)
    desk.own()
    settle_retry(desk, [f"m:{entry}"], entry)
    assert fire(desk, SECOND, group="hits") == ["OVERLAP"]


def test_overlap_waits_for_a_copy_in_the_retry_stream(desk: Desk) -> None:
    """Unread, then pending, then delayed again, until it is acknowledged."""
    entry = fired_before(desk, read=True)
    desk.own()
    settle_retry(desk, [f"m:{entry}"], entry)
    due_at, words = TICK + 1_000, []

    def again() -> None:
        nonlocal due_at
        words.extend(fire(desk, tick(due_at, due_at + 1_000), group="hits"))
        due_at += 1_000

    desk.link.run(messages.promote_retries(desk.keys, desk.unit, 10))
    again()
    [copy] = desk.fetch(stream=desk.retry)
    again()
    settle_retry(desk, [f"r:{copy.decode()}"], entry)
    again()
    desk.link.run(messages.promote_retries(desk.keys, desk.unit, 10))
    [copy] = desk.fetch(stream=desk.retry)
    desk.do("XACK", desk.retry, "hits", copy)
    again()
    assert words == ["OVERLAP", "OVERLAP", "OVERLAP", "FIRED"]


def settle_retry(desk: Desk, places: Sequence[str], original: str) -> None:
    changed = {b"originalId": original.encode(), b"retryCount": b"1"}
    entries_ = [(place.encode(), 0.0, changed) for place in places]
    desk.link.run(messages.retry(desk.keys, desk.leased("t1"), entries_))


@pytest.mark.parametrize("group", ["hits", "none-of-that-name"])
def test_overlap_ignores_a_missing_group(desk: Desk, group: str) -> None:
    kept_schedule(desk)
    assert fire(desk, tick(), group=group) == ["FIRED"]
    assert fire(desk, SECOND, group=group) == ["FIRED"]


def test_overlap_treats_a_trimmed_message_as_finished(desk: Desk) -> None:
    fired_before(desk, read=False)
    desk.do("XTRIM", desk.stream, "MAXLEN", 0)
    assert fire(desk, SECOND, group="hits") == ["FIRED"]


def test_overlap_applies_within_one_call(desk: Desk) -> None:
    kept_schedule(desk)
    desk.groups()
    assert fire(desk, tick(), SECOND, group="hits") == ["FIRED", "OVERLAP"]


def test_overlap_ignores_an_invalid_id(desk: Desk) -> None:
    kept_schedule(desk)
    desk.groups()
    desk.do("HSET", desk.keys.schedules_last(*PLACE), "tick:id", "- + x")
    assert fire(desk, tick(), group="hits") == ["FIRED"]


# --- pages ----------------------------------------------------------------------------------------


def test_schedule_page_has_due_ticks_and_the_next_due_time(desk: Desk) -> None:
    kept_schedule(desk)
    later = desk.now_unix_ms() + 60_000
    desk.do("ZADD", desk.keys.schedules_due(*PLACE), later, "later", TICK - 1, "no specification")
    with desk.instant() as now:
        rest = desk.expect("schedule_page", "OK", calls.page(desk.keys, PLACE, 10))
    assert now == int(rest[0])
    assert rest[1] == [
        *(b"no specification", str(TICK - 1).encode(), b""),
        *(b"tick", str(TICK).encode(), b"h1"),
    ]
    assert rest[2] == str(later).encode()


def test_schedule_page_of_an_empty_place_is_empty(desk: Desk) -> None:
    assert desk.expect("schedule_page", "OK", calls.page(desk.keys, PLACE, 10))[1:] == [[], b""]


# --- declaring ------------------------------------------------------------------------------------


def test_schedule_declare_makes_a_new_schedule_due(desk: Desk) -> None:
    with desk.instant() as now:
        desk.expect("schedule_declare", "ADDED", declare(desk))
    assert due(desk) == {"tick": TICK}
    assert field(desk, "origin") == b"file"
    assert now == int(field(desk, "seen") or 0)


def test_schedule_declare_repeated_changes_nothing(desk: Desk) -> None:
    kept_schedule(desk)
    call = declare(desk, next_unix_ms=TICK + 5, since_unix_ms=99)
    desk.expect("schedule_declare", "SAME", call)


def test_schedule_declare_of_a_later_file_replaces(desk: Desk) -> None:
    kept_schedule(desk)
    call = declare(desk, "h2", since_unix_ms=2, next_unix_ms=TICK + 5)
    desk.expect("schedule_declare", "REPLACED", call)
    assert (field(desk, "hash"), due(desk)) == (b"h2", {"tick": TICK + 5})


def test_schedule_declare_of_an_earlier_file_is_refused(desk: Desk) -> None:
    kept_schedule(desk)
    call = declare(desk, "h2")
    assert desk.expect("schedule_declare", "OTHER", call) == [b"h1"]


def test_schedule_declare_replaces_a_rolled_back_release(desk: Desk) -> None:
    """A rollback: the file was read earlier, and no instance declares the later one any more."""
    kept_schedule(desk)
    old = desk.now_unix_ms() - calls.TAKEOVER_MS - 1
    desk.do("HSET", desk.keys.schedules(*PLACE), "tick:seen", old)
    desk.expect("schedule_declare", "REPLACED", declare(desk, "h2", since_unix_ms=0))


def test_schedule_declare_keeps_an_operators_schedule(desk: Desk) -> None:
    kept_schedule(desk, origin=OPERATOR)
    desk.expect("schedule_declare", "OPERATOR", declare(desk, "h2", since_unix_ms=99))


def test_schedule_declare_with_force_replaces(desk: Desk) -> None:
    kept_schedule(desk, origin=OPERATOR)
    call = declare(desk, "h2", origin=OPERATOR, force=True, next_unix_ms=None)
    desk.expect("schedule_declare", "REPLACED", call)
    assert due(desk) == {}


def test_schedule_declare_keeps_a_pause(desk: Desk) -> None:
    kept_schedule(desk)
    desk.link.run(calls.hold(desk.keys, PLACE, "tick", PAUSED))
    call = declare(desk, "h2", since_unix_ms=2, next_unix_ms=TICK + 5)
    desk.expect("schedule_declare", "REPLACED", call)
    assert (due(desk), field(desk, "held")) == ({}, f"paused {TICK + 5}".encode())


def test_schedule_declare_replaces_an_unreadable_schedule(desk: Desk) -> None:
    kept_schedule(desk)
    desk.link.run(calls.hold(desk.keys, PLACE, "tick", calls.UNREADABLE))
    desk.expect_words("schedule_stamp", ["OTHER"], calls.stamp(desk.keys, PLACE, [("tick", "h1")]))
    desk.expect("schedule_declare", "REPLACED", declare(desk))
    assert (due(desk), field(desk, "held")) == ({"tick": TICK}, None)


def test_schedule_stamp_reports_each_schedule(desk: Desk) -> None:
    kept_schedule(desk)
    desk.do("HSET", desk.keys.schedules(*PLACE), "tick:seen", "5")
    pairs = [("tick", "h1"), ("tick", "h2"), ("none", "h1")]
    stamp = calls.stamp(desk.keys, PLACE, pairs)
    desk.expect_words("schedule_stamp", ["SAME", "OTHER", "MISSING"], stamp)
    assert int(field(desk, "seen") or 0) > 5
    assert due(desk) == {"tick": TICK}


def test_schedule_stamp_revives_an_orphan_with_its_due_time(desk: Desk) -> None:
    kept_schedule(desk)
    desk.link.run(calls.hold(desk.keys, PLACE, "tick", ORPHANED))
    desk.expect("schedule_stamp", "OK", calls.stamp(desk.keys, PLACE, [("tick", "h1")]))
    assert (due(desk), field(desk, "held")) == ({"tick": TICK}, None)


def test_schedule_stamp_keeps_a_pause(desk: Desk) -> None:
    kept_schedule(desk)
    desk.link.run(calls.hold(desk.keys, PLACE, "tick", PAUSED))
    desk.expect("schedule_stamp", "OK", calls.stamp(desk.keys, PLACE, [("tick", "h1")]))
    assert (due(desk), field(desk, "held")) == ({}, f"paused {TICK}".encode())


# --- holding, by hand, removing -------------------------------------------------------------------


def test_schedule_hold_keeps_the_due_time(desk: Desk) -> None:
    kept_schedule(desk)
    for reason in (ORPHANED, PAUSED):
        call = calls.hold(desk.keys, PLACE, "tick", reason)
        assert desk.expect("schedule_hold", "OK", call) == [str(TICK).encode()]
    assert fire(desk, tick()) == ["STALE"]
    call = calls.release(desk.keys, PLACE, "tick")
    assert desk.expect("schedule_release", "OK", call) == [str(TICK).encode()]
    assert (due(desk), field(desk, "held")) == ({"tick": TICK}, None)
    desk.expect("schedule_release", "GONE", call)


@pytest.mark.parametrize("raw", ["paused", "paused 12x", "\x00\xff", "PAUSED 5"])
def test_schedule_release_without_a_due_time_works(desk: Desk, raw: str) -> None:
    kept_schedule(desk)
    desk.do("ZREM", desk.keys.schedules_due(*PLACE), "tick")
    desk.do("HSET", desk.keys.schedules(*PLACE), "tick:held", raw)
    desk.expect("schedule_release", "OK", calls.release(desk.keys, PLACE, "tick"))
    assert (due(desk), field(desk, "held")) == ({}, None)


def test_nothing_is_held_that_is_not_there(desk: Desk) -> None:
    desk.expect("schedule_hold", "GONE", calls.hold(desk.keys, PLACE, "tick", PAUSED))


def test_schedule_run_writes_a_message_and_keeps_the_due_time(desk: Desk) -> None:
    kept_schedule(desk)
    call = calls.run(desk.keys, PLACE, "tick", "h1", TICK + 5, ["payload", "now"])
    [entry] = desk.expect("schedule_run", "OK", call)
    assert entries(desk) == [{"payload": b"now"}]
    assert (due(desk), last(desk, "id")) == ({"tick": TICK}, entry)
    desk.expect("schedule_run", "AGAIN", call)


def test_schedule_run_refuses_the_instant_of_a_tick(desk: Desk) -> None:
    kept_schedule(desk)
    assert fire(desk, tick()) == ["FIRED"]
    call = calls.run(desk.keys, PLACE, "tick", "h1", TICK, ["payload", "now"])
    desk.expect("schedule_run", "AGAIN", call)


def test_schedule_run_refuses_a_changed_schedule(desk: Desk) -> None:
    kept_schedule(desk)
    call = calls.run(desk.keys, PLACE, "tick", "h2", TICK, ["payload", "now"])
    desk.expect("schedule_run", "CHANGED", call)
    call = calls.run(desk.keys, PLACE, "tick", "h1", TICK, ["payload", "now"], 3)
    assert desk.expect("schedule_run", "MOVED", call) == [b"0"]


def test_schedule_drop_leaves_nothing(desk: Desk) -> None:
    before = desk.dump()
    kept_schedule(desk)
    call = calls.drop(desk.keys, PLACE, "tick")
    desk.expect("schedule_drop", "OK", call)
    assert desk.dump() == before
    desk.expect("schedule_drop", "GONE", call)


def test_schedule_fires_after_drop_and_immediate_declare(desk: Desk) -> None:
    kept_schedule(desk)
    desk.link.run(calls.drop(desk.keys, PLACE, "tick"))
    kept_schedule(desk)
    assert fire(desk, tick()) == ["FIRED"]


def test_schedule_fire_with_overlap_names_the_groups_keys(desk: Desk) -> None:
    call = calls.fire(desk.keys, PLACE, [tick()], group="hits")
    unit = Unit(*PLACE, "hits")
    assert desk.keys.retry(*unit) in call.argv
    assert desk.keys.retry_items(*unit) in call.argv
