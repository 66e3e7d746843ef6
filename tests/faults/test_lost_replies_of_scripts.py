"""Every script is executed, its reply is lost, and the caller repeats the call.

The second answer must be the one in the script's contract, and the second call must not change
anything. test_lost_replies_of_callers.py shows how callers handle the loss.
"""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.errors import RedisUnavailableError
from streamqd.store import retention, scripts, statistics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract import scenarios
from tests.contract.harness import Harness
from tests.contract.scenarios import WHEN_FULL, Scenario
from tests.faults.scenario_runner import normal
from tests.support.proxy import Fault, FaultProxy

# Answers of a second call that differ from the first answer.
AGAIN: dict[Scenario, str] = {
    scenarios.archive_advance: "UNCHANGED",
    scenarios.dead_deliver: "DUPLICATE",
    scenarios.dead_replay: "GONE",
    scenarios.dead_replay_all_groups: "GONE",
    scenarios.group_ensure: "OK",
    scenarios.growth_finish: "GONE",
    scenarios.lease_acquire: "MINE",
    scenarios.lease_acquire_retried: "MINE",
    scenarios.lease_release: "FENCED",
    scenarios.lease_renew_late: "OK",
    scenarios.member_leave: "GONE",
    scenarios.message_publish: "DUPLICATE",
    scenarios.outbox_release: "FENCED",
    scenarios.pipeline_lease_release: "LOST",
    scenarios.schedule_declare: "SAME",
    scenarios.schedule_drop: "GONE",
    scenarios.schedule_release: "GONE",
    scenarios.schedule_run: "AGAIN",
    scenarios.sink_start: "STARTED",
    scenarios.topic_configure: "CHANGED",
    scenarios.topic_create: "EXISTS",
}
# Each heartbeat, directive and declaration of a schedule carries its own time.
ANOTHER_TIME = {
    *(scenarios.member_heartbeat, scenarios.control_change, scenarios.schedule_stamp),
    # A relay publishes when it was last seen, and takes its outbox over under a new epoch.
    *(scenarios.outbox_renew, scenarios.outbox_renew_late, scenarios.outbox_acquire),
}
# The contract allows this, because no producer repeats the call after an unknown outcome.
WRITES_AGAIN = {scenarios.message_append}


def measures(harness: Harness) -> dict[str, Call]:
    """Return calls of the read-only scripts, for which test_every_script has no scenario."""
    harness.groups()
    harness.add("1-0")
    topic, partition, _ = harness.assignment
    return {
        "partition_measure": statistics.measure_partition(harness.keys, topic, partition),
        "dead_letters_measure": statistics.count_dead_letters(
            harness.keys, topic, partition, statistics.DeadLetterCount()
        ),
        "assignment_measure": statistics.measure_assignment(harness.keys, harness.assignment),
        "retention_measure": retention.measure(harness.keys, topic, partition),
    }


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


def repeat(harness: Harness, proxy: FaultProxy, call: Call, fault: Fault) -> tuple[str, bool, bool]:
    """Lose the reply to a call, and repeat the call.

    Return the answer, whether anything changed, and whether anything other than times changed.
    """
    # Load the script first. Otherwise, the first command of the call has no effect.
    harness.do("SCRIPT", "LOAD", call.script.source)
    shaky = connect(proxy.settings, timeout=5.0, name="test:shaky")
    shaky.open()
    proxy.arm(fault, command="EVALSHA")
    with pytest.raises(RedisUnavailableError) as caught:
        shaky.run(call)
    assert caught.value.sent, "the outcome is unknown"
    before = harness.state()
    word = shaky.run(call).word
    shaky.close()
    after = harness.state()
    return word, after != before, normal(after) != normal(before)


@pytest.mark.fault("F12")
@pytest.mark.parametrize("scenario", WHEN_FULL, ids=lambda scenario: scenario.__name__)
def test_script_is_safe_to_repeat_after_a_lost_reply(
    harness: Harness, proxy: FaultProxy, scenario: Scenario
):
    call = scenario(harness)
    word, changed, more = repeat(harness, proxy, call, Fault.DROP_REPLY)
    first = {"lease_acquire_mine": "MINE", "lease_renew_late": "LATE"}
    assert word == AGAIN.get(scenario, first.get(scenario.__name__, "OK"))
    assert not changed or scenario in ANOTHER_TIME | WRITES_AGAIN
    assert more == (scenario in WRITES_AGAIN), "more than a time has changed"


@pytest.mark.fault("F12")
@pytest.mark.parametrize("scenario", WHEN_FULL, ids=lambda scenario: scenario.__name__)
def test_script_lost_before_its_execution_runs_on_the_repeat(
    harness: Harness, proxy: FaultProxy, scenario: Scenario
):
    call = scenario(harness)
    word, *_ = repeat(harness, proxy, call, Fault.CUT_BEFORE)
    expected: dict[Scenario, Any] = {
        scenarios.group_ensure: "CREATED",
        scenarios.lease_acquire_mine: "MINE",
        scenarios.lease_renew_late: "LATE",
        scenarios.schedule_declare: "ADDED",
    }
    assert word == expected.get(scenario, "OK")


@pytest.mark.fault("F12")
def test_measuring_is_safe_to_repeat(harness: Harness, proxy: FaultProxy):
    calls = measures(harness)
    assert {*calls} == {name for name in scripts.load() if name.endswith("_measure")}
    for name, call in calls.items():
        assert call.script.name == name
        assert repeat(harness, proxy, call, Fault.DROP_REPLY) == ("OK", False, False)
