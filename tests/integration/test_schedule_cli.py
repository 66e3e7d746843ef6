"""`streamqd schedule` on a real server."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from streamqd.admin import schedules as admin
from streamqd.config import Schedule, Topic
from streamqd.schedules import firing
from streamqd.schedules.firing import Firer
from streamqd.schedules.reconciliation import Reconciler, server_unix_ms
from streamqd.schedules.record import hash_specification
from streamqd.store import schedules as calls
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support.commands import Run, document

TOPIC = "reports"


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every turn check all places immediately."""
    monkeypatch.setattr(firing, "PLACES_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(firing, "STAGGER_MS", 0)


@pytest.fixture
def store(link: Connection, keys: Keys) -> Store:
    store = Store(link, keys)
    topics.create(store, TOPIC, Topic(partitions=4))
    topics.create(store, "others", Topic())
    return store


@pytest.fixture
def run_schedule(run: Run, store: Store) -> Run:
    return functools.partial(run, "schedule")


@pytest.fixture
def run_with_schedule(run_schedule: Run) -> Run:
    """The commands, and a schedule `tick` that an operator has added."""
    run_schedule("add", "tick", "--topic", TOPIC, "--every", "1h")
    return run_schedule


def reconcile(store: Store, *names: str) -> None:
    declared = [Schedule(name, TOPIC, every=3600.0) for name in names]
    Reconciler(store, "default", declared, 1, {}).run()


def row(run_schedule: Run, name: str = "tick") -> dict[str, Any]:
    found: dict[str, Any] = document(run_schedule("show", name, "--json"))["row"]
    return found


def make_due(store: Store, due: int, name: str = "tick") -> None:
    line = calls.index(store, [name])[name]
    assert isinstance(line, calls.IndexLine)
    store.execute("ZADD", store.keys.schedules_due(*line.place), due, name)


def set_last_seen(store: Store, name: str, seconds: int) -> None:
    """Set how many seconds ago an instance last declared a schedule."""
    line = calls.index(store, [name])[name]
    assert isinstance(line, calls.IndexLine)
    seen = server_unix_ms(store) - seconds * 1000
    store.execute("HSET", store.keys.schedules(*line.place), f"{name}:seen", seen)


def keep_only_name(store: Store, name: str) -> None:
    """Remove everything of a schedule except its name, like a command that was interrupted."""
    line = calls.index(store, [name])[name]
    assert isinstance(line, calls.IndexLine)
    store.run(calls.drop(store.keys, line.place, name))


def read_messages(
    store: Store, topic: str = TOPIC, partitions: int = 4
) -> list[dict[bytes, bytes]]:
    found = []
    for number in range(partitions):
        for _, flat in store.execute("XRANGE", store.keys.stream(topic, number), "-", "+"):
            found.append(dict(zip(flat[::2], flat[1::2], strict=True)))
    return found


def fire(store: Store) -> None:
    Firer(store, set, lambda _outcome: None).turn()


# --- adding and editing ---------------------------------------------------------------------------


def test_added_schedule_fires(run_schedule: Run, store: Store) -> None:
    told = run_schedule(
        "add", "tick", "--topic", TOPIC, "--every", "1h", "--payload", '{"kind":"full"}'
    ).stdout
    assert told.startswith("tick added; due in ")
    make_due(store, server_unix_ms(store) // 3_600_000 * 3_600_000)
    fire(store)
    [message] = read_messages(store)
    assert message[b"payload"] == b'{"kind":"full"}'
    assert row(run_schedule)["fired"] == 1
    assert document(run_schedule("show", "tick", "--json"))["last_uid"].startswith(f"{TOPIC}/")


def test_schedule_add_repeated_changes_nothing(run_with_schedule: Run) -> None:
    due = row(run_with_schedule)["due_unix_ms"]
    again = run_with_schedule("add", "tick", "--topic", TOPIC, "--every", "60m")
    assert "nothing was changed" in again.stdout
    refused = run_with_schedule("add", "tick", "--topic", TOPIC, "--every", "2h", code=8)
    assert "run `streamqd schedule edit tick`" in refused.stderr
    assert row(run_with_schedule)["due_unix_ms"] == due


def test_schedule_add_repeated_finishes_an_interrupted_one(run_schedule: Run, store: Store) -> None:
    partition = admin.record.choose_partition(Schedule("tick", TOPIC, every=3600.0), 4)
    line = calls.IndexLine("default", calls.OPERATOR, (TOPIC, partition))
    calls.write_index(store, "tick", line, new=True)
    assert row(run_schedule)["state"] == "missing"
    run_schedule("add", "tick", "--topic", TOPIC, "--every", "1h")
    assert row(run_schedule)["state"] == "active"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--every", "1h", "--topic", "nope"), 8, "topic nope does not exist"),
        (("--topic", TOPIC), 2, "needs exactly one of cron"),
        (("--topic", TOPIC, "--cron", "x"), 2, "five"),
        (("--topic", TOPIC, "--every", "1h", "--cron", "0 3 * * *"), 2, "exactly one"),
        (("--topic", TOPIC, "--every", "soon"), 2, "is not a duration"),
        (("--topic", TOPIC, "--every", "1h", "--partition", "9"), 8, "partition 9 of topic"),
        (("--topic", TOPIC, "--cron", "0 3 * * *", "--timezone", "Berlin"), 2, "Europe/Berlin"),
    ],
)
def test_schedule_add_with_an_invalid_setting_adds_nothing(
    run_schedule: Run, words: tuple[str, ...], code: int, told: str
) -> None:
    assert told in run_schedule("add", "tick", *words, code=code).stderr
    assert document(run_schedule("list", "--json"))["rows"] == []


