"""Declared schedules are stored on a real server, and any housekeeper sends their due ticks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamqd.admin import growth, topics_deletion
from streamqd.config import Schedule, Topic
from streamqd.housekeeper.isolation import TaskIsolation
from streamqd.metrics.view import MetricsView
from streamqd.model import TopicPartition
from streamqd.schedules import firing, reconciliation
from streamqd.schedules.firing import Firer, Outcome
from streamqd.schedules.reconciliation import (
    Declaration,
    MoveFinisher,
    Reconciler,
    read_stored,
    server_unix_ms,
)
from streamqd.schedules.record import choose_partition
from streamqd.scoreboard import Scoreboard
from streamqd.store import schedules as calls
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.schedules import OPERATOR, IndexLine, StoredSchedule
from streamqd.store.store import Store
from tests.contract.harness import Harness

TOPIC = "reports"


@pytest.fixture
def store(link: Connection, keys: Keys) -> Store:
    return Store(link, keys)


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every turn check all places immediately."""
    monkeypatch.setattr(firing, "PLACES_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(firing, "STAGGER_MS", 0)


def schedule(name: str = "tick", **given: Any) -> Schedule:
    return Schedule(**{"name": name, "topic": TOPIC, "every": 3600.0, **given})


def reconcile(store: Store, *schedules: Schedule, fleet: str = "default", since: int = 1) -> None:
    Reconciler(store, fleet, schedules, since, {}).run()


def find_place(store: Store, name: str = "tick") -> TopicPartition:
    entry = calls.index(store, [name])[name]
    assert isinstance(entry, IndexLine)
    return entry.place


def read_schedule(store: Store, name: str = "tick") -> StoredSchedule:
    [found] = read_stored(store, [(name, find_place(store, name))])
    assert found is not None
    return found


def make_due(store: Store, due: int, name: str = "tick") -> None:
    store.execute("ZADD", store.keys.schedules_due(*find_place(store, name)), due, name)


def read_ticks(store: Store, topic: str = TOPIC, partitions: int = 1) -> list[tuple[str, str]]:
    """Return the schedule and tick of every message."""
    found = []
    for number in range(partitions):
        for _, fields in store.execute("XRANGE", store.keys.stream(topic, number), "-", "+"):
            headers = json.loads(dict(zip(fields[::2], fields[1::2], strict=True))[b"headers"])
            found.append((headers["x-schedule"], headers["x-scheduled-for"]))
    return sorted(found)


def fire(store: Store) -> list[Outcome]:
    outcomes: list[Outcome] = []
    Firer(store, set, outcomes.append).turn()
    return outcomes


def past_hour(store: Store, hours: int = 1) -> int:
    """Return a past tick of an hourly schedule, counted back from its next tick."""
    hour = 3_600_000
    return (server_unix_ms(store) // hour + 1 - hours) * hour


# --- declaring ------------------------------------------------------------------------------------


def test_declared_schedule_is_stored_with_its_topic(store: Store) -> None:
    reconcile(store, schedule())
    assert topics.partition_count(store, TOPIC) == 1
    assert read_schedule(store).due_unix_ms == past_hour(store, 0)
    assert calls.places(store) == [(TOPIC, 0)]


def test_unchanged_declaration_changes_nothing(store: Store) -> None:
    reconcile(store, schedule())
    make_due(store, 12_345)
    reconcile(store, schedule(), since=99)
    assert read_schedule(store).due_unix_ms == 12_345


def test_edited_schedule_fires_from_now(store: Store) -> None:
    reconcile(store, schedule())
    reconcile(store, schedule(every=7200.0), since=2)
    due = read_schedule(store).due_unix_ms or 0
    assert due % 7_200_000 == 0
    assert due > server_unix_ms(store)


def test_edit_after_a_clock_step_back_does_not_repeat_a_tick(store: Store) -> None:
    """An edit does not repeat a tick that was sent while the clock was ahead."""
    reconcile(store, schedule())
    ahead = past_hour(store, -5)
    store.execute("HSET", store.keys.schedules_last(TOPIC, 0), "tick:tick", ahead)
    reconcile(store, schedule(payload='{"a":1}'), since=2)
    assert read_schedule(store).due_unix_ms == ahead + 3_600_000


def test_two_releases_fire_all_their_schedules(store: Store) -> None:
    old, new = (schedule("a"), schedule("b")), (schedule("b"), schedule("c"))
    for _ in range(2):
        reconcile(store, *old, since=1)
        reconcile(store, *new, since=2)
    for name in ("a", "b", "c"):
        make_due(store, past_hour(store), name)
    fire(store)
    assert [name for name, _ in read_ticks(store)] == ["a", "b", "c"]


def test_later_release_wins_while_both_run(store: Store) -> None:
    old, new = schedule(), schedule(every=60.0)
    reconcile(store, old, since=1)
    reconcile(store, new, since=2)
    digest = read_schedule(store).hash
    reconcile(store, old, since=1)
    assert read_schedule(store).hash == digest


def test_undeclared_schedule_stops_until_declared_again(store: Store) -> None:
    reconcile(store, schedule())
    tick = past_hour(store)
    make_due(store, tick)
    store.execute("HSET", store.keys.schedules(TOPIC, 0), "tick:seen", "5")
    fire(store)
    assert (read_schedule(store).held, read_schedule(store).due_unix_ms, read_ticks(store)) == (
        "orphaned",
        tick,
        [],
    )
    reconcile(store, schedule())
    fire(store)
    assert len(read_ticks(store)) == 1


def test_two_fleets_cannot_declare_the_same_name(store: Store, caplog: Any) -> None:
    """The second fleet that declares the name is refused.

    It changes nothing, whatever its schedule is.
    """
    reconcile(store, schedule(), fleet="blue")
    before, mine = Harness(store.connection, store.keys).dump(), read_schedule(store)
    for other in (schedule(), schedule(every=60.0), schedule(partition=0)):
        reconcile(store, other, fleet="green", since=99)
    assert Harness(store.connection, store.keys).dump() == before
    assert caplog.text.count("fleet blue has a schedule of this name") == 3
    moved = schedule(every=60.0, topic="others")
    reconcile(store, moved, fleet="green", since=99)
    assert read_schedule(store) == mine
    assert calls.places(store) == [(TOPIC, 0)]
    make_due(store, past_hour(store))
    fire(store)
    assert len(read_ticks(store)) == 1
    assert read_ticks(store, "others") == []


def test_two_fleets_fire_each_schedule_once(store: Store) -> None:
    """Fleets that share a topic fire each of its schedules once, including those of the other."""
    reconcile(store, schedule("a"), fleet="blue")
    reconcile(store, schedule("b"), fleet="green")
    for name in "ab":
        make_due(store, past_hour(store), name)
    for _ in range(2):  # one housekeeper for each fleet
        fire(store)
    assert [name for name, _ in read_ticks(store)] == ["a", "b"]
    for name, fleet in (("a", "blue"), ("b", "green")):
        line = calls.index(store, [name])[name]
        assert isinstance(line, IndexLine)
        assert line.fleet == fleet


def test_schedule_for_a_missing_partition_is_refused(store: Store) -> None:
    reconcile(store, schedule(partition=3))
    assert calls.index(store, ["tick"]) == {}


def test_unreadable_index_line_affects_only_its_schedule(store: Store) -> None:
    store.execute("HSET", store.keys.schedule_index(), "tick", "what is this")
    reconcile(store, schedule(), schedule("other"))
    assert read_schedule(store, "other").due_unix_ms is not None


@pytest.mark.parametrize("kind", ["field", "type"])
def test_unreadable_schedule_does_not_block_others(store: Store, kind: str) -> None:
    """A schedule that cannot be read does not keep others from being declared.

    They would otherwise be orphaned after 10 minutes.
    """
    reconcile(store, schedule(), schedule("a"), schedule("z"), schedule("other", topic="others"))
    if kind == "field":
        store.execute("HSET", store.keys.schedules_last(TOPIC, 0), "tick:late", "x")
        left = ("a", "z", "other")
    else:
        store.execute("DEL", store.keys.schedules(TOPIC, 0))
        store.execute("SET", store.keys.schedules(TOPIC, 0), "x")
        left = ("other",)
    edited = [schedule(each, every=60.0) for each in ("tick", "a", "z")]
    reconcile(store, *edited, schedule("other", topic="others", every=60.0), since=2)
    for name in left:
        assert (read_schedule(store, name).due_unix_ms or 0) - server_unix_ms(store) <= 60_000


def test_past_instant_is_not_sent(store: Store) -> None:
    reconcile(store, schedule(every=None, at="2020-01-01T00:00:00+00:00"))
    assert read_schedule(store).due_unix_ms is None
    fire(store)
    assert read_ticks(store) == []


# --- firing ---------------------------------------------------------------------------------------


def test_two_housekeepers_send_a_tick_once(store: Store) -> None:
    reconcile(store, schedule())
    make_due(store, past_hour(store))
    outcomes = [*fire(store), *fire(store)]
    assert len(read_ticks(store)) == 1
    assert [each.reason for each in outcomes] == [""]
    assert read_schedule(store).due_unix_ms == past_hour(store, 0)


@pytest.mark.parametrize(("misfire", "messages"), [("once", 1), ("skip", 0), ("all", 20)])
def test_twenty_missed_ticks_follow_the_policy(store: Store, misfire: str, messages: int) -> None:
    """After 20 ticks without an instance, the three policies send 1, 0 and 20 messages."""
    reconcile(store, schedule(misfire=misfire))
    make_due(store, past_hour(store, 20))
    outcomes = fire(store)
    assert len(read_ticks(store)) == len({*read_ticks(store)}) == messages
    assert sum(each.ticks for each in outcomes if each.reason == "misfire") == 20 - messages
    assert read_schedule(store).due_unix_ms == past_hour(store, 0)


def test_newest_missed_tick_is_sent(store: Store) -> None:
    reconcile(store, schedule())
    make_due(store, past_hour(store, 20))
    fire(store)
    [(_, when)] = read_ticks(store)
    assert when == firing.record.format_tick(past_hour(store, 1))


def test_unreadable_specification_holds_only_its_schedule(store: Store) -> None:
    """Other schedules still fire.

    An instance that declares this schedule replaces its specification.
    """
    reconcile(store, schedule(), schedule("other"))
    for name in ("tick", "other"):
        make_due(store, past_hour(store), name)
    store.execute("HSET", store.keys.schedules(TOPIC, 0), "tick", '{"name":"other"}')
    fire(store)
    assert [name for name, _ in read_ticks(store)] == ["other"]
    assert read_schedule(store).held == "unreadable"
    reconcile(store, schedule(), schedule("other"))
    assert (read_schedule(store).held, read_schedule(store).due_unix_ms) == (
        "",
        past_hour(store, 0),
    )


@pytest.mark.parametrize("name", [b"\xff\x00", b"a:hash", b"x" * 1000])
def test_due_time_without_a_specification_is_removed(store: Store, name: bytes) -> None:
    reconcile(store, schedule())
    store.execute("ZADD", store.keys.schedules_due(TOPIC, 0), 5, name)
    make_due(store, past_hour(store))
    fire(store)
    assert len(read_ticks(store)) == 1
    assert store.execute("ZSCORE", store.keys.schedules_due(TOPIC, 0), name) is None


@pytest.mark.parametrize("score", ["-inf", "-9e300", "-1", "1.5", "1e-300"])
def test_invalid_due_time_fires_once(store: Store, score: str) -> None:
    """A schedule with an invalid due time fires once and does not delay its partition's others."""
    reconcile(store, schedule(), schedule("other"))
    for name, due in (("tick", score), ("other", past_hour(store))):
        store.execute("ZADD", store.keys.schedules_due(TOPIC, 0), due, name)
    for _ in range(2):
        fire(store)
    assert [name for name, _ in read_ticks(store)] == ["other", "tick"]
    assert read_schedule(store).due_unix_ms == past_hour(store, 0)


def test_schedule_key_of_a_wrong_type_affects_no_other_topic(store: Store) -> None:
    reconcile(store, schedule(), schedule("other", topic="others"))
    store.execute("DEL", store.keys.schedules_due("others", 0))
    store.execute("SET", store.keys.schedules_due("others", 0), "x")
    make_due(store, past_hour(store))
    fire(store)
    assert len(read_ticks(store)) == 1


def test_schedule_does_not_recreate_a_deleted_topic(store: Store) -> None:
    reconcile(store, schedule())
    make_due(store, past_hour(store))
    store.execute("DEL", store.keys.meta(TOPIC), store.keys.stream(TOPIC, 0))
    fire(store)
    assert store.execute("EXISTS", store.keys.stream(TOPIC, 0)) == 0


def test_many_due_schedules_fire_in_pages(store: Store) -> None:
    names = [f"s{at}" for at in range(300)]
    reconcile(store, *(schedule(each) for each in names))
    for each in names:
        make_due(store, past_hour(store), each)
    firer = Firer(store, set, lambda _outcome: None)
    for _ in range(20):
        firer.turn()
    assert [name for name, _ in read_ticks(store)] == sorted(names)


@pytest.mark.parametrize("count", [1, firing.PAGE, 300])
def test_specifications_are_read_ahead_of_their_due_time(store: Store, count: int) -> None:
    """Specifications are read ahead of time.

    Thousands that are due at one instant would be late if they were read only then.
    """
    names = [f"s{at}" for at in range(count)]
    reconcile(store, *(schedule(each) for each in names))
    for each in names:
        make_due(store, server_unix_ms(store) + firing.AHEAD_MS // 2, each)
    firer = Firer(store, set, lambda _outcome: None)
    for _ in range(5):
        firer.turn()
    key = store.keys.schedules(TOPIC, 0)
    store.execute("HSET", key, *(word for each in names for word in (each, "unreadable now")))
    for each in names:
        make_due(store, past_hour(store), each)
    for _ in range(5):
        firer.turn()
    assert [name for name, _ in read_ticks(store)] == sorted(names)


# --- moving ---------------------------------------------------------------------------------------


def test_schedule_moves_with_its_key_in_a_grown_topic(store: Store) -> None:
    """Schedules whose key stays on its partition are not touched.

    All others move, and keep their due time.
    """
    topics.create(store, TOPIC, Topic(partitions=1))
    names = [f"s{at}" for at in range(8)]
    reconcile(store, *(schedule(each) for each in names))
    for each in names:
        make_due(store, past_hour(store), each)
    growth.grow(store, TOPIC, 4)
    for _ in range(3):
        fire(store)
    assert {find_place(store, each)[1] for each in names} == {0, 1, 2, 3}
    assert [name for name, _ in read_ticks(store, partitions=4)] == names
    assert {read_schedule(store, each).due_unix_ms for each in names} == {past_hour(store, 0)}
    for name in names:
        for number in set(range(4)) - {find_place(store, name)[1]}:
            assert read_stored(store, [(name, (TOPIC, number))]) == [None]


def test_schedule_move_keeps_counts_and_the_last_tick(store: Store) -> None:
    """A move keeps the counts and the last tick.

    Without the last tick, an edit after a clock step back would send it again.
    """
    reconcile(store, schedule(misfire="skip"))
    make_due(store, past_hour(store, 20))
    fire(store)
    before = read_schedule(store)
    ahead = past_hour(store, -5)
    store.execute("HSET", store.keys.schedules_last(TOPIC, 0), "tick:tick", ahead, "tick:ran", 7)
    reconcile(store, schedule(topic="others"), since=2)
    moved = read_schedule(store)
    assert (moved.tick, moved.ran, moved.skipped) == (ahead, 7, before.skipped)
    assert moved.due_unix_ms == ahead + 3_600_000
    reconcile(store, schedule(topic="others", payload="1"), since=3)
    assert read_schedule(store).due_unix_ms == ahead + 3_600_000


def test_second_copy_of_a_schedule_sends_nothing(store: Store) -> None:
    """A second copy of a schedule sends nothing.

    It appears if an old release reads the index before a new one moves the schedule, and then
    declares it.

    Otherwise, both copies would send each tick, until the second one is an orphan after 10 minutes.
    """
    reconcile(store, schedule())
    reconcile(store, schedule(topic="others"), since=2)
    reconciliation.declare(store, (TOPIC, 0), [Declaration(schedule(), "default", calls.FILE, 1)])
    for place in ((TOPIC, 0), ("others", 0)):
        store.execute("ZADD", store.keys.schedules_due(*place), past_hour(store), "tick")
    for _ in range(2):
        fire(store)
    assert (len(read_ticks(store)), len(read_ticks(store, "others"))) == (0, 1)
    [copy] = read_stored(store, [("tick", (TOPIC, 0))])
    assert copy is not None
    assert (copy.held, read_schedule(store).held) == ("unreadable", "")
    reconcile(store, schedule(), since=3)
    assert (find_place(store), read_schedule(store).held) == ((TOPIC, 0), "")
    assert read_schedule(store).due_unix_ms == past_hour(store, 0)


STEPS = ("hold", "declare", "drop")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("paused", [False, True])
def test_interrupted_schedule_move_is_finished(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str, paused: bool
) -> None:
    """If a move is interrupted at any of its steps, it is finished later.

    No tick is sent twice or lost.
    """
    reconcile(store, schedule())
    tick = past_hour(store)
    make_due(store, tick)
    if paused:
        store.run(calls.hold(store.keys, (TOPIC, 0), "tick", calls.PAUSED))
    _die_after(monkeypatch, step)
    moved = schedule(topic="others")
    with pytest.raises(KeyboardInterrupt):
        reconcile(store, moved, since=2)
    monkeypatch.undo()
    reconcile(store, moved, since=2)
    reconcile(store, moved, since=2)
    assert find_place(store) == ("others", 0)
    assert read_stored(store, [("tick", (TOPIC, 0))]) == [None]
    assert read_schedule(store).held == ("paused" if paused else "")
    fire(store)
    assert read_ticks(store) == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("paused", [False, True])
def test_interrupted_schedule_move_by_growth_is_finished(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str, paused: bool
) -> None:
    """A move that a growing topic started is finished, even for a schedule of an operator."""
    topics.create(store, TOPIC, Topic(partitions=1))
    name = next(each for each in map(str, range(99)) if choose_partition(schedule(each), 4) != 0)
    calls.write_index(store, name, IndexLine("default", OPERATOR, (TOPIC, 0)), new=True)
    reconciliation.declare(store, (TOPIC, 0), [Declaration(schedule(name), "default", OPERATOR, 1)])
    make_due(store, past_hour(store), name)
    growth.grow(store, TOPIC, 4)
    _die_after(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        fire(store)
    monkeypatch.undo()
    if paused:
        for number in (0, choose_partition(schedule(name), 4)):
            store.run(calls.hold(store.keys, (TOPIC, number), name, calls.PAUSED))
    moves = MoveFinisher(store)
    moves.run()
    assert calls.index(store, [name])[name] == IndexLine(
        "default", OPERATOR, (TOPIC, choose_partition(schedule(name), 4)), (TOPIC, 0)
    ), "another process may be at it"
    moves.run()
    assert calls.index(store, [name])[name] == IndexLine(
        "default", OPERATOR, (TOPIC, choose_partition(schedule(name), 4))
    )
    assert read_stored(store, [(name, (TOPIC, 0))]) == [None]
    assert read_schedule(store, name).held == ("paused" if paused else "")
    Firer(store, set, lambda _outcome: None).turn()
    assert len(read_ticks(store, partitions=4)) == (0 if paused else 1)


def _die_after(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Stop the process after this call, as if it were killed."""
    build: Callable[..., Any] = getattr(calls, step)
    run = Store.run
    made: list[Any] = []

    def built(*args: Any, **named: Any) -> Any:
        made.append(build(*args, **named))
        return made[-1]

    def ran(self: Store, call: Any) -> Any:
        reply = run(self, call)
        if any(call is each for each in made):
            raise KeyboardInterrupt
        return reply

    monkeypatch.setattr(reconciliation.calls, step, built)
    monkeypatch.setattr(Store, "run", ran)


def test_older_release_does_not_move_a_schedule_back(store: Store) -> None:
    reconcile(store, schedule(), since=1)
    reconcile(store, schedule(topic="others"), since=2)
    reconcile(store, schedule(), since=1)
    assert find_place(store) == ("others", 0)


def test_topic_delete_removes_its_schedule_names(store: Store) -> None:
    reconcile(store, schedule(), schedule("other", topic="others"))
    topics_deletion.delete(store, TOPIC, force=True)
    assert store.execute("KEYS", "*:schedule:*{" + TOPIC + "*") == []
    assert [*calls.read_index(store)] == ["other"]
    assert calls.places(store) == [("others", 0)]


def test_declared_schedule_returns_after_a_topic_delete(store: Store) -> None:
    """A declared schedule returns with a restart or a reload.

    The topic is not created again until then.
    """
    running = Reconciler(store, "default", [schedule()], 1, {})
    running.run()
    topics_deletion.delete(store, TOPIC, force=True)
    running.run()
    assert calls.read_index(store) == {}
    reconcile(store, schedule())
    assert read_schedule(store).due_unix_ms == past_hour(store, 0)


@pytest.mark.parametrize("deleted", [TOPIC, "others"])
def test_schedule_move_survives_a_topic_delete(store: Store, deleted: str) -> None:
    reconcile(store, schedule(), schedule("other", topic="others"))
    moving = IndexLine("default", calls.FILE, ("others", 0), (TOPIC, 0))
    calls.write_index(store, "tick", moving, new=False)
    topics_deletion.delete(store, deleted, force=True)
    assert calls.read_index(store)["tick"] == moving
    reconcile(store, schedule(topic="others"), since=2)
    assert read_schedule(store).due_unix_ms == past_hour(store, 0)


def test_failed_declaration_affects_only_its_partition(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed declaration affects only its own partition.

    The housekeeper's task succeeds, and declares all other schedules.
    """
    real = reconciliation.declare

    def struck(of: Store, place: TopicPartition, some: Sequence[Declaration]) -> list[str]:
        if place[0] == TOPIC:
            raise AssertionError(place)
        return real(of, place, some)

    monkeypatch.setattr(reconciliation, "declare", struck)
    isolate = TaskIsolation(MetricsView("one", Scoreboard(1))).isolate_task("declare_schedules")
    wanted = [schedule(), schedule("other", topic="others")]
    Reconciler(store, "default", wanted, 1, {}, isolate).run()
    found = read_stored(store, [("tick", (TOPIC, 0)), ("other", ("others", 0))])
    assert [each is not None for each in found] == [False, True]


def test_schedules_start_despite_topic_meta_of_a_wrong_type(store: Store) -> None:
    """An error about one key does not keep the other schedules from being declared."""
    store.execute("DEL", store.keys.meta(TOPIC))
    store.execute("SET", store.keys.meta(TOPIC), "x")
    reconcile(store, schedule(), schedule("other", topic="others"))
    assert calls.places(store) == [("others", 0)]


def test_refused_schedule_move_does_not_stop_the_others(store: Store) -> None:
    """Moves that come after a key of a wrong type are still finished."""
    reconcile(store, schedule("a", topic="broken"), schedule("b"))
    for name, topic in (("a", "broken"), ("b", TOPIC)):
        moving = IndexLine("default", calls.FILE, (topic, 1), (topic, 0))
        calls.write_index(store, name, moving, new=False)
    store.execute("SET", store.keys.schedules("broken", 1), "x")
    moves = MoveFinisher(store)
    moves.run()
    moves.run()
    assert calls.index(store, ["b"])["b"] == IndexLine("default", calls.FILE, (TOPIC, 1))
