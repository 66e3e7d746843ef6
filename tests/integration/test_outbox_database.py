"""The relay's side of a database, and the sender's row in it, on each real database."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

import pytest

from streamqd import config
from streamqd.errors import DatabaseRefused
from streamqd.outbox.database import Database, connect
from streamqd.outbox.outbox import Outbox
from tests.support.databases import DatabaseServer

outbox = Outbox(settings=config.Settings())


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An empty outbox, opened as the relay does."""
    with connect(database_url) as made:
        for statement in made.table.create():
            made.run(statement)
        yield made


def test_a_committed_message_is_the_oldest_row(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        first = outbox.send(
            application, "orders", b"\x00\xff", key=b"\xfe", headers={"a": "é"}, partition=3
        )
        outbox.send(application, "orders", {"n": 1}, delay=60, expires=5)
        assert database.oldest(10) == []
        application.commit()
    one, two = database.oldest(10)
    assert (one.topic, one.key, one.partition, one.fault) == ("orders", b"\xfe", 3, "")
    assert first == f"orders/outbox/{one.uid}"
    assert one.payload == b"\x00\xff"
    assert json.loads(one.headers or b"") == {"a": "é"}
    assert two.fields == [b"payload", b'{"n":1}', b"expiresAfter", b"5000"]
    assert two.due_unix_ms == two.created_unix_ms + 60_000
    assert database.oldest(1) == [one]
    assert database.still_there([one, two]) == {one.uid, two.uid}
    database.delete([one])
    assert database.still_there([one, two]) == {two.uid}
    assert database.backlog(10)[0] == 1
    database.bury(two, "no such topic")
    assert database.oldest(10) == []
    [dead] = database.dead(10)
    assert (dead.uid, dead.topic, dead.error) == (two.uid, "orders", "no such topic")
    assert database.dead_count(10) == 1


def test_a_rolled_back_message_does_not_exist(
    database: Database, database_server: DatabaseServer, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url)) as application:
        outbox.send(application, "orders", b"x")
        application.rollback()
    assert database.oldest(10) == []


def test_wait_returns_when_its_descriptor_is_readable(database: Database) -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        database.wait(60, read)
    finally:
        os.close(read)
        os.close(write)


def test_a_missing_table_names_its_remedy(database_url: str) -> None:
    with connect(database_url) as made, pytest.raises(DatabaseRefused, match="outbox create"):
        made.oldest(1)