def test_schedule_add_refuses_too_many_per_topic(
    run_with_schedule: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "PER_TOPIC_MAX", 1)
    told = run_with_schedule("add", "other", "--topic", TOPIC, "--every", "1h", code=8).stderr
    assert "1 is the maximum" in told
    run_with_schedule("add", "other", "--topic", "others", "--every", "1h")


def test_schedule_edit_keeps_other_settings(run_with_schedule: Run) -> None:
    run_with_schedule("edit", "tick", "--payload", "text", "--misfire", "skip")
    run_with_schedule("edit", "tick", "--cron", "0 3 * * *", "--timezone", "Europe/Berlin")
    found = document(run_with_schedule("show", "tick", "--json"))
    stated = found["specification"]
    assert (stated["payload"], stated["misfire"]) == ("text", "skip")
    assert (stated["cron"], stated["every"]) == ("0 3 * * *", "none")
    assert found["row"]["when"] == "cron 0 3 * * * (Europe/Berlin)"
    run_with_schedule("edit", "tick", "--every", "5m")
    assert document(run_with_schedule("show", "tick", "--json"))["specification"]["timezone"] == ""
    assert "nothing was changed" in run_with_schedule("edit", "tick", "--every", "300s").stdout
    assert "pass an option" in run_with_schedule("edit", "tick", code=2).stderr


@pytest.mark.parametrize("paused", [False, True])
def test_schedule_edit_moves_to_a_new_topic(
    run_with_schedule: Run, store: Store, paused: bool
) -> None:
    if paused:
        run_with_schedule("pause", "tick")
    run_with_schedule("edit", "tick", "--topic", "others")
    found = row(run_with_schedule)
    assert (found["topic"], found["partition"]) == ("others", 0)
    assert found["state"] == ("paused" if paused else "active")
    assert len(document(run_with_schedule("list", "--json"))["rows"]) == 1


def test_schedule_edit_finishes_an_interrupted_move(run_with_schedule: Run, store: Store) -> None:
    before = calls.index(store, ["tick"])["tick"]
    assert isinstance(before, calls.IndexLine)
    store.run(calls.hold(store.keys, before.place, "tick", calls.MOVING))
    calls.write_index(
        store, "tick", before._replace(place=("others", 0), origin_place=before.place), new=False
    )
    assert row(run_with_schedule)["state"] == "moving"
    run_with_schedule("edit", "tick", "--topic", "others")
    found = row(run_with_schedule)
    assert (found["topic"], found["state"]) == ("others", "active")


