"""The relay reads a database, and a sender writes its row there, on each real database."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.errors import DatabaseResponseError, DatabaseUnavailableError
from streamqd.outbox import drivers, schema
from streamqd.outbox.database import BATCH_BYTES, ROWS_PER_OTHER, Database, connect
from streamqd.outbox.outbox import Outbox
from streamqd.outbox.rows import OutboxRow
from tests.support import databases, servers
from tests.support.databases import DatabaseServer
from tests.support.waiting import wait_until

outbox = Outbox(settings=config.Settings())


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An empty outbox, opened in the same way as by the relay."""
    with connect(database_url) as made:
        for statement in made.table.create():
            made.run(statement)
        yield made


def test_committed_message_is_the_oldest_row(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        first = outbox.send(
            application, "orders", b"\x00\xff", key=b"\xfe", headers={"a": "é"}, partition=3
        )
        outbox.send(application, "orders", {"n": 1}, delay=60, expires=5)
        assert database.read_oldest(10) == []
        application.commit()
    one, two = database.read_oldest(10)
    assert (one.topic, one.key, one.partition, one.fault) == ("orders", b"\xfe", 3, "")
    assert first == f"orders/outbox/{one.uid}"
    assert one.payload == b"\x00\xff"
    assert json.loads(one.headers or b"") == {"a": "é"}
    assert two.fields == [b"payload", b'{"n":1}', b"expiresAfter", b"5000"]
    assert two.due_unix_ms == two.created_unix_ms + 60_000
    assert database.read_oldest(1) == [one]
    assert database.find_existing([one, two]) == {one.uid, two.uid}
    database.delete([one])
    assert database.find_existing([one, two]) == {two.uid}
    assert database.measure_backlog(10)[0] == 1
    database.move_to_dead_table(two, "no such topic")
    assert database.read_oldest(10) == []
    [dead] = database.read_dead(10)
    assert (dead.uid, dead.topic, dead.error) == (two.uid, "orders", "no such topic")
    assert database.count_dead(10) == 1


def test_database_refuses_a_second_row_with_the_same_uid(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    made = database_server.connect(database_url, autocommit=True)
    with contextlib.closing(made) as application:
        statement = (
            "INSERT INTO streamqd_outbox (uid, topic, payload, created_unix_ms)"
            f" VALUES ('{'0' * 32}', 'orders', 'x', 1)"
        )
        application.cursor().execute(statement)
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
            application.cursor().execute(statement)
    assert database.measure_backlog(10)[0] == 1


def test_two_urls_of_one_table_have_the_same_identity(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    same, other = {
        "postgresql": ("postgres@", "second@"),
        "mysql": ("root@", "second@"),
        "sqlite": ("sqlite:////", "sqlite:////./"),
    }[database.dialect]
    create = {
        "postgresql": ["CREATE ROLE second LOGIN"],
        "mysql": ["CREATE USER second", "GRANT ALL ON *.* TO second"],
        "sqlite": [],
    }[database.dialect]
    made = database_server.connect(database_url, autocommit=True)
    with contextlib.closing(made) as owner:
        for statement in create:
            owner.cursor().execute(statement)
    found = schema.identity(database)
    assert len(found) == 32
    with connect(database_url.replace(same, other)) as again:
        assert schema.identity(again) == found
    with connect(database_url, table="box") as box, connect(database_server.new()) as elsewhere:
        schema.create(box)
        schema.create(elsewhere)
        assert len({found, schema.identity(box), schema.identity(elsewhere)}) == 3


@pytest.mark.parametrize("database_server", ["postgresql"], indirect=True)
def test_relay_connection_never_commits_asynchronously(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    made = database_server.connect(database_url, autocommit=True)
    with contextlib.closing(made) as owner:
        owner.execute(f"ALTER DATABASE {owner.info.dbname} SET synchronous_commit = off")
    database.close()
    assert database.rows("SHOW synchronous_commit") == [(b"on",)]
    made = database_server.connect(database_url, autocommit=True)
    with contextlib.closing(made) as owner:
        owner.execute(f"ALTER DATABASE {owner.info.dbname} SET synchronous_commit = remote_apply")
    database.close()
    assert database.rows("SHOW synchronous_commit") == [(b"remote_apply",)]


def test_rolled_back_message_has_no_row(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"x")
        application.rollback()
    assert database.read_oldest(10) == []


def test_wait_returns_when_its_descriptor_is_readable(database: Database) -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        database.wait(60, read)
    finally:
        os.close(read)
        os.close(write)


def test_missing_table_names_its_remedy(database_url: str) -> None:
    with connect(database_url) as made, pytest.raises(DatabaseResponseError, match="outbox create"):
        made.read_oldest(1)


def test_recreated_table_keeps_its_new_rows(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"old")
        application.commit()
        old = database.read_oldest(1)
        for table in ("streamqd_outbox", "streamqd_outbox_dead"):
            database.run(f"DROP TABLE {table}")
        for statement in database.table.create():
            database.run(statement)
        outbox.send(application, "orders", b"new")
        application.commit()
    [new] = database.read_oldest(1)
    assert new.id == old[0].id
    assert database.find_existing(old) == set()
    database.delete(old)
    assert database.read_oldest(1) == [new]


def test_recreated_table_keeps_rows_despite_old_dead_rows(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"old")
        application.commit()
        [old] = database.read_oldest(1)
        for statement in (*database.table.drop(), *database.table.create()):
            database.run(statement)
        outbox.send(application, "orders", b"new")
        application.commit()
    [new] = database.read_oldest(1)
    assert new.id == old.id
    database.move_to_dead_table(old, "the topic orders does not exist")
    assert [each.payload for each in database.read_oldest(1)] == [b"new"]
    assert database.count_dead(1) == 0


@pytest.mark.parametrize("database_server", ["postgresql", "mysql"], indirect=True)
def test_row_deleted_by_another_relay_is_not_marked_dead(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    waiting = {
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }[database.dialect]
    with contextlib.closing(database_server.connect(database_url)) as other:
        outbox.send(other, "orders", b"x")
        other.commit()
        [row] = database.read_oldest(1)
        other.cursor().execute("DELETE FROM streamqd_outbox")
        with ThreadPoolExecutor(1) as threads, connect(database_url) as observer:
            buried = threads.submit(database.move_to_dead_table, row, "no such topic")
            # MariaDB refreshes this table only if it has not been read for 0.1 s.
            wait_until(lambda: observer.rows(waiting)[0][0] > 0, timeout=20, every=0.3)
            other.commit()
            assert not buried.result(20)
    assert database.read_dead(1) == []


def test_sent_row_kept_by_a_trigger_is_an_error(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    if database.dialect == "mysql":
        pytest.skip("a trigger of MariaDB can only raise an error")
    keep = {
        "postgresql": (
            "CREATE FUNCTION k() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
            "CREATE TRIGGER k BEFORE DELETE ON streamqd_outbox FOR EACH ROW EXECUTE FUNCTION k()",
        ),
        "sqlite": (
            "CREATE TRIGGER k BEFORE DELETE ON streamqd_outbox BEGIN SELECT RAISE(IGNORE); END",
        ),
    }[database.dialect]
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"a")
        application.commit()
    [row] = database.read_oldest(1)
    for statement in keep:
        database.run(statement)
    with pytest.raises(
        DatabaseResponseError, match="1 sent rows of outbox streamqd_outbox are still"
    ):
        database.delete([row])


def test_row_with_a_uid_in_bytes_is_deleted(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    if database.dialect != "sqlite":
        pytest.skip("only a text column of SQLite keeps bytes")
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"a")
        application.execute("UPDATE streamqd_outbox SET uid = CAST(uid AS BLOB)")
        application.commit()
    [row] = database.read_oldest(1)
    assert row.fault == ""
    assert database.find_existing([row]) == {row.uid}
    database.delete([row])
    assert database.read_oldest(1) == []


def test_more_rows_than_fit_into_one_statement_are_deleted(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        for number in range(ROWS_PER_OTHER + 2):
            outbox.send(application, "orders", number)
        application.commit()
    rows = database.read_oldest(10_000)
    assert [int(row.payload) for row in rows] == list(range(len(rows)))
    assert database.find_existing(rows) == {row.uid for row in rows}
    database.delete(rows[:-1])
    assert database.read_oldest(10_000) == rows[-1:]


def test_large_rows_are_read_in_several_batches(
    database_server: DatabaseServer, database_url: str
) -> None:
    large = Outbox(settings=config.Settings(daemon=config.Daemon(max_message_bytes=6 << 20)))
    with connect(database_url, max_message_bytes=6 << 20) as database:
        schema.create(database)
        with contextlib.closing(database_server.connect(database_url)) as application:
            for letter in b"abc":
                large.send(application, "orders", bytes([letter]) * (5 << 20))
            application.commit()
        rows = database.read_oldest(10)
        assert [row.payload[:1] for row in rows] == [b"a", b"b"]
        assert sum(row.size for row in rows) <= BATCH_BYTES + (6 << 20)
        database.delete(rows)
        assert [row.payload[:1] for row in database.read_oldest(10)] == [b"c"]


def test_oversized_row_is_not_loaded(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    large = Outbox(settings=config.Settings(daemon=config.Daemon(max_message_bytes=6 << 20)))
    with contextlib.closing(database_server.connect(database_url)) as application:
        large.send(application, "orders", b"x" * (2 << 20), headers={"a": "b"})
        outbox.send(application, "orders", b"good")
        application.commit()
    bad, good = database.read_oldest(10)
    assert "the payload takes 2,097,152 bytes" in bad.fault
    assert bad.payload == b""
    assert (good.payload, good.fault) == (b"good", "")
    database.move_to_dead_table(bad, bad.fault)
    assert database.read_oldest(10) == [good]
    assert [each.uid for each in database.read_dead(10)] == [bad.uid]


def test_hostile_row_does_not_affect_other_rows(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    marker = "?" if database.dialect == "sqlite" else "%s"
    made = database_server.connect(database_url, autocommit=True)
    with contextlib.closing(made) as application:
        hostile: list[tuple[Any, ...]] = [
            ("X" * 32, "orders", b"x", None, 1),
            ("0" * 32, "a b", b"x", None, 1),
            ("1" * 32, "orders", b"x", "[1]", 1),
            ("2" * 32, "orders", b"x", '{"a": 1}', 1),
            ("3" * 32, "orders", b"x", "{", -1),
        ]
        if database.dialect == "sqlite":  # it accepts any type in any column
            hostile += [
                (b"\xff" * 32, 1.5, "text", b"\xff", "never"),
                (7, b"\x00", 2**62, 7, 2**62),
            ]
        for values in hostile:
            application.cursor().execute(
                "INSERT INTO streamqd_outbox (uid, topic, payload, headers, created_unix_ms)"
                f" VALUES ({', '.join([marker] * 5)})",
                values,
            )
        application.cursor().execute("BEGIN")
        outbox.send(application, "orders", b"good")
        application.commit()
    *bad, good = database.read_oldest(100)
    assert all(row.fault for row in bad)
    assert (len(bad), good.payload, good.fault) == (len(hostile), b"good", "")
    assert database.measure_backlog(100)[0] == len(hostile) + 1
    for row in bad:
        database.move_to_dead_table(row, row.fault)
    assert database.read_oldest(100) == [good]
    assert len(database.read_dead(100)) == len(hostile)


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_killed_database_is_unavailable_until_its_restart(dialect: str) -> None:
    server: Any = servers.require(databases.start, dialect)
    try:
        with connect(server.new()) as database:
            schema.create(database)
            assert database.read_oldest(1) == []
            server.kill()
            for _ in range(2):
                with pytest.raises(DatabaseUnavailableError) as unavailable:
                    database.read_oldest(1)
                assert not isinstance(unavailable.value, DatabaseResponseError)
                assert "\n" not in str(unavailable.value)
            server.start()
            assert database.read_oldest(1) == []
    finally:
        server.close()


@pytest.mark.parametrize("database_server", ["postgresql"], indirect=True)
def test_killed_connection_interrupts_the_wait(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    made = database_server.connect(database_url, autocommit=True)
    with contextlib.closing(made) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'streamqd-outbox' AND datname = current_database()"
        )

    def wait_twice() -> None:  # the first wait may read the last words that the server sent
        database.wait(60)
        database.wait(60)

    with pytest.raises(DatabaseUnavailableError):
        wait_twice()
    database.wait(0)
    assert database.read_oldest(1) == []


@pytest.mark.parametrize("database_server", ["sqlite"], indirect=True)
def test_replaced_sqlite_file_is_reopened(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    """A replaced SQLite file is opened again.

    Otherwise, the relay could read the old file forever and send no row of the new one.
    """
    path = Path(database_url.removeprefix("sqlite:///"))
    database.wait(0)
    path.rename(path.with_suffix(".old"))
    with connect(database_url, create=True) as made:
        schema.create(made)
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"new")
        application.commit()
    with pytest.raises(DatabaseUnavailableError, match="was moved or replaced"):
        database.wait(0)
    assert [each.payload for each in database.read_oldest(1)] == [b"new"]
    database.wait(0)


@pytest.mark.parametrize("database_server", ["sqlite"], indirect=True)
def test_locked_sqlite_file_is_unavailable(
    database: Database,
    database_server: DatabaseServer,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drivers, "TIMEOUT", 0.2)
    database.close()
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"x")  # from now on, this sender holds the write lock
        with pytest.raises(DatabaseUnavailableError, match="locked") as unavailable:
            database.delete([OutboxRow(1, "0" * 32)])
        assert not isinstance(unavailable.value, DatabaseResponseError)
        application.commit()
    assert len(database.read_oldest(10)) == 1
