"""`streamqd doctor` and `why` report why an outbox's rows do not arrive, seeded on real servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from streamqd import config
from streamqd.admin import diagnosis
from streamqd.cli import cli
from streamqd.outbox import schema
from streamqd.outbox.database import connect
from streamqd.outbox.outbox import Outbox
from streamqd.store import outbox
from streamqd.store.client import Connection
from tests.support.databases import DatabaseServer
from tests.support.doctor_case import GROUP, TOPIC, DoctorCase
from tests.support.servers import Server
from tests.support.waiting import wait_until

NAME, TOKEN, OWNER = "shop", "token", "web-1 (host, process 7)"
sender = Outbox(settings=config.Settings())


class Clinic(DoctorCase):
    """A healthy system with an outbox in a database, and a relay that has published its figures."""

    url_of_database: str

    def offer(self, database: DatabaseServer) -> None:
        self.database = database
        self.url_of_database = database.new()
        with connect(self.url_of_database) as made:
            schema.create(made)
        with self.path.open("a") as file:
            file.write(f'[[outboxes]]\nname = "{NAME}"\ndatabase = "{self.url_of_database}"\n')

    def relay(self, name: str = NAME, **figures: Any) -> None:
        """Hold the outbox and publish figures, with the same calls as a relay."""
        outbox.register(self.store, name)
        call = outbox.acquire(self.keys, name, TOKEN, 60, owner=OWNER, above=0, dead="")
        epoch = int(self.store.run(call).values[0])
        call = outbox.renew(self.keys, name, TOKEN, 60, figures)
        assert self.store.run(call).word == "OK"
        for number in range(2):
            call = outbox.fence(self.keys, name, TOPIC, number, epoch, 2, self.keys.meta(TOPIC))
            assert self.store.run(call).word == "OK"

    def leave(self, name: str = NAME) -> None:
        self.store.run(outbox.release(self.keys, name, TOKEN))

    def send(self, count: int = 1, *, age: float = 0.0) -> None:
        """Commit rows whose time is `age` seconds ago."""
        with contextlib.closing(self.database.connect(self.url_of_database)) as application:
            for number in range(count):
                sender.send(application, TOPIC, number)
            application.cursor().execute(
                "UPDATE streamqd_outbox SET created_unix_ms = created_unix_ms"
                f" - {round(age * 1000)}"
            )
            application.commit()

    def dead_letter_row(self, error: str) -> None:
        self.send()
        with connect(self.url_of_database) as made:
            made.move_to_dead_table(made.read_oldest(1)[0], error)

    def why(self, *words: str) -> Result:
        return CliRunner().invoke(cli, ["--config", str(self.path), "why", *words])


@pytest.fixture
def clinic(
    tmp_path: Path,
    server: Server,
    link: Connection,
    new_database_server: Callable[[str], DatabaseServer],
) -> Clinic:
    made = Clinic(tmp_path, server.url, link)
    made.settle_in()
    made.offer(new_database_server("sqlite"))
    return made


CHECKS = ("no-relay", "failing", "waiting", "dead-rows", "database", "bloat", "shared-table")


def test_doctor_accepts_a_healthy_outbox(clinic: Clinic) -> None:
    clinic.relay(rows=3, oldest_ms=2000)
    clinic.send(3)
    for check in CHECKS:
        clinic.silent(f"outboxes.{check}")


def test_doctor_finds_an_outbox_without_a_relay(clinic: Clinic) -> None:
    clinic.send(3, age=7200)
    found = clinic.finding("outboxes.no-relay")
    assert found["severity"] == "problem"
    assert found["text"] == "no relay owns outbox shop: 3 rows wait, the oldest 2 h 0 min"
    assert "`streamqd outbox run shop`" in found["fix"]
    assert found["evidence"]["rows"] == 3


def test_doctor_names_the_last_error_of_a_stopped_relay(clinic: Clinic) -> None:
    clinic.relay(error="no login", cause="refused", failing_ms=1)
    clinic.leave()
    assert clinic.finding("outboxes.no-relay")["text"] == (
        "no relay owns outbox shop: new rows wait; its last relay reported: no login"
    )


def test_doctor_finds_an_unconfigured_outbox_by_its_relay(clinic: Clinic) -> None:
    clinic.relay()
    clinic.relay("other", rows=2, oldest_ms=1000)
    clinic.silent("outboxes.no-relay")
    clinic.leave("other")
    found = clinic.finding("outboxes.no-relay")
    assert found["about"] == "other"
    assert "--database" in found["fix"]


def test_doctor_finds_a_failing_relay(clinic: Clinic) -> None:
    clinic.send(2, age=60)
    clinic.relay(error="the database did not answer", cause="database", failing_ms=1000)
    clinic.silent("outboxes.failing")
    clinic.relay(error="the database did not answer", cause="database", failing_ms=3 * 3_600_000)
    found = clinic.finding("outboxes.failing")
    assert found["severity"] == "problem"
    assert found["text"].startswith(
        f"the relay of outbox shop ({OWNER}) has been blocked for 3 h 0 min, and 2 rows wait"
    )
    assert found["text"].endswith(": the database did not answer")
    assert "`streamqd outbox check shop`" in found["fix"]


def test_doctor_warns_about_a_relay_that_waits_for_room(clinic: Clinic) -> None:
    clinic.relay(error="access/0: full", cause="backlog", topic=TOPIC, failing_ms=3 * 3_600_000)
    found = clinic.finding("outboxes.failing")
    assert found["severity"] == "warning"
    assert f"`streamqd why {TOPIC}`" in found["fix"]


def test_doctor_warns_about_old_rows_of_a_working_relay(clinic: Clinic) -> None:
    clinic.relay()
    clinic.send(2, age=200)
    clinic.silent("outboxes.waiting")
    clinic.send(1, age=7200)
    assert "3 rows wait, the oldest 2 h" in clinic.finding("outboxes.waiting")["text"]


def test_doctor_counts_dead_rows_and_shows_the_last_error(clinic: Clinic) -> None:
    clinic.relay(dead=7)
    clinic.silent("outboxes.dead-rows")
    clinic.dead_letter_row("first")
    clinic.dead_letter_row("topic nowhere does not exist")
    found = clinic.finding("outboxes.dead-rows")
    assert found["text"] == (
        "2 rows of outbox shop could not be sent; the newest: topic nowhere does not exist"
    )


def test_doctor_reports_an_unavailable_database_once(clinic: Clinic) -> None:
    path = Path(clinic.url_of_database.removeprefix("sqlite:///"))
    path.unlink()
    found = clinic.finding("outboxes.database")
    assert found["severity"] == "problem"
    assert "SQLite cannot open" in found["text"]
    assert "`streamqd outbox check shop`" in found["fix"]
    clinic.relay()
    found = clinic.finding("outboxes.database")
    assert found["severity"] == "note"  # because the relay is on another host
    assert found["text"].endswith("; its relay can read them")
    problem = (
        found["text"].partition("from this host: ")[2].removesuffix("; its relay can read them")
    )
    clinic.relay(error=problem, cause="refused", failing_ms=3 * 3_600_000)
    assert [each["check"] for each in clinic.run("--only", "outboxes")["findings"]] == [
        "outboxes.failing"
    ]


def test_doctor_reports_a_locked_table_once(
    tmp_path: Path,
    server: Server,
    link: Connection,
    new_database_server: Callable[[str], DatabaseServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clinic = Clinic(tmp_path, server.url, link)
    clinic.settle_in()
    clinic.offer(new_database_server("postgresql"))
    with (
        contextlib.closing(clinic.database.connect(clinic.url_of_database)) as other,
        monkeypatch.context() as patch,
    ):
        # This matters only while the table is locked. On a busy machine, any other statement may
        # take longer.
        patch.setattr("streamqd.outbox.inspection.STATEMENT_MS", 200)
        other.execute("LOCK TABLE streamqd_outbox")
        found = clinic.finding("outboxes.database")
    assert "did not answer (canceling statement due to statement timeout" in found["text"]
    clinic.silent("outboxes.database")


def test_doctor_reports_a_missing_variable_once(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    text = clinic.path.read_text().replace(clinic.url_of_database, "${DATABASE_URL}")
    clinic.path.write_text(text)
    found = clinic.finding("outboxes.database")
    assert "environment variable DATABASE_URL is not set" in found["text"]


def test_doctor_finds_two_relays_of_one_table(clinic: Clinic) -> None:
    clinic.relay(table="a")
    clinic.relay("copy", table="b")
    clinic.silent("outboxes.shared-table")
    clinic.relay("copy", table="a")
    found = clinic.finding("outboxes.shared-table")
    assert "the outboxes copy and shop use the same table" in found["text"]


def test_doctor_warns_about_rows_that_need_a_vacuum(
    tmp_path: Path,
    server: Server,
    link: Connection,
    new_database_server: Callable[[str], DatabaseServer],
) -> None:
    database = new_database_server("postgresql")  # without autovacuum
    clinic = Clinic(tmp_path, server.url, link)
    clinic.settle_in()
    clinic.offer(database)
    clinic.relay()
    clinic.silent("outboxes.bloat")
    columns = "(uid, topic, payload, created_unix_ms)"
    values = "SELECT md5(i::text), 'access', '1', 1 FROM generate_series(1, 100000) AS i"
    made = database.connect(clinic.url_of_database, autocommit=True)
    with contextlib.closing(made) as application:
        application.execute(f"INSERT INTO streamqd_outbox {columns} {values}")
        application.execute("DELETE FROM streamqd_outbox")
    wait_until(
        lambda: clinic.run("--only", "outboxes.bloat")["findings"] != [], timeout=30, every=0.5
    )
    found = clinic.finding("outboxes.bloat")
    assert "has 100,000 deleted rows that are not vacuumed" in found["text"]
    assert found["fix"].startswith("run `VACUUM streamqd_outbox`")
    with contextlib.closing(database.connect(clinic.url_of_database, autocommit=True)) as owner:
        owner.execute("VACUUM streamqd_outbox")
    wait_until(
        lambda: clinic.run("--only", "outboxes.bloat")["findings"] == [], timeout=30, every=0.5
    )


def test_doctor_reads_the_table_size_in_each_database(
    tmp_path: Path,
    server: Server,
    link: Connection,
    database_server: DatabaseServer,
) -> None:
    clinic = Clinic(tmp_path, server.url, link)
    clinic.settle_in()
    clinic.offer(database_server)
    clinic.relay()
    clinic.send(1)
    clinic.dead_letter_row("x")
    report = clinic.run("--only", "outboxes")
    assert report["unseen"] == []
    [found] = report["findings"]
    assert found["check"] == "outboxes.dead-rows"


def test_console_connects_to_no_database(clinic: Clinic) -> None:
    clinic.dead_letter_row("x")
    clinic.relay(dead=1)
    loaded = config.load(clinic.path)
    report = diagnosis.examine(clinic.link, loaded, diagnosis.select_checks(["outboxes"]))
    [found] = report.findings
    assert found.text == "1 row of outbox shop could not be sent since its relay started"
    assert report.unseen == [
        "the tables of outboxes: run `streamqd doctor` on the host of a daemon"
    ]


# --- why ------------------------------------------------------------------------------------------


def test_why_names_an_outbox_without_a_relay(clinic: Clinic) -> None:
    clinic.relay(rows=12, oldest_ms=5000)
    assert clinic.why(TOPIC).exit_code == 0
    clinic.leave()
    found = clinic.why(TOPIC)
    assert found.exit_code == 1
    assert "no relay owns outbox shop, which sends to access; it last had 12 rows" in one_line(
        found
    )
    assert "-> start a daemon whose configuration has the outbox" in one_line(found)
    answers = json.loads(clinic.why(f"{TOPIC}/1/{GROUP}", "--json").stdout)["answers"]
    assert [each["word"] for each in answers[0]["causes"]] == ["outbox-no-relay"]


def test_why_names_an_outbox_that_never_had_a_relay(clinic: Clinic) -> None:
    found = clinic.why(TOPIC)
    assert found.exit_code == 1
    assert "rows for access may wait in its table" in one_line(found)
    found = clinic.why(f"{TOPIC}/1/{GROUP}")
    assert found.exit_code == 0, "it may feed other topics"
    assert "outbox" not in found.stdout


@pytest.mark.parametrize(
    ("cause", "topic", "advice"),
    [
        ("database", "", "`streamqd outbox check shop` succeeds; the relay tries again"),
        ("refused", "", "with the user of the relay"),
        ("backlog", TOPIC, "`streamqd why access`; the relay continues when"),
        ("partition", TOPIC, "`streamqd doctor --only server`"),
    ],
)
def test_why_names_the_obstacle_of_a_relay(
    clinic: Clinic, cause: str, topic: str, advice: str
) -> None:
    clinic.relay(
        rows=1,
        oldest_ms=90_000,
        error="because",
        cause=cause,
        topic=topic,
        failing_ms=3 * 3_600_000,
    )
    found = clinic.why(TOPIC)
    assert found.exit_code == 1
    assert (
        "the relay of outbox shop, which sends to access, has been blocked for 3 h 0 min, with"
        " 1 row for all of its topics, the oldest 90 s old: because"
    ) in one_line(found)
    assert advice in one_line(found)


def test_why_omits_outboxes_of_other_topics(clinic: Clinic) -> None:
    """`why` omits both outboxes.

    One has no record in this topic, and the rows of the other one wait for another topic.
    """
    clinic.relay(
        rows=5, error="other/1: full", cause="backlog", topic="other", failing_ms=3 * 3_600_000
    )
    outbox.register(clinic.store, "away")
    clinic.store.execute("HSET", clinic.keys.outbox("away"), "epoch", 7, "rows", 5)
    found = clinic.why(TOPIC)
    assert found.exit_code == 0
    assert "outbox" not in found.stdout


def test_why_lists_an_outbox_after_causes_of_the_group(clinic: Clinic) -> None:
    clinic.relay(rows=12, oldest_ms=5000)
    clinic.leave()
    assert CliRunner().invoke(cli, ["--config", str(clinic.path), "pause", TOPIC]).exit_code == 0
    causes = json.loads(clinic.why(f"{TOPIC}/1/{GROUP}", "--json").stdout)["answers"][0]["causes"]
    words = [each["word"] for each in causes]
    assert (words[0], words[-1]) == ("paused", "outbox-no-relay")


def test_why_reports_an_unreadable_outbox_without_failing(clinic: Clinic) -> None:
    clinic.relay()
    clinic.store.execute("HSET", clinic.keys.outbox(NAME), "rows", "many")
    found = clinic.why(f"{TOPIC}/0/{GROUP}", "--json")
    assert found.exit_code == 0
    [answer] = json.loads(found.stdout)["answers"]
    assert [(each["key"], each["field"]) for each in answer["unreadable"]] == [
        (clinic.keys.outbox(NAME), "rows")
    ]


def one_line(result: Result) -> str:
    return " ".join(result.stdout.split())
