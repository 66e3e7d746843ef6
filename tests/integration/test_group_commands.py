"""The group and retry commands work on a real server: their output, JSON and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamqd.admin import backlog, groups, growth
from streamqd.errors import RequestRefusedError
from streamqd.store import messages, spark, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support.commands import HarnessAt, Run, document
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.servers import ProcessServer


def delay_retries(
    harness: Harness, *ids: str, delay: float = 60.0, key: str = "k1", count: int = 1
) -> None:
    """Record failures of these messages in the same way as a worker."""
    harness.groups()
    if not harness.do("EXISTS", harness.lease):
        harness.own("t1")
    for each in ids:
        harness.add(each, "payload", f"body of {each}", "key", key)
        harness.fetch()
        fields = {b"originalId": each.encode(), b"retryCount": b"%d" % count, b"crashCount": b"0"}
        call = messages.retry(
            harness.keys, harness.leased("t1"), [(f"m:{each}".encode(), delay, fields)]
        )
        assert harness.link.run(call).word == "OK"


# --- list, describe -------------------------------------------------------------------------------


def test_groups_are_listed_and_described(run: Run, harness_at: HarnessAt) -> None:
    assert run("group", "list").stdout == "no group reads any topic\n"
    for number in (0, 1):
        harness_at(number).groups()
    harness_at(0).own("t1", owner="west-1")
    for entry_id in ("1000-0", "2000-0", "3000-0"):
        harness_at(0).add(entry_id)
    harness_at(0).fetch(1)
    harness_at(0).do("ZADD", harness_at(0).delayed, 9e12, "m:1-0")
    harness_at(1).add("5-0", stream=harness_at(1).retry)

    [row] = document(run("group", "list", "access", "--json"))["rows"]
    detail = document(run("group", "describe", "access", "hits", "--json"))

    assert row == {
        "topic": "access",
        "group": "hits",
        "partitions": 2,
        "owned": 1,
        "owners": ["west-1"],
        "lag": 3,
        "lag_exact": True,
        "pending": 1,
        "waiting_retries": 1,
        "oldest_unix_ms": 5,
        "unreadable": [],
    }
    assert detail["missing"] == [2]
    first, second = detail["partitions"]
    assert (first["state"], first["owner"], first["position"]) == ("owned", "west-1", "1000-0")
    assert (first["lag"], first["pending"], first["waiting_retries"]) == (2, 1, 1)
    assert first["oldest_unread_unix_ms"] == 2000
    assert first["oldest_pending_unix_ms"] == 1000
    assert (second["state"], second["lag"], second["retry_unread"]) == ("free", 1, 1)
    text = run("group", "describe", "access", "hits")
    assert text.stdout.startswith("group hits of access: 3 unread, 1 pending, 1 waiting retry\n")
    assert "not on partition 2 yet" in text.stdout
    assert "did you mean hits" in run("group", "describe", "access", "hist", code=8).stderr


@pytest.mark.parametrize("bound", [None, 3000])
def test_group_lag_is_counted_if_the_server_has_none(
    harness_at: HarnessAt,
    link: Connection,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    bound: int | None,
) -> None:
    """The lag is counted if the server has none.

    A group that was created in the middle of a stream has no count, and Redis 6.2 never has one.
    """
    harness = harness_at(0)
    for first in range(1, 5001, 500):
        link.pipeline(
            [("XADD", harness.stream, f"{n}-0", "f", "v") for n in range(first, first + 500)]
        )
    harness.do("XGROUP", "CREATE", harness.stream, "hits", "1234-0")
    harness.do("XGROUP", "CREATE", harness.retry, "hits", "0", "MKSTREAM")
    if bound:
        monkeypatch.setattr(backlog, "COUNT_MAX", bound)

    [part] = groups.describe(store, "access", "hits").partitions

    assert part.lag == (None if bound else 5000 - 1234)
    assert part.lag_at_least >= (bound or 5000 - 1234)


# --- reset ----------------------------------------------------------------------------------------

NOW = 1_800_000_000_000
SEQ = "18446744073709551615"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("earliest", "0-0"),
        ("latest", ""),
        ("5-3", "5-2"),
        ("5-0", f"4-{SEQ}"),
        ("0-0", "0-0"),
        ("2h", f"{NOW - 7_200_001}-{SEQ}"),
        ("2027-01-15T08:00:00Z", f"{NOW - 1}-{SEQ}"),
        ("2027-01-15T09:00:00.500+01:00", f"{NOW + 499}-{SEQ}"),
        ("1000w", f"{NOW - 604_800_001_000 + 999}-{SEQ}"),
    ],
)
def test_group_position_accepts_each_form(text: str, after: str) -> None:
    assert groups.position(text, NOW) == after


@pytest.mark.parametrize("text", ["", "soon", "5-", "2027-01-15", "2027-01-15T09:00:00", "-1h"])
def test_group_reset_refuses_an_invalid_position(text: str) -> None:
    with pytest.raises(RequestRefusedError, match="earliest, latest"):
        groups.position(text, NOW)


@pytest.mark.parametrize("text", ["2999-01-01T00:00:00Z", f"{NOW + 3_600_000}-0"])
def test_group_reset_refuses_a_future_position(text: str) -> None:
    with pytest.raises(RequestRefusedError, match="is in the future"):
        groups.position(text, NOW)


def test_group_reset_dry_run_matches_the_reset(run: Run, harness_at: HarnessAt) -> None:
    for number in range(3):
        harness = harness_at(number)
        delay_retries(harness, "1-0")
        for entry_id in ("2-0", "3-0"):
            harness.add(entry_id)
        harness.fetch(1)
        harness.do("DEL", harness.lease)  # as if the owner were gone
    arguments = ("group", "reset", "access", "hits", "--to", "2-0", "--drop-retries")

    foretold = document(run(*arguments, "--dry-run", "--json"))
    run(*arguments, code=8)  # there is no terminal for the question
    done = document(run(*arguments, "--yes", "--json"))

    assert foretold["dry_run"]
    assert not done["dry_run"]
    assert foretold["partitions"] == done["partitions"]
    assert done["partitions"][0] == {
        "partition": 0,
        "before": "2-0",
        "after": f"1-{SEQ}",
        "unread": 2,
        "unread_exact": True,
        "pending": 1,
        "waiting_retries": 1,
        "retried": 0,
    }
    assert harness_at(2).fetch() == [b"2-0", b"3-0"]


def test_group_reset_dry_run_works_on_an_owned_group(run: Run, harness_at: HarnessAt) -> None:
    """`group reset --dry-run` works on an owned group, and reports that a reset would not."""
    for number in range(3):
        harness_at(number).groups()
        harness_at(number).add("1000-0")
    harness_at(1).own("t1", owner="west-1")
    before = harness_at(0).dump()
    words = ("group", "reset", "access", "hits", "--to", "earliest")

    shown = run(*words, "--dry-run").stdout
    foretold = document(run(*words, "--dry-run", "--json"))
    refused = run(*words, "--yes", code=8).stderr

    assert "the command would fail now: access/1/hits is owned by west-1" in shown
    assert foretold["obstacle"].startswith("access/1/hits is owned by west-1")
    assert len(foretold["partitions"]) == 3
    assert "streamqd group stop access hits --wait" in refused
    assert harness_at(0).dump() == before
    assert document(run(*words, "--dry-run", "--force", "--json"))["obstacle"] == ""


def test_group_commands_print_special_positions_as_words(run: Run, harness_at: HarnessAt) -> None:
    """The largest ID, 18446744073709551615, is printed as a word, not as a number."""
    for number in range(3):
        harness_at(number).groups()
        harness_at(number).add("1000-0")
        harness_at(number).add("2000-0")
    reset = ("group", "reset", "access", "hits")
    first = run(*reset, "--to", "2000-0", "--yes").stdout
    last = run(*reset, "--to", "latest", "--yes").stdout
    described = run("group", "describe", "access", "hits").stdout
    run(*reset, "--to", "2000-0", "--yes")
    between = run("group", "describe", "access", "hits").stdout

    assert re.search(r"0 +start +before 2000-0 +1 ", first)
    assert re.search(r"0 +before 2000-0 +end +0 ", last)
    assert "  2000-0  " in described.splitlines()[-1]
    assert "  before 2000-0  " in between.splitlines()[-1]
    assert not any(str(SEQ) in text for text in (first, last, described, between))


def test_group_reset_accepts_some_partitions(run: Run, harness_at: HarnessAt) -> None:
    for number in range(3):
        harness_at(number).groups()
        harness_at(number).add("1-0")
        harness_at(number).fetch()
    harness_at(0).own("t1")
    run("group", "reset", "access", "hits", "--to", "earliest", "--yes", code=8)
    run("group", "reset", "access", "hits", "--to", "earliest", "--yes", "-p", "3", code=8)

    run("group", "reset", "access", "hits", "--to", "earliest", "--yes", "-p", "1", "-p", "2")

    assert [harness_at(number).fetch() for number in range(3)] == [[], [b"1-0"], [b"1-0"]]


def begin_growth(harness_at: HarnessAt, link: Connection, keys: Keys) -> None:
    """Start to grow the topic. The growth waits for one message of each partition."""
    for number in range(3):
        harness_at(number).groups()
        harness_at(number).add("1-0")
    assert not growth.grow(Store(link, keys), "access", 6).done


def test_group_reset_with_force_respects_a_growing_topic(
    run: Run, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    begin_growth(harness_at, link, keys)
    before = harness_at(4).dump()

    refused = run("group", "reset", "access", "hits", "--to", "latest", "--force", "--yes", code=8)

    assert "topic grow" in refused.stderr
    assert harness_at(4).dump() == before
    run("group", "reset", "access", "hits", "--to", "latest", "--yes", "-p", "0")


@pytest.mark.fault("F26")
def test_group_reset_makes_a_running_owner_read_again(
    tmp_path: Path, fresh_server: ProcessServer
) -> None:
    daemon = Daemon(tmp_path, fresh_server.url, daemon={"lease_ttl": "2s"})
    with daemon:
        sent = daemon.send(["ok"] * 5)
        daemon.wait_settled()
        epoch = daemon.epochs()[0]

        groups.reset(daemon.store, TOPIC, GROUP, "earliest", force=True)

        daemon.wait_for(
            lambda: all(len(daemon.ledger.records_for(uid, "end")) == 2 for uid in sent),
            what="all have run again",
        )
        daemon.wait_settled()
        assert daemon.epochs()[0] > epoch


# --- delete ---------------------------------------------------------------------------------------


def test_group_delete_removes_a_group(
    run: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys
) -> None:
    for number in range(3):
        harness_at(number).groups()
        harness_at(number, "agents").groups()
    link.execute("HSET", keys.meta("access"), "group:hits", 3, "group:agents", 3)
    harness_at(1).own("t1")
    run("group", "delete", "access", "hits", "--yes", code=8)
    harness_at(1).do("DEL", harness_at(1).lease)
    harness_at(2).pending("1-0")
    result = run("group", "delete", "access", "hits", "--yes", code=8)
    assert "--force" in result.stderr
    assert "hits" in run("group", "list").stdout

    run("group", "delete", "access", "hits", "--yes", "--force")

    assert [row["group"] for row in document(run("group", "list", "--json"))["rows"]] == ["agents"]
    assert topics.known_groups(store, "access") == ["agents"]
    run("group", "delete", "access", "hits", "--yes", code=8)


def test_interrupted_group_delete_can_be_repeated(
    run: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys
) -> None:
    for number in range(3):
        harness_at(number).groups()
    link.execute("HSET", keys.meta("access"), "group:hits", 3)
    harness_at(0).do("XGROUP", "DESTROY", harness_at(0).stream, "hits")
    run("group", "delete", "access", "hits", "--yes")
    assert topics.known_groups(store, "access") == []


def test_group_delete_in_a_growing_topic_needs_force(
    run: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys
) -> None:
    """The group may never settle its messages, so --force deletes it. The growth then continues."""
    begin_growth(harness_at, link, keys)

    refused = run("group", "delete", "access", "hits", "--yes", code=8)
    assert "access is growing, and hits has not acknowledged 3 messages" in refused.stderr
    asked = run("group", "delete", "access", "hits", "--force", code=8)
    assert "keys would lose their order. Delete group hits of access?" in asked.stderr
    run("group", "delete", "access", "hits", "--force", "--yes")

    (deed,) = document(run("dlq", "audit", "access", "--json"))["entries"]
    assert deed["arguments"]["growing"] is True
    assert growth.grow(store, "access", 6).done
    harness_at(0).groups()
    run("group", "delete", "access", "hits", "--yes")


# --- retries --------------------------------------------------------------------------------------


def test_retries_are_listed_by_due_time_over_all_partitions(
    run: Run, harness_at: HarnessAt
) -> None:
    delay_retries(harness_at(0), "1-0", delay=90, key="a")
    delay_retries(harness_at(1), "1-0", delay=30, key="b", count=3)
    delay_retries(harness_at(2), "1-0", "2-0", delay=60, key="a")

    seen = document(run("retry", "list", "access", "hits", "--json"))

    assert [row["id"] for row in seen["rows"]] == ["1:m:1-0", "2:m:1-0", "2:m:2-0", "0:m:1-0"]
    assert seen["total"] == 4
    assert seen["cursor"] == ""
    assert {name: seen["rows"][0][name] for name in ("attempt", "crashes", "key", "uid")} == {
        "attempt": 4,
        "crashes": 0,
        "key": "b",
        "uid": "access/1/1-0",
    }
    assert seen["rows"][0]["payload_bytes"] == len("body of 1-0")

    def ids(*options: str) -> list[str]:
        found = document(run("retry", "list", "access", "hits", "--json", *options))
        return [row["id"] for row in found["rows"]]

    assert ids("-k", "a", "-p", "2") == ["2:m:1-0", "2:m:2-0"]
    assert ids("--attempt", "4") == ["1:m:1-0"]
    assert ids("--due-within", "45s") == ["1:m:1-0"]
    page = run("retry", "list", "access", "hits", "-n", "2")
    cursor = re.search(r"--cursor (\S+)", page.stderr)
    assert cursor
    assert ids("--cursor", cursor[1]) == ["2:m:2-0", "0:m:1-0"]
    assert run("retry", "list", "access", "hits", "--cursor", "x", code=2)


def test_retry_now_runs_retries_immediately(run: Run, harness_at: HarnessAt) -> None:
    """`retry now` accepts --yes, just like `retry cancel`."""
    delay_retries(harness_at(0), "1-0", "2-0")
    delay_retries(harness_at(1), "1-0", key="other")
    run("retry", "now", "access", "hits", code=2)
    run("retry", "now", "access", "hits", "0:m:1-0", "--all", code=2)
    run("retry", "now", "access", "hits", "0:m:7-0", code=8)
    run("retry", "now", "access", "hits", "zero", code=2)
    run("retry", "now", "access", "hits", "9:m:1-0", code=8)

    one = run("retry", "now", "access", "hits", "0:m:1-0")
    rest = document(
        run("retry", "now", "access", "hits", "--all", "-k", "other", "--json", "--yes")
    )

    assert one.stdout == "1 retry due now\n"
    assert (rest["due"], rest["missing"]) == (1, 0)
    call = messages.promote_retries(harness_at(0).keys, harness_at(0).assignment, 10)
    assert harness_at(0).link.run(call).values[0] == 1
    assert harness_at(0).state()["delayed"].keys() == {"m:2-0"}


def test_retry_cancel_dead_letters_the_retries(run: Run, harness_at: HarnessAt) -> None:
    delay_retries(harness_at(0), "1-0", "2-0", count=2)
    delay_retries(harness_at(1), "1-0")
    run("retry", "cancel", "access", "hits", "--all", code=8)  # no terminal for the question

    done = document(run("retry", "cancel", "access", "hits", "0:m:1-0", "--yes", "--json"))
    dropped = run("retry", "cancel", "access", "hits", "--all", "-p", "1", "--drop", "--yes")

    assert (done["dead_letters"], done["dropped"], done["missing"]) == (1, 0, 0)
    assert dropped.stdout == "1 lost\n"
    [letter] = document(run("dlq", "list", "access", "--json"))["rows"]
    assert letter["id"] == done["dead_letter_ids"][0]
    assert (letter["reason"], letter["attempts"], letter["group"]) == ("canceled", 2, "hits")
    assert letter["uid"] == "access/0/1-0"
    run("dlq", "replay", "access", "--id", letter["id"], "--yes")
    assert (
        harness_at(0).read_stream(harness_at(0).retry).entries.popitem()[1]["payload"]
        == b"body of 1-0"
    )
    assert [
        row["id"] for row in document(run("retry", "list", "access", "hits", "--json"))["rows"]
    ] == ["0:m:2-0"]
    deeds = document(run("dlq", "audit", "access", "--json"))["entries"]
    assert [(d["command"], d["counts"]) for d in deeds if d["command"] == "retry cancel"] == [
        ("retry cancel", {"dead_letters": 0, "dropped": 1, "missing": 0}),
        ("retry cancel", {"dead_letters": 1, "dropped": 0, "missing": 0}),
    ]


def test_group_reset_and_delete_are_in_the_audit_log(run: Run, harness_at: HarnessAt) -> None:
    harness_at(0).groups()
    harness_at(0).pending("1-0", "2-0")
    reset = ("group", "reset", "access", "hits", "--to", "earliest", "-p", "0")
    run(*reset, "--dry-run")
    run(*reset, code=8)  # there is no terminal for the question
    assert run("dlq", "audit", "access").stdout == "nothing in the audit log of access\n"

    run(*reset, "--yes")
    run("group", "delete", "access", "hits", "--yes", "--force")

    deleted, moved = document(run("dlq", "audit", "access", "--json"))["entries"]
    assert (deleted["command"], deleted["arguments"]) == (
        "group delete",
        {"group": "hits", "force": True},
    )
    assert moved["command"] == "group reset"
    assert moved["counts"] == {"forgotten": 2, "dropped": 0}
    assert moved["arguments"]["partitions"] == {"0": "2-0 -> 0-0"}
    assert "@" in moved["who"]


@pytest.mark.parametrize(
    "words",
    [
        ("dlq", "show", "access", "zero"),
        ("dlq", "list", "access", "--cursor", "zero"),
        ("dlq", "audit", "access", "--cursor", "zero"),
        ("dlq", "purge", "access", "--id", "zero", "--yes"),
        ("dlq", "replay", "access", "--id", "0-0", "--yes"),
        ("pending", "access", "--group", "hits", "--cursor", "zero"),
        ("retry", "list", "access", "hits", "--cursor", "zero"),
        ("retry", "cancel", "access", "hits", "zero", "--yes"),
        ("group", "reset", "access", "hits", "--to", "soon", "--yes"),
        ("topic", "create", "no name"),
    ],
    ids=" ".join,
)
def test_group_commands_reject_invalid_arguments(
    run: Run, harness_at: HarnessAt, words: tuple[str, ...]
) -> None:
    harness_at(0).groups()
    assert run(*words, code=2).stderr.startswith("Error: ")


# --- defects --------------------------------------------------------------------------------------


def test_produce_reports_a_missing_file_in_json(run: Run, tmp_path: Path) -> None:
    result = run("produce", "orders", "--from", str(tmp_path / "nope"), "--json", code=2)
    told = document(result)
    assert told["sent"] == 0
    assert "nope" in told["error"]
    assert "nope" in result.stderr


def test_group_list_shows_a_spark_query_as_unowned_group(
    run: Run, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    """A Spark query is listed as a group without an owner.

    It has a lag, causes no finding, and can be deleted like any other group.
    """
    harness_at(0).groups()
    harness_at(0).own("t1", owner="west-1")
    for entry_id in ("1000-0", "2000-0", "3000-0"):
        harness_at(0).add(entry_id)
    link.run(spark.query_position(keys, "access", 0, "etl", "1000-0", 1, hold=True))

    assert re.search(r"access +spark:etl +- +2 ", run("group", "list").stdout)
    seen = run("status").stdout
    assert re.search(r"access/spark:etl +- .*Spark query", seen)
    assert "no instance owns access/spark:etl" not in seen
    why = run("why", "access/0/spark:etl", code=0).stdout
    assert "reported its position" in why
    run("group", "delete", "access", "spark:etl", "--force", "--yes")
    assert link.execute("HGETALL", keys.trim("access", 0)) in ([], {})


def test_group_list_skips_an_invalid_topic_name(run: Run, link: Connection, keys: Keys) -> None:
    link.execute("SADD", keys.registry(), "..")
    assert not re.search(r"^ +0/0", run("group", "list").stdout, re.MULTILINE)
