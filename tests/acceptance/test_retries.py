"""Failed messages are retried with growing delays, and only by the group in which they failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamqd import config
from streamqd.producer import Producer
from tests.support.daemon import ROOT, TOPIC, Daemon
from tests.support.ledger import Audit, Record

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]

FAILING, OTHER = "bill", "ship"
DEBUG = {"format": "json", "level": "debug"}  # one line per retry, with its delay

# A payload lists the steps of the failing group's runs, and the last step repeats. The other group
# does nothing. A file next to the ledger counts the runs, including those that crashed.
SCRIPTED = """
import json, os
from pathlib import Path
from streamqd import Dead, Message, Retry
from tests.support.ledger import Ledger

ledger = Ledger.from_environment()

def obey(message: Message) -> None:
    with ledger.run(message):
        ledger.note(message, json.dumps(dict(
            replays=message.replay_count, crashes=message.crash_count,
            key=(message.key or b"").decode(), id=message.id, original=message.original_id,
        )))
        if message.group != "bill":
            return
        steps = message.json()
        runs = Path(message.uid.replace("/", "-") + ".runs")
        done = int(runs.read_text()) if runs.exists() else 0
        runs.write_text(str(done + 1))
        step = steps[min(done, len(steps) - 1)]
        if step == "fail":
            raise ValueError(f"run {done + 1}")
        if step == "key":
            raise KeyError("no such customer")
        if step == "dead":
            raise Dead("beyond help")
        if step == "exit":
            os._exit(9)
        if isinstance(step, float):
            raise Retry(after=step)
