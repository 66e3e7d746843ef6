"""The sender of the outbox, which writes a message as one row in the application's transaction."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any

from streamqd import config, telemetry
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.errors import ConfigError, RequestRefusedError
from streamqd.outbox import adapters
from streamqd.outbox.rows import SentRow, encode
from streamqd.outbox.table import TABLE, check_name
from streamqd.producer.encoding import Outgoing, check_topic, to_encoded, to_envelope
from streamqd.store.topics import PARTITIONS_MAX


class Outbox:
    """A sender that inserts messages into a table of your database, in your transaction.

    After the commit, the outbox's relay moves the message to Redis. After a rollback, the message
    does not exist. An `Outbox` has no connection of its own and never connects to Redis. Threads,
    tasks and forked children can share it.

    `table` is a table that was created by `streamqd outbox create`. `settings` is a result of
    `config.load`. By default, the outbox uses the settings of the command line, from the file in
    STREAMQ_CONFIG or from ./streamq.toml if it exists. If `traces` is True, each send creates an
    OpenTelemetry span and writes its context to the headers. If it is None, the setting
    `telemetry.traces` applies.

    Raises TypeError or ValueError for an invalid table name, and ConfigError for an invalid
    configuration.
    """

    def __init__(
        self,
        table: str = TABLE,
        settings: config.Settings | None = None,
        *,
        traces: bool | None = None,
    ) -> None:
        check_name(table)
        if settings is None:
            settings = config.load(config.find())
        self._table = table
        self._max_bytes = settings.daemon.max_message_bytes
        try:
            self._spans = telemetry.send_spans(settings, traces)
        except telemetry.TelemetryUnavailableError as error:
            raise ConfigError([str(error)]) from error

    def send(
        self,
        connection: Any,
        topic: str,
        value: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        expires: float | timedelta | datetime | None = None,
    ) -> str:
        """Insert one message in the open transaction, and return its ID for `streamqd trace`.

        `connection` is a connection of psycopg, sqlite3, PyMySQL or Django, or a session or
        connection of SQLAlchemy. The call executes a single INSERT. Commits, rollbacks and
        savepoints are up to the caller. The other arguments are the same as for `Producer.send`.
        `delay` counts from now, on this host's clock. A message without a key is routed by its ID.
        If the given partition does not exist, the relay moves the row to the dead-letter table.

        Raises:

        - RequestRefusedError if the connection is in autocommit mode.
        - MessageTooLargeError if the message exceeds `max_message_bytes`.
        - TypeError or ValueError if the message cannot be encoded.
        - the errors of the database driver, unchanged.

        In the first three cases, nothing was inserted.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires)
        with self._span(topic) as span:
            row = self._row(topic, item, span)
            try:
                adapters.insert(connection, self._table, row)
            except adapters.AutocommitError as error:
                raise RequestRefusedError(str(error)) from None
            return _finish_send(row, span)

    async def send_async(
        self,
        connection: Any,
        topic: str,
        value: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        expires: float | timedelta | datetime | None = None,
    ) -> str:
        """Insert one message over an asynchronous connection, in the same way as `send`.

        `connection` is an AsyncSession or AsyncConnection of SQLAlchemy, or an AsyncConnection of
        psycopg.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires)
        with self._span(topic) as span:
            row = self._row(topic, item, span)
            try:
                await adapters.insert_async(connection, self._table, row)
            except adapters.AutocommitError as error:
                raise RequestRefusedError(str(error)) from None
            return _finish_send(row, span)

    def _span(self, topic: object) -> Any:
        return nullcontext() if self._spans is None else self._spans.start(topic, "create")

    def _row(self, topic: str, item: Outgoing, span: Any) -> SentRow:
        check_topic(topic)
        if not NAME.fullmatch(topic):
            raise ValueError(f"{topic!r} is not a valid topic name ({NAME_HINT})")
        if span is not None:
            item = item._replace(headers=span.headers(item.headers))
        message = to_encoded(to_envelope(item, self._max_bytes))
        if message.partition is not None and not 0 <= message.partition < PARTITIONS_MAX:
            raise RequestRefusedError(
                f"partition {message.partition} of topic {topic} is out of range; pass 0 to"
                f" {PARTITIONS_MAX - 1}"
            )
        return encode(topic, message)


def _finish_send(row: SentRow, span: Any) -> str:
    uid = f"{row.topic}/outbox/{row.uid}"
    if span is not None:
        span.note_created(uid)
    return uid
