"""`topic settings`, `describe` and `delete` on a real server. Commands that read write nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamqd import config
from streamqd.admin import topics as admin_topics
from streamqd.admin import topics_deletion
from streamqd.errors import RedisResponseError, TopicNotFoundError
from streamqd.model import Assignment
from streamqd.producer import Producer
from streamqd.store import members, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.integration.test_admin import write_dead_letter
from tests.support.commands import HarnessAt, Run, document
from tests.support.servers import Server


def fill(harness_at: HarnessAt, *, everywhere: bool = True) -> None:
    """Write a value to every key that a topic may have."""
    for number in range(3 if everywhere else 1):
        harness = harness_at(number)
        write_dead_letter(harness, "1-0")
        harness.add("2-0")
        harness.fetch()
        harness.add("3-0")
        harness.add("7-0", stream=harness.retry)
        harness.do("ZADD", harness.delayed, 9e12, "m:2-0")
        harness.do("HSET", harness.items, "m:2-0", b"\x92\xa7payload\xa1x")
        harness.do("HSET", harness.attempts, b"m:2-0:c", "1")
        harness.do("ZADD", harness.delayed_sends, 9e12, "send")
        harness.do("HSET", harness.delayed_send_items, "send", b"\x92\xa7payload\xa1x")
        harness.do("HSET", harness.trim, "first", "1-0", "floor:hits", "2-0")
        harness.do("SET", harness.keys.dedup("access", number, "order-1"), "1-0", "PX", 60_000)
        harness.do(
            "XADD", harness.keys.staged_rows("access", number, "q", "a"), "0-1", "payload", "x"
        )
        harness.do("HSET", harness.keys.meta("access"), "group:hits", "3")
    harness_at(0).do("SET", harness_at(0).keys.pipeline("access", "archive"), "t", "PX", 60_000)


# --- settings -------------------------------------------------------------------------------------


def test_topic_settings_accepts_configuration_syntax(run: Run, harness_at: HarnessAt) -> None:
    changed = document(
        run("topic", "settings", "access", "retention.max_age=24h", "archive=required", "--json")
    )

    assert changed["changed"]
    assert changed["registered"] == {"archive": "required", "retention": {"max_age": 86400.0}}
    assert changed["effective"]["retention"]["max_age"] == 86400.0
    shown = run("topic", "describe", "access").stdout
    assert 'archive = "required"\n' in shown
    assert 'retention.max_age = "1d"\n' in shown
    again = run("topic", "settings", "access", "archive=required")
    assert "nothing changed" in again.stderr
    run("topic", "settings", "access", "retention.max_age=none")
    assert document(run("topic", "settings", "access", "--json"))["registered"] == {
        "archive": "required",
        "retention": {},
    }


@pytest.mark.parametrize(
    ("assignment", "why"),
    [
        ("retention.max_age=soon", "is not a duration"),
        ("retention.max_age=0", "too small"),
        ("archive=yes", "not one of"),
        ("retention.max_agee=1h", "did you mean topics.access.retention.max_age"),
        ("partitions=8", "topic grow access"),
        ("archive", "NAME=VALUE"),
        ("retention=5", "is not a table"),
    ],
)
def test_topic_settings_refuses_invalid_values(
    run: Run, harness_at: HarnessAt, assignment: str, why: str
) -> None:
    before = harness_at(0).dump()
    assert why in run("topic", "settings", "access", assignment, code=2).stderr
    assert harness_at(0).dump() == before


def test_topic_settings_checks_combinations(run: Run, harness_at: HarnessAt) -> None:
    run("topic", "settings", "access", "retention.max_age=2h")
    result = run("topic", "settings", "access", "retention.drop_unacked_after=1h", code=2)
    assert "at least max_age" in result.stderr


def test_topic_shows_registered_and_configured_settings(
    run: Run, harness_at: HarnessAt, file: Path
) -> None:
    run("topic", "settings", "access", "retention.max_age=24h", "retention.max_length=5")
    with file.open("a") as opened:
        opened.write('[topics.access]\nretention = { max_age = "1h" }\n')

    seen = document(run("topic", "settings", "access", "--json"))

    assert seen["configured"] == {"retention": {"max_age": 3600.0}}
    assert (seen["effective"]["retention"]["max_age"]) == 3600.0
    assert (seen["effective"]["retention"]["max_length"]) == 5
    line = 'retention.max_age = "1h"  (from this configuration; registered: "1d")\n'
    assert line in run("topic", "describe", "access").stdout


def test_topic_settings_keeps_unknown_fields(run: Run, harness_at: HarnessAt) -> None:
    stored = '{"later":1,"archive":"off","retention":{"newer":2}}'
    harness_at(0).do("HSET", harness_at(0).keys.meta("access"), "settings", stored)
    run("topic", "settings", "access", "archive=required")
    assert json.loads(
        topics.read_settings(Store(harness_at(0).link, harness_at(0).keys), "access")
    ) == {
        "later": 1,
        "archive": "required",
        "retention": {"newer": 2},
    }


# --- delete ---------------------------------------------------------------------------------------


def test_topic_delete_leaves_no_key(
    run: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys
) -> None:
    topics.create(store, "access.p", config.Topic())
    neighbour = Harness(link, keys, Assignment("access.p", 0, "hits"))
    neighbour.groups()
    neighbour.add("1-0")
    link.execute("SET", "foreign:{access:p:0}:hits", "x")
    before = neighbour.dump()
    fill(harness_at)

    run("topic", "delete", "access", "--yes", code=8)  # because the topic still has an owner
    done = document(run("topic", "delete", "access", "--yes", "--force", "--json"))

    assert (done["topic"], done["partitions"]) == ("access", 3)
    registry = keys.registry().encode()
    kept = {key for key in before if b"{access}" not in key}
    after = neighbour.dump()
    trail = keys.audit("access").encode()
    assert after.keys() == kept | {trail}, "and who has done it"
    assert all(after[key] == before[key] for key in kept - {registry})
    (deed,) = document(run("dlq", "audit", "access", "--json"))["entries"]
    assert deed["command"] == "topic delete"
    assert "@" in deed["who"]
    assert deed["arguments"] == {"groups": ["hits"], "partitions": 3, "force": True}
    assert deed["counts"]["keys"] == done["keys"]
    assert deed["counts"]["messages"] > 0
    assert topics.names(store) == ["access.p"]
    assert run("topic", "delete", "access", "--yes", code=8).stderr.count("does not exist") == 1


def test_topic_delete_refuses_a_topic_in_use(
    run: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys
) -> None:
    fill(harness_at)
    info = {"offers": [["access", "hits"]], "weight": 1, "cap": 0}
    link.run(members.heartbeat(keys, "default", "west-1", "n1", info, 15.0))
    link.run(
        members.heartbeat(keys, "default", "east-1", "n2", info | {"offers": [["x", "y"]]}, 15.0)
    )

    refused = run("topic", "delete", "access", "--yes", "--force", code=8)

    assert refused.stderr.startswith("Error: west-1 would create the topic again, empty; ")
    assert "in use: offered by west-1\n" in run("topic", "delete", "access", "--dry-run").stdout
    assert topics.partition_count(store, "access") == 3
    run("topic", "delete", "access", "--yes", "--force", "--while-consumed")
    assert topics.names(store) == []


def test_topic_delete_covers_every_key_of_a_partition(keys: Keys) -> None:
    own = topics_deletion.pattern(keys, "access")
    built = [
        *(keys.stream("access", 3), keys.dlq("access", 3), keys.delayed_sends("access", 3)),
        *(
            keys.delayed_send_items("access", 3),
            keys.dedup("access", 3, "a:b"),
            keys.trim("access", 3),
        ),
        *(keys.staged_rows("access", 3, "q", "a"), keys.pipeline("access", "archive")),
        *(keys.moving("access", 3), keys.audit("access")),
        keys.outbox_record("access", 3, "shop"),
        *(
            keys.schedules("access", 3),
            keys.schedules_due("access", 3),
            keys.schedules_last("access", 3),
        ),
    ]
    of_groups = ("retry_stream", "lease", "fence", "retry", "retry_items", "attempts")
    of_groups += ("epochs", "stack")
    built += [getattr(keys, name)("access", 3, "hits") for name in of_groups]
    for name in built:
        assert own.fullmatch(name.encode()), name
    for name in (keys.meta("access"), keys.stream("access2", 3), "x" + keys.stream("access", 3)):
        assert not own.fullmatch(name.encode()), name
    public = {each for each in dir(Keys) if not each.startswith("_")}
    fleetwide = {
        "registry",
        "members",
        "info",
        "instance",
        "directives",
        "wake",
        "progress",
        "sink",
    }
    fleetwide |= {
        "duplicate",
        "history",
        "outboxes",
        "outbox",
        "outbox_lease",
        "schedule_index",
        "schedule_places",
    }
    # `source` is `stream` or `dlq`, depending on the group.
    rest = public - fleetwide - {"control", "streams", "meta", "partitions", "source"}
    # A new kind of key must be added either to the pattern or to this list of exceptions.
    assert len(rest) == len(built), sorted(rest)


class HaltError(Exception):
    pass


def test_interrupted_topic_delete_can_be_repeated(
    run: Run, harness_at: HarnessAt, store: Store, keys: Keys
) -> None:
    fill(harness_at)

    def stop(_removed: int) -> None:
        raise HaltError

    with pytest.raises(HaltError):
        topics_deletion.delete(store, "access", force=True, progress=stop)

    with pytest.raises(RedisResponseError, match="is being deleted"):
        topics.create(store, "access", config.Topic())
    with pytest.raises(TopicNotFoundError):
        admin_topics.partition_count(store, "access")
    assert "partly deleted" in run("topic", "delete", "access", "--dry-run").stdout
    run("topic", "delete", "access", "--yes", "--force")
    assert harness_at(0).dump().keys() == {keys.audit("access").encode()}


def test_producers_leave_no_partial_topic_after_a_delete(
    run: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys, server: Server
) -> None:
    """One producer recreates the whole topic, and the other one reports that it is gone."""
    with Producer(server.url) as first, Producer(server.url, create=False) as second:
        for each in (first, second):
            for number in range(3):
                each.send("access", b"x", partition=number)
        run("topic", "delete", "access", "--yes")

        with pytest.raises(TopicNotFoundError):
            second.send("access", b"x", key="k")
        assert harness_at(0).dump().keys() == {keys.audit("access").encode()}
        first.send("access", b"x", key="k")

    assert topics.names(store) == ["access"]
    assert topics.partition_count(store, "access") == 1
    assert set(link.execute("SMEMBERS", keys.partitions("access"))) == {
        keys.stream("access", 0).encode()
    }
    assert link.execute("XLEN", keys.stream("access", 0)) == 1


# --- reading commands -----------------------------------------------------------------------------

LOOKS = (
    ("status",),
    ("partitions",),
    ("partitions", "access", "-g", "hits"),
    ("pending", "access", "-s", "idle"),
    ("topic", "list"),
    ("topic", "describe", "access"),
    ("topic", "settings", "access"),
    ("topic", "delete", "access", "--dry-run"),
    ("group", "list"),
    ("group", "describe", "access", "hits"),
    ("group", "reset", "access", "hits", "--to", "latest", "--force", "--dry-run"),
    ("retry", "list", "access", "hits"),
    ("retry", "now", "access", "hits", "--all", "--dry-run"),
    ("retry", "cancel", "access", "hits", "--all", "--dry-run"),
    ("tail", "access"),
    ("dlq", "list", "access"),
    ("dlq", "show", "access", "DEAD_LETTER"),
    ("dlq", "stats", "access"),
    ("dlq", "replay", "access", "--all", "--dry-run"),
    ("dlq", "purge", "access", "--all", "--dry-run"),
    ("config", "show"),
    ("topic", "describe", "nope"),
    ("group", "list", "nope"),
)


@pytest.mark.parametrize("args", LOOKS, ids=" ".join)
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_topic_views_write_nothing(
    run: Run, harness_at: HarnessAt, link: Connection, args: tuple[str, ...], form: tuple[str, ...]
) -> None:
    fill(harness_at)
    letter = "0:" + link.execute("XRANGE", harness_at(0).dlq, "-", "+")[0][0].decode()
    before = harness_at(0).dump()
    command = [letter if each == "DEAD_LETTER" else each for each in args]

    run(*command, *form, code=8 if "nope" in args else 0)

    assert harness_at(0).dump() == before


def test_growth_to_the_current_count_changes_nothing(run: Run, harness_at: HarnessAt) -> None:
    """The command neither asks for confirmation nor warns that a topic cannot shrink."""
    harness_at(0)
    said = run("topic", "grow", "access", "3").stdout
    assert said == "access already has 3 partitions, so nothing was changed\n"


def test_growth_to_an_invalid_count_gives_no_advice_for_the_file(
    run: Run, harness_at: HarnessAt, file: Path
) -> None:
    harness_at(0)
    with file.open("a") as opened:
        opened.write("[topics.access]\npartitions = 3\n")

    assert "change it to 6 there" in run("topic", "grow", "access", "6", code=8).stderr
    assert "choose 6" in run("topic", "grow", "access", "4", code=8).stderr
