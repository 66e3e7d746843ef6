"""`streamqd doctor` and `status` on schedules that send nothing, each seeded on a real server."""

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
from tests.support.servers import Server
from tests.support.surgery import GROUP, TOPIC, Surgery

NAMES = ("nightly", "weekly")


@pytest.fixture
def surgery(tmp_path: Path, server: Server, link: Connection) -> Surgery:
    """Return a fleet with two healthy schedules."""
    made = Surgery(tmp_path, server.url, link)
    made.settle_in()
    declared = [Schedule(name, TOPIC, every=3600.0) for name in NAMES]
    Reconciler(made.store, "default", declared, 1, {}).run()
    return made


def place_of(surgery: Surgery, name: str = "nightly") -> TopicPartition:
    line = calls.index(surgery.store, [name])[name]
    assert isinstance(line, IndexLine)
    return line.place


def shown(surgery: Surgery, *words: str) -> str:
    result = CliRunner().invoke(cli, ["--config", str(surgery.path), *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def orphan(surgery: Surgery) -> None:
    seen = server_unix_ms(surgery.link) - ORPHAN_MS - 1
    surgery.do("HSET", surgery.keys.schedules(*place_of(surgery)), "nightly:seen", seen)


def spoil(surgery: Surgery) -> None:
    surgery.do("HSET", surgery.keys.schedules(*place_of(surgery)), "nightly", "{}")


def lose(surgery: Surgery) -> None:
    surgery.store.run(calls.drop(surgery.keys, place_of(surgery), "nightly"))


def delay(surgery: Surgery) -> None:
    late = server_unix_ms(surgery.link) - 61_000
    surgery.do("ZADD", surgery.keys.schedules_due(*place_of(surgery)), late, "nightly")


def found(surgery: Surgery, check: str, seed: Callable[[Surgery], None]) -> Any:
    surgery.silent(check)
    seed(surgery)
    result = surgery.finding(check)
    assert result["evidence"]["schedules"] == ["nightly"]
    assert result["about"] == TOPIC
    return result


def test_doctor_finds_an_orphaned_schedule(surgery: Surgery) -> None:
    found(surgery, "schedules.orphaned", orphan)
    assert "streamqd schedule prune" in surgery.finding("schedules.orphaned")["fix"]


def test_doctor_finds_a_name_without_a_schedule(surgery: Surgery) -> None:
    found(surgery, "schedules.missing", lose)
    surgery.finding("schedules.missing")


def test_doctor_finds_an_unreadable_specification(surgery: Surgery) -> None:
    found(surgery, "schedules.unreadable", spoil)
    assert "schedule remove nightly" in surgery.finding("schedules.unreadable")["fix"]


def test_doctor_finds_a_schedule_that_does_not_fire(surgery: Surgery) -> None:
    found(surgery, "schedules.late", delay)
    assert "were due up to 6" in surgery.finding("schedules.late")["text"]


def test_overlap_with_a_group_that_does_not_read_the_topic(surgery: Surgery) -> None:
    """A misspelt group would let the messages of slow ticks pile up."""

    def declare(group: str, since: int) -> None:
        declared = [
            Schedule("nightly", TOPIC, every=3600.0, overlap=f"skip:{group}"),
            Schedule("weekly", TOPIC, every=3600.0),
        ]
        Reconciler(surgery.store, "default", declared, since, {}).run()

    declare(GROUP, 2)
    found(surgery, "schedules.overlap", lambda _: declare("hist", 3))
    result = surgery.finding("schedules.overlap")
    assert result["evidence"]["group"] == "hist"
    assert "skips ticks for the group hist, which does not read the topic" in result["text"]


def test_doctor_accepts_a_paused_schedule(surgery: Surgery) -> None:
    delay(surgery)
    surgery.store.run(calls.hold(surgery.keys, place_of(surgery), "nightly", calls.PAUSED))
    surgery.silent("schedules.late")


def test_doctor_finds_a_schedule_name_of_another_fleet(surgery: Surgery) -> None:
    with surgery.path.open("a") as file:
        file.write(f'[[schedules]]\nname = "nightly"\ntopic = "{TOPIC}"\nevery = "1h"\n')
    surgery.silent("schedules.refused")
    other = IndexLine("green", calls.FILE, place_of(surgery))
    calls.enter(surgery.store, "nightly", other, new=False)
    told = surgery.finding("schedules.refused")
    assert "fleet green has a schedule of this name" in told["text"]


@pytest.mark.parametrize(
    ("seed", "word"),
    [(orphan, "orphaned"), (spoil, "unreadable"), (lose, "without a topic"), (delay, "late")],
)
def test_status_counts_schedules_that_send_nothing(
    surgery: Surgery, seed: Callable[[Surgery], None], word: str
) -> None:
    well = shown(surgery, "status")
    assert "  2 schedules, next due in " in well
    assert "schedules:" not in well
    seed(surgery)
    problem = f"  ! schedules: 1 {word}; see `streamqd doctor --only schedules`"
    assert problem in shown(surgery, "status")
    assert problem in shown(surgery, "status", TOPIC)
