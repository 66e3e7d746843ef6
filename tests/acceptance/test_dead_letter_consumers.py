"""A consumer with `source = "dlq"` handles dead letters, and never creates new ones."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from streamqd import config
from streamqd.admin import groups, growth, partitions, retries, topics, why
from streamqd.admin.messages import MATCH_ALL
from streamqd.admin.published import Fleet
from streamqd.model import Assignment
from streamqd.producer import Producer
from streamqd.store import dead, messages
from streamqd.store.fetch import CONSUMER
from streamqd.store.store import Store
from tests.support.daemon import GROUP, TOPIC, Daemon

NewDaemon = Callable[..., Daemon]

READER = "watch@dlq"
PLACE = (TOPIC, 0)
QUICK = {"kind": "fixed", "base": "20ms", "jitter": "none"}

# The payload controls the reader. The group of the topic dead-letters every message.
SCRIPTED = """
import json, os, time
from pathlib import Path
from streamqd import Dead, Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment()

def obey(message: Message) -> None:
    assert message.dead_letter is None
    with ledger.run(message):
        raise Dead(f"no use: {message.text()}")

def read(message: Message) -> None:
    letter, word = message.dead_letter, message.text()
    assert letter is not None
    with ledger.run(message):
        ledger.note(message, json.dumps(dict(
            group=letter.group, reason=letter.reason, kind=letter.error_class, error=letter.error,
            traced="raise Dead" in letter.traceback, attempts=letter.attempts,
            crashes=letter.crashes, handler=letter.handler, dated=letter.failed_at > 1e9,
            replays=message.replay_count, own_crashes=message.crash_count,
        )))
        if word == "never" or word == "twice" and message.attempt < 3:
            raise ValueError(f"run {message.attempt}")
        if word == "exit":
            os._exit(9)
        while word == "hold" and not Path("go").exists():
            time.sleep(0.005)
"""


@pytest.fixture
def make(new_daemon: NewDaemon) -> NewDaemon:
    def make(**reader: Any) -> Daemon:
        daemon = new_daemon(code=SCRIPTED, daemon={"lease_ttl": "2s"}, http="unix:./http.sock")
        reads = {"topic": TOPIC, "group": "watch", "source": "dlq", "handler": "work:read"}
        given = {"max_attempts": 3, "max_crashes": 2, "backoff": QUICK, **reader}
        daemon.write_config(
            consumers=[*daemon.tables["consumers"], {**reads, **given}],
            topics={TOPIC: {"partitions": 1, "retention": {"ack_policy": "delete"}}},
        )
        return daemon

    return make


def read_attempts(daemon: Daemon, uid: str) -> list[int]:
    return [
        each.attempt for each in daemon.ledger.records_for(uid, "start") if each.group == READER
    ]


def notes(daemon: Daemon, uid: str) -> list[dict[str, Any]]:
    return [json.loads(each.text) for each in daemon.ledger.records_for(uid, "note")]


def read_snapshot(daemon: Daemon, group: str = READER) -> messages.Snapshot | None:
    return messages.Snapshot.parse(
        daemon.link.run(messages.snapshot(daemon.keys, Assignment(*PLACE, group)))
    )


def counters(daemon: Daemon, name: str) -> dict[str, float]:
    """Return a counter of the daemon's metrics, by group."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(str(daemon.folder / "http.sock"))
        wire.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        page = b"".join(iter(lambda: wire.recv(65536), b"")).decode()
    found = re.findall(rf'^streamqd_{name}_total{{.*group="([^"]+)".*}} (\S+)$', page, re.MULTILINE)
    return {group: float(value) for group, value in found}


def is_settled(daemon: Daemon, letters: int) -> bool:
    """Return True if `letters` dead letters exist and the reader has none unread or pending."""
    seen = read_snapshot(daemon)
    assert seen is not None
    return seen[1:6] == (0, 0, 0, 0, 0) and seen.retry_pending == 0 and seen.dead == letters


