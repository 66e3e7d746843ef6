"""`streamqd doctor` and `status` find schedules that send nothing, seeded on a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.admin.reading import server_unix_ms
from streamqd.cli import cli
from streamqd.config import Schedule
from streamqd.model import TopicPartition
from streamqd.schedules.reconciliation import Reconciler
from streamqd.store import schedules as calls
from streamqd.store.client import Connection
from streamqd.store.schedules import ORPHAN_MS, IndexLine
from tests.support.doctor_case import GROUP, TOPIC, DoctorCase
from tests.support.servers import Server

NAMES = ("nightly", "weekly")


@pytest.fixture
def doctor_case(tmp_path: Path, server: Server, link: Connection) -> DoctorCase:
    """A fleet with two healthy schedules."""
    made = DoctorCase(tmp_path, server.url, link)
    made.settle_in()
    declared = [Schedule(name, TOPIC, every=3600.0) for name in NAMES]
    Reconciler(made.store, "default", declared, 1, {}).run()
    return made


def find_place(doctor_case: DoctorCase, name: str = "nightly") -> TopicPartition:
    line = calls.index(doctor_case.store, [name])[name]
    assert isinstance(line, IndexLine)
    return line.place


def run_command(doctor_case: DoctorCase, *words: str) -> str:
    result = CliRunner().invoke(cli, ["--config", str(doctor_case.path), *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def orphan_schedule(doctor_case: DoctorCase) -> None:
    seen = server_unix_ms(doctor_case.link) - ORPHAN_MS - 1
    doctor_case.do(
        "HSET", doctor_case.keys.schedules(*find_place(doctor_case)), "nightly:seen", seen
    )


def corrupt_schedule(doctor_case: DoctorCase) -> None:
    doctor_case.do("HSET", doctor_case.keys.schedules(*find_place(doctor_case)), "nightly", "{}")


def delete_schedule(doctor_case: DoctorCase) -> None:
    doctor_case.store.run(calls.drop(doctor_case.keys, find_place(doctor_case), "nightly"))


def delay_schedule(doctor_case: DoctorCase) -> None:
    late = server_unix_ms(doctor_case.link) - 61_000
    doctor_case.do(
        "ZADD", doctor_case.keys.schedules_due(*find_place(doctor_case)), late, "nightly"
    )


def check_finding(doctor_case: DoctorCase, check: str, seed: Callable[[DoctorCase], None]) -> Any:
    doctor_case.silent(check)
    seed(doctor_case)
    result = doctor_case.finding(check)
    assert result["evidence"]["schedules"] == ["nightly"]
    assert result["about"] == TOPIC
    return result


def test_doctor_finds_an_orphaned_schedule(doctor_case: DoctorCase) -> None:
    check_finding(doctor_case, "schedules.orphaned", orphan_schedule)
    assert "streamqd schedule prune" in doctor_case.finding("schedules.orphaned")["fix"]


def test_doctor_finds_a_name_without_a_schedule(doctor_case: DoctorCase) -> None:
    check_finding(doctor_case, "schedules.missing", delete_schedule)
    doctor_case.finding("schedules.missing")


def test_doctor_finds_an_unreadable_specification(doctor_case: DoctorCase) -> None:
    check_finding(doctor_case, "schedules.unreadable", corrupt_schedule)
    assert "schedule remove nightly" in doctor_case.finding("schedules.unreadable")["fix"]


def test_doctor_finds_a_schedule_that_does_not_fire(doctor_case: DoctorCase) -> None:
    check_finding(doctor_case, "schedules.late", delay_schedule)
    assert "were due up to 6" in doctor_case.finding("schedules.late")["text"]


def test_doctor_finds_overlap_with_an_unknown_group(doctor_case: DoctorCase) -> None:
    """The doctor finds an unknown group.

    A misspelled name would let the messages of slow ticks pile up.
    """

    def declare(group: str, since: int) -> None:
        declared = [
            Schedule("nightly", TOPIC, every=3600.0, overlap=f"skip:{group}"),
            Schedule("weekly", TOPIC, every=3600.0),
        ]
        Reconciler(doctor_case.store, "default", declared, since, {}).run()

    declare(GROUP, 2)
    check_finding(doctor_case, "schedules.overlap", lambda _: declare("hist", 3))
    result = doctor_case.finding("schedules.overlap")
    assert result["evidence"]["group"] == "hist"
    assert "so no tick is ever skipped" in result["text"]


def test_doctor_skips_overlap_of_an_unreadable_topic(doctor_case: DoctorCase) -> None:
    """A topic that cannot be read prevents only the checks of its own schedules."""
    declared = [Schedule("nightly", TOPIC, every=3600.0, overlap="skip:hist")]
    Reconciler(doctor_case.store, "default", declared, 2, {}).run()
    doctor_case.finding("schedules.overlap")
    doctor_case.do("HSET", doctor_case.keys.meta(TOPIC), "partitionCount", "abc")
    doctor_case.silent("schedules.overlap")
    doctor_case.finding("values.unreadable")


def test_doctor_accepts_a_paused_schedule(doctor_case: DoctorCase) -> None:
    delay_schedule(doctor_case)
    doctor_case.store.run(
        calls.hold(doctor_case.keys, find_place(doctor_case), "nightly", calls.PAUSED)
    )
    doctor_case.silent("schedules.late")


def test_doctor_finds_a_schedule_name_of_another_fleet(doctor_case: DoctorCase) -> None:
    with doctor_case.path.open("a") as file:
        file.write(f'[[schedules]]\nname = "nightly"\ntopic = "{TOPIC}"\nevery = "1h"\n')
    doctor_case.silent("schedules.refused")
    other = IndexLine("green", calls.FILE, find_place(doctor_case))
    calls.write_index(doctor_case.store, "nightly", other, new=False)
    told = doctor_case.finding("schedules.refused")
    assert "fleet green has a schedule of this name" in told["text"]


@pytest.mark.parametrize(
    ("seed", "word"),
    [
        (orphan_schedule, "orphaned"),
        (corrupt_schedule, "unreadable"),
        (delete_schedule, "without a topic"),
        (delay_schedule, "late"),
    ],
)
def test_status_counts_schedules_that_send_nothing(
    doctor_case: DoctorCase, seed: Callable[[DoctorCase], None], word: str
) -> None:
    well = run_command(doctor_case, "status")
    assert "  2 schedules, next due in " in well
    assert "schedules:" not in well
    seed(doctor_case)
    problem = f"  ! schedules: 1 {word}; see `streamqd doctor --only schedules`"
    assert problem in run_command(doctor_case, "status")
    assert problem in run_command(doctor_case, "status", TOPIC)
