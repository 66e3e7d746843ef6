"""`streamqd dlq` on a real server prints the right output and exits with the right codes."""

from __future__ import annotations

import functools
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamqd import config
from streamqd.admin import dead_letters
from streamqd.admin.reading import server_unix_ms
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.integration.test_admin import write_dead_letter
from tests.support.commands import HarnessAt, Run, document
from tests.support.proxy import Fault, FaultProxy
from tests.support.waiting import wait_until


@pytest.fixture
def dlq(run: Run) -> Run:
    """Run a command of `dlq` and assert its exit code `code`."""
    return functools.partial(run, "dlq")


def write(harness: Harness, count: int, **fields: str) -> None:
    harness.groups()
    for _ in range(count):
        flat = [part for pair in ({"group": "hits"} | fields).items() for part in pair]
        harness.do("XADD", harness.dlq, "*", "payload", "x", *flat)


TRACE = 'Traceback (most recent call last):\n  File "/srv/bank.py", line 1, in pay\nE: x\n'


def test_dlq_stats_shows_recent_dead_letters_by_cause(
    dlq: Run, harness_at: HarnessAt, link: Connection
) -> None:
    yesterday = server_unix_ms(link) - 30 * 3_600_000
    harness_at(0).add(f"{yesterday}-0", "payload", "x", "group", "hits", stream=harness_at(0).dlq)
    for number in range(3):
        write_dead_letter(
            harness_at(number), f"{number + 1}-0", traceback=TRACE, handler="shop:pay"
        )
    write_dead_letter(
        harness_at(1),
        "9-0",
        reason="crashes",
        errorClass="",
        errorMessage="signal SIGSEGV",
        traceback="",
    )

    tonight = dlq("stats", "access", "--since", "12h")
    told = document(dlq("stats", "access", "--since", "12h", "--json"))

    lines = tonight.stdout.splitlines()
    first = told["causes"][0]
    assert lines[0] == f"3  {first['fingerprint']}  hits  attempts: ValueError at bank.py:pay"
    assert "first 0." in lines[1]
    assert lines[1].endswith("s ago, on west-1")
    assert lines[2].startswith(f"   example: {first['example']} in shop:pay: no \\x1b[31mcolour")
    assert "crashes: signal SIGSEGV" in lines[3]
    assert tonight.stderr == "4 of 5 dead letters in access\n"
    assert [each["count"] for each in told["causes"]] == [3, 1]
    assert document(dlq("stats", "access", "--json"))["looked_at"] == 5
    assert dlq("stats", "access", "--reason", "undecodable").stdout == ("nothing matches\n")
    # The fingerprint and the example in the output lead to the dead letters.
    mine = document(dlq("list", "access", "--fingerprint", first["fingerprint"], "--json"))
    assert len(mine["rows"]) == 3
    shown = dlq("show", "access", first["example"]).stdout
    assert "fingerprint: " + first["fingerprint"] in shown
    assert "at:          bank.py:pay" in shown


def test_dlq_replay_dry_run_shows_the_effects(
    dlq: Run, harness_at: HarnessAt, file: Path, store: Store
) -> None:
    for number in range(2):
        harness_at(number).own("t1", owner=f"west-{number}")
        write_dead_letter(harness_at(number), "1-0", traceback=TRACE)
    write(harness_at(2), 1, replayCount="7", group="hits")
    before = harness_at(0).dump()

    told = dlq("replay", "access", "--reason", "attempts", "--dry-run")
    plain = dlq("replay", "access", "--all", "--dry-run", "--json")

    assert harness_at(0).dump() == before
    lines = told.stdout.splitlines()
    assert lines[0] == "2 dead letters of access would be replayed to the original group"
    assert "hits  attempts: ValueError at bank.py:pay" in lines[2]
    assert any(line.split() == ["hits", *"22202", "west-0,", "west-1"] for line in lines)
    assert (
        "! group hits: the worker that failed still runs on 2 of 2 partitions, so the same"
        " code would run again"
    ) in lines
    plan = document(plain)
    assert plan["refused"] == {
        "it was replayed 3 times or more already, and was dead-lettered again": 1
    }
    few = dlq("replay", "access", "--all", "--dry-run", "--limit", "1").stdout
    assert few.startswith("1 dead letter of access would be replayed to the original group\n")
    assert "limited by --limit" in few
    # The receiving groups are counted for that dead letter as well.
    assert any(line.split()[:3] == ["hits", "1", "1"] for line in few.splitlines())
    assert few.splitlines()[-1].endswith("--limit 1")
    # The printed command does what the plan shows, and leaves out dead letters that came later.
    write_dead_letter(harness_at(0), "5-0")
    words = lines[-1].removeprefix("to replay them, run: ").split()
    assert words[:6] == ["streamqd", "--config", str(file), "dlq", "replay", "access"]
    result = dlq(*words[4:], "--yes")
    assert result.stdout == "2 dead letters of access replayed\n"
    assert dead_letters.total(store, "access") == 2