def test_schedule_of_a_file_cannot_be_edited_or_removed(run_schedule: Run, store: Store) -> None:
    reconcile(store, "filed")
    assert (
        "edit it there and reload" in run_schedule("edit", "filed", "--every", "2h", code=8).stderr
    )
    told = run_schedule("remove", "filed", "--yes", code=8).stderr
    assert "declared by an instance of fleet default" in told
    told = run_schedule("add", "filed", "--topic", TOPIC, "--every", "1h", code=8).stderr
    assert "add this one under another name" in told
    set_last_seen(store, "filed", 61)
    assert run_schedule("remove", "filed", "--yes").stdout == "1 schedule removed\n"


def test_file_does_not_replace_a_schedule_of_an_operator(
    run_with_schedule: Run, store: Store
) -> None:
    reconcile(store, "tick")
    assert row(run_with_schedule)["origin"] == "operator"


# --- pausing --------------------------------------------------------------------------------------


def test_paused_schedule_sends_nothing_until_resumed(run_with_schedule: Run, store: Store) -> None:
    hour = 3_600_000
    make_due(store, server_unix_ms(store) // hour * hour - 5 * hour)
    assert run_with_schedule("pause", "tick").stdout == "1 schedule paused\n"
    fire(store)
    assert (read_messages(store), row(run_with_schedule)["state"]) == ([], "paused")
    assert run_with_schedule("pause", "tick").stdout == "no schedules paused\n"
    assert run_with_schedule("resume", "tick").stdout == "1 schedule resumed\n"
    fire(store)
    assert len(read_messages(store)) == 1
    assert row(run_with_schedule)["skipped"] == 5


def test_deploy_does_not_resume_a_paused_schedule(run_schedule: Run, store: Store) -> None:
    reconcile(store, "filed")
    run_schedule("pause", "filed")
    reconcile(store, "filed")
    assert row(run_schedule, "filed")["state"] == "paused"


def test_schedule_pause_pauses_all_named_or_none(run_with_schedule: Run) -> None:
    told = run_with_schedule("pause", "tick", "tock", code=8).stderr
    assert "schedule tock does not exist; did you mean tick?" in told
    assert row(run_with_schedule)["state"] == "active"


def test_orphaned_schedule_cannot_be_resumed(run_schedule: Run, store: Store) -> None:
    reconcile(store, "filed")
    set_last_seen(store, "filed", 601)
    assert "no instance declares it" in run_schedule("resume", "filed", code=8).stderr


# --- running --------------------------------------------------------------------------------------


def test_schedule_run_sends_a_message_now(run_with_schedule: Run, store: Store) -> None:
    due = row(run_with_schedule)["due_unix_ms"]
    run_with_schedule("pause", "tick")
    told = [document(run_with_schedule("run", "tick", "--json")) for _ in range(3)]
    assert len({each["scheduled_for"] for each in told}) == 3
    headers = [json.loads(each[b"headers"]) for each in read_messages(store)]
    assert {each["x-scheduled-for"] for each in headers} == {e["scheduled_for"] for e in told}
    assert {each["x-schedule"] for each in headers} == {"tick"}
    assert row(run_with_schedule)["due_unix_ms"] == due


def test_schedule_run_does_not_count_as_a_tick(
    run_with_schedule: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manual message is not a tick.

    Its headers contain none, because the tick is still sent when it is due.
    """
    hour = row(run_with_schedule)["due_unix_ms"]
    monkeypatch.setattr(admin, "server_unix_ms", lambda _link: hour)
    found = admin.run(store, "tick")
    assert found.scheduled_for == admin.format_tick(hour + 1)


# --- removing -------------------------------------------------------------------------------------


def test_schedule_remove_leaves_nothing(run_with_schedule: Run, store: Store) -> None:
    assert (
        run_with_schedule("remove", "tick", "--dry-run").stdout
        == "would remove 1 schedule\ntick (active)\n"
    )
    assert "pass --yes" in run_with_schedule("remove", "tick", code=8).stderr
    run_with_schedule("remove", "tick", "--yes")
    assert store.execute("KEYS", "*schedule:{*") == []
    assert calls.index(store, ["tick"]) == {}
    assert "does not exist" in run_with_schedule("remove", "tick", "--yes", code=8).stderr


def test_schedule_can_be_removed_and_added_again(run_with_schedule: Run, store: Store) -> None:
    make_due(store, server_unix_ms(store) // 3_600_000 * 3_600_000)
    fire(store)
    run_with_schedule("remove", "tick", "--yes")
    run_with_schedule("add", "tick", "--topic", TOPIC, "--every", "1h")
    fire(store)
    assert len(read_messages(store)) == 1


def test_schedule_prune_removes_orphans_and_unused_names(
    run_with_schedule: Run, store: Store
) -> None:
    reconcile(store, "kept", "orphan")
    run_with_schedule("add", "left", "--topic", "others", "--every", "1h")
    set_last_seen(store, "orphan", 601)
    keep_only_name(store, "left")
    told = run_with_schedule("prune", "--dry-run").stdout
    assert told == "would remove 2 schedules\nleft (missing)\norphan (orphaned)\n"
    assert document(run_with_schedule("prune", "--yes", "--json"))["changed"] == {
        "left": "removed",
        "orphan": "removed",
    }
    assert [each["name"] for each in document(run_with_schedule("list", "--json"))["rows"]] == [
        "kept",
        "tick",
    ]
    assert document(run_with_schedule("prune", "--json"))["changed"] == {}


def test_schedule_remove_accepts_a_name_without_a_schedule(run_schedule: Run, store: Store) -> None:
    run_schedule("add", "left", "--topic", "others", "--every", "1h")
    keep_only_name(store, "left")
    told = run_schedule("add", "left", "--topic", TOPIC, "--every", "1h", code=8).stderr
    assert "left over from a deleted topic; run `streamqd schedule remove left` first" in told
    run_schedule("remove", "left", "--yes")
    run_schedule("add", "left", "--topic", TOPIC, "--every", "1h")


def test_unreadable_schedule_name_is_reported_and_removed(
    run_with_schedule: Run, store: Store
) -> None:
    store.execute("HSET", store.keys.schedule_index(), "tick", "x", "bad\n", "y")
    seen = run_with_schedule("list", "--json")
    assert len(document(seen)["unreadable"]) == 2
    assert "and not `fleet origin" in run_with_schedule("show", "tick", code=8).stderr
    run_with_schedule("remove", "tick", "--yes")
    assert store.execute("KEYS", "*schedule:{*") == []


def test_schedule_list_survives_a_key_of_a_wrong_type(run_with_schedule: Run, store: Store) -> None:
    run_with_schedule("add", "other", "--topic", "others", "--every", "1h")
    store.execute("DEL", store.keys.schedules("others", 0))
    store.execute("SET", store.keys.schedules("others", 0), "x")
    seen = document(run_with_schedule("list", "--json"))
    assert {each["name"]: each["state"] for each in seen["rows"]}["tick"] == "active"
    assert len(seen["unreadable"]) == 1


@pytest.mark.parametrize("part", ["tick", "ran"])
def test_schedule_list_survives_an_out_of_range_tick(
    run_with_schedule: Run, store: Store, part: str
) -> None:
    """A tick that is out of range does not make `schedule list` fail with an error about a year."""
    run_with_schedule("add", "other", "--topic", "others", "--every", "1h")
    line = calls.index(store, ["tick"])["tick"]
    assert isinstance(line, calls.IndexLine)
    store.execute("HSET", store.keys.schedules_last(*line.place), f"tick:{part}", 2**53 - 1)
    seen = document(run_with_schedule("list", "--json"))
    assert {each["name"]: each["state"] for each in seen["rows"]}["other"] == "active"
    assert [each["field"] for each in seen["unreadable"]] == [f"tick:{part}"]


def test_schedule_prune_keeps_schedules_with_an_unreadable_state(
    run_with_schedule: Run, store: Store
) -> None:
    """Schedules whose state cannot be read are kept.

    A bad counter, or a key of another type, does not mean that the topic was deleted.
    """
    run_with_schedule("add", "other", "--topic", "others", "--every", "1h")
    line = calls.index(store, ["tick"])["tick"]
    assert isinstance(line, calls.IndexLine)
    store.execute("HSET", store.keys.schedules_last(*line.place), "tick:late", "x")
    store.execute("DEL", store.keys.schedules("others", 0))
    store.execute("SET", store.keys.schedules("others", 0), "x")
    rows = document(run_with_schedule("list", "--json"))["rows"]
    assert {each["name"]: each["state"] for each in rows} == {
        "other": "unreadable",
        "tick": "unreadable",
    }
    assert document(run_with_schedule("prune", "--yes", "--json"))["changed"] == {}
    told = run_with_schedule("add", "tick", "--topic", TOPIC, "--every", "2h", code=8).stderr
    assert "schedule tick exists, but cannot be read" in told


# --- listing --------------------------------------------------------------------------------------


def test_schedule_list_is_paged(run_schedule: Run) -> None:
    for name in ("a", "b", "c"):
        run_schedule("add", name, "--topic", "others" if name == "b" else TOPIC, "--every", "1h")
    found: list[str] = []
    cursor: tuple[str, ...] = ()
    for _ in range(2):
        page = document(run_schedule("list", "--topic", TOPIC, "-n", "1", *cursor, "--json"))
        found += [each["name"] for each in page["rows"]]
        cursor = ("--cursor", page["cursor"])
    assert (found, page["cursor"], page["total"]) == (["a", "c"], "", 2)
    assert run_schedule("list").stdout.splitlines()[2].split()[:4] == [
        "b",
        "others/0",
        "every",
        "1h",
    ]


def test_schedule_next_ticks_handle_the_clock_change(run_schedule: Run) -> None:
    zone = ("--topic", TOPIC, "--timezone", "Europe/Berlin", "--cron")
    run_schedule("add", "half", *zone, "*/30 * * * *")
    run_schedule("add", "once", *zone, "30 2 * * *")
    since = ("--from", "2026-10-25T00:00", "--count", "5", "--json")
    locals_ = [row["local"] for row in document(run_schedule("next", "half", *since))["rows"]]
    assert [each[11:] for each in locals_] == [
        "02:00:00+02:00",
        "02:30:00+02:00",
        "02:00:00+01:00",
        "02:30:00+01:00",
        "03:00:00+01:00",
    ]
    days = [row["local"][:10] for row in document(run_schedule("next", "once", *since))["rows"]]
    assert days == [f"2026-10-{day}" for day in (25, 26, 27, 28, 29)]


def test_schedule_commands_are_in_the_audit_log(
    run_with_schedule: Run, run: Run, store: Store
) -> None:
    run_with_schedule("pause", "tick")
    run_with_schedule("resume", "tick")
    run_with_schedule("edit", "tick", "--every", "2h")
    run_with_schedule("run", "tick")
    run_with_schedule("remove", "tick", "--yes")
    trail = document(run("dlq", "audit", TOPIC, "--json"))["entries"]
    verbs = ["remove", "run", "edit", "resume", "pause", "add"]
    assert [each["command"] for each in trail] == [f"schedule {each}" for each in verbs]


def test_schedule_show_explains_an_unreadable_specification(
    run_with_schedule: Run, store: Store
) -> None:
    key = store.keys.schedules(TOPIC, 0)
    store.execute("HSET", key, "tick", b"\x00\xffgarbage{")
    assert (
        "cannot be read: specification does not match its hash"
        in run_with_schedule("show", "tick").stdout
    )
    store.execute("HSET", key, "tick", "[]", "tick:hash", hash_specification("[]"))
    assert "is not a table" in document(run_with_schedule("show", "tick", "--json"))["problem"]


def test_audit_lists_schedule_names_without_brackets(run_with_schedule: Run, run: Run) -> None:
    run_with_schedule("pause", "tick")
    line = run("dlq", "audit", TOPIC).stdout.splitlines()[1]
    assert line.endswith("schedules tick")


@pytest.mark.parametrize(
    "words",
    [
        ("add", "new", "--topic", TOPIC, "--every", "1h"),
        ("edit", "tick", "--every", "2h"),
        ("edit", "tick", "--topic", "others"),
        ("pause", "tick"),
        ("run", "tick"),
        ("remove", "tick"),
        ("prune",),
    ],
    ids=" ".join,
)
def test_schedule_dry_run_changes_nothing(
    run_with_schedule: Run, store: Store, words: tuple[str, ...]
) -> None:
    harness = Harness(store.connection, store.keys)
    before = harness.dump()
    run_with_schedule(*words, "--dry-run")
    assert document(run_with_schedule(*words, "--dry-run", "--json")).get("dry_run") is True
    assert harness.dump() == before