def test_dead_letters_are_handled_retried_and_given_up(make: NewDaemon):
    # One dead letter succeeds at its first attempt, one at its third, and one never.
    with make() as daemon:
        plain, twice, never = daemon.send(["plain", "twice", "never"])
        given_up = daemon.wait_event("dead_letter.given_up")
        daemon.wait_for(lambda: is_settled(daemon, 3), what="all letters are done with")
        # The partition can be trimmed without waiting for the reader, which has no group in its
        # stream.
        daemon.wait_for(
            lambda: daemon.link.execute("XLEN", daemon.keys.stream(*PLACE)) == 0,
            what="the partition is trimmed",
        )

        assert (given_up["uid"], given_up["reason"]) == (never, "attempts")
        assert (given_up["group"], given_up["error"]) == (READER, "ValueError: run 3")
        runs = [read_attempts(daemon, each) for each in (plain, twice, never)]
        assert runs == [[1], [1, 2, 3], [1, 2, 3]]
        assert daemon.ledger.finished_uids(READER) == {plain, twice}
        told = {
            "group": GROUP,
            "reason": "dead",
            "kind": "streamqd.handlers.Dead",
            "error": "no use: twice",
            "traced": True,
            "attempts": 1,
            "crashes": 0,
            "handler": "work:obey",
            "dated": True,
            "replays": 0,
            "own_crashes": 0,
        }
        assert notes(daemon, twice) == [told] * 3, "a retried letter tells what the first one told"
        assert not daemon.events("message.dead_lettered", group=READER), "a letter of a letter"
        assert not daemon.events("trim.refused")
        assert len(daemon.events("dead_letter.given_up")) == 1
        assert counters(daemon, "given_up") == {GROUP: 0.0, READER: 1.0}
        assert counters(daemon, "dead_lettered") == {GROUP: 3.0, READER: 0.0}
        assert counters(daemon, "acked") == {GROUP: 0.0, READER: 3.0}


def test_age_of_a_dead_letter_counts_from_its_death(make: NewDaemon):
    with make(retry_max_age="1h") as daemon:
        fields = ("payload", "never", "originalId", "1000-0")  # an ID from 1970
        daemon.link.execute("XADD", daemon.keys.stream(*PLACE), "*", *fields)
        given_up = daemon.wait_event("dead_letter.given_up")
        assert (given_up["uid"], given_up["reason"]) == (f"{TOPIC}/0/1000-0", "attempts")
        assert read_attempts(daemon, f"{TOPIC}/0/1000-0") == [1, 2, 3]


def test_retries_of_a_dead_letter_group_can_be_canceled(make: NewDaemon):
    with make(max_attempts=0, backoff={**QUICK, "base": "1h", "max": "2h"}) as daemon:
        (uid,) = daemon.send(["never"])
        daemon.wait_for(
            lambda: (seen := read_snapshot(daemon)) and seen.waiting_retries,
            what="it is tried again",
        )

        assert topics.groups(daemon.store, TOPIC, [0]) == [GROUP, READER]
        assert [
            (row.group, row.owned, row.lag, row.waiting_retries)
            for row in groups.list_groups(daemon.store)
        ] == [
            (GROUP, 1, 0, 0),
            (READER, 1, 0, 1),
        ]
        assert groups.describe(daemon.store, TOPIC, READER).waiting_retries == 1
        (row,) = partitions.view(daemon.store, TOPIC, group=READER).assignments
        assert (row.lease, row.owner, row.lag) == ("owned", "one", 0)
        (told,) = why.answer(Fleet(daemon.store, "default", 60.0), TOPIC, 0, READER)
        assert (told.row.group, told.row.owner, told.row.waiting_retries) == (READER, "one", 1)
        # Canceling the retry creates no dead letter, because the original dead letter is still
        # there.
        rows = retries.select_rows(daemon.store, TOPIC, READER, MATCH_ALL)
        assert [each.uid for each in rows] == [uid]
        done = retries.cancel(daemon.store, TOPIC, READER, rows)
        assert (done.dropped, done.dead_letters) == (1, 0)
        assert is_settled(daemon, 1)


@pytest.mark.parametrize("victim", ["worker", "daemon"])
def test_dead_letters_survive_a_killed_process(make: NewDaemon, victim: str):
    daemon = make()
    with daemon:
        hold, plain, last = daemon.send(["hold", "plain", "exit"])
        daemon.wait_for(
            lambda: read_attempts(daemon, hold), what="the first letter is being handled"
        )
        if victim == "worker":
            os.kill(daemon.pids(READER)[0], signal.SIGKILL)
            crashed = daemon.wait_event("worker.charged")
            assert crashed["group"] == READER
        else:
            daemon.kill()
            daemon.wait_gone(10.0)
            daemon.start()
        (daemon.folder / "go").touch()
        given_up = daemon.wait_event("dead_letter.given_up", timeout=30.0)
        daemon.wait_for(lambda: is_settled(daemon, 3), what="all letters are done with")

        assert (given_up["uid"], given_up["reason"]) == (last, "crashes")
        assert daemon.ledger.finished_uids(READER) == {hold, plain}
        assert len(read_attempts(daemon, last)) == 2, "it ran as often as it may kill"
        assert read_attempts(daemon, hold) == [1, 1], "a crash is no failed attempt"
        # No crash count is left behind that would be charged to a later dead letter.
        assert not daemon.link.execute("EXISTS", daemon.keys.attempts(*PLACE, READER))


