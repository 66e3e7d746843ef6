"""Insert a row over an application's connection, in its open transaction.

The class of a connection is recognized by the name of its module, so that no driver has to be
imported. This module never commits, rolls back or closes a connection.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from streamqd.outbox.rows import SentRow
from streamqd.outbox.table import (
    BINARY,
    DIALECTS,
    INTEGER,
    KINDS,
    MYSQL,
    POSTGRESQL,
    SENT_COLUMNS,
    SQLITE,
    TEXT,
    OutboxTable,
)

ACCEPTED = (
    "pass a connection of psycopg, sqlite3, PyMySQL or Django, or a session or connection of"
    " SQLAlchemy"
)
_AUTOCOMMIT = (
    "{} commits each statement (autocommit), so the message would be sent even if your transaction"
    " fails; {}"
)
_SERVER_STATUS_IN_TRANS = 1  # MySQL's flag for an open transaction


class AutocommitError(Exception):
    """Raised if the connection has no open transaction."""


def insert(connection: Any, table: str, row: SentRow) -> None:
    """Insert a row over a connection of an application.

    Raises AutocommitError or TypeError before anything is inserted. Errors of the driver are raised
    unchanged.
    """
    _choose_adapter(connection, _SYNC)(connection, table, row)


async def insert_async(connection: Any, table: str, row: SentRow) -> None:
    """Insert a row as `insert` does, over an asynchronous connection."""
    await _choose_adapter(connection, _ASYNC)(connection, table, row)


def _choose_adapter(
    connection: Any, adapters: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    kinds = [f"{each.__module__}.{each.__qualname__}" for each in type(connection).__mro__]
    for kind in kinds:
        if kind in adapters:
            return adapters[kind]
    for kind in kinds:
        if kind in _SYNC:
            raise TypeError(f"{_type_name(connection)} is not asynchronous; call send")
        if kind in _ASYNC:
            raise TypeError(f"{_type_name(connection)} is asynchronous; await send_async")
    raise TypeError(f"{_type_name(connection)} cannot be used; {ACCEPTED}")


def _type_name(connection: Any) -> str:
    return f"{type(connection).__module__.partition('.')[0]}.{type(connection).__qualname__}"


@functools.lru_cache(maxsize=64)
def _statement(table: str, dialect: str) -> str:
    return OutboxTable(table, DIALECTS[dialect]).insert()


def _execute(connection: Any, statement: str, row: SentRow) -> None:
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(statement, tuple(row))


# --- drivers --------------------------------------------------------------------------------------


def _check_psycopg(connection: Any) -> None:
    # Status 0 means that no transaction is open. Otherwise, `with connection.transaction()` may
    # have opened one, even in autocommit mode.
    if connection.autocommit and connection.info.transaction_status == 0:
        raise AutocommitError(_AUTOCOMMIT.format("the connection", "use connection.transaction()"))


def _psycopg(connection: Any, table: str, row: SentRow) -> None:
    _check_psycopg(connection)
    _execute(connection, _statement(table, POSTGRESQL.name), row)


async def _psycopg_async(connection: Any, table: str, row: SentRow) -> None:
    _check_psycopg(connection)
    async with connection.cursor() as cursor:
        await cursor.execute(_statement(table, POSTGRESQL.name), tuple(row))


def _check_sqlite3(connection: Any) -> None:
    if connection.in_transaction:
        return
    # `autocommit` exists since Python 3.12. If it is -1, isolation_level determines the mode.
    mode = getattr(connection, "autocommit", -1)
    if mode is True or (mode is not False and connection.isolation_level is None):
        raise AutocommitError(_AUTOCOMMIT.format("the connection", "execute BEGIN first"))


def _sqlite3(connection: Any, table: str, row: SentRow) -> None:
    _check_sqlite3(connection)
    _execute(connection, _statement(table, SQLITE.name), row)


def _check_mysql(connection: Any) -> None:
    status = getattr(connection, "server_status", _SERVER_STATUS_IN_TRANS)
    if connection.get_autocommit() and not status & _SERVER_STATUS_IN_TRANS:
        raise AutocommitError(_AUTOCOMMIT.format("the connection", "call connection.begin() first"))


def _pymysql(connection: Any, table: str, row: SentRow) -> None:
    _check_mysql(connection)
    _execute(connection, _statement(table, MYSQL.name), row)


# --- SQLAlchemy -----------------------------------------------------------------------------------


def _session(session: Any, table: str, row: SentRow) -> None:
    _sqlalchemy(session.connection(), table, row)


def _scoped_session(scoped: Any, table: str, row: SentRow) -> None:
    _session(scoped(), table, row)


def _sqlalchemy(connection: Any, table: str, row: SentRow) -> None:
    # SQLAlchemy begins a transaction with the first statement. It is begun here, to find out
    # whether the connection can have an open transaction at all.
    if not connection.in_transaction():
        connection.begin()
    if _sqlalchemy_commits(connection):
        raise AutocommitError(
            _AUTOCOMMIT.format("the connection", "use one without isolation_level AUTOCOMMIT")
        )
    connection.execute(_sqlalchemy_insert(table), row._asdict())


def _sqlalchemy_commits(connection: Any) -> bool:
    """Return True if the connection is known to be in autocommit mode."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    pooled = connection.connection
    if connection.dialect.name == "sqlite":
        # SQLAlchemy's recipe for savepoints sets isolation_level to None and executes BEGIN itself,
        # so None does not mean autocommit here.
        driver = pooled.driver_connection
        return driver.isolation_level is None and not driver.in_transaction
    try:
        return bool(connection.dialect.detect_autocommit_setting(pooled.dbapi_connection))
    except (AttributeError, NotImplementedError):
        return False


