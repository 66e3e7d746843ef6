"""`source = "dlq"`: the configuration of a consumer of dead letters, and the messages it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamqd import config
from streamqd.dead_letter import DeadLetter
from streamqd.errors import ConfigError, ContractError
from streamqd.message import Delivery, Message
from streamqd.model import Assignment, Lease
from streamqd.store import messages
from streamqd.store.keys import Keys

READS = '[[consumers]]\ntopic = "access"\ngroup = "hits"\nhandler = "weblog:count_hit"\n'
LETTERS = READS.replace("count_hit", "look") + 'source = "dlq"\n'
ASSIGNMENT = Assignment("access", 3, "hits@dlq")
DELIVERY = Delivery(ASSIGNMENT, "west-1", 1_763_640_000_123)


def load(folder: Path, text: str) -> config.Settings:
    file = folder / "streamq.toml"
    file.write_text(text)
    return config.load(file, {}, {})


def problem(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(folder, text)
    (found,) = raised.value.problems
    return found


# --- configuration ------------------------------------------------------------------------------


def test_dead_letter_consumer_is_distinct_from_its_namesake(tmp_path: Path):
    settings = load(tmp_path, READS + LETTERS)
    assert [each.name for each in settings.consumers] == ["access/hits", "access/hits@dlq"]
    assert [each.group for each in settings.consumers] == ["hits", "hits"]
    assert [each.assignment_group for each in settings.consumers] == ["hits", "hits@dlq"]
    assert settings.message_groups("access") == ["hits"]
    assert settings.message_groups("errors") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LETTERS + LETTERS, "already reads the dead letters of access as group hits; choose"),
        (LETTERS.replace('"dlq"', '"dql"'), "consumers[0].source: "),
        (LETTERS.replace('"weblog:look"', '""'), "consumers[0].handler: is missing; write handler"),
    ],
)
def test_dead_letter_consumer_problem_is_one_sentence(tmp_path: Path, text: str, said: str):
    found = problem(tmp_path, text)
    assert said in found
    assert "\n" not in found


def test_handler_may_consume_a_topic_and_its_dead_letters(tmp_path: Path):
    declared = [
        {"topic": "access", "group": "hits", "handler": "weblog:count_hit"},
        {"topic": "access", "group": "hits", "handler": "weblog:look", "source": "dlq"},
    ]
    text = LETTERS.replace('handler = "weblog:look"\n', "max_attempts = 2\n")
    settings = config.declare_consumers(
        load(tmp_path, '[daemon]\nhandlers = ["weblog"]\n' + text), declared
    )
    found = {each.name: (each.handler, each.max_attempts) for each in settings.consumers}
    assert found == {"access/hits@dlq": ("weblog:look", 2), "access/hits": ("weblog:count_hit", 5)}


# --- keys ---------------------------------------------------------------------------------------


def test_dead_letter_assignment_shares_only_the_stream():
    keys = Keys()
    assert keys.source(*ASSIGNMENT) == keys.dlq("access", 3)
    assert keys.source("access", 3, "hits") == keys.stream("access", 3)
    assert keys.retry_stream(*ASSIGNMENT) == "stream:topic:{access:p:3}:retry:hits@dlq"
    assert keys.fence(*ASSIGNMENT) != keys.fence("access", 3, "hits")


def test_dead_letter_is_never_dead_lettered_again():
    with pytest.raises(ContractError, match="access/3/hits@dlq reads dead letters"):
        messages.dead(Keys(), Lease(ASSIGNMENT, "token"), [(b"m:1-0", {})])


# --- the message of a handler -------------------------------------------------------------------

FIELDS = {
    b"failedAt": b"1763640009500",
    b"payload": b"x",
    b"originalId": b"1763640000000-7",
    b"retryCount": b"5",
    b"crashCount": b"1",
    b"replayCount": b"2",
    b"group": b"hits",
    b"instance": b"west-1",
    b"handler": b"weblog:count_hit",
    b"attempts": b"5",
    b"crashes": b"1",
    b"reason": b"attempts",
    b"errorClass": b"ValueError",
    b"errorMessage": "schön".encode(),
    b"traceback": b"Traceback \xff",
    b"fingerprint": b"9f2c51d0a7be",
}


def message(
    fields: dict[bytes, bytes], assignment: Assignment = ASSIGNMENT, *, retried: bool = False
) -> Message:
    flat = [part for pair in fields.items() for part in pair]
    delivery = Delivery(assignment, DELIVERY.instance, DELIVERY.epoch)
    return Message(delivery, b"1763640009500-0", flat, retried=retried)


def test_dead_letter_contains_the_failure_of_its_message():
    found = message(FIELDS)
    assert found.dead_letter == DeadLetter(
        group="hits",
        reason="attempts",
        error_class="ValueError",
        error="schön",
        traceback="Traceback \ufffd",
        attempts=5,
        crashes=1,
        handler="weblog:count_hit",
        instance="west-1",
        fingerprint="9f2c51d0a7be",
        failed_at=1763640009.5,
        signal="",
        exit_code=None,
    )
    assert found.uid == "access/3/1763640000000-7", "the message's, not the letter's"
    assert (found.group, found.payload) == ("hits@dlq", b"x")


def test_dead_letter_attempts_restart_and_replay_count_stays():
    first, third = message(FIELDS), message(FIELDS | {b"retryCount": b"2"}, retried=True)
    assert (first.attempt, first.crash_count, first.replay_count) == (1, 0, 2)
    assert (third.attempt, third.dead_letter, third.replay_count) == (3, first.dead_letter, 2)


def test_message_of_the_topic_is_never_a_dead_letter():
    plain = message(FIELDS, Assignment("access", 3, "hits"))
    assert plain.dead_letter is None
    assert plain.replay_count == 0


def test_missing_dead_letter_fields_are_empty():
    found = message({b"payload": b"x", b"attempts": b"many", b"failedAt": b"9" * 19}).dead_letter
    assert found is not None
    assert (found.attempts, found.failed_at, found.exit_code) == (0, 0.0, None)
    assert (found.group, found.reason, found.signal) == ("", "", "")
    crashed = message({b"signal": b"SIGSEGV", b"exitCode": b"139"}).dead_letter
    assert crashed is not None
    assert (crashed.signal, crashed.exit_code) == ("SIGSEGV", 139)
