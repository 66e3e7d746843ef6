"""The migration operation that creates the tables of an outbox in the database's dialect."""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError, router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation

from streamqd.outbox.table import DIALECTS, TABLE, OutboxTable


class CreateOutbox(Operation):
    """Create an outbox's table and its dead-letter table, as `streamqd outbox create` does.

    Tables that already exist are left unchanged. In PostgreSQL, `notify` adds a trigger that wakes
    the relay after each commit. The reverse operation drops both tables, with all messages that
    have not been sent.
    """

    reversible = True

    def __init__(self, table: str = TABLE, *, notify: bool = True) -> None:
        self.table = table
        self.notify = notify

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing, because the outbox has no models."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: Any,  # noqa: ARG002 - Django passes them
        to_state: Any,  # noqa: ARG002
    ) -> None:
        """Create the tables. Raises NotSupportedError for a database that has no outbox."""
        self._execute(app_label, schema_editor, create=True)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: Any,  # noqa: ARG002 - Django passes them
        to_state: Any,  # noqa: ARG002
    ) -> None:
        """Drop the tables. Raises NotSupportedError for a database that has no outbox."""
        self._execute(app_label, schema_editor, create=False)

    def describe(self) -> str:
        """Return the text that `migrate --plan` prints."""
        return f"Create outbox {self.table}"

    def _execute(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *, create: bool
    ) -> None:
        connection = schema_editor.connection
        if not router.allow_migrate(connection.alias, app_label):
            return
        dialect = DIALECTS.get(connection.vendor)
        if dialect is None:
            raise NotSupportedError(
                f"the outbox supports {', '.join(sorted(DIALECTS))}, not {connection.vendor}; write"
                f" a database router whose allow_migrate returns False for {app_label!r}"
            )
        table = OutboxTable(self.table, dialect)
        for statement in table.create(notify=self.notify) if create else table.drop():
            schema_editor.execute(statement, params=None)
