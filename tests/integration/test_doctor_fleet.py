"""`streamqd doctor` finds faults of a fleet: in instances, leases, directives and summaries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamqd import config
from streamqd.admin import diagnosis
from streamqd.admin.diagnosis import facts
from streamqd.admin.reading import ViewReader
from streamqd.model import Assignment, Lease
from streamqd.store import directives, leases
from streamqd.store.client import Connection
from streamqd.store.members import Heartbeat
from tests.support.doctor_case import GROUP, INSTANCE, TOPIC, DoctorCase
from tests.support.servers import Server


@pytest.fixture
def doctor_case(tmp_path: Path, server: Server, link: Connection) -> DoctorCase:
    made = DoctorCase(tmp_path, server.url, link)
    made.settle_in()
    return made


def order(doctor_case: DoctorCase, name: str, to: str = "") -> None:
    call = directives.change(doctor_case.keys, "default", name, by="ann@west", why="a test", to=to)
    assert doctor_case.link.run(call).word == "OK"


def age(doctor_case: DoctorCase, name: str, *, days: int) -> None:
    """Make a directive some days old."""
    key = doctor_case.keys.directives("default")
    found = json.loads(doctor_case.do("HGET", key, name))
    found["at_unix_ms"] = doctor_case.ago(86_400 * days)
    doctor_case.do("HSET", key, name, json.dumps(found))


def silence(doctor_case: DoctorCase, name: str = "one", seconds: float = 300) -> None:
    """Make an instance's last heartbeat some seconds old."""
    doctor_case.do("ZADD", doctor_case.keys.members("default"), doctor_case.ago(seconds), name)


# --- live instances -------------------------------------------------------------------------------


def test_doctor_finds_an_empty_or_silent_fleet(doctor_case: DoctorCase) -> None:
    doctor_case.silent("fleet.empty")
    doctor_case.silent("fleet.silent")
    silence(doctor_case)
    assert "no instance of the fleet default" in doctor_case.finding("fleet.empty")["text"]
    found = doctor_case.finding("fleet.silent")
    assert found["about"] == "one"
    assert found["evidence"]["host"] == "web-1"


def test_doctor_finds_a_consumer_without_instance(doctor_case: DoctorCase) -> None:
    doctor_case.silent("fleet.not-offered")
    doctor_case.heartbeat(offers=[[TOPIC, "mail"]])
    found = doctor_case.finding("fleet.not-offered")
    assert found["about"] == "access/hits"
    doctor_case.heartbeat(offers="spoiled")
    doctor_case.finding("fleet.not-offered")


def test_doctor_finds_two_instances_of_one_name(doctor_case: DoctorCase) -> None:
    doctor_case.silent("fleet.duplicate-instances")
    doctor_case.publish(host="web-2", pid=9)
    found = doctor_case.finding("fleet.duplicate-instances")
    assert "web-1 (pid 7) and web-2 (pid 9)" in found["text"]
    assert "daemon.instance" in found["fix"]


def test_doctor_finds_a_duplicate_run_of_an_instance(doctor_case: DoctorCase) -> None:
    """The doctor finds a second run of an instance.

    The second run publishes nothing under the name of the first, which may still be starting.
    """
    doctor_case.heartbeat(started=doctor_case.ago(5) / 1000)
    doctor_case.publish(f"{INSTANCE}/duplicate", host="web-2", pid=9)
    found = doctor_case.finding("fleet.duplicate-instances")
    assert "web-1 (pid 7) and web-2 (pid 9)" in found["text"]
    assert found["evidence"]["publishes"] == {"host": "web-2", "pid": 9}
    doctor_case.publish(f"{INSTANCE}/duplicate", host="web-1", pid=7)
    doctor_case.silent("fleet.duplicate-instances")


def test_doctor_accepts_a_restarted_instance(doctor_case: DoctorCase) -> None:
    doctor_case.publish(pid=6)
    doctor_case.heartbeat(started=doctor_case.ago(5) / 1000)
    doctor_case.silent("fleet.duplicate-instances")


