"""Read the state of an outbox's tables for `doctor`: their rows, and the space that they use."""

from __future__ import annotations

import contextlib

from streamqd.admin.diagnosis.facts import OutboxTableState
from streamqd.config import OutboxSettings
from streamqd.errors import DatabaseUnavailableError
from streamqd.outbox.database import Database, connect
from streamqd.outbox.relay import COUNTED_MAX
from streamqd.outbox.schema import table_parameters

# Time limit of a statement in milliseconds. Without it, `doctor` would wait for a lock on the
# table.
STATEMENT_MS = 10_000
# Each query returns the number of deleted rows that still take up space, the unused bytes, and the
# total bytes. A value may be NULL.
_SPACE = {
    "postgresql": (
        "SELECT n_dead_tup, NULL::bigint, pg_total_relation_size(relid)"
        " FROM pg_stat_user_tables WHERE relid = to_regclass(%s)"
    ),
    "mysql": (
        "SELECT NULL, data_free, data_length + index_length + data_free"
        " FROM information_schema.tables WHERE table_schema = COALESCE(%s, DATABASE())"
        " AND table_name = %s"
    ),
    # These values apply to the whole file.
    "sqlite": (
        "SELECT NULL, freelist_count * page_size, page_count * page_size"
        " FROM pragma_freelist_count, pragma_page_count, pragma_page_size"
    ),
}


def inspect_table(outbox: OutboxSettings, max_message_bytes: int) -> OutboxTableState:
    """Read the tables of an outbox.

    No error is raised for an invalid URL or an unavailable database. The result describes the
    problem.
    """
    problem = outbox.fault()
    if problem:
        return OutboxTableState(outbox.table, problem=problem)
    try:
        with contextlib.closing(
            connect(
                outbox.url(),
                table=outbox.table,
                password=outbox.password(),
                max_message_bytes=max_message_bytes,
            )
        ) as database:
            return _read(database)
    except (DatabaseUnavailableError, ValueError) as error:
        return OutboxTableState(outbox.table, problem=str(error))


def _read(database: Database) -> OutboxTableState:
    if database.dialect == "postgresql":  # the other drivers have their own time limit
        database.run(f"SET statement_timeout = {STATEMENT_MS}")
    rows, oldest = database.measure_backlog(COUNTED_MAX)
    newest = database.read_dead(1)
    name = database.table.name
    values = () if database.dialect == "sqlite" else table_parameters(database, name)
    space = database.rows(_SPACE[database.dialect], values)
    deleted, unused, total = space[0] if space else (None, None, None)
    return OutboxTableState(
        name,
        dialect=database.dialect,
        rows=rows,
        oldest_seconds=oldest,
        dead=database.count_dead(COUNTED_MAX),
        dead_error=newest[0].error if newest else "",
        deleted_rows=None if deleted is None else int(deleted),
        unused_bytes=None if unused is None else int(unused),
        total_bytes=int(total or 0),
    )