@functools.lru_cache(maxsize=64)
def _sqlalchemy_insert(table: str) -> Any:
    import sqlalchemy

    types = {
        BINARY: sqlalchemy.LargeBinary,
        INTEGER: sqlalchemy.BigInteger,
        TEXT: sqlalchemy.Text,
    }
    schema, _, name = table.rpartition(".")
    columns = [sqlalchemy.column(each, types[KINDS[each]]()) for each in SENT_COLUMNS]
    return sqlalchemy.table(name, *columns, schema=schema or None).insert().inline()


async def _session_async(session: Any, table: str, row: SentRow) -> None:
    await session.run_sync(_session, table, row)


async def _sqlalchemy_async(connection: Any, table: str, row: SentRow) -> None:
    await connection.run_sync(_sqlalchemy, table, row)


async def _scoped_session_async(scoped: Any, table: str, row: SentRow) -> None:
    await _session_async(scoped(), table, row)


# --- Django ---------------------------------------------------------------------------------------


def _django(connection: Any, table: str, row: SentRow) -> None:
    if connection.get_autocommit() and not connection.in_atomic_block:
        raise AutocommitError(_AUTOCOMMIT.format("Django", "use transaction.atomic()"))
    dialect = DIALECTS.get(connection.vendor)
    if dialect is None:
        raise TypeError(
            f"the database {connection.vendor} cannot have an outbox; use {', '.join(DIALECTS)}"
        )
    # All of Django's database backends accept this parameter marker.
    statement = OutboxTable(table, replace(dialect, marker="%s")).insert()
    binary = connection.Database.Binary
    with connection.cursor() as cursor:
        cursor.execute(statement, [binary(each) if type(each) is bytes else each for each in row])


_SYNC: dict[str, Callable[..., None]] = {
    "psycopg.Connection": _psycopg,
    "sqlite3.Connection": _sqlite3,
    "pymysql.connections.Connection": _pymysql,
    "sqlalchemy.orm.session.Session": _session,
    "sqlalchemy.orm.scoping.scoped_session": _scoped_session,
    "sqlalchemy.engine.base.Connection": _sqlalchemy,
    "django.db.backends.base.base.BaseDatabaseWrapper": _django,
    "django.utils.connection.ConnectionProxy": _django,
}
_ASYNC: dict[str, Callable[..., Awaitable[None]]] = {
    "psycopg.AsyncConnection": _psycopg_async,
    "sqlalchemy.ext.asyncio.session.AsyncSession": _session_async,
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": _scoped_session_async,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": _sqlalchemy_async,
}