def test_dead_letters_purged_in_flight_count_as_missing(make: NewDaemon):
    daemon = make()
    daemon.start("--only", f"{TOPIC}/{GROUP}")
    replayed, purged, kept = daemon.send(["replayed", "purged", "kept"])
    daemon.wait_for(lambda: len(daemon.letters()) == 3, what="all are dead")
    assert daemon.stop() == 0
    # Leave the dead letters pending, like a reader that is killed before it handles them.
    link, keys, assignment, dlq = (
        daemon.link,
        daemon.keys,
        Assignment(*PLACE, READER),
        daemon.keys.dlq(*PLACE),
    )
    link.run(messages.ensure_group(keys, assignment, "0"))
    read = link.execute("XREADGROUP", "GROUP", READER, CONSUMER, "STREAMS", dlq, ">")
    ids = [entry[0].decode() for entry in read[0][1]]
    changed = {b"retryCount": b"0", b"crashCount": b"0", b"replayCount": b"1"}
    assert link.run(dead.replay(keys, *PLACE, ids[0], GROUP, changed)).word == "OK"
    assert link.run(dead.purge(keys, *PLACE, [ids[1]])).values == [1, 0, 0]

    daemon.start()
    # The replayed message fails again, so there is a new dead letter.
    daemon.wait_for(lambda: read_attempts(daemon, replayed), what="the new letter is read")
    daemon.wait_for(lambda: is_settled(daemon, 2), what="all letters are done with")
    assert [len(read_attempts(daemon, each)) for each in (replayed, purged, kept)] == [1, 0, 1]
    assert notes(daemon, replayed)[0]["replays"] == 1
    missing_entries = daemon.events("missing_entry.acknowledged", group=READER)
    assert [each["place"] for each in missing_entries] == [f"m:{each}" for each in ids[:2]]


def test_reset_of_a_dead_letter_group_affects_no_other_group(make: NewDaemon):
    daemon = make()
    with daemon:
        sent = daemon.send(["one", "two", "three"])
        daemon.wait_for(lambda: is_settled(daemon, 3), what="all letters are done with")
        daemon.wait_for(
            lambda: read_snapshot(daemon, GROUP).pending == 0, what="the topic is done with"
        )
        daemon.stop()
    link, keys = daemon.link, daemon.keys
    before = groups.describe(Store(link, keys), TOPIC, GROUP)

    (row,) = groups.reset(Store(link, keys), TOPIC, READER, "earliest").partitions
    assert (row.unread, row.unread_exact, row.pending) == (3, True, 0)
    # A dead letter that was purged from the middle is not counted, even if the server's lag
    # includes it.
    (_, second, _) = link.execute("XRANGE", keys.dlq(*PLACE), "-", "+")
    link.run(dead.purge(keys, *PLACE, [second[0].decode()]))
    assert groups.describe(Store(link, keys), TOPIC, READER).lag == 2
    daemon.start()
    daemon.wait_for(lambda: is_settled(daemon, 2), what="what is left is read again")
    assert [len(read_attempts(daemon, each)) for each in sent] == [2, 1, 2]
    daemon.stop()

    groups.delete(Store(link, keys), TOPIC, READER, force=False)
    assert topics.groups(Store(link, keys), TOPIC, [0]) == [GROUP]
    after = groups.describe(Store(link, keys), TOPIC, GROUP)
    assert [after.lag, *(each.position for each in after.partitions)] == [
        0,
        *(each.position for each in before.partitions),
    ]
    assert link.execute("XLEN", keys.dlq(*PLACE)) == 2, "letters went with their reader"
    assert not link.execute("HEXISTS", keys.meta(TOPIC), f"group:{READER}")


def test_topic_grows_during_a_dead_letter_retry(make: NewDaemon):
    with make(backoff={**QUICK, "base": "1h", "max": "2h"}) as daemon:
        with Producer(settings=config.load(daemon.config_path)) as before:
            late = before.send(TOPIC, "never")
        daemon.wait_for(
            lambda: (seen := read_snapshot(daemon)) and seen.waiting_retries,
            what="it is tried again",
        )
        growth.grow(daemon.store, TOPIC, 2)
        daemon.wait_for(
            lambda: growth.grow(daemon.store, TOPIC, 2).done,
            what="the topic has grown",
        )
        daemon.write_config(topics={TOPIC: {"partitions": 2}})
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        daemon.partitions = 2
        sent = {*daemon.send(["one", "two"])}
        daemon.wait_for(
            lambda: daemon.ledger.finished_uids(READER) == sent,
            what="letters of both partitions are read",
        )
        assert read_attempts(daemon, late) == [1]


def test_dead_letter_consumer_of_an_unknown_topic_is_refused(make: NewDaemon):
    daemon = make()
    reader = daemon.tables["consumers"][1] | {"topic": "oders"}
    daemon.write_config(consumers=[daemon.tables["consumers"][0], reader])
    daemon.start()
    assert daemon.wait() == 3
    assert "reads the dead letters of oders, which does not exist yet" in daemon.tail()
    assert not daemon.link.execute("EXISTS", daemon.keys.meta("oders"))
