"""`trim` and `doctor stream` have the right effects, output and exit codes on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamqd import config
from streamqd.model import Assignment
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support.commands import Run, document
from tests.support.servers import Server


@pytest.fixture
def harness(link: Connection, store: Store, keys: Keys) -> Harness:
    topics.create(store, "access", config.Topic(partitions=2))
    return Harness(link, keys)


def fill(harness: Harness, count: int, *, acked: int, first: int = 1) -> None:
    harness.groups()
    harness.link.pipeline(
        [("XADD", harness.stream, f"{n}-0", "payload", "x") for n in range(first, first + count)]
    )
    if acked:
        harness.do("XACK", harness.stream, "hits", *harness.fetch(acked))


def length(harness: Harness) -> int:
    return int(harness.do("XLEN", harness.stream))


# --- trim -----------------------------------------------------------------------------------------


def test_trim_removes_only_unneeded_entries(harness: Harness, run: Run) -> None:
    fill(harness, 350, acked=220)
    would = document(run("trim", "access", "--max-length", "0", "--dry-run", "--json"))
    assert would["partitions"][0]["removed"] == 220
    assert length(harness) == 350
    done = document(run("trim", "access", "--max-length", "0", "--yes", "--json"))
    assert done["removed"] == 200, "whole nodes"
    assert length(harness) == 150
    row = done["partitions"][0]
    assert (row["holder"], row["held_since_unix_ms"]) == ("hits", 221)
    assert row["bytes"] > 0
    shown = run("trim", "access", "--max-length", "0", "--yes").stdout
    assert "hits, for " in shown
    assert "no messages removed" in shown


@pytest.mark.parametrize(
    ("limit", "would"),
    [
        (("--max-age", "1h"), 300),
        (("--max-length", "100"), 300),
        (("--max-length", "390"), 10),
        (("--max-bytes", "1"), 320),
        (("--max-bytes", "1GiB"), 0),
    ],
)
def test_trim_dry_run_counts_by_each_limit(
    harness: Harness, run: Run, limit: tuple[str, str], would: int
) -> None:
    fill(harness, 300, acked=300)
    fill(harness, 100, acked=20, first=harness.now_unix_ms())
    before = harness.dump()
    found = document(run("trim", "access", *limit, "-p", "0", "--dry-run", "--json"))
    assert found["partitions"][0]["removed"] == would
    assert harness.dump() == before


def test_trim_uses_the_limits_of_the_topic(harness: Harness, run: Run, file: Path) -> None:
    fill(harness, 350, acked=350)
    told = run("trim", "access", "--yes", code=8).stderr
    assert "has no retention" in told
    with file.open("a") as opened:
        opened.write('[topics.access]\nretention = { ack_policy = "delete" }\n')
    assert document(run("trim", "access", "--yes", "--json"))["removed"] == 350


def test_trim_keeps_unarchived_entries(harness: Harness, run: Run, file: Path) -> None:
    with file.open("a") as opened:
        opened.write('[topics.access]\narchive = "required"\n')
    fill(harness, 300, acked=300)
    row = document(run("trim", "access", "--max-length", "0", "--yes", "--json"))["partitions"][0]
    assert (row["removed"], row["holder"], row["held_since_unix_ms"]) == (0, "@archive", 1)
    harness.do("HSET", harness.trim, "archived", "200-0")
    assert document(run("trim", "access", "--max-length", "0", "--yes", "--json"))["removed"] == 200


def test_trim_asks_for_confirmation_or_refuses(harness: Harness, run: Run, file: Path) -> None:
    fill(harness, 300, acked=300)
    assert "--yes" in run("trim", "access", "--max-length", "0", code=8).stderr
    assert "did you mean access?" in run("trim", "acess", "--max-length", "0", code=8).stderr
    assert "numbered 0 to 1" in run("trim", "access", "-p", "2", "--dry-run", code=8).stderr
    run("trim", "access", "--max-length", "-1", code=2)
    run("trim", "access", "--max-age", "long", code=2)
    with file.open("a") as opened:
        opened.write('[[consumers]]\ntopic = "access"\ngroup = "late"\nhandler = "a:b"\n')
    for more in ("--yes", "--dry-run"):
        assert "group late" in run("trim", "access", "--max-length", "0", more, code=8).stderr
    assert length(harness) == 300


def test_trim_refuses_a_topic_without_groups(harness: Harness, run: Run, file: Path) -> None:
    harness.link.pipeline([("XADD", harness.stream, f"{n}-0", "payload", n) for n in range(1, 301)])
    for more in ("--yes", "--dry-run"):
        told = run("trim", "access", "--max-length", "100", more, code=8).stderr
        assert "without_groups" in told
    with file.open("a") as opened:
        opened.write("[topics.access]\nretention = { without_groups = true }\n")
    limit = ("--max-length", "100")
    assert document(run("trim", "access", *limit, "--dry-run", "--json"))["removed"] == 200
    assert document(run("trim", "access", *limit, "--yes", "--json"))["removed"] == 200


# --- doctor stream --------------------------------------------------------------------------------


def configure_retention(file: Path, text: str) -> None:
    with file.open("a") as opened:
        opened.write(f"[topics.access]\n{text}\n")


def test_doctor_stream_finds_nothing_in_a_healthy_topic(
    harness: Harness, run: Run, file: Path
) -> None:
    configure_retention(file, "retention = { max_length = 1000 }")
    fill(harness, 50, acked=50)
    harness.own("t1")
    found = document(run("doctor", "stream", "access", "--json"))
    assert found["problems"] == []
    assert [row["kept_by"] for row in found["partitions"]] == ["retention", "empty"]
    assert found["messages"] == 50
    assert found["bytes"] > 0
    assert found["partitions"][0]["needed"] == 0
    assert "retention.max_length = 1000" in run("doctor", "stream", "access").stdout


def test_doctor_stream_writes_nothing(harness: Harness, run: Run) -> None:
    fill(harness, 50, acked=20)
    before = harness.dump()
    run("doctor", "stream", "access")
    assert harness.dump() == before


def test_doctor_stream_accepts_missing_retention(harness: Harness, run: Run) -> None:
    fill(harness, 50, acked=50)
    shown = run("doctor", "stream", "access").stdout
    assert "no retention" in shown


@pytest.mark.fault("F29")
def test_doctor_stream_names_an_abandoned_group(harness: Harness, run: Run, file: Path) -> None:
    configure_retention(file, "retention = { max_length = 10 }")
    now = harness.now_unix_ms()
    fill(harness, 300, acked=300, first=now - 7_200_000)
    harness.do("XGROUP", "CREATE", harness.stream, "audit", f"{now - 7_200_000 + 99}-0")
    found = document(run("doctor", "stream", "access", "--json", code=1))
    row = found["partitions"][0]
    assert (row["kept_by"], row["holder"], row["needed"]) == ("group", "audit", 200)
    assert row["since_unix_ms"] == now - 7_200_000 + 100
    assert row["needed_bytes"] == row["bytes"] * 200 // 300
    (problem,) = found["problems"]
    assert (problem["kind"], problem["holder"]) == ("abandoned", "audit")
    assert "200 messages" in problem["text"]
    assert "group delete access audit" in problem["advice"]
    shown = run("doctor", "stream", "access", code=1).stdout
    assert "2h" in shown
    assert "audit" in shown


def test_doctor_stream_shows_an_owned_group_as_lagging(
    harness: Harness, run: Run, file: Path
) -> None:
    configure_retention(file, 'retention = { ack_policy = "delete" }')
    fill(harness, 300, acked=100)
    harness.fetch(50)
    harness.own("t1", owner="west-1")
    found = document(run("doctor", "stream", "access", "--json", code=1))
    (problem,) = found["problems"]
    assert problem["kind"] == "lag"
    assert "west-1" in problem["text"]
    assert "50 pending" in problem["text"]
    row = found["partitions"][0]
    assert (row["needed"], row["since_unix_ms"]) == (200, 101)
    (group,) = row["groups"]
    assert (group["owner"], group["pending"]) == ("west-1", 50)


def test_doctor_stream_calls_a_silent_group_abandoned(
    harness: Harness, run: Run, file: Path
) -> None:
    configure_retention(file, "retention = { max_length = 10 }")
    fill(harness, 300, acked=100)
    found = document(run("doctor", "stream", "access", "--json", code=1))
    assert [each["kind"] for each in found["problems"]] == ["lag"], "it has just read"
    found = document(run("doctor", "stream", "access", "--abandoned-after", "0", "--json", code=1))
    assert [each["kind"] for each in found["problems"]] == ["abandoned"]


def test_doctor_stream_names_the_archive(harness: Harness, run: Run, file: Path) -> None:
    configure_retention(file, 'retention = { max_length = 10 }\narchive = "required"')
    fill(harness, 300, acked=300)
    harness.do("HSET", harness.trim, "archived", "100-0")
    found = document(run("doctor", "stream", "access", "--json", code=1))
    row = found["partitions"][0]
    assert (row["kept_by"], row["holder"], row["needed"]) == ("archive", "@archive", 200)
    (problem,) = found["problems"]
    assert problem["kind"] == "archive"
    assert "pipeline archive" in problem["advice"]


def test_doctor_stream_reports_missing_groups(
    harness: Harness, run: Run, file: Path, link: Connection, keys: Keys
) -> None:
    configure_retention(
        file,
        "retention = { max_length = 10 }\n"
        '[[consumers]]\ntopic = "access"\ngroup = "late"\nhandler = "a:b"',
    )
    fill(harness, 50, acked=50)
    other = Harness(link, keys, Assignment("access", 1, "hits"))
    other.add("1-0")
    found = document(run("doctor", "stream", "access", "--json", code=1))
    kinds = [(each["partition"], each["kind"]) for each in found["problems"]]
    assert kinds == [(0, "missing_group"), (1, "missing_group"), (1, "no_groups")]


def test_doctor_stream_shows_dropped_messages(harness: Harness, run: Run) -> None:
    fill(harness, 50, acked=50)
    harness.do("HSET", harness.trim, "dropped_unread:hits", 7, "dropped_pending:hits", 5)
    found = document(run("doctor", "stream", "access", "--json"))
    assert found["partitions"][0]["groups"][0]["dropped"] == 12


def test_doctor_stream_measures_related_keys(harness: Harness, run: Run) -> None:
    fill(harness, 50, acked=50)
    harness.add("1-0", "payload", "x" * 50_000, stream=harness.dlq)
    harness.add("1-0", "payload", "x" * 20_000, stream=harness.retry)
    found = document(run("doctor", "stream", "access", "--json"))
    assert found["dead_letters"] == 1
    assert 50_000 < found["dead_letter_bytes"] < 70_000
    assert 20_000 < found["retry_bytes"] < 40_000
    assert "in addition: 1 dead letter, " in run("doctor", "stream", "access").stdout


def test_doctor_stream_survives_a_bad_dead_letter_key(harness: Harness, run: Run) -> None:
    fill(harness, 50, acked=50)
    harness.do("SET", harness.dlq, "x")
    found = document(run("doctor", "stream", "access", "--json", code=1))
    assert [row["messages"] for row in found["partitions"]] == [50, 0]
    assert [each["key"] for each in found["unreadable"]] == [harness.dlq]


def test_doctor_stream_works_without_memory_permission(
    harness: Harness, run: Run, file: Path, server: Server
) -> None:
    fill(harness, 50, acked=50)
    harness.do("ACL", "SETUSER", "viewer", "reset", "on", ">secret", "+@all", "-memory", "~*")
    secret = file.with_name("password")
    secret.write_text("secret")
    secret.chmod(0o600)
    more = 'username = "viewer"\npassword_file = "password"\n'
    file.write_text(f'[redis]\nurl = "{server.url}"\n{more}')
    try:
        found = document(run("doctor", "stream", "access", "--json"))
    finally:
        harness.do("ACL", "DELUSER", "viewer")
    assert (found["messages"], found["bytes"], found["dead_letter_bytes"]) == (50, None, None)


def test_doctor_stream_reports_unreadable_settings(harness: Harness, run: Run) -> None:
    harness.do("HSET", harness.keys.meta("access"), "settings", "no JSON")
    assert "settings of" in run("doctor", "stream", "access", code=1).stderr
    assert "JSON" in run("trim", "access", "--max-length", "0", "--yes", code=8).stderr


def test_doctor_stream_suggests_a_similar_topic(run: Run, harness: Harness) -> None:
    assert "did you mean access?" in run("doctor", "stream", "acces", code=8).stderr
