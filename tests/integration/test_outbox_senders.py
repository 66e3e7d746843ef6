"""The sender joins the transaction of each kind of connection: both commit, or neither does."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import django
import django.conf
import psycopg
import pytest
import sqlalchemy
from django.db import connections, transaction
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from streamqd import config
from streamqd.errors import MessageTooLargeError, RequestRefusedError
from streamqd.outbox.database import Database, connect
from streamqd.outbox.outbox import Outbox
from streamqd.outbox.schema import create
from tests.support.databases import DatabaseServer

outbox = Outbox(settings=config.Settings())
ENGINES = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An empty outbox, opened in the same way as by the relay."""
    with connect(database_url) as made:
        create(made)
        yield made


@pytest.fixture
def application(
    database: Database, database_server: DatabaseServer, database_url: str
) -> Iterator[Any]:
    """A connection of the driver itself, not in autocommit mode."""
    with contextlib.closing(database_server.connect(database_url)) as made:
        yield made


@pytest.fixture
def engine(database: Database, database_url: str) -> Iterator[Callable[..., sqlalchemy.Engine]]:
    """An SQLAlchemy engine for the database of this test."""
    made: list[sqlalchemy.Engine] = []

    def make(**options: Any) -> sqlalchemy.Engine:
        _, _, rest = database_url.partition("://")
        url = f"{ENGINES[database.dialect]}://{rest}"
        made.append(sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, **options))
        return made[-1]

    yield make
    for each in made:
        each.dispose()


def payloads(database: Database) -> list[bytes]:
    rows = database.read_oldest(100)
    assert [row.fault for row in rows] == [""] * len(rows)
    return [row.payload for row in rows]


# --- drivers --------------------------------------------------------------------------------------


def test_rolled_back_savepoint_removes_its_message(application: Any, database: Database) -> None:
    cursor = application.cursor()
    if database.dialect == "sqlite":
        cursor.execute("BEGIN")
    outbox.send(application, "orders", b"kept")
    cursor.execute("SAVEPOINT one")
    outbox.send(application, "orders", b"lost")
    cursor.execute("SAVEPOINT two")
    outbox.send(application, "orders", b"lost too")
    cursor.execute("ROLLBACK TO SAVEPOINT one")
    outbox.send(application, "orders", b"kept too")
    cursor.close()
    application.commit()
    assert payloads(database) == [b"kept", b"kept too"]


def test_closed_connection_leaves_no_row(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"lost")
    assert payloads(database) == []


