"""A relay on each real database sends each committed row once, despite obstacles."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from streamqd import config
from streamqd.errors import DatabaseResponseError, DatabaseUnavailableError, RedisUnavailableError
from streamqd.outbox import schema
from streamqd.outbox.database import Database, connect
from streamqd.outbox.outbox import Outbox
from streamqd.outbox.relay import Relay
from streamqd.outbox.rows import OutboxRow
from streamqd.policy.partitioning import crc32_partition
from streamqd.store import outbox, topics
from streamqd.store.client import Connection
from streamqd.store.client import connect as connect_redis
from streamqd.store.keys import Keys
from streamqd.store.outbox import OutboxView
from streamqd.store.store import Store
from tests.support import databases, servers
from tests.support.databases import DatabaseServer
from tests.support.servers import ProcessServer, Server

NAME = "shop"
sender = Outbox(settings=config.Settings())


class Shop:
    """An outbox on one database, and topics on the shared server."""

    def __init__(self, server: Server, store: Store, database: Database, application: Any) -> None:
        self.server = server
        self.store = store
        self.database = database
        self.application = application
        self.stop_fd, self._writer = os.pipe()
        self.relays: list[Relay] = []

    def topic(self, name: str = "orders", partitions: int = 2) -> None:
        topics.create(self.store, name, config.Topic(partitions=partitions))

    def send(self, *values: bytes, topic: str = "orders", **options: Any) -> list[str]:
        uids = [sender.send(self.application, topic, each, **options) for each in values]
        self.application.commit()
        return uids

    def relay(
        self, settings: config.Settings | None = None, name: str = NAME, **options: Any
    ) -> Relay:
        """Make a relay that has its own connections."""
        link = connect_redis(self.server.settings, timeout=5.0, name="test:relay")
        made = Relay(
            config.OutboxSettings(name, "", **{"poll": 0.05, **options}),
            settings or config.Settings(),
            self.database,
            Store(link, self.store.keys),
            stop_fd=self.stop_fd,
            stopping=lambda: False,
        )
        self.relays.append(made)
        return made

    def burst(self, **options: Any) -> None:
        assert self.relay(**options).run(burst=True) == 0

    def entries(self, topic: str = "orders") -> list[dict[bytes, bytes]]:
        """Return the entries of all partitions, one partition after another."""
        count = topics.partition_count(self.store, topic) or 0
        found = []
        for number in range(count):
            for _, flat in self.store.execute(
                "XRANGE", self.store.keys.stream(topic, number), "-", "+"
            ):
                found.append(dict(zip(flat[::2], flat[1::2], strict=True)))
        return found

    def payloads(self, topic: str = "orders") -> list[bytes]:
        return sorted(each[b"payload"] for each in self.entries(topic))

    def view(self) -> OutboxView:
        replies = self.store.pipeline(outbox.view_commands(self.store.keys, NAME))
        return OutboxView.parse(NAME, *replies, "the outbox")

    def close(self) -> None:
        os.close(self.stop_fd)
        os.close(self._writer)
        for each in self.relays:
            each._store.connection.close()


@pytest.fixture
def shop(
    server: Server, store: Store, database_server: DatabaseServer, database_url: str
) -> Iterator[Shop]:
    with (
        connect(database_url) as database,
        contextlib.closing(database_server.connect(database_url)) as application,
    ):
        for statement in database.table.create():
            database.run(statement)
        made = Shop(server, store, database, application)
        yield made
        made.close()


def test_relay_sends_rows_as_a_producer_writes_them(shop: Shop) -> None:
    shop.topic()
    [uid] = shop.send(b"\x00\xff", key=b"k", headers={"a": "é"}, expires=60)
    shop.burst()
    [entry] = shop.entries()
    assert entry == {
        b"payload": b"\x00\xff",
        b"key": b"k",
        b"headers": '{"a":"é"}'.encode(),
        b"expiresAfter": b"60000",
        b"sendId": uid.rpartition("/")[2].encode(),
    }
    number = crc32_partition(b"k", 2)
    assert shop.store.execute("XLEN", shop.store.keys.stream("orders", number)) == 1
    assert shop.database.measure_backlog(1)[0] == 0
    view = shop.view()
    assert (view.sent, view.rows, view.relayed, view.error) == (1, 0, False, "")


def test_relay_keeps_the_order_of_a_key_over_many_batches(shop: Shop) -> None:
    shop.topic(partitions=3)
    for number in range(30):
        shop.send(b"%d" % number, key=f"k{number % 5}")
    shop.burst(batch=4)
    seen: dict[bytes, list[int]] = {}
    for entry in shop.entries():
        seen.setdefault(entry[b"key"], []).append(int(entry[b"payload"]))
    assert sorted(number for each in seen.values() for number in each) == list(range(30))
    assert all(each == sorted(each) for each in seen.values())


def test_relay_delays_rows_until_they_are_due(shop: Shop) -> None:
    shop.topic(partitions=1)
    shop.send(b"later", delay=60)
    shop.send(b"now", delay=0)
    shop.burst()
    assert shop.payloads() == [b"now"]
    assert shop.store.execute("ZCARD", shop.store.keys.delayed_sends("orders", 0)) == 1


def test_relay_marks_unsendable_rows_dead(shop: Shop) -> None:
    shop.topic()
    shop.send(b"1", topic="nowhere")
    shop.send(b"2", partition=7)
    shop.send(b"3", partition=1)
    shop.send(b"4", topic="known")
    settings = config.Settings(topics={"known": config.Topic(partitions=3)})
    assert shop.relay(settings).run(burst=True) == 0
    assert shop.payloads() == [b"3"]
    assert shop.payloads("known") == [b"4"]
    errors = {row.error for row in shop.database.read_dead(10)}
    assert errors == {
        "topic nowhere does not exist; create it, and send the row again",
        "partition 7 of topic orders not found; partitions are numbered 0 to 1",
    }
    assert shop.view().dead == 2


def publish_row(shop: Shop, epoch: int, row: OutboxRow | None = None) -> OutboxRow:
    """Publish a row (the oldest by default), like a relay that exits before it deletes the row."""
    row = row or shop.database.read_oldest(1)[0]
    keys, meta = shop.store.keys, shop.store.keys.meta("orders")
    count = topics.partition_count(shop.store, "orders") or 0
    for number in range(count):
        shop.store.run(outbox.fence(keys, NAME, "orders", number, epoch, count, meta))
    sent = outbox.OutgoingRow(row.id, row.uid, None, row.fields)
    call = outbox.publish(keys, NAME, "orders", 0, [sent], epoch, count, meta)
    assert shop.store.run(call).word == "OK"
    return row


def test_rows_of_a_dead_relay_are_not_sent_twice(shop: Shop) -> None:
    shop.topic(partitions=1)
    shop.send(b"1", b"2", b"3")
    publish_row(shop, 5)
    shop.burst(batch=2)
    assert shop.payloads() == [b"1", b"2", b"3"]


def test_rows_of_a_killed_relay_are_sent_once_to_a_grown_topic(shop: Shop) -> None:
    shop.topic(partitions=1)
    shop.send(
        b"1", b"2", b"3", key=next(f"k{n}" for n in range(99) if crc32_partition(b"k%d" % n, 2))
    )
    publish_row(shop, 5)
    shop.store.execute("HSET", shop.store.keys.meta("orders"), "partitionCount", 2)
    shop.burst()
    assert shop.payloads() == [b"1", b"2", b"3"]


def test_recorded_row_is_deleted_even_if_not_the_oldest(shop: Shop) -> None:
    """A recorded row is deleted even if it is not the oldest.

    The next batch replaces its record, which is the only proof that it was sent.
    """
    shop.topic(partitions=1)
    shop.send(b"2", b"3")
    row = publish_row(shop, 5)
    shop.send(b"4")
    shop.database.run(f"UPDATE streamqd_outbox SET id = 99 WHERE id = {row.id}")
    shop.store.execute(
        *("HSET", shop.store.keys.outbox_record("orders", 0, NAME), "rows", f"{row.uid}{99:016x}")
    )
    shop.burst(batch=1)
    assert shop.payloads() == [b"2", b"3", b"4"]


def test_relay_rereads_rows_read_before_the_fence(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay reads its rows again if they are older than its fence.

    Here, an earlier relay sends and deletes both rows between the read and the fence.
    """
    shop.topic(partitions=1)
    shop.send(b"1", b"2")
    oldest, reads = shop.database.read_oldest, []

    def overtaken(limit: int) -> list[OutboxRow]:
        rows = oldest(limit)
        reads.append(len(rows))
        if len(reads) == 1:
            for row in rows:
                publish_row(shop, 5, row)
                shop.database.delete([row])
        return rows

    relay = shop.relay()
    monkeypatch.setattr(shop.database, "read_oldest", overtaken)
    relay._turn()
    monkeypatch.setattr(shop.database, "read_oldest", oldest)
    assert relay.run(burst=True) == 0
    assert shop.payloads() == [b"1", b"2"]


