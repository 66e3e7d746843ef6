"""The conservation check on a real server sees every place and every planted violation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streamqd.store import messages, publishing
from tests.contract.harness import Harness
from tests.support.conservation import Conservation, read_places
from tests.support.ledger import Ledger

TOKEN = "t1"


class Run(NamedTuple):
    uid: str
    group: str
    attempt: int = 1


class Scenario:
    """An assignment with messages 1 to 5, which were sent and recorded. 1 to 4 have been read."""

    def __init__(self, harness: Harness, path: Path, **options: Any) -> None:
        self.harness = harness
        self.ledger = Ledger(path)
        self.conservation = Conservation(
            harness.link, harness.keys, [harness.assignment], self.ledger, **options
        )
        harness.groups()
        harness.own(TOKEN)
        self.places = {number: self.send(number) for number in range(1, 6)}
        assert len(harness.fetch(4)) == 4

    def send(self, number: int) -> bytes:
        self.ledger.record_sent(f"access/0/{number}-0", f"{number} sleep 0")
        return self.harness.add(f"{number}-0", "payload", f"{number} sleep 0")

    def end(self, number: int) -> None:
        with self.ledger.run(
            Run(f"access/0/{number}-0", self.harness.assignment.group), f"{number} 7"
        ):
            pass

    def ack(self, number: int) -> None:
        call = messages.ack(self.harness.keys, self.harness.leased(TOKEN), [self.places[number]])
        assert self.harness.link.run(call).word == "OK"

    def retry(self, number: int) -> None:
        fields = {b"originalId": f"{number}-0".encode(), b"retryCount": b"1"}
        entries = [(self.places[number], 0.0, fields)]
        call = messages.retry(self.harness.keys, self.harness.leased(TOKEN), entries)
        self.harness.expect_entries("settle_retry", ["MOVED"], call)

    def dead_letter(self, number: int, **more: bytes) -> None:
        fields = {b"group": self.harness.assignment.group.encode()}
        fields |= {name.encode(): value for name, value in more.items()}
        entries = [(self.places[number], fields)]
        call = messages.dead(self.harness.keys, self.harness.leased(TOKEN), entries)
        self.harness.expect_entries("settle_dead", ["MOVED"], call)

    def find_places(self) -> dict[str, list[str]]:
        seen = read_places(self.harness.link, self.harness.keys, [self.harness.assignment])
        return dict(sorted(seen[self.harness.assignment].places.items()))

    def new_violations(self) -> list[str]:
        """Run another check. Return its sentences without the assignment's name."""
        self.conservation.check()
        return [each.partition(": ")[2] for each in self.conservation.violations]


@pytest.fixture
def scenario(harness: Harness, tmp_path: Path) -> Scenario:
    return Scenario(harness, tmp_path / "ledger")


def test_conservation_check_accounts_for_all_read_only(scenario: Scenario):
    harness = scenario.harness
    scenario.end(1)
    scenario.ack(1)
    scenario.retry(2)
    scenario.dead_letter(3)
    scenario.send(6)
    harness.add("9-0", "payload", "7 sleep 0", "originalId", "7-0", stream=harness.retry)
    harness.fetch(1, stream=harness.retry)
    harness.add("10-0", "payload", "8 sleep 0", "originalId", "8-0", stream=harness.retry)
    fields = [b"payload", b"9 sleep 0"]
    harness.link.run(publishing.schedule(harness.keys, "access", 0, 60.0, "s1", fields))
    before = harness.dump()

    assert scenario.find_places() == {
        "2": ["delayed"],
        "3": ["dead"],
        "4": ["pending"],
        "5": ["unread"],
        "6": ["unread"],
        "7": ["retry pending"],
        "8": ["retry unread"],
        "9": ["scheduled"],
    }
    assert harness.dump() == before
    assert scenario.new_violations() == []
    assert scenario.conservation.count_unfinished().total() == 7
    assert scenario.conservation.dead_letter_numbers() == {harness.assignment.group: {"3"}}


def test_finished_pending_message_is_not_a_violation(scenario: Scenario):
    scenario.end(1)
    assert scenario.new_violations() == []
    scenario.ack(1)
    assert scenario.new_violations() == []


# --- planted violations ---------------------------------------------------------------------------


def test_ack_without_success_is_a_violation(scenario: Scenario):
    scenario.ack(1)
    assert scenario.new_violations() == ["1 is nowhere, and no run of it has ended well"]


def test_skipped_message_is_a_violation(scenario: Scenario):
    harness = scenario.harness
    harness.do("XGROUP", "SETID", harness.stream, harness.assignment.group, "5-0")
    assert scenario.new_violations() == ["5 is nowhere, and no run of it has ended well"]