def test_autocommit_is_refused_outside_a_transaction(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    made = database_server.connect(database_url, autocommit=True)
    with contextlib.closing(made) as application:
        with pytest.raises(RequestRefusedError, match="commits each statement") as refused:
            outbox.send(application, "orders", b"x")
        assert "\n" not in str(refused.value)
        application.cursor().execute("BEGIN")
        outbox.send(application, "orders", b"kept")
        application.cursor().execute("COMMIT")
    assert payloads(database) == [b"kept"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Connection.autocommit is of Python 3.12")
@pytest.mark.parametrize("database_server", ["sqlite"], indirect=True)
def test_sqlite_autocommit_attribute_is_respected(application: Any, database: Database) -> None:
    application.autocommit = True
    with pytest.raises(RequestRefusedError):
        outbox.send(application, "orders", b"x")
    application.autocommit = False
    outbox.send(application, "orders", b"kept")
    application.commit()
    assert payloads(database) == [b"kept"]


def test_refused_message_keeps_the_transaction_usable(application: Any, database: Database) -> None:
    outbox.send(application, "orders", b"kept")
    with pytest.raises(MessageTooLargeError):
        outbox.send(application, "orders", b"x" * ((1 << 20) + 1))
    for topic, options in (
        ("a b", {}),
        ("orders", {"delay": -1}),
        ("orders", {"delay": 1, "at": 1}),
        ("orders", {"headers": {"a": "\ud800"}}),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            outbox.send(application, topic, b"x", **options)
    with pytest.raises(TypeError, match="must be a string"):
        outbox.send(application, 7, b"x")  # type: ignore[arg-type]
    with pytest.raises(RequestRefusedError, match="partition -1 of topic"):
        outbox.send(application, "orders", b"x", partition=-1)
    application.commit()
    assert payloads(database) == [b"kept"]


@pytest.mark.parametrize("wrong", [None, "orders", object(), sqlalchemy.create_engine("sqlite://")])
def test_unsupported_connection_error_names_the_choices(wrong: object) -> None:
    with pytest.raises(TypeError, match="cannot be used; pass a connection of psycopg"):
        outbox.send(wrong, "orders", b"x")


def test_send_async_refuses_a_synchronous_connection(application: Any) -> None:
    with pytest.raises(TypeError, match="is not asynchronous; call send"):
        asyncio.run(outbox.send_async(application, "orders", b"x"))


@pytest.mark.parametrize("database_server", ["postgresql"], indirect=True)
def test_send_async_accepts_a_psycopg_connection(database: Database, database_url: str) -> None:
    async def work() -> None:
        made = await psycopg.AsyncConnection.connect(database_url)
        async with made:
            with pytest.raises(TypeError, match="is asynchronous; await send_async"):
                outbox.send(made, "orders", b"x")
            await outbox.send_async(made, "orders", b"kept")
        made = await psycopg.AsyncConnection.connect(database_url, autocommit=True)
        async with made:
            with pytest.raises(RequestRefusedError, match=r"connection.transaction\(\)"):
                await outbox.send_async(made, "orders", b"x")
            async with made.transaction():
                await outbox.send_async(made, "orders", b"kept too")

    asyncio.run(work())
    assert payloads(database) == [b"kept", b"kept too"]


@pytest.mark.parametrize("database_server", ["postgresql"], indirect=True)
def test_commit_interrupts_the_wait_of_the_relay(application: Any, database: Database) -> None:
    outbox.send(application, "orders", b"x")
    application.commit()
    database.wait(60)  # the notification had already arrived before the wait
    assert payloads(database) == [b"x"]


@pytest.mark.parametrize("database_server", ["postgresql"], indirect=True)
def test_table_of_another_schema_is_used(
    database: Database, application: Any, database_url: str
) -> None:
    database.run("CREATE SCHEMA app")
    with connect(database_url, table="app.box") as other:
        create(other)
        Outbox("app.box", config.Settings()).send(application, "orders", b"x")
        application.commit()
        other.wait(60)
        assert payloads(other) == [b"x"]
    assert payloads(database) == []


# --- SQLAlchemy -----------------------------------------------------------------------------------


def test_sqlalchemy_session_commits_and_rolls_back(
    engine: Callable[..., sqlalchemy.Engine], database: Database
) -> None:
    with orm.Session(engine()) as session:
        outbox.send(session, "orders", b"kept\x00\xff", key=b"\xfe", headers={"a": "é"})
        with contextlib.suppress(ZeroDivisionError), session.begin_nested():
            if database.dialect != "sqlite":  # SQLite needs the recipe of the next test
                outbox.send(session, "orders", b"lost")
            raise ZeroDivisionError
        session.commit()
        outbox.send(session, "orders", b"lost")
        session.rollback()
    assert payloads(database) == [b"kept\x00\xff"]


@pytest.mark.parametrize("database_server", ["sqlite"], indirect=True)
def test_sqlalchemy_savepoint_recipe_of_sqlite_works(
    engine: Callable[..., sqlalchemy.Engine], database: Database
) -> None:
    made = engine()

    @sqlalchemy.event.listens_for(made, "connect")
    def no_begin(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(made, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    with made.connect() as connection:
        outbox.send(connection, "orders", b"kept")
        with contextlib.suppress(ZeroDivisionError), connection.begin_nested():
            outbox.send(connection, "orders", b"lost")
            raise ZeroDivisionError
        connection.commit()
        outbox.send(connection, "orders", b"lost")
    assert payloads(database) == [b"kept"]


def test_sqlalchemy_scoped_session_is_accepted(
    engine: Callable[..., sqlalchemy.Engine], database: Database
) -> None:
    session = orm.scoped_session(orm.sessionmaker(engine()))
    outbox.send(session, "orders", b"kept")
    session.commit()
    session.remove()
    assert payloads(database) == [b"kept"]


def test_sqlalchemy_engine_in_autocommit_is_refused(
    engine: Callable[..., sqlalchemy.Engine], database: Database
) -> None:
    for made in (
        engine(isolation_level="AUTOCOMMIT").connect(),
        engine().connect().execution_options(isolation_level="AUTOCOMMIT"),
    ):
        with made as connection, pytest.raises(RequestRefusedError, match="AUTOCOMMIT"):
            outbox.send(connection, "orders", b"x")
    assert payloads(database) == []


@pytest.mark.parametrize("database_server", ["postgresql", "sqlite"], indirect=True)
def test_sqlalchemy_async_session_commits_and_rolls_back(
    database: Database, database_url: str
) -> None:
    scheme = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+aiosqlite"}[database.dialect]
    url = f"{scheme}://{database_url.partition('://')[2]}"

    async def work() -> None:
        made = create_async_engine(url, poolclass=sqlalchemy.NullPool)
        async with AsyncSession(made) as session:
            with pytest.raises(TypeError, match="await send_async"):
                outbox.send(session, "orders", b"x")
            uid = await outbox.send_async(session, "orders", b"kept", delay=1)
            assert uid.startswith("orders/outbox/")
            await session.commit()
            await outbox.send_async(session, "orders", b"lost")
            await session.rollback()
        async with made.begin() as connection:
            await outbox.send_async(connection, "orders", b"kept too")
        automatic = made.execution_options(isolation_level="AUTOCOMMIT")
        async with automatic.connect() as connection:
            with pytest.raises(RequestRefusedError):
                await outbox.send_async(connection, "orders", b"x")
        await made.dispose()

    asyncio.run(work())
    assert payloads(database) == [b"kept", b"kept too"]


# --- Django ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("database_server", ["postgresql", "sqlite"], indirect=True)
def test_django_send_requires_atomic(database: Database, database_url: str) -> None:
    if not django.conf.settings.configured:
        django.conf.settings.configure()
        django.setup()
    with _django(database, database_url) as connection:
        with pytest.raises(RequestRefusedError, match="Django commits each statement"):
            outbox.send(connection, "orders", b"x")
        with transaction.atomic(connection.alias):
            outbox.send(connection, "orders", b"kept\x00", key="k", headers={"a": "é"}, expires=1)
            with contextlib.suppress(ZeroDivisionError), transaction.atomic(connection.alias):
                outbox.send(connection, "orders", b"lost")
                raise ZeroDivisionError
    assert payloads(database) == [b"kept\x00"]


@contextlib.contextmanager
def _django(database: Database, url: str) -> Iterator[Any]:
    if database.dialect == "postgresql":
        with psycopg.connect(url) as probe:
            info = probe.info
            place = {"NAME": info.dbname, "USER": info.user, "HOST": info.host}
        place["ENGINE"] = "django.db.backends.postgresql"
    else:
        place = {
            "NAME": url.removeprefix("sqlite:///"),
            "ENGINE": "django.db.backends.sqlite3",
        }
    named = connections.configure_settings({"default": {}, "shop": place})
    connections.settings["shop"] = named["shop"]
    try:
        yield connections["shop"]
    finally:
        connections["shop"].close()
        del connections["shop"]
        del connections.settings["shop"]