def test_dlq_replay_accepts_filters_and_a_target(
    dlq: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys
) -> None:
    topics.create(store, "other", config.Topic(partitions=1))
    write(harness_at(0), 2, key="a")
    write(harness_at(1), 2, headers='{"tenant":"x"}')
    write(harness_at(2), 2)
    harness_at(1).groups()

    by_key = dlq("replay", "access", "--key", "a", "--to-partition", "1", "--yes", "--json")
    assert (document(by_key)["replayed"], document(by_key)["target"]) == (
        *(2, "the original group, on partition 1"),
    )
    assert link.execute("XLEN", harness_at(1).retry) == 2
    header = dlq("replay", "access", "-H", "tenant=x", "--all-groups", "--yes")
    assert header.stdout == "2 dead letters of access replayed to every group\n"
    assert link.execute("XLEN", harness_at(1).stream) == 2
    rest = dlq("replay", "access", "--all", "--to-topic", "other", "--rate", "1000/s", "--yes")
    assert rest.stdout == "2 dead letters of access replayed to topic other\n"
    assert link.execute("XLEN", keys.stream("other", 0)) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("replay", "access"), "pass --"),
        (("purge", "access"), "pass --"),
        (("replay", "access", "--all", "--id", "0:1-0"), "cannot be used with"),
        (
            ("replay", "access", "--all", "--all-groups", "--to-topic", "x"),
            "cannot be used with --all-groups",
        ),
        (("replay", "access", "--all", "--rate", "0/s"), "is not a valid rate"),
        (("replay", "access", "--all", "--rate", "fast"), "is not a valid rate"),
        (("replay", "access", "--all", "--max-replays", "0"), "max-replays"),
        (("list", "access", "-H", "nope"), "is not NAME=VALUE"),
        (("list", "access", "--since", "tonight"), "is not a valid time; pass an age"),
        (("list", "--group", "hits"), "pass TOPIC, because the filters apply"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_dlq_reports_invalid_arguments(
    dlq: Run, harness_at: HarnessAt, args: tuple[str, ...], words: str
) -> None:
    assert words in " ".join(dlq(*args, code=2).stderr.split())


@pytest.mark.parametrize(
    ("since", "found"),
    [
        *(("1h", 1), ("48h", 2), ("2026-11-21", 0), ("1970-01-01T00:00:05Z", 2)),
        *(("1970-01-01 00:00", 2), ("9999-12-31", 0)),
    ],
)
def test_dlq_accepts_times_in_each_spelling(
    dlq: Run, harness_at: HarnessAt, link: Connection, since: str, found: int
) -> None:
    if since == "2026-11-21":
        since = str(server_unix_ms(link) + 10_000)  # unix milliseconds
    yesterday = server_unix_ms(link) - 24 * 3_600_000
    harness_at(0).add(f"{yesterday}-0", "payload", "x", stream=harness_at(0).dlq)
    write(harness_at(0), 1)
    assert len(document(dlq("list", "access", "--since", since, "--json"))["rows"]) == found
    purged = dlq("purge", "access", "--since", since, "--yes", "--json")
    assert document(purged)["purged"] == found


def test_dlq_replay_refuses_a_missing_target_before_asking(dlq: Run, harness_at: HarnessAt) -> None:
    write(harness_at(0), 1)
    before = harness_at(0).dump()
    for args, words in (
        (("--to-topic", "access"), "is the topic of the dead letters"),
        (("--to-topic", "acces"), "did you mean access"),
        (("--to-partition", "7"), "partition 7 of topic access not found"),
    ):
        assert words in dlq("replay", "access", "--all", *args, code=8).stderr
    assert harness_at(0).dump() == before


def test_dlq_replay_prints_why_dead_letters_remain(dlq: Run, harness_at: HarnessAt) -> None:
    write(harness_at(0), 1)
    write(harness_at(1), 2, replayCount="1")
    result = dlq("replay", "access", "--all", "--yes", "--max-replays", "1", code=8)
    assert result.stdout == "1 dead letter of access replayed\n"
    assert (
        "not replayed: 2 dead letters: it was replayed before, and was dead-lettered again"
        in result.stderr
    )


def test_dlq_purge_has_a_dry_run(dlq: Run, harness_at: HarnessAt) -> None:
    write(harness_at(0), 2, reason="dead")
    write(harness_at(0), 1, reason="decode")
    before = harness_at(0).dump()
    tried = dlq("purge", "access", "--reason", "dead", "--dry-run")
    assert tried.stdout.startswith("2 dead letters of access would be deleted permanently\n\n2  ")
    assert document(dlq("purge", "access", "--all", "--dry-run", "--json"))["looked_at"] == 3
    assert harness_at(0).dump() == before
    assert dlq("purge", "access", "--reason", "dead", "--yes").stdout == (
        "2 dead letters of access purged\n"
    )


def test_dlq_purge_keeps_unarchived_dead_letters(dlq: Run, run: Run, harness_at: HarnessAt) -> None:
    write(harness_at(0), 2)
    run("topic", "settings", "access", "archive=required")
    kept = dlq("purge", "access", "--all", "--yes", code=8)
    assert kept.stdout == "no dead letters of access purged\n"
    assert "2 dead letters of access not archived yet, so not purged" in kept.stderr
    assert "pass --unarchived" in kept.stderr
    told = document(dlq("purge", "access", "--all", "--yes", "--json", code=8))
    assert (told["purged"], told["unarchived"]) == (0, 2)
    forced = dlq("purge", "access", "--all", "--yes", "--unarchived")
    assert forced.stdout == "2 dead letters of access purged\n"


def test_dlq_export_writes_a_file(
    dlq: Run, harness_at: HarnessAt, tmp_path: Path, store: Store
) -> None:
    write(harness_at(0), 2, key="a")
    write(harness_at(1), 1)
    file = tmp_path / "dead_letters.jsonl"

    lines = dlq("export", "access")
    assert [json.loads(line)["partition"] for line in lines.stdout.splitlines()] == [0, 0, 1]
    assert lines.stderr == "3 dead letters of access exported\n"
    told = document(dlq("export", "access", "--key", "a", "--out", str(file), "--json"))
    assert (told["exported"], told["result"], told["audited"]) == (2, "done", True)
    assert len(file.read_text().splitlines()) == 2
    assert "exists. Replace it?" in dlq("export", "access", "-o", str(file), code=8).stderr
    dlq("export", "access", "-o", str(file), "--yes")
    assert len(file.read_text().splitlines()) == 3
    refused = dlq("export", "access", "-o", str(tmp_path / "no" / "x"), code=8)
    assert "cannot be written: No such file or directory" in refused.stderr
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".toml"] == [
        "dead_letters.jsonl"
    ]
    assert dead_letters.total(store, "access") == 3


