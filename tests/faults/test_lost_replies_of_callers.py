"""No effect is lost or doubled if any command of any role is lost.

The scenarios drive the real roles in this process. scenario_runner.py describes which commands are
lost.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamqd.store import scripts
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.faults import (
    scenarios_admin,
    scenarios_housekeeper,
    scenarios_producer,
    scenarios_schedules,
    scenarios_spark,
    scenarios_supervisor,
    scenarios_worker,
)
from tests.faults.scenario_runner import BY_SOURCE, FAULTS, WHOLE, Scenario, ScenarioRunner
from tests.support import usage
from tests.support.proxy import Fault
from tests.support.servers import ProcessServer

ROLES: tuple[Scenario, ...] = (
    scenarios_worker.one_at_a_time,
    scenarios_worker.several_at_once,
    scenarios_worker.in_place,
    scenarios_worker.on_a_full_server,
    scenarios_worker.a_group_that_is_destroyed,
    scenarios_supervisor.an_assignment_from_its_acquisition_to_its_release,
    scenarios_supervisor.a_burst_that_is_over,
    scenarios_supervisor.registration,
    scenarios_housekeeper.everything_that_is_due,
    scenarios_schedules.schedules_of_an_instance,
    scenarios_producer.single_messages,
    scenarios_producer.many_messages,
    scenarios_producer.the_first_message_of_a_topic,
    scenarios_spark.a_task_that_writes_rows,
    scenarios_spark.an_archive_that_goes_on,
    scenarios_spark.a_stream_that_shows_its_position,
)
SCENARIOS = (*ROLES, *scenarios_admin.CHANGING, *scenarios_admin.LOOKING)
# For an operator's command, a cut reply is the same as a lost one, and a read-only command has no
# effect that could be doubled.
CASES = [
    *((scenario, fault) for scenario in ROLES for fault in FAULTS),
    *(
        (scenario, fault)
        for scenario in scenarios_admin.CHANGING
        for fault in FAULTS
        if fault in WHOLE
    ),
    *((scenario, Fault.DROP_REPLY) for scenario in scenarios_admin.LOOKING),
]
# A scenario of the worker covers this on servers that refuse to queue a read when memory is full.
FULL_MEMORY_ONLY = {"message_fetch"}
# The relay of an outbox also uses a database. Its calls are lost in
# test_lost_replies_of_scripts.py, and test_kill_points_outbox.py kills it at each of them.
OF_RELAYS = {"outbox_acquire", "outbox_renew", "outbox_release", "outbox_fence", "outbox_publish"}
# Scenarios whose roles call single scripts, which are loaded when they are first used.
WITHOUT_SCRIPTS = (
    scenarios_worker.in_place,
    scenarios_supervisor.an_assignment_from_its_acquisition_to_its_release,
    scenarios_producer.single_messages,
    scenarios_spark.a_task_that_writes_rows,
)
# The sources of commands, and the reasons why some commands may be lost without a scenario.
PARTS = (
    *("startup.py", "registration.py", "inspection.py", "supervisor", "worker", "housekeeper"),
    *("admin", "cli", "spark", "producer", "store"),
)
NO_COMMANDS = {"keys"}  # a word in the headers of scripts
LOOKS = "the start checks and the doctor look at a server with it, and change nothing"
OPENS = "sent while a connection is opened; a failed one is replaced"
NEED_NO_SCENARIO = {
    "asking": "sent before a command and repeated with it (test_cluster_link.py)",
    **dict.fromkeys(("auth", "select", "client|setname", "hello"), OPENS),
    "cluster|slots": "reads the map of a cluster, which is asked for again",
    "config|get": LOOKS,
    "info": LOOKS,
    "latency|latest": LOOKS,
    "slowlog|get": LOOKS,
    "discard": "discards the transaction with which doctor tests permissions",
    "expire": "the life of a figure that a person sees while Spark reads; each report renews it",
    "hvals": "reads that figure",
    "lrange": "reads the last owners of an assignment for a person",
}


@pytest.fixture
def new_runner(
    process_server: ProcessServer, link: Connection, keys: Keys
) -> Callable[..., ScenarioRunner]:
    return lambda scenario, **options: ScenarioRunner(
        process_server, link, keys, scenario, **options
    )


@pytest.mark.fault("F12")
@pytest.mark.parametrize(
    ("scenario", "fault"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1].name.lower()}") for case in CASES],
)
def test_lost_command_loses_or_repeats_no_message(
    new_runner: Callable[[Scenario], ScenarioRunner], scenario: Scenario, fault: Fault
):
    print(new_runner(scenario).survive(fault), "commands were lost")


@pytest.mark.fault("F12")
@pytest.mark.parametrize("fault", WHOLE, ids=lambda each: each.name.lower())
@pytest.mark.parametrize("scenario", WITHOUT_SCRIPTS, ids=lambda each: each.__name__)
def test_lost_eval_loses_or_repeats_no_message(
    new_runner: Callable[..., ScenarioRunner], scenario: Scenario, fault: Fault
):
    """No message is lost or repeated if a script is missing and the call by source is lost."""
    runner = new_runner(scenario, scripts_loaded=False)
    assert [kind for kind in runner.kinds() if kind.startswith(BY_SOURCE)]
    print(runner.survive(fault), "commands were lost")


@pytest.mark.fault("F12")
def test_every_command_is_lost_in_a_scenario(
    new_runner: Callable[..., ScenarioRunner], link: Connection
):
    """Every command that has an effect is part of a role's scenario."""
    said = {kind for scenario in SCENARIOS for kind in new_runner(scenario).kinds()}
    assert scripts.load().keys() - said <= FULL_MEMORY_ONLY | OF_RELAYS

    known = {entry[0].decode().lower() for entry in link.execute("COMMAND")}
    plain = {kind.lower() for kind in said}
    used = {each for each in usage.module_commands(*PARTS) if each.partition("|")[0] in known}
    never = {each for each in used if each.partition("|")[0] not in plain}
    in_scripts = usage.script_commands(scripts.load()) | {"eval", "evalsha"}
    assert never - in_scripts - NO_COMMANDS == NEED_NO_SCENARIO.keys()
