"""The relay's database access: read the oldest rows, delete sent rows, and dead-letter others.

No transaction is open between two calls, so a relay that hangs or is killed holds no locks. After
an error, the connection is closed, and the next call opens a new one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from streamqd.config.outboxes import split
from streamqd.errors import DatabaseResponseError, DatabaseUnavailableError
from streamqd.outbox import drivers
from streamqd.outbox.drivers import Opened
from streamqd.outbox.rows import DeadRow, OutboxRow, decode_all, decode_dead, readable_uid
from streamqd.outbox.table import DIALECTS, TABLE, OutboxTable

BATCH_BYTES = 8 << 20  # target bytes of a batch, which a single message may exceed
# Maximum rows per statement. Each row takes two parameters. Old versions of SQLite allow 999
# parameters, and PostgreSQL allows 65,535.
ROWS_PER_STATEMENT = {"sqlite": 400}
ROWS_PER_OTHER = 4096
DETAIL_CHARS_MAX = 1_000  # limit of characters in the error of a dead-lettered row


def connect(
    url: str,
    *,
    table: str = TABLE,
    password: str | None = None,
    max_message_bytes: int = 1 << 20,
    create: bool = False,
) -> Database:
    """Return an open database. If `create` is True, a missing SQLite file is created.

    Raises ValueError if the URL or the table name is invalid, DatabaseUnavailableError if the
    database does not answer, and DatabaseResponseError if it rejects the login or the driver is
    missing.
    """
    database = Database(url, table, password, max_message_bytes, create=create)
    database.open()
    return database


class _RowGoneError(Exception):
    """Raised if another relay has already moved or deleted the row."""


class Database:
    """One connection to one outbox, owned by one relay or command. It is not thread-safe.

    Every method may be repeated. A method raises DatabaseUnavailableError if the connection is
    lost, and its subclass DatabaseResponseError, whose text contains the remedy, if the database
    returns an error.
    """

    def __init__(
        self, url: str, table: str, password: str | None, max_message_bytes: int, *, create: bool
    ) -> None:
        name, _ = split(url)
        self.table = OutboxTable(table, DIALECTS[name])
        self._max_bytes = max_message_bytes
        self._open: Callable[[], Opened] = lambda: drivers.open_connection(
            url, password=password, listen=self.table.channel, create=create
        )
        self._opened: Opened | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dialect(self) -> str:
        """The name of the SQL dialect: postgresql, mysql or sqlite."""
        return self.table.dialect.name

    def open(self) -> Opened:
        """Open the connection unless it is already open. Raises the same errors as `connect`."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with contextlib.suppress(*opened.errors):
                opened.connection.close()

    # --- rows ---

    def read_oldest(self, limit: int) -> list[OutboxRow]:
        """Return the oldest rows by ID, up to `limit` rows and about 8 MiB, from a new snapshot.

        If a row cannot be sent, its `fault` is set. Raises DatabaseResponseError if the ID of a row
        is not an integer.
        """
        query = self.table.select_oldest(limit, BATCH_BYTES, self._max_bytes)
        found = self.rows(query)
        try:
            return decode_all(found, self._max_bytes)
        except ValueError as error:
            raise DatabaseResponseError(
                f"table {self.table.name} is not a valid outbox table ({error}); run `streamqd"
                " outbox check`"
            ) from None

    def find_existing(self, rows: Sequence[OutboxRow]) -> set[str]:
        """Return the uids of the rows that still exist.

        Call this after a delete that got no reply.
        """
        found: set[str] = set()
        for count, values in self._parts(rows):
            uids = self.rows(self.table.select_uids(count), values)
            found.update(bytes(uid).decode("ascii", "replace") for (uid,) in uids)
        return found

    def delete(self, rows: Sequence[OutboxRow]) -> None:
        """Delete rows that have been sent.

        Raises DatabaseResponseError if rows still exist afterwards. If it raises
        DatabaseUnavailableError, any of the rows may be deleted. Call `find_existing` to find out
        which.
        """
        parts = self._parts(rows)
        deleted = 0
        if len(parts) == 1:
            deleted = self.run(self.table.delete(parts[0][0]), parts[0][1])
        elif parts:
            # All parts use one commit, because each commit costs a write to the disk.
            with self._transaction() as cursor:
                for count, values in parts:
                    cursor.execute(self.table.delete(count), values)
                    deleted += cursor.rowcount
        # Rows may be missing because they were deleted earlier. However, a trigger or a policy can
        # also prevent a delete without an error, and such a row would be sent again in a later
        # batch.
        if deleted < len(rows) and (left := self.find_existing(rows)):
            raise DatabaseResponseError(
                f"{len(left)} sent rows of outbox {self.table.name} are still there after their"
                " DELETE; remove the trigger, rule or policy that keeps them"
            )

    def move_to_dead_table(self, row: OutboxRow, error: str) -> bool:
        """Move a row to the dead-letter table, in one transaction. Return True if it was moved.

        If the row no longer exists, nothing is changed, even if another row has got its ID.
        """
        values = (error[:DETAIL_CHARS_MAX].replace("\0", ""), time.time_ns() // 1_000_000, row.id)
        try:
            with self._transaction() as cursor:
                cursor.execute(self.table.select_uid(), (row.id,))
                if [readable_uid(uid) for (uid,) in cursor.fetchall()] != [row.uid]:
                    return False
                cursor.execute(self.table.insert_dead_row(), values)
                cursor.execute(self.table.delete_one(), (row.id,))
                if cursor.rowcount != 1:
                    raise _RowGoneError
        except _RowGoneError:
            return False
        return True

    def measure_backlog(self, limit: int) -> tuple[int, float]:
        """Return the number of rows, counted up to `limit`, and the age of the oldest in seconds.

        The age is this host's time minus the time on the sender's clock, but at least 0.
        """
        [(count, oldest)] = self.rows(self.table.select_backlog(limit))
        if not count or not isinstance(oldest, int):
            return count, 0.0
        return count, max(0.0, time.time() - oldest / 1000)

    def read_dead(self, limit: int) -> list[DeadRow]:
        """Return the newest dead-lettered rows, up to `limit`."""
        return [decode_dead(each) for each in self.rows(self.table.select_dead(limit))]

    def count_dead(self, limit: int) -> int:
        """Return the number of dead-lettered rows, counted up to `limit`."""
        [(count,)] = self.rows(self.table.select_dead_count(limit))
        return int(count)

    def wait(self, seconds: float, wake_fd: int | None = None) -> None:
        """Wait until `seconds` have passed, new rows are notified, or `wake_fd` becomes readable.

        Only PostgreSQL can notify the relay of new rows. Nothing is read from `wake_fd`.
        """
        with self._errors() as opened:
            opened.wait(seconds, wake_fd)

    # --- statements ---

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Sequence[Any]]:
        """Run a query and return its rows, in which strings are bytes."""
        with self._errors() as opened, contextlib.closing(opened.connection.cursor()) as cursor:
            cursor.execute(query, values)
            return list(cursor.fetchall())

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run one statement and commit it immediately.

        Return the number of rows that it changed.
        """
        with self._errors() as opened, contextlib.closing(opened.connection.cursor()) as cursor:
            cursor.execute(statement, values)
            return int(cursor.rowcount)

    def run_all(self, statements: Sequence[str]) -> None:
        """Run statements in one transaction, if the database supports this."""
        with self._transaction() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def _parts(self, rows: Sequence[OutboxRow]) -> list[tuple[int, list[Any]]]:
        """Split rows into parts, each for one statement.

        A part consists of its number of rows and the parameters of the statement (IDs and uids).
        """
        most = ROWS_PER_STATEMENT.get(self.dialect, ROWS_PER_OTHER)
        parts = [rows[at : at + most] for at in range(0, len(rows), most)]
        return [(len(part), self._values(part)) for part in parts]

    def _values(self, part: Sequence[OutboxRow]) -> list[Any]:
        if self.dialect != "postgresql":
            return [*(each.id for each in part), *(each.uid for each in part)]
        # The uids in the array literal need no quotes, because they are hex digits.
        return [
            f"{{{','.join([str(each.id) for each in part])}}}",
            f"{{{','.join([each.uid for each in part])}}}",
        ]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        # If an error occurs, the connection is closed, which rolls the transaction back.
        with self._errors() as opened, contextlib.closing(opened.connection.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN")
            yield cursor
            cursor.execute("COMMIT")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Opened]:
        """Yield the connection, and translate the driver's errors into those of streamqd."""
        opened = self.open()
        try:
            yield opened
        except opened.errors as error:
            self.close()
            advice = opened.refusal(error)
            name = f"outbox {self.table.name}"
            if advice is None:
                text = f"the database of {name} did not answer ({drivers.error_text(error)})"
                raise DatabaseUnavailableError(text) from error
            text = drivers.refused_text(f"the database of {name} returned an error", error, advice)
            raise DatabaseResponseError(text) from error
        except BaseException:
            self.close()  # the reply to an interrupted statement is still unread
            raise