def test_dlq_export_failing_keeps_the_old_file(
    dlq: Run, harness_at: HarnessAt, file: Path, tmp_path: Path, proxy: FaultProxy
) -> None:
    write(harness_at(0), 250)
    out = tmp_path / "dead_letters.jsonl"
    out.write_text("old\n")
    file.write_text(f'[redis]\nurl = "{proxy.url}"\n')
    proxy.arm(Fault.CUT_BEFORE, command="EVALSHA", nth=2)
    dlq("export", "access", "-o", str(out), "--yes", code=4)
    assert out.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dead_letters.jsonl",
        "streamq.toml",
    ]


def test_dlq_replay_reports_its_progress_after_an_outage(
    dlq: Run, harness_at: HarnessAt, file: Path, proxy: FaultProxy, link: Connection, store: Store
) -> None:
    write(harness_at(1), 1)
    dlq("replay", "access", "--all", "--yes")
    write(harness_at(0), 250)
    file.write_text(f'[redis]\nurl = "{proxy.url}"\n')
    proxy.arm(Fault.DROP_REPLY, command="EVALSHA", nth=150)
    result = dlq("replay", "access", "--all", "--yes", code=4)
    assert result.stdout == "128 dead letters of access replayed\n"
    assert "64 dead letters may or may not have been replayed" in result.stderr
    [again] = [line for line in result.stderr.splitlines() if "continue with: " in line]
    words = again.partition("continue with: ")[2].split()
    assert words[4:7] == ["replay", "access", "--all"]
    rest = dlq(*words[4:], "--yes")
    left = int(rest.stdout.split()[0])
    assert 50 <= left <= 150
    assert link.execute("XLEN", harness_at(0).retry) == 250
    assert dead_letters.total(store, "access") == 0