def test_doctor_finds_instances_with_alternating_heartbeats(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = facts.changed_runs

    def after_the_other(
        reader: ViewReader, fleet: str, heartbeats: Sequence[Heartbeat]
    ) -> frozenset[str]:
        silence(doctor_case)
        doctor_case.heartbeat(nonce="n2")
        return look(reader, fleet, heartbeats)

    monkeypatch.setattr(diagnosis, "changed_runs", after_the_other)
    checks = diagnosis.select_checks(["fleet.duplicate-instances"])
    report = diagnosis.examine(doctor_case.link, config.load(doctor_case.path), checks)
    assert [each.evidence["changed"] for each in report.findings] == [True]


def test_doctor_finds_a_silent_housekeeper(doctor_case: DoctorCase) -> None:
    doctor_case.silent("fleet.housekeeper")
    doctor_case.publish(redis_up=False)
    assert doctor_case.finding("fleet.housekeeper")["evidence"]["redis_up"] is False
    doctor_case.publish(at_unix_ms=doctor_case.ago(120))
    assert "2 minutes" in doctor_case.finding("fleet.housekeeper")["text"]
    doctor_case.do("DEL", doctor_case.keys.instance("default", "one"))
    doctor_case.finding("fleet.housekeeper")
    doctor_case.heartbeat(started=doctor_case.ago(1) / 1000)
    doctor_case.silent("fleet.housekeeper")


def test_doctor_finds_an_instance_that_cannot_fork(doctor_case: DoctorCase) -> None:
    """The doctor names the instance, the operating system's error, and the limit to raise."""
    doctor_case.silent("fleet.limited")
    doctor_case.heartbeat(capacity=3, capacity_problem="Too many open files", cap=3)
    found = doctor_case.finding("fleet.limited")
    assert "one can run no more than 3 partitions" in found["text"]
    assert "Too many open files" in found["text"]
    assert "LimitNOFILE" in found["fix"]
    doctor_case.heartbeat(capacity="many")
    doctor_case.silent("fleet.limited")


def test_doctor_finds_a_waiting_reload(doctor_case: DoctorCase) -> None:
    reload = {"directive_unix_ms": 0, "assignment": [TOPIC, 0, GROUP], "step": "finish"}
    doctor_case.heartbeat(reloading=reload | {"since_unix_ms": doctor_case.ago(5)})
    doctor_case.silent("fleet.reload-waiting")
    doctor_case.heartbeat(reloading=reload | {"since_unix_ms": doctor_case.ago(300)})
    found = doctor_case.finding("fleet.reload-waiting")
    assert found["about"] == "one"
    assert "one was asked to reload 5 min" in found["text"]
    assert f"`streamqd why {TOPIC}/0/{GROUP}`" in found["fix"]
    doctor_case.heartbeat(reloading="spoiled")
    doctor_case.silent("fleet.reload-waiting")


def test_doctor_names_a_failed_assignment_and_its_instance(doctor_case: DoctorCase) -> None:
    """The doctor names the assignment that was abandoned, but does not report a crash loop."""
    doctor_case.silent("fleet.assignment-failed")
    doctor_case.publish(
        assignments=[
            {"topic": TOPIC, "partition": 1, "group": GROUP, "state": "failed"},
            {"state": []},
        ]
    )
    found = doctor_case.finding("fleet.assignment-failed")
    assert found["evidence"] == {"instance": "one", "assignment": [TOPIC, 1, GROUP]}
    assert "assignment.given_up" in found["fix"]
    doctor_case.silent("fleet.crash-loop")


def test_doctor_names_a_refused_scoreboard_file(doctor_case: DoctorCase) -> None:
    """The doctor names a scoreboard file that an instance could not use and has renamed."""
    doctor_case.silent("fleet.scoreboard-refused")
    doctor_case.publish(refused_board="/run/streamqd/one 1.refused")
    found = doctor_case.finding("fleet.scoreboard-refused")
    assert found["about"] == "one"
    assert "rm '/run/streamqd/one 1.refused'" in found["fix"]
    for spoiled in ("", None, 7, ["/"]):
        doctor_case.publish(refused_board=spoiled)
        doctor_case.silent("fleet.scoreboard-refused")


def test_doctor_names_a_blocked_event_loop_for_15_minutes(doctor_case: DoctorCase) -> None:
    """The doctor names a blocked loop even after it has recovered, so that operators see it."""
    doctor_case.silent("fleet.loop-blocked")
    assignment = {"topic": TOPIC, "partition": 1, "group": GROUP, "state": "busy"}

    def publish(seconds: object, ago: object) -> None:
        told = {"loop_blocked_seconds": seconds, "loop_blocked_seconds_ago": ago}
        doctor_case.publish(
            assignments=[{**assignment, **told, "loop_blocker": "shop.py:7 in bill"}]
        )

    publish(4.2, None)
    found = doctor_case.finding("fleet.loop-blocked")
    assert found["about"] == f"{TOPIC}/1/{GROUP}"
    assert "shop.py:7 in bill" in found["text"]
    assert "asyncio.to_thread" in found["fix"]
    publish(0.0, 840.0)
    assert found["evidence"] != doctor_case.finding("fleet.loop-blocked")["evidence"]
    for seconds, ago in ((0.0, None), (0.0, 960.0), ("soon", {}), (None, None)):
        publish(seconds, ago)
        doctor_case.silent("fleet.loop-blocked")


def test_doctor_finds_a_crash_loop(doctor_case: DoctorCase) -> None:
    doctor_case.silent("fleet.crash-loop")
    doctor_case.publish(
        assignments=[
            {"topic": TOPIC, "partition": 1, "group": GROUP, "state": "broken"},
            {"state": []},
        ]
    )
    assert doctor_case.finding("fleet.crash-loop")["evidence"] == {"partitions": {"1": "one"}}
    doctor_case.publish()
    doctor_case.heartbeat(broken=[[TOPIC, 0, GROUP]])
    assert "streamqd why access/0/hits" in doctor_case.finding("fleet.crash-loop")["fix"]


# --- directives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drain:two", "reload:two", "move:access/1/hits"])
def test_doctor_finds_a_directive_for_a_missing_instance(
    doctor_case: DoctorCase, name: str
) -> None:
    to = "two" if name.startswith("move") else ""
    order(doctor_case, name, to)
    assert "control clear --missing" in doctor_case.finding("fleet.directives-for-missing")["fix"]
    doctor_case.heartbeat("two")
    doctor_case.silent("fleet.directives-for-missing")


def test_doctor_finds_an_unreadable_directive(doctor_case: DoctorCase) -> None:
    order(doctor_case, "reload:*")
    doctor_case.silent("fleet.directives-unreadable")
    doctor_case.do("HSET", doctor_case.keys.directives("default"), "pause:all", "now")
    assert "control clear 'pause:all'" in doctor_case.finding("fleet.directives-unreadable")["fix"]


def test_doctor_finds_a_long_pause(doctor_case: DoctorCase) -> None:
    order(doctor_case, "pause:access/*/*")
    doctor_case.silent("fleet.paused")
    age(doctor_case, "pause:access/*/*", days=3)
    found = doctor_case.finding("fleet.paused")
    assert "3 days by ann@west (a test)" in found["text"]
    assert found["fix"] == "`streamqd resume access`", "no star that a shell would expand"


def test_doctor_finds_a_long_stop(doctor_case: DoctorCase) -> None:
    """The doctor finds a group that was stopped a long time ago and may have been forgotten."""
    order(doctor_case, "stop:access/*/hits")
    doctor_case.silent("fleet.stopped")
    age(doctor_case, "stop:access/*/hits", days=3)
    found = doctor_case.finding("fleet.stopped")
    assert "3 days by ann@west (a test)" in found["text"]
    assert found["fix"] == "`streamqd group start access hits`"


# --- leases ---------------------------------------------------------------------------------------


def test_doctor_finds_a_lease_without_a_fence(doctor_case: DoctorCase) -> None:
    doctor_case.silent("fleet.lease-without-fence")
    doctor_case.do("HDEL", doctor_case.harness.fence, "token")
    assert doctor_case.finding("fleet.lease-without-fence")["evidence"]["partitions"] == [0]
    doctor_case.do("HSET", doctor_case.harness.fence, "token", "another")
    assert (
        f"DEL {doctor_case.harness.lease}"
        in doctor_case.finding("fleet.lease-without-fence")["fix"]
    )


def test_doctor_accepts_a_released_assignment(doctor_case: DoctorCase) -> None:
    released = leases.release(doctor_case.keys, Lease(Assignment(TOPIC, 0, GROUP), "t0"))
    assert doctor_case.link.run(released).word == "OK"
    for check in ("lease-without-fence", "owner-silent", "not-renewed"):
        doctor_case.silent(f"fleet.{check}")


def test_doctor_finds_an_expired_lease(doctor_case: DoctorCase) -> None:
    doctor_case.do("DEL", doctor_case.harness.lease)
    found = doctor_case.finding("fleet.not-renewed")
    assert found["evidence"] == {"partitions": [0], "owners": ["one"]}
    doctor_case.silent("fleet.owner-silent")

    silence(doctor_case)
    doctor_case.silent("fleet.not-renewed")
    found = doctor_case.finding("fleet.owner-silent")
    assert found["evidence"]["partitions"] == [0]


def test_doctor_finds_an_endless_quarantine(doctor_case: DoctorCase) -> None:
    fence = doctor_case.harness.fence
    doctor_case.do("HSET", fence, "quarantine", 1)
    doctor_case.silent("fleet.quarantine-stuck")
    doctor_case.do("HSET", fence, "since", doctor_case.ago(3_600))
    assert "streamqd reload one" in doctor_case.finding("fleet.quarantine-stuck")["fix"]
    doctor_case.harness.add("*", "payload", "x")
    doctor_case.harness.fetch()
    doctor_case.silent("fleet.quarantine-stuck")