@pytest.mark.parametrize("done", [True, False])
def test_delete_with_a_lost_reply_sends_no_row_twice(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    shop.topic(partitions=1)
    shop.send(b"1", b"2", b"3")
    delete, failures = shop.database.delete, 2

    def lost(rows: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            if done:
                delete(rows)
            raise DatabaseUnavailableError("the connection was lost")
        delete(rows)

    monkeypatch.setattr(shop.database, "delete", lost)
    shop.burst(batch=1)
    assert shop.payloads() == [b"1", b"2", b"3"]


def test_publish_with_a_lost_reply_raises_the_epoch(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.topic(partitions=1)
    shop.send(b"1", b"2", b"3")
    relay = shop.relay(batch=2)
    store = relay._store
    run_each, calls = Connection.run_each, []

    def lost(link: Connection, asked: Any) -> Any:
        replies = run_each(link, asked)
        if asked[0].script.name == "outbox_publish":
            calls.append(asked[0])
            if len(calls) == 1:
                raise RedisUnavailableError("no answer", sent=True)
        return replies

    monkeypatch.setattr(Connection, "run_each", lost)
    assert relay.run(burst=True) == 0
    assert shop.payloads() == [b"1", b"2", b"3"]
    # The lost call arrives late, after another relay or the same one has already fenced its epoch.
    assert shop.store.run(calls[0]).word == "FENCED"
    assert store is not shop.store


def test_growth_between_two_batches_sends_each_row_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.topic(partitions=1)
    for number in range(10):
        shop.send(b"%d" % number, key=f"k{number % 3}")
    delete = shop.database.delete

    def grown(rows: Any) -> None:
        delete(rows)
        shop.store.execute("HSET", shop.store.keys.meta("orders"), "partitionCount", 4)

    monkeypatch.setattr(shop.database, "delete", grown)
    shop.burst(batch=4)
    assert shop.payloads() == [b"%d" % number for number in range(10)]


def test_full_partition_delays_only_its_own_rows(shop: Shop) -> None:
    shop.topic(partitions=2)
    shop.send(*(b"0-%d" % number for number in range(9)), partition=0)
    shop.send(b"1-0", partition=1)
    relay = shop.relay(batch=2, max_backlog=3)
    for _ in range(20):
        relay._turn()
    assert shop.payloads() == [b"0-0", b"0-1", b"0-2", b"1-0"]
    assert relay._figures.obstacle is not None
    assert "max_backlog" in relay._figures.obstacle.error
    relay._keep_at = 0.0
    relay._turn()
    assert (shop.view().cause, shop.view().topic) == ("backlog", "orders")
    shop.store.execute("XTRIM", shop.store.keys.stream("orders", 0), "MAXLEN", 0)
    relay._options = replace(relay._options, max_backlog=None)
    relay._blocked.clear()
    assert relay.run(burst=True) == 0
    assert len(shop.payloads()) == 7


def test_unreadable_record_delays_only_its_own_topic(shop: Shop) -> None:
    shop.topic(partitions=1)
    shop.topic("other", partitions=1)
    key = shop.store.keys.outbox_record("orders", 0, NAME)
    shop.store.execute("HSET", key, "epoch", "soon")
    shop.send(*(b"%d" % number for number in range(5)))
    shop.send(b"x", topic="other")
    relay = shop.relay(batch=2)
    for _ in range(20):
        relay._turn()
    assert shop.payloads("other") == [b"x"]
    assert shop.payloads() == []
    assert relay._figures.obstacle is not None
    assert "epoch" in relay._figures.obstacle.error
    shop.store.execute("DEL", key)
    relay._blocked.clear()
    assert relay.run(burst=True) == 0
    assert len(shop.payloads()) == 5


TEXT_KEYS = {
    "postgresql": ("bigint GENERATED BY DEFAULT AS IDENTITY", "text DEFAULT gen_random_uuid()"),
    "mysql": ("bigint NOT NULL AUTO_INCREMENT", "varchar(36) NOT NULL DEFAULT uuid()"),
    "sqlite": ("integer NOT NULL PRIMARY KEY AUTOINCREMENT", "text PRIMARY KEY DEFAULT 'a'"),
}


def test_relay_waits_at_a_table_with_other_ids(shop: Shop) -> None:
    """The relay waits without exiting, and sends no row that it could not delete."""
    shop.topic()
    for statement in (*shop.database.table.drop(), *shop.database.table.create()):
        shop.database.run(statement.replace(*TEXT_KEYS[shop.database.dialect]))
    shop.send(b"1")
    relay = shop.relay(lease_ttl=1)
    relay._turn()
    relay._keep_at = 0.0
    assert relay._turn() > 0.1  # at least 0.1 s until the next try
    view = shop.view()
    assert (view.relayed, view.cause) == (True, "refused")
    assert "table streamqd_outbox is not a valid outbox table (id " in view.error
    assert view.error.endswith("is not an integer of 64 bits); run `streamqd outbox check`")
    with pytest.raises(DatabaseResponseError, match="not an integer"):
        relay.run(burst=True)
    assert shop.payloads() == []


def test_burst_exits_if_rows_are_blocked(shop: Shop) -> None:
    shop.topic(partitions=1)
    shop.topic("other", partitions=1)
    shop.send(b"1", b"2", b"3", b"4")
    shop.send(b"x", topic="other")
    relay = shop.relay(max_backlog=3)
    assert relay.run(burst=True) == 1
    assert relay.left == (
        "rows of outbox shop wait: orders/0: max_backlog is reached (3 messages wait)"
    )
    assert shop.payloads() == [b"1", b"2", b"3"]
    assert shop.payloads("other") == [b"x"]
    assert shop.database.measure_backlog(10)[0] == 1
    assert not shop.view().relayed


def test_burst_exits_if_another_relay_is_stuck(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.topic(partitions=1)
    shop.send(b"1", b"2")
    holder = shop.relay(max_backlog=1)
    for _ in range(4):
        holder._turn()
    holder._keep_at = 0.0
    holder._turn()
    monkeypatch.setattr("streamqd.outbox.relay.FAILING_SECONDS", 0.0)
    burst = shop.relay()
    assert burst.run(burst=True) == 1
    assert burst.left.startswith("another relay (")
    assert "and its rows wait: orders/0: max_backlog is reached" in burst.left


def test_second_row_with_the_same_uid_is_marked_dead(shop: Shop) -> None:
    """The second row is marked as dead.

    A table that was not made by `outbox create` may lack the unique index.
    """
    shop.topic(partitions=1)
    for statement in (*shop.database.table.drop(), *shop.database.table.create()):
        shop.database.run(statement.replace(" NOT NULL UNIQUE", " NOT NULL"))
    [first, second] = shop.send(b"1", b"2")
    uid = first.rpartition("/")[2]
    shop.database.run(f"UPDATE streamqd_outbox SET uid = '{uid}'")
    shop.send(b"3")
    shop.burst()
    assert second != first
    assert shop.payloads() == [b"1", b"3"]
    [dead] = shop.database.read_dead(10)
    assert dead.error == f"another row has the uid {uid}; give each row a unique uid"


def test_two_outboxes_of_one_table_use_one_relay(shop: Shop) -> None:
    shop.topic(partitions=1)
    first, second = shop.relay(lease_ttl=60), shop.relay(name="copy", lease_ttl=60)
    first._turn()
    shop.send(b"1")
    for _ in range(3):
        second._turn()
        assert second._epoch == 0
    assert shop.payloads() == []
    [copy] = outbox.read_views(shop.store, ["copy"])
    assert (copy.relayed, copy.cause) == (False, "shared")
    assert copy.error.startswith("outbox shop has the same table, and its relay (")
    for _ in range(3):
        first._turn()
    first._release()
    shop.send(b"2")
    for _ in range(3):
        second._turn()
    assert second._epoch > 0
    assert shop.payloads() == [b"1", b"2"]
    [copy] = outbox.read_views(shop.store, ["copy"])
    second._keep_at = 0.0
    second._turn()
    assert outbox.read_views(shop.store, ["copy"])[0].error == ""


def test_two_outboxes_started_together_both_yield(shop: Shop) -> None:
    """Each relay publishes its table before it looks for the other one, so each finds the other."""
    shop.topic(partitions=1)
    shop.send(b"1")
    first, second = shop.relay(lease_ttl=60), shop.relay(name="copy", lease_ttl=60)
    for each in (first, second):
        each._acquire()
        each._measure()
        shop.store.run(each._renew_call())
    for _ in range(2):
        second._keep_at = 0.0
        second._turn()
    assert second._epoch == 0
    for _ in range(3):
        first._turn()
    assert first._epoch > 0
    assert shop.payloads() == [b"1"]


def test_rows_are_deleted_after_a_replica_has_them(
    shop: Shop, new_server: Callable[..., ProcessServer]
) -> None:
    master, replica = new_server(tcp=True), new_server(tcp=True)
    with contextlib.ExitStack() as stack:
        link, copy = (
            stack.enter_context(
                contextlib.closing(connect_redis(each.settings, timeout=5.0, name="test:link"))
            )
            for each in (master, replica)
        )
        link.execute("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        shop.server, shop.store = master, Store(link, Keys())
        shop.topic(partitions=1)
        shop.send(b"1", b"2")
        relay = shop.relay(wait_replicas=1)
        for _ in range(2):
            relay._turn()
        assert shop.payloads() == [b"1", b"2"]  # the rows are written, but not deleted
        assert shop.database.measure_backlog(10)[0] == 2
        assert relay._figures.obstacle is not None
        assert "0 of 1 replicas have the last rows" in relay._figures.obstacle.error

        host, _, port = master.tcp_url.rpartition("/")[2].rpartition(":")
        copy.execute("REPLICAOF", host, port)
        assert relay.run(burst=True) == 0
        assert shop.database.measure_backlog(10)[0] == 0
        assert shop.payloads() == [b"1", b"2"]
        stream = shop.store.keys.stream("orders", 0)
        assert copy.execute("XLEN", stream) == 2  # the copy confirmed the rows before the deletion


def test_database_crash_restores_no_sent_row(server: Server, store: Store) -> None:
    """No row is sent again.

    With synchronous_commit = off, the rows of three batches return, but only one batch is recorded.
    """
    started: Any = servers.require(databases.start, "postgresql")
    with contextlib.ExitStack() as stack:
        stack.callback(started.close)
        url = started.new()
        owner = stack.enter_context(contextlib.closing(started.connect(url, autocommit=True)))
        owner.execute(f"ALTER DATABASE {owner.info.dbname} SET synchronous_commit = off")
        database = stack.enter_context(connect(url))
        schema.create(database)
        application = stack.enter_context(contextlib.closing(started.connect(url)))
        shop = Shop(server, store, database, application)
        stack.callback(shop.close)
        shop.topic(partitions=1)
        shop.send(b"1", b"2", b"3")
        [(writer,)] = owner.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
        ).fetchall()
        owner.execute("CHECKPOINT")  # the rows are on disk now
        os.kill(writer, signal.SIGSTOP)  # all other writes stay in memory
        shop.burst(batch=1)
        started.kill()
        started.start()
        shop.burst(batch=1)
        assert shop.payloads() == [b"1", b"2", b"3"]


def test_replaced_relay_sends_nothing_after_a_takeover(shop: Shop) -> None:
    shop.topic(partitions=1)
    shop.send(b"1")
    first, second = shop.relay(lease_ttl=60), shop.relay(lease_ttl=60)
    for _ in range(3):
        first._turn()
    second._turn()
    assert (first._epoch > 0, second._epoch) == (True, 0)
    shop.send(b"2")
    shop.store.execute("DEL", shop.store.keys.outbox_lease(NAME))  # as if the lease had expired
    for _ in range(4):
        second._turn()
    assert second._epoch > first._epoch > 0
    shop.send(b"3")
    first._turn()
    assert first._epoch == 0
    for _ in range(3):
        second._turn()
        first._turn()
    assert shop.payloads() == [b"1", b"2", b"3"]


def test_deleted_topic_leaves_no_outbox_record(shop: Shop) -> None:
    from streamqd.admin import topics_deletion

    shop.topic(partitions=2)
    shop.send(b"1", b"2", b"3")
    shop.burst()
    topics_deletion.delete(shop.store, "orders", force=False)
    assert shop.store.execute("KEYS", "*{orders*") == []
    keys = Keys()
    shop.topic(partitions=2)
    shop.send(b"4")
    shop.burst()
    assert shop.payloads() == [b"4"]
    assert shop.store.execute("EXISTS", keys.outbox_record("orders", 0, NAME)) == 1


def test_relay_bounds_each_call_by_bytes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.topic(partitions=1)
    shop.send(*(bytes([number]) * 400_000 for number in range(6)), key="k")
    sizes = []
    run_each: Callable[..., Any] = Connection.run_each

    def measured(link: Connection, asked: Any) -> Any:
        sizes.extend(
            sum(len(each) for each in call.argv if isinstance(each, bytes))
            for call in asked
            if call.script.name == "outbox_publish"
        )
        return run_each(link, asked)

    monkeypatch.setattr(Connection, "run_each", measured)
    shop.burst()
    assert [each[b"payload"][0] for each in shop.entries()] == list(range(6))
    assert max(sizes) < 1_300_000
