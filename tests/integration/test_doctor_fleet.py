"""`streamqd doctor` on faulty fleets: instances, leases, directives and summaries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamqd import config
from streamqd.admin import diagnosis
from streamqd.admin.diagnosis import facts
from streamqd.admin.reading import BadValues
from streamqd.model import Lease, Unit
from streamqd.store import directives, leases
from streamqd.store.client import Connection
from streamqd.store.members import Heartbeat
from streamqd.store.store import Store
from tests.support.servers import Server
from tests.support.surgery import GROUP, INSTANCE, TOPIC, Surgery


@pytest.fixture
def surgery(tmp_path: Path, server: Server, link: Connection) -> Surgery:
    made = Surgery(tmp_path, server.url, link)
    made.settle_in()
    return made


def order(surgery: Surgery, name: str, to: str = "") -> None:
    call = directives.change(surgery.keys, "default", name, by="ann@west", why="a test", to=to)
    assert surgery.link.run(call).word == "OK"


def silence(surgery: Surgery, name: str = "one", seconds: float = 300) -> None:
    """Set the age of an instance's last heartbeat."""
    surgery.do("ZADD", surgery.keys.members("default"), surgery.ago(seconds), name)


# --- live instances -------------------------------------------------------------------------------


def test_doctor_finds_an_empty_or_silent_fleet(surgery: Surgery) -> None:
    surgery.silent("fleet.empty")
    surgery.silent("fleet.silent")
    silence(surgery)
    assert "no instance of the fleet default" in surgery.finding("fleet.empty")["text"]
    found = surgery.finding("fleet.silent")
    assert found["about"] == "one"
    assert found["evidence"]["host"] == "web-1"


def test_doctor_finds_a_consumer_without_instance(surgery: Surgery) -> None:
    surgery.silent("fleet.not-offered")
    surgery.beat(offers=[[TOPIC, "mail"]])
    found = surgery.finding("fleet.not-offered")
    assert found["about"] == "access/hits"
    surgery.beat(offers="spoiled")
    surgery.finding("fleet.not-offered")


def test_doctor_finds_two_instances_of_one_name(surgery: Surgery) -> None:
    surgery.silent("fleet.duplicate-instances")
    surgery.publish(host="web-2", pid=9)
    found = surgery.finding("fleet.duplicate-instances")
    assert "web-1 (pid 7) and web-2 (pid 9)" in found["text"]
    assert "daemon.instance" in found["fix"]


def test_doctor_finds_a_duplicate_run_of_an_instance(surgery: Surgery) -> None:
    """U5: the second run publishes nothing under the name of the first, which may be starting."""
    surgery.beat(started=surgery.ago(5) / 1000)
    surgery.publish(f"{INSTANCE}/duplicate", host="web-2", pid=9)
    found = surgery.finding("fleet.duplicate-instances")
    assert "web-1 (pid 7) and web-2 (pid 9)" in found["text"]
    assert found["evidence"]["publishes"] == {"host": "web-2", "pid": 9}
    surgery.publish(f"{INSTANCE}/duplicate", host="web-1", pid=7)
    surgery.silent("fleet.duplicate-instances")


def test_doctor_accepts_a_restarted_instance(surgery: Surgery) -> None:
    surgery.publish(pid=6)
    surgery.beat(started=surgery.ago(5) / 1000)
    surgery.silent("fleet.duplicate-instances")