"""


@pytest.fixture
def make(new_daemon: NewDaemon) -> NewDaemon:
    def make(**options: Any) -> Daemon:
        daemon = new_daemon(groups=(FAILING, OTHER), code=SCRIPTED, **options)
        daemon.write_config(log=DEBUG)
        return daemon

    return make


@contextmanager
def producer(daemon: Daemon) -> Iterator[Producer]:
    with Producer(settings=config.load(daemon.config_path)) as opened:
        yield opened


def script(*steps: object) -> str:
    return json.dumps(steps)


def read_attempts(daemon: Daemon, uid: str, group: str) -> list[int]:
    return [each.attempt for each in daemon.ledger.records_for(uid, "start") if each.group == group]


def notes(daemon: Daemon, uid: str, group: str) -> list[dict[str, Any]]:
    found = [each for each in daemon.ledger.records_for(uid, "note") if each.group == group]
    return [json.loads(each.text) for each in found]


def dlq(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    """Run `streamqd dlq`. Return its JSON output."""
    done = start_dlq(daemon, *arguments)
    out, _ = done.communicate(timeout=30.0)
    assert done.returncode == 0, out
    return json.loads(out)


def start_dlq(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "streamqd", "--config", daemon.config_path.name, "dlq"]
    return subprocess.Popen(
        [*command, *arguments, "--json"],
        cwd=daemon.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# --- growing delays -------------------------------------------------------------------------------


def test_retry_delays_grow_with_jitter_per_group(make: NewDaemon):
    base, tries, total = 0.04, 5, 12
    backoff = {"kind": "exponential", "base": f"{base * 1000:.0f}ms", "max": "10s"}
    # Each worker gets four messages, because the log suppresses lines beyond 20 retries per second.
    with make(partitions=6, consumer={"backoff": backoff, "max_attempts": 9}) as daemon:
        uids = daemon.send([script(*["fail"] * (tries - 1), "ok")] * total)
        daemon.wait_settled()

        delays: dict[int, list[float]] = defaultdict(list)
        for event in daemon.events("message.retried"):
            delays[event["attempt"]].append(event["delay"])
        assert {attempt: len(found) for attempt, found in delays.items()} == dict.fromkeys(
            range(1, tries), total
        )
        for attempt, found in delays.items():
            longest = base * 2 ** (attempt - 1)
            assert max(found) <= longest + 0.001
            assert max(found) > longest / 2, "no wait is longer than those of the attempt before"
            assert len(set(found)) > total / 2, "no jitter"
        lateness = []
        for uid in uids:
            assert read_attempts(daemon, uid, FAILING) == list(range(1, tries + 1))
            assert read_attempts(daemon, uid, OTHER) == [1]
            lateness += retry_waits(daemon, uid, retry_delays(daemon, uid))
        print(f"retries came {sum(lateness) / len(lateness) * 1000:.0f} ms after they were due on")
        print(f"average, {max(lateness) * 1000:.0f} ms at worst")
        assert daemon.letters() == []
        for assignment in daemon.assignments():
            if assignment.group == OTHER:
                assert daemon.link.execute("XLEN", daemon.keys.retry_stream(*assignment)) == 0
                assert daemon.link.execute("EXISTS", daemon.keys.retry(*assignment)) == 0
        assert daemon.ledger.audit(OTHER) == Audit()


def retry_delays(daemon: Daemon, uid: str) -> list[float]:
    return [event["delay"] for event in daemon.events("message.retried", uid=uid)]


def retry_waits(daemon: Daemon, uid: str, delays: list[float]) -> list[float]:
    """Return the seconds from the due time to the start of each retry. None may start early."""
    runs = [
        each for each in daemon.ledger.records_for(uid, "start", "raise") if each.group == FAILING
    ]
    late = []
    for failed, again, delay in zip(runs[1::2], runs[2::2], delays, strict=True):
        assert (failed.kind, again.kind) == ("raise", "start")
        late.append(again.at - failed.at - delay)
    assert min(late) > -0.002, "a run began before it was due"
    return late


def test_retry_in_an_idle_daemon_runs_when_due(make: NewDaemon):
    """A retry runs when it is due even if nothing else happens, so only the clock can start it."""
    with make(consumer={"max_attempts": 9}) as daemon:
        (uid,) = daemon.send([script(0.4, 1.3, "ok")])
        daemon.wait_settled()
        assert retry_delays(daemon, uid) == [0.4, 1.3]
        late = retry_waits(daemon, uid, [0.4, 1.3])
        print(f"after Retry(after=…), idle: {[f'{each * 1000:.0f} ms late' for each in late]}")
        assert max(late) < 5.0


def test_scheduled_message_is_handled_by_every_group(make: NewDaemon):
    with make(partitions=2) as daemon, producer(daemon) as sender:
        sent = time.monotonic()
        waits = {"soon": 0.3, "later": 0.9}
        for key, delay in waits.items():
            sender.send(TOPIC, script("ok"), key=key, delay=delay)
        daemon.wait_for(lambda: daemon.ledger.count("end") == 4, what="both groups handled both")
        first: dict[tuple[str, str], Record] = {}
        for each in daemon.ledger.records("note"):
            first[json.loads(each.text)["key"], each.group] = each
        for (key, group), record in first.items():
            late = record.at - sent - waits[key]
            print(f"{key} for {group}: {late * 1000:.0f} ms after it was due")
            assert late > -0.002
        assert len(first) == 4
        daemon.wait_settled()


# --- dead letters ---------------------------------------------------------------------------------

QUICK = {"backoff": {"kind": "fixed", "base": "10ms"}, "max_attempts": 3}


def test_dead_letters_of_every_reason_have_all_details(make: NewDaemon):
    consumer = {**QUICK, "dead_on": ["KeyError"]}
    with make(consumer=consumer) as daemon, producer(daemon) as sender:
        began = time.time()
        payloads = {
            "attempts": script("fail"),
            "dead": script("dead"),
            "not-retried": script("fail", "key"),
        }
        uids = {
            reason: sender.send(TOPIC, text, key=reason, headers={"trace": "t1"})
            for reason, text in payloads.items()
        }
        daemon.wait_for(lambda: len(daemon.letters()) == 3, what="three letters")
        daemon.wait_settled()

        letters = {letter["reason"]: letter for letter in daemon.letters()}
        runs = {"attempts": 3, "dead": 1, "not-retried": 2}
        errors = {
            "attempts": ("ValueError", "run 3"),
            "dead": ("streamqd.handlers.Dead", "beyond help"),
            "not-retried": ("KeyError", "'no such customer'"),
        }
        assert letters.keys() == payloads.keys()
        for reason, letter in letters.items():
            assert letter["uid"] == uids[reason]
            assert letter["payload"] == payloads[reason]
            assert letter["key"] == reason
            assert json.loads(letter["headers"]) == {"trace": "t1"}
            assert (letter["group"], letter["instance"]) == (FAILING, "one")
            assert (letter["originalTopic"], letter["originalPartition"]) == (TOPIC, "0")
            assert int(letter["attempts"]) == runs[reason]
            assert letter["crashes"] == "0"
            assert (letter["errorClass"], letter["errorMessage"]) == errors[reason]
            assert "work.py" in letter["traceback"]
            assert letter["fingerprint"]
            assert letter["timestamp"] == letter["originalId"].partition("-")[0]
            assert began - 1 < int(letter["failedAt"]) / 1000 < time.time() + 1
            assert read_attempts(daemon, uids[reason], FAILING) == list(range(1, runs[reason] + 1))
            assert read_attempts(daemon, uids[reason], OTHER) == [1]


def test_crashes_of_a_message_are_counted_across_retries(make: NewDaemon):
    """Crashes are counted across retries.

    A retry has a new entry, which must not reset the crash count.
    """
    with make(consumer={**QUICK, "max_crashes": 2}) as daemon:
        (uid,) = daemon.send([script("exit", "fail", "exit", "ok")])
        daemon.wait_for(daemon.letters, what="the letter")
        (letter,) = daemon.letters()
        assert (letter["reason"], letter["crashes"], letter["attempts"]) == ("crashes", "2", "1")
        assert letter["exitCode"] == "9"
        assert read_attempts(daemon, uid, FAILING) == [1, 1, 2], "a crash is no failed attempt"
        assert notes(daemon, uid, FAILING)[2]["crashes"] == 1
        daemon.wait_settled()


def test_retry_counts_written_by_a_producer_are_ignored(make: NewDaemon):
    hostile = {"retryCount": "99", "crashCount": "99", "replayCount": "7" * 30}
    with make(consumer=QUICK) as daemon:
        flat = [part for pair in hostile.items() for part in pair]
        entry = daemon.link.execute(
            "XADD", daemon.keys.stream(TOPIC, 0), "*", "payload", script("fail"), *flat
        )
        uid = f"{TOPIC}/0/{entry.decode()}"
        daemon.wait_for(daemon.letters, what="the letter")
        (letter,) = daemon.letters()
        assert (letter["attempts"], letter["crashes"]) == ("3", "0")
        assert read_attempts(daemon, uid, FAILING) == [1, 2, 3]
        assert {(note["crashes"], note["replays"]) for note in notes(daemon, uid, FAILING)} == {
            (0, 0)
        }


# --- replay ---------------------------------------------------------------------------------------


def test_replayed_dead_letter_returns_once_to_its_group(make: NewDaemon):
    with make(partitions=2, consumer=QUICK) as daemon:
        uids = daemon.send([script("dead", "fail", "ok")] * 3 + [script("ok")])
        daemon.wait_for(lambda: len(daemon.letters()) == 3, what="three letters")
        daemon.wait_settled()

        assert dlq(daemon, "replay", TOPIC, "--all", "--yes")["replayed"] == 3
        again = dlq(daemon, "replay", TOPIC, "--all", "--yes")
        assert (again["replayed"], again["missing"]) == (0, 0)
        daemon.wait_settled()

        assert daemon.letters() == []
        for uid in uids[:3]:
            # The message is dead-lettered at its first run. After the replay, it fails, is retried,
            # and succeeds.
            assert read_attempts(daemon, uid, FAILING) == [1, 1, 2]
            assert read_attempts(daemon, uid, OTHER) == [1]
            found = notes(daemon, uid, FAILING)
            assert [note["replays"] for note in found] == [0, 1, 1]
            assert {note["original"] for note in found} == {uid.rpartition("/")[2]}
            assert len({note["id"] for note in found}) == 3, "each is an entry of its own"
        assert read_attempts(daemon, uids[3], FAILING) == [1]


def test_replayed_dead_letter_may_die_again_under_a_new_id(make: NewDaemon):
    with make(consumer=QUICK) as daemon:
        uids = daemon.send([script("dead")] * 2)
        daemon.wait_for(lambda: len(daemon.letters()) == 2, what="two letters")
        listed = dlq(daemon, "list", TOPIC)["rows"]
        (chosen,) = [row for row in listed if row["uid"] == uids[1]]
        assert dlq(daemon, "replay", TOPIC, "--id", chosen["id"])["replayed"] == 1
        daemon.wait_run(uids[1], "raise", count=2)
        daemon.wait_settled()

        by_uid = {row["uid"]: row for row in dlq(daemon, "list", TOPIC)["rows"]}
        assert by_uid.keys() == set(uids)
        assert (by_uid[uids[0]]["replays"], by_uid[uids[1]]["replays"]) == (0, 1)
        assert by_uid[uids[1]]["id"] != chosen["id"]
        gone = start_dlq(daemon, "replay", TOPIC, "--id", chosen["id"])
        out, _ = gone.communicate(timeout=30.0)
        assert gone.returncode == 8, out


def test_concurrent_replays_replay_each_dead_letter_once(make: NewDaemon):
    """Each dead letter is replayed once, because reading, writing and deleting it are one step.

    The slower of two replays reports the dead letter as gone.
    """
    total = 300
    with make(partitions=2, consumer=QUICK) as daemon:
        uids = daemon.send([script("dead", "ok")] * total)
        daemon.wait_for(lambda: len(daemon.letters()) == total, what="all are dead", every=0.1)
        both = [start_dlq(daemon, "replay", TOPIC, "--all", "--yes") for _ in range(2)]
        said = [json.loads(one.communicate(timeout=30.0)[0]) for one in both]
        print("replayed:", [(one["replayed"], one["missing"]) for one in said])
        assert sum(one["replayed"] for one in said) == total
        daemon.wait_settled()

        runs: dict[str, int] = defaultdict(int)
        for each in daemon.ledger.records("start"):
            runs[each.uid] += each.group == FAILING
        assert {runs[uid] for uid in uids} == {2}
        assert daemon.letters() == []