def test_dlq_replay_stops_cleanly_on_ctrl_c(
    file: Path, harness_at: HarnessAt, link: Connection, store: Store
) -> None:
    write(harness_at(0), 60)
    command = [sys.executable, "-m", "streamqd", "--config", str(file), "dlq", "replay", "access"]
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*command, "--all", "--yes", "--rate", "10/s", "--json"],
            stdout=subprocess.PIPE,
            stderr=theirs,
        ) as started:
            wait_until(lambda: link.execute("XLEN", harness_at(0).retry) >= 8, what="some letters")
            started.send_signal(signal.SIGINT)
            out, _ = started.communicate(timeout=20)
        err = os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)

    done = json.loads(out)
    assert started.returncode == 130
    assert (done["result"], done["unknown"]) == ("stopped", 0)
    assert done["replayed"] == link.execute("XLEN", harness_at(0).retry) < 60
    assert "dead letters …" in err.decode()
    assert b"stopping after this batch" in err
    assert b"continue with: streamqd" in err
    assert b"--rate 10/s" in err
    assert dead_letters.total(store, "access") == 60 - done["replayed"]


def test_dlq_audit_names_user_and_command(dlq: Run, harness_at: HarnessAt) -> None:
    assert dlq("audit", "access").stdout == "nothing in the audit log of access\n"
    assert "did you mean access" in dlq("audit", "acces", code=8).stderr
    write(harness_at(0), 2)
    dlq("export", "access")
    dlq("replay", "access", "--all", "--limit", "1", "--yes")
    dlq("purge", "access", "--all", "--yes")

    [heading, purge, replay, export] = dlq("audit", "access").stdout.splitlines()
    assert heading.split() == ["AGE", "WHO", "COMMAND", "COUNTS", "DETAILS"]
    assert "dlq purge" in purge
    assert "purged 1" in purge
    assert "replayed 1" in replay
    assert "to the original group" in replay
    assert "exported 2" in export
    page = document(dlq("audit", "access", "-n", "1", "--json"))
    rest = document(dlq("audit", "access", "--cursor", page["cursor"], "--json"))
    assert [each["command"] for each in (*page["entries"], *rest["entries"])] == [
        *("dlq purge", "dlq replay", "dlq export"),
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("stats",),
        ("replay", "--yes"),
        ("replay", "--dry-run"),
        ("purge", "--yes"),
        ("export",),
    ],
    ids=" ".join,
)
def test_dlq_refuses_an_unknown_group(
    dlq: Run, harness_at: HarnessAt, words: tuple[str, ...]
) -> None:
    harness_at(0).groups()
    write_dead_letter(harness_at(0), "1-0")
    verb, *rest = words
    refused = dlq(verb, "access", "--group", "hist", *rest, code=8)
    assert refused.stderr == ("Error: no group hist reads topic access; did you mean hits?\n")
    # The dead letters of a deleted group can still be listed and exported.
    harness_at(0).do(
        "XADD", harness_at(0).dlq, "*", "group", "gone", "reason", "dead", "originalId", "1-0"
    )
    assert document(dlq("list", "access", "--group", "gone", "--json"))["rows"]