def test_doctor_finds_instances_with_alternating_heartbeats(
    surgery: Surgery, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = facts.changed_runs

    def after_the_other(
        store: Store, bad: BadValues, fleet: str, beats: Sequence[Heartbeat]
    ) -> frozenset[str]:
        silence(surgery)
        surgery.beat(nonce="n2")
        return look(store, bad, fleet, beats)

    monkeypatch.setattr(diagnosis, "changed_runs", after_the_other)
    checks = diagnosis.chosen(["fleet.duplicate-instances"])
    report = diagnosis.examine(surgery.link, config.load(surgery.path), checks)
    assert [each.evidence["changed"] for each in report.findings] == [True]


def test_doctor_finds_a_silent_housekeeper(surgery: Surgery) -> None:
    surgery.silent("fleet.housekeeper")
    surgery.publish(redis_up=False)
    assert surgery.finding("fleet.housekeeper")["evidence"]["redis_up"] is False
    surgery.publish(at_unix_ms=surgery.ago(120))
    assert "2 minutes" in surgery.finding("fleet.housekeeper")["text"]
    surgery.do("DEL", surgery.keys.instance("default", "one"))
    surgery.finding("fleet.housekeeper")
    surgery.beat(started=surgery.ago(1) / 1000)
    surgery.silent("fleet.housekeeper")


def test_doctor_finds_an_instance_that_cannot_fork(surgery: Surgery) -> None:
    """C2: doctor names the instance, the error of the operating system, and the limit to raise."""
    surgery.silent("fleet.limited")
    surgery.beat(capacity=3, capacity_problem="Too many open files", cap=3)
    found = surgery.finding("fleet.limited")
    assert "one can run no more than 3 partitions" in found["text"]
    assert "Too many open files" in found["text"]
    assert "LimitNOFILE" in found["fix"]
    surgery.beat(capacity="many")
    surgery.silent("fleet.limited")


def test_doctor_names_a_failed_assignment_and_its_instance(surgery: Surgery) -> None:
    """B3: doctor names the abandoned assignment, and does not report a crash loop."""
    surgery.silent("fleet.assignment-failed")
    surgery.publish(
        assignments=[
            {"topic": TOPIC, "partition": 1, "group": GROUP, "state": "failed"},
            {"state": []},
        ]
    )
    found = surgery.finding("fleet.assignment-failed")
    assert found["evidence"] == {"instance": "one", "assignment": [TOPIC, 1, GROUP]}
    assert "assignment.given_up" in found["fix"]
    surgery.silent("fleet.crash-loop")


def test_refused_scoreboard_file_is_named_until_deleted(surgery: Surgery) -> None:
    """B1: doctor names a scoreboard file that an instance could not use and renamed."""
    surgery.silent("fleet.scoreboard-refused")
    surgery.publish(refused_board="/run/streamqd/one 1.refused")
    found = surgery.finding("fleet.scoreboard-refused")
    assert found["about"] == "one"
    assert "rm '/run/streamqd/one 1.refused'" in found["fix"]
    for spoiled in ("", None, 7, ["/"]):
        surgery.publish(refused_board=spoiled)
        surgery.silent("fleet.scoreboard-refused")


def test_doctor_names_a_blocked_event_loop_for_15_minutes(surgery: Surgery) -> None:
    """S4: doctor names a blocked loop, and names it for a while afterwards so operators see it."""
    surgery.silent("fleet.loop-blocked")
    unit = {"topic": TOPIC, "partition": 1, "group": GROUP, "state": "busy"}

    def publish(seconds: object, ago: object) -> None:
        told = {"loop_blocked_seconds": seconds, "loop_blocked_seconds_ago": ago}
        surgery.publish(assignments=[{**unit, **told, "loop_blocker": "shop.py:7 in bill"}])

    publish(4.2, None)
    found = surgery.finding("fleet.loop-blocked")
    assert found["about"] == f"{TOPIC}/1/{GROUP}"
    assert "shop.py:7 in bill" in found["text"]
    assert "asyncio.to_thread" in found["fix"]
    publish(0.0, 840.0)
    assert found["evidence"] != surgery.finding("fleet.loop-blocked")["evidence"]
    for seconds, ago in ((0.0, None), (0.0, 960.0), ("soon", {}), (None, None)):
        publish(seconds, ago)
        surgery.silent("fleet.loop-blocked")


def test_doctor_finds_a_crash_loop(surgery: Surgery) -> None:
    surgery.silent("fleet.crash-loop")
    surgery.publish(
        assignments=[
            {"topic": TOPIC, "partition": 1, "group": GROUP, "state": "broken"},
            {"state": []},
        ]
    )
    assert surgery.finding("fleet.crash-loop")["evidence"] == {"partitions": {"1": "one"}}
    surgery.publish()
    surgery.beat(broken=[[TOPIC, 0, GROUP]])
    assert "streamqd why access/0/hits" in surgery.finding("fleet.crash-loop")["fix"]


# --- directives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drain:two", "reload:two", "move:access/1/hits"])
def test_doctor_finds_a_directive_for_a_missing_instance(surgery: Surgery, name: str) -> None:
    to = "two" if name.startswith("move") else ""
    order(surgery, name, to)
    assert "control clear --missing" in surgery.finding("fleet.directives-for-missing")["fix"]
    surgery.beat("two")
    surgery.silent("fleet.directives-for-missing")


def test_doctor_finds_an_unreadable_directive(surgery: Surgery) -> None:
    order(surgery, "reload:*")
    surgery.silent("fleet.directives-unreadable")
    surgery.do("HSET", surgery.keys.orders("default"), "pause:all", "now")
    assert "control clear 'pause:all'" in surgery.finding("fleet.directives-unreadable")["fix"]


def test_doctor_finds_a_long_pause(surgery: Surgery) -> None:
    order(surgery, "pause:access/*/*")
    surgery.silent("fleet.paused")
    name, field = surgery.keys.orders("default"), "pause:access/*/*"
    told = json.loads(surgery.do("HGET", name, field))
    surgery.do("HSET", name, field, json.dumps({**told, "at_unix_ms": surgery.ago(86_400 * 3)}))
    found = surgery.finding("fleet.paused")
    assert "3 days by ann@west (a test)" in found["text"]
    assert found["fix"] == "`streamqd resume access`", "no star that a shell would expand"


def test_doctor_finds_a_long_stop(surgery: Surgery) -> None:
    """U11: doctor finds a group that was stopped and then forgotten."""
    order(surgery, "stop:access/*/hits")
    surgery.silent("fleet.stopped")
    name, field = surgery.keys.orders("default"), "stop:access/*/hits"
    told = json.loads(surgery.do("HGET", name, field))
    surgery.do("HSET", name, field, json.dumps({**told, "at_unix_ms": surgery.ago(86_400 * 3)}))
    found = surgery.finding("fleet.stopped")
    assert "3 days by ann@west (a test)" in found["text"]
    assert found["fix"] == "`streamqd group start access hits`"


# --- leases ---------------------------------------------------------------------------------------


def test_doctor_finds_a_lease_without_a_fence(surgery: Surgery) -> None:
    surgery.silent("fleet.lease-without-fence")
    surgery.do("HDEL", surgery.desk.fence, "token")
    assert surgery.finding("fleet.lease-without-fence")["evidence"]["partitions"] == [0]
    surgery.do("HSET", surgery.desk.fence, "token", "another")
    assert f"DEL {surgery.desk.lease}" in surgery.finding("fleet.lease-without-fence")["fix"]


def test_doctor_accepts_a_released_assignment(surgery: Surgery) -> None:
    released = leases.release(surgery.keys, Lease(Unit(TOPIC, 0, GROUP), "t0"))
    assert surgery.link.run(released).word == "OK"
    for check in ("lease-without-fence", "owner-silent", "not-renewed"):
        surgery.silent(f"fleet.{check}")


def test_doctor_finds_an_expired_lease(surgery: Surgery) -> None:
    surgery.do("DEL", surgery.desk.lease)
    found = surgery.finding("fleet.not-renewed")
    assert found["evidence"] == {"partitions": [0], "owners": ["one"]}
    surgery.silent("fleet.owner-silent")

    silence(surgery)
    surgery.silent("fleet.not-renewed")
    found = surgery.finding("fleet.owner-silent")
    assert found["evidence"]["partitions"] == [0]


def test_quarantine_without_end(surgery: Surgery) -> None:
    fence = surgery.desk.fence
    surgery.do("HSET", fence, "quarantine", 1)
    surgery.silent("fleet.quarantine-stuck")
    surgery.do("HSET", fence, "since", surgery.ago(3_600))
    assert "streamqd reload one" in surgery.finding("fleet.quarantine-stuck")["fix"]
    surgery.desk.add("*", "payload", "x")
    surgery.desk.fetch()
    surgery.silent("fleet.quarantine-stuck")