def test_message_in_two_places_is_a_violation(scenario: Scenario):
    scenario.retry(1)
    harness = scenario.harness
    harness.add("9-0", "payload", "1 sleep 0", "originalId", "1-0", stream=harness.retry)
    [sentence] = scenario.new_violations()
    assert "['delayed', 'retry unread']" in sentence


def test_message_back_after_settling_is_a_violation(scenario: Scenario):
    scenario.end(1)
    scenario.ack(1)
    assert scenario.new_violations() == []
    harness = scenario.harness
    harness.do("XGROUP", "SETID", harness.stream, harness.assignment.group, "0")
    assert "1 was settled and is ['unread'] again" in scenario.new_violations()


def test_pending_entry_without_a_body_is_a_violation(scenario: Scenario):
    harness = scenario.harness
    harness.do("XTRIM", harness.stream, "MINID", "2-0")
    blamed = scenario.new_violations()
    assert any("without a body: ['pending']" in each for each in blamed)
    assert "1 is nowhere, and no run of it has ended well" in blamed


@pytest.mark.parametrize("half", ["delayed", "items"])
def test_delayed_message_without_its_other_half_is_found(scenario: Scenario, half: str):
    scenario.retry(1)
    scenario.harness.do("DEL", getattr(scenario.harness, half))
    assert any("without a body: ['delayed'" in each for each in scenario.new_violations())


def test_falling_epoch_is_a_violation(scenario: Scenario):
    assert scenario.new_violations() == []
    scenario.harness.do("HSET", scenario.harness.fence, "epoch", "5")
    [sentence] = scenario.new_violations()
    assert sentence.startswith("the epoch fell from ")
    assert sentence.endswith(" to 5")


def test_check_fails_when_the_group_is_missing(scenario: Scenario):
    harness = scenario.harness
    harness.do("XGROUP", "DESTROY", harness.retry, harness.assignment.group)
    harness.do("XGROUP", "CREATE", harness.retry, "another", "0")
    with pytest.raises(Exception, match="NOGROUP"):
        scenario.conservation.check()


# --- charges, and deliberate losses ---------------------------------------------------------------


def test_crash_counts_come_from_counters_and_fields(scenario: Scenario):
    harness, group = scenario.harness, scenario.harness.assignment.group
    harness.do("HSET", harness.attempts, "m:1-0:c", 2, "m:4-0:f", 3)
    scenario.dead_letter(3, crashCount=b"1", crashes=b"1")
    fields = ("originalId", "7-0", "crashCount", "4")
    harness.add("9-0", "payload", "7 sleep 0", *fields, stream=harness.retry)
    assert scenario.new_violations() == []
    assert scenario.conservation.charges == {(group, "1"): 2, (group, "3"): 1, (group, "7"): 4}
    harness.fetch(1, stream=harness.retry)
    harness.do("HSET", harness.attempts, "r:9-0:c", 1)
    harness.do("HDEL", harness.attempts, "m:1-0:c")
    scenario.conservation.check()
    assert scenario.conservation.charges == {(group, "1"): 2, (group, "3"): 1, (group, "7"): 5}


@pytest.fixture
def losing(harness: Harness, tmp_path: Path) -> Scenario:
    return Scenario(harness, tmp_path / "ledger", drops=True, expiring={"2"})


@pytest.mark.parametrize(("counted", "fine"), [(0, False), (1, True), (2, False)])
def test_unread_losses_must_equal_the_counter(losing: Scenario, counted: int, *, fine: bool):
    harness = losing.harness
    harness.do("XGROUP", "SETID", harness.stream, harness.assignment.group, "5-0")
    harness.do("HSET", harness.trim, f"dropped_unread:{harness.assignment.group}", counted)
    assert bool(losing.new_violations()) is not fine
    assert losing.conservation.unhandled == {harness.assignment: {"5"}}


@pytest.mark.parametrize("counted", [False, True])
def test_pending_losses_are_allowed_around_their_counting(losing: Scenario, *, counted: bool):
    harness = losing.harness
    harness.do("XTRIM", harness.stream, "MINID", "2-0")
    if counted:
        harness.do("XACK", harness.stream, harness.assignment.group, "1-0")
        harness.do("HSET", harness.trim, f"dropped_pending:{harness.assignment.group}", 1)
    assert losing.new_violations() == []
    losing.ack(3)
    assert losing.new_violations() == ["1 are nowhere, not handled well, and not counted"]


def test_expiring_message_may_be_acknowledged_unhandled(losing: Scenario):
    losing.ack(2)
    assert losing.new_violations() == []
    assert losing.conservation.unhandled == {losing.harness.assignment: {"2"}}
