"""A producer on a real server: its entries, their partitions, and lost answers."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import logging
import os
import pickle
import zlib
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

from streamqd import BufferedProducer, config
from streamqd.cli import cli
from streamqd.errors import (
    MessageTooLargeError,
    OutcomeUnknownError,
    RedisResponseError,
    RedisUnavailableError,
    RequestRefusedError,
    TopicNotFoundError,
)
from streamqd.housekeeper.script_loader import ScriptLoader
from streamqd.producer import BatchOutcomeUnknownError, BatchRejectedError, Outgoing, Producer
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.publishing import Transaction
from streamqd.store.store import Store
from tests.support.proxy import Fault
from tests.support.servers import Server

Make = Callable[..., Producer]


@pytest.fixture
def producer(server: Server, link: Connection) -> Iterator[Producer]:
    with Producer(server.url) as made:
        yield made


def create(link: Connection, keys: Keys, topic: str, partitions: int) -> None:
    assert (
        topics.create(Store(link, keys), topic, config.Topic(partitions=partitions)) == partitions
    )


def entries(link: Connection, keys: Keys, topic: str, partition: int = 0) -> list[dict[str, bytes]]:
    found = link.execute("XRANGE", keys.stream(topic, partition), "-", "+")
    return [
        {name.decode(): value for name, value in zip(raw[::2], raw[1::2], strict=True)}
        for _, raw in found
    ]


def with_topic(url: str, topic: str, partitions: int) -> config.Settings:
    stated = config.Topic(partitions=partitions, explicit=frozenset({"partitions"}))
    settings = config.Settings(topics={topic: stated})
    return dataclasses.replace(settings, redis=dataclasses.replace(settings.redis, url=url))


# --- entries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (b"\xff\x00raw", b"\xff\x00raw"),
        (bytearray(b"ab"), b"ab"),
        ("h\u00e9llo", "h\u00e9llo".encode()),
        ({"a": [1, None, "\u00e9"]}, '{"a":[1,null,"\u00e9"]}'.encode()),
        (7, b"7"),
        (b"", b""),
    ],
)
def test_send_writes_values_as_bytes_text_or_json(producer, link, keys, value, payload):
    producer.send("access", value)

    assert entries(link, keys, "access") == [{"payload": payload}]


@pytest.mark.parametrize("payload", [b"", b"x"])
@pytest.mark.parametrize(
    ("options", "said"), [({}, {}), ({"max_backlog": 9}, {}), ({}, {"dedup_id": "1"})]
)
def test_each_send_method_writes_the_same_plain_entry(server, link, keys, payload, options, said):
    with Producer(server.url, **options) as producer:
        producer.send("access", payload, **said)
        producer.send_many("access", [payload, Outgoing(payload)])

    assert entries(link, keys, "access") == [{"payload": payload}] * 3


def test_entry_has_only_payload_key_and_headers(producer, link, keys):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    sent = producer.send("access", b"x", key="user-1", headers={"traceparent": trace})

    [entry] = entries(link, keys, "access")
    assert list(entry) == ["payload", "key", "headers"]
    assert entry["key"] == b"user-1"
    assert json.loads(entry["headers"]) == {"traceparent": trace}
    assert link.execute("XRANGE", keys.stream("access", 0), sent.id, sent.id)


def test_send_returns_the_uid_of_the_message(server, link, keys):
    """`send` and `send_many` return `topic/partition/id`, and never return the same value twice."""
    create(link, keys, "access", 4)
    with Producer(server.url) as producer:
        one = producer.send("access", b"x", key="k")
        sent = [one, *producer.send_many("access", [b"y"] * 1200)]

    written = {
        f"access/{number}/{raw_id.decode()}"
        for number in range(4)
        for raw_id, _ in link.execute("XRANGE", keys.stream("access", number), "-", "+")
    }
    assert set(sent) == written
    assert len(set(sent)) == len(sent) == 1201
    topic, number, entry_id = one.split("/")
    assert (one.topic, one.partition, one.id) == (topic, int(number), entry_id)
    assert type(one.partition) is int
    assert json.loads(json.dumps({one: one})) == {str(one): str(one)}
    assert pickle.loads(pickle.dumps(one)).id == one.id
    assert copy.deepcopy(one).partition == one.partition


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan")])
def test_producer_refuses_a_value_that_is_not_json(producer, link, keys, value):
    with pytest.raises((TypeError, ValueError)):
        producer.send("access", value)

    assert entries(link, keys, "access") == []


def test_producer_refuses_a_header_that_is_not_a_string(producer):
    with pytest.raises(TypeError, match="headers"):
        producer.send("access", b"x", headers={"retries": 3})


def test_producer_size_limit_is_exact(server, link, keys):
    settings = config.Settings(redis=server.settings, daemon=config.Daemon(max_message_bytes=100))
    with Producer(settings=settings) as producer:
        producer.send("access", b"x" * 100, key=b"k" * 100)
        with pytest.raises(MessageTooLargeError, match=r"101 bytes.*100"):
            producer.send("access", b"x" * 101)
        with pytest.raises(MessageTooLargeError, match="key and headers"):
            producer.send("access", b"", key=b"k" * 101)

    assert len(entries(link, keys, "access")) == 1


# --- partitions -----------------------------------------------------------------------------------


def test_producer_routes_keys_by_crc32(producer, link, keys):
    create(link, keys, "access", 4)
    for number in range(40):
        producer.send("access", b"x", key=f"k{number}")

    for partition in range(4):
        found = {entry["key"] for entry in entries(link, keys, "access", partition)}
        assert found == {b"k%d" % n for n in range(40) if zlib.crc32(b"k%d" % n) % 4 == partition}


def test_empty_key_is_a_valid_key(producer, link, keys):
    create(link, keys, "access", 4)
    for _ in range(3):
        producer.send("access", b"x", key="")

    assert [entry["key"] for entry in entries(link, keys, "access", zlib.crc32(b"") % 4)] == [
        b"",
        b"",
        b"",
    ]


def test_messages_without_a_key_use_partitions_in_turn(producer, link, keys):
    create(link, keys, "access", 4)

    producer.send_many("access", [b"%d" % n for n in range(10)])
    producer.send("access", b"10")
    producer.send("access", b"11")

    lengths = [len(entries(link, keys, "access", partition)) for partition in range(4)]
    assert lengths == [3, 3, 3, 3]


def test_explicit_partition_is_used_or_refused(producer, link, keys):
    create(link, keys, "access", 2)
    producer.send("access", b"x", partition=1)

    assert len(entries(link, keys, "access", 1)) == 1
    with pytest.raises(RequestRefusedError, match="partition 2 of topic"):
        producer.send("access", b"x", partition=2)


def test_equal_dedup_ids_share_a_partition(producer, link, keys):
    create(link, keys, "access", 8)

    first, *others = [producer.send("access", b"x", dedup_id="order-7") for _ in range(5)]

    assert set(others) == {first}
    assert not first.is_duplicate
    assert all(each.is_duplicate for each in others)
    assert sum(len(entries(link, keys, "access", n)) for n in range(8)) == 1


def test_dedup_ids_spread_over_the_partitions(producer, link, keys):
    create(link, keys, "access", 4)
    for number in range(20):
        producer.send("access", b"%d" % number, dedup_id=f"d{number}")

    for partition in range(4):
        found = {int(entry["payload"]) for entry in entries(link, keys, "access", partition)}
        assert found == {n for n in range(20) if zlib.crc32(b"d%d" % n) % 4 == partition}


# --- topics ---------------------------------------------------------------------------------------


def test_first_send_registers_the_partition_count(server, store: Store):
    with Producer(settings=with_topic(server.url, "access", 3)) as producer:
        producer.send("access", b"x")

    assert topics.partition_count(store, "access") == 3
    assert topics.names(store) == ["access"]


@pytest.mark.parametrize("delay", [None, 60.0])
def test_send_watches_no_key(producer, link, delay):
    """A send watches no key, because the script that writes compares the partition count itself.

    Nothing is kept between two sends.
    """
    link.execute("CONFIG", "RESETSTAT")

    producer.send("access", b"x", delay=delay)
    producer.send_many("access", [b"x"] * 1000)

    assert "cmdstat_watch:" not in link.execute("INFO", "commandstats").decode()


def test_send_without_create_refuses_an_unknown_topic(server, store: Store):
    with (
        Producer(server.url, create=False) as producer,
        pytest.raises(TopicNotFoundError, match="create"),
    ):
        producer.send("access", b"x")

    assert topics.partition_count(store, "access") is None


def test_producer_warns_about_a_different_configured_count(server, link, keys, caplog):
    create(link, keys, "access", 4)

    with (
        caplog.at_level(logging.WARNING, logger="streamqd.producer"),
        Producer(settings=with_topic(server.url, "access", 2)) as producer,
    ):
        for number in range(8):
            producer.send("access", b"%d" % number)

    assert [len(entries(link, keys, "access", n)) for n in range(4)] == [2, 2, 2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "topic access has 4 partitions; the configured 2 do not change that"
    ]


def test_producer_completes_an_interrupted_registration(producer, link, store: Store, keys):
    create(link, keys, "access", 2)
    link.execute("DEL", keys.registry())

    producer.send("access", b"x")

    assert topics.names(store) == ["access"]


def test_producer_refuses_an_unreadable_partition_count(proxy, link, keys):
    create(link, keys, "access", 4)
    proxy.arm(Fault.DROP_REPLY, command="HGET")
    with Producer(proxy.url) as producer:
        with pytest.raises(RedisUnavailableError, match="nothing was sent") as caught:
            producer.send("access", b"x")
        assert not caught.value.sent
        producer.send("access", b"y", partition=3)

    assert [len(entries(link, keys, "access", n)) for n in range(4)] == [0, 0, 0, 1]


def test_plain_send_needs_no_permission_to_load_scripts(server, link, keys):
    create(link, keys, "access", 2)
    ScriptLoader(link).run()
    rights = ["+xadd", "+hget", "+client|setname", "~stream:*", "~streaming:*"]
    rights += ["+evalsha", "+multi", "+exec"]
    if server.version[0] < 7:
        rights[2] = "+client"
    link.execute("ACL", "SETUSER", "sender", "reset", "on", "nopass", *rights)
    try:
        settings = config.Settings(
            redis=dataclasses.replace(server.settings, username="sender", password_file=None)
        )
        with Producer(settings=settings) as producer:
            producer.send("access", b"x")
            producer.send_many("access", [b"y", b"z"])
            with pytest.raises(RedisResponseError, match="producer-scripts"):
                producer.send("access", b"w", dedup_id="1")
            with pytest.raises(RedisResponseError, match="streamqd topic create other"):
                producer.send("other", b"w")
    finally:
        link.execute("ACL", "DELUSER", "sender")

    assert sum(len(entries(link, keys, "access", n)) for n in range(2)) == 3


# --- delayed --------------------------------------------------------------------------------------


def test_delayed_message_is_stored_outside_the_stream(producer, link, keys):
    sent = producer.send("access", b"x", key="k", delay=60)

    assert entries(link, keys, "access") == []
    [(member, due)] = pairs(
        link.execute("ZRANGE", keys.delayed_sends("access", 0), 0, -1, "WITHSCORES")
    )
    seconds, _ = link.execute("TIME")
    assert member.decode() == sent.id
    assert 55 <= float(due) / 1000 - int(seconds) <= 61


def test_delay_and_dedup_id_can_be_combined(producer, link, keys):
    first = producer.send("access", b"x", delay=60, dedup_id="a")
    second = producer.send("access", b"y", delay=60, dedup_id="a")

    assert first == second
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert link.execute("ZCARD", keys.delayed_sends("access", 0)) == 1


def pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


# --- lost answers ---------------------------------------------------------------------------------


@pytest.mark.fault("F12")
def test_send_with_a_lost_reply_is_not_repeated(proxy, link, keys):
    with Producer(proxy.url) as producer:
        producer.send("access", b"first")
        proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
        with pytest.raises(OutcomeUnknownError, match="may or may not"):
            producer.send("access", b"second")
        producer.send("access", b"third")

    assert [entry["payload"] for entry in entries(link, keys, "access")] == [
        b"first",
        b"second",
        b"third",
    ]


@pytest.mark.fault("F12")
def test_dedup_id_repeats_a_lost_send_without_a_duplicate(proxy, link, keys):
    with Producer(proxy.url) as producer:
        producer.send("access", b"first")
        trigger = proxy.arm(Fault.DROP_REPLY, wanted=lambda args: args[0] in (b"EVAL", b"EVALSHA"))
        # On a fresh server, the first answer is NOSCRIPT. It matters only that this answer is lost.
        sent = producer.send("access", b"second", dedup_id="2")
        assert trigger.hit
        assert producer.send("access", b"second", dedup_id="2") == sent

    assert [entry["payload"] for entry in entries(link, keys, "access")] == [b"first", b"second"]


def test_dedup_id_prevents_a_second_execution_of_the_script(proxy, link, keys):
    with Producer(proxy.url) as producer:
        producer.send("access", b"warm", dedup_id="1")
        trigger = proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
        sent = producer.send("access", b"second", dedup_id="2")
        assert trigger.hit

    found = link.execute("XRANGE", keys.stream("access", 0), "-", "+")
    assert [f"access/0/{raw_id.decode()}" for raw_id, _ in found][1:] == [sent]


def test_dedup_id_raises_if_every_reply_is_lost(proxy, link, keys, monkeypatch):
    monkeypatch.setattr("streamqd.producer.sender.PAUSES", (0.0, 0.0))
    with Producer(proxy.url) as producer:
        producer.send("access", b"warm", dedup_id="1")
        for nth in (1, 2, 3):
            proxy.arm(Fault.DROP_REPLY, command="EVALSHA", nth=nth)
        with pytest.raises(OutcomeUnknownError):
            producer.send("access", b"second", dedup_id="2")

    assert len(entries(link, keys, "access")) == 2


def test_unknown_outcome_stays_unknown_while_redis_is_down(proxy, link, keys, monkeypatch):
    monkeypatch.setattr("streamqd.producer.sender.PAUSES", (0.0,))
    with Producer(proxy.url) as producer:
        producer.send("access", b"warm", dedup_id="1")
        proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
        proxy.refusing = True
        with pytest.raises(OutcomeUnknownError):
            producer.send("access", b"second", dedup_id="2")

    assert len(entries(link, keys, "access")) == 2


@pytest.mark.parametrize("delay", [5, 3600])
def test_send_with_a_long_delay_is_repeated(proxy, link, keys, delay):
    with Producer(proxy.url) as producer:
        producer.send("access", b"warm", delay=delay)
        trigger = proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
        if delay < 30:
            with pytest.raises(OutcomeUnknownError):
                producer.send("access", b"second", delay=delay)
        else:
            producer.send("access", b"second", delay=delay)
        assert trigger.hit

    assert link.execute("ZCARD", keys.delayed_sends("access", 0)) == 2


def test_unsent_command_is_repeated(proxy, link, keys):
    with Producer(proxy.url) as producer:
        producer.send("access", b"first")
        proxy.cut()
        producer.send("access", b"second")

    assert len(entries(link, keys, "access")) == 2


def test_refused_connection_is_a_known_failure(proxy, link, keys, monkeypatch):
    monkeypatch.setattr("streamqd.producer.sender.PAUSES", (0.0,))
    with Producer(proxy.url) as producer:
        producer.send("access", b"first")
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(RedisUnavailableError) as caught:
            producer.send("access", b"second")
        assert not isinstance(caught.value, OutcomeUnknownError)
        assert not caught.value.sent
        tried = proxy.refused
        with pytest.raises(RedisUnavailableError):
            producer.send("access", b"second")
        assert proxy.refused == tried + 2, "before and after the pause"
        with pytest.raises(RedisUnavailableError) as caught:
            producer.send_many("access", [b"third"])
        assert not caught.value.sent

    assert len(entries(link, keys, "access")) == 1


# --- many messages --------------------------------------------------------------------------------


def test_send_many_keeps_the_order_and_returns_ids(producer, link, keys):
    ids = producer.send_many("access", (b"%d" % n for n in range(1300)))

    found = link.execute("XRANGE", keys.stream("access", 0), "-", "+")
    assert [f"access/0/{raw_id.decode()}" for raw_id, _ in found] == ids
    assert [fields[1] for _, fields in found] == [b"%d" % n for n in range(1300)]


def test_send_many_writes_bounded_chunks(proxy, link, keys):
    with Producer(proxy.url) as producer:
        chunks = list(producer.send_chunks("access", (b"x" for _ in range(1100))))
        large = list(producer.send_chunks("access", (b"y" * 400_000 for _ in range(6))))

    assert [len(chunk) for chunk in chunks] == [512, 512, 76]
    assert [len(chunk) for chunk in large] == [3, 3]


def test_send_many_accepts_keys_headers_and_partitions(producer, link, keys):
    create(link, keys, "access", 2)

    producer.send_many(
        "access",
        [
            Outgoing({"n": 1}, partition=1),
            Outgoing("two", "k", {"h": "v"}, 1),
            Outgoing(b"3", None, None, 1),
        ],
    )

    assert entries(link, keys, "access", 1) == [
        {"payload": b'{"n":1}'},
        {"payload": b"two", "key": b"k", "headers": b'{"h":"v"}'},
        {"payload": b"3"},
    ]


@pytest.mark.fault("F13")
def test_send_many_reports_confirmed_ids_after_a_lost_reply(proxy, link, keys):
    with Producer(proxy.url) as producer:
        producer.send("access", b"warm")
        proxy.arm(Fault.CUT_REPLY, command="EVALSHA", nth=2)
        with pytest.raises(BatchOutcomeUnknownError) as caught:
            producer.send_many("access", (b"%d" % n for n in range(2000)))

    error = caught.value
    assert isinstance(error, OutcomeUnknownError)
    assert (len(error.ids), error.unknown) == (512, 512)
    found = link.execute("XRANGE", keys.stream("access", 0), "-", "+")[1:]
    assert [f"access/0/{raw_id.decode()}" for raw_id, _ in found][: len(error.ids)] == error.ids
    assert len(found) <= 1024


@pytest.mark.fault("F21")
def test_send_many_reports_written_ids_with_full_memory(producer, link, keys):
    producer.send("access", b"warm")
    link.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(RedisResponseError) as single:
            producer.send("access", b"x")
        with pytest.raises(BatchRejectedError) as many:
            producer.send_many("access", [b"x", b"y"])
    finally:
        link.execute("CONFIG", "SET", "maxmemory", "0")

    assert single.value.code == many.value.code == "OOM"
    assert many.value.ids == [None, None]
    assert len(entries(link, keys, "access")) == 1


@pytest.mark.parametrize(
    ("first", "tries", "ids"),
    [
        (
            [RedisResponseError("TRYAGAIN", "x"), RedisResponseError("TRYAGAIN", "x")],
            2,
            ["access/0/3-0", "access/1/4-0"],
        ),
        ([[b"OK", [b"1-0"]], RedisResponseError("TRYAGAIN", "x")], 1, ["access/0/1-0", None]),
        ([RedisResponseError("OOM", "x"), RedisResponseError("OOM", "x")], 1, [None, None]),
    ],
)
def test_chunk_is_repeated_only_if_it_was_refused_whole(
    producer, link, keys, monkeypatch, first, tries, ids
):
    """A chunk is repeated only if all of it was refused.

    A cluster that is moving slots may refuse a part of a pipeline for some time.
    """
    create(link, keys, "access", 2)
    answers = [first, [[b"OK", [b"3-0"]], [b"OK", [b"4-0"]]]]

    def answered(topic: str, *_: object) -> Transaction:
        transaction = Transaction(topic, 2)
        transaction.answer(answers.pop(0))
        return transaction

    monkeypatch.setattr(producer._sender._writer, "post", answered)
    try:
        items = [Outgoing(b"x", partition=0), Outgoing(b"y", partition=1)]
        got: list[str | None] = list(producer.send_many("access", items))
    except BatchRejectedError as error:
        got = error.ids

    assert (got, 2 - len(answers)) == (ids, tries)


def test_send_many_writes_the_items_before_an_invalid_one(producer, link, keys):
    def items() -> Iterator[object]:
        yield from (b"0", b"1", object(), b"3")

    with pytest.raises(TypeError) as caught:
        producer.send_many("access", items())

    assert [entry["payload"] for entry in entries(link, keys, "access")] == [b"0", b"1"]
    assert caught.value.__notes__ == ["2 messages of this call were written before it"]


def test_send_chunks_schedules_many_messages(producer, link, keys):
    [ids] = producer.send_chunks("access", [b"x", b"y"], delay=60)

    members = link.execute("ZRANGE", keys.delayed_sends("access", 0), 0, -1)
    assert {each.decode() for each in members} == {each.id for each in ids}


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["python", "c"])
def test_producer_reconnects_in_a_forked_child(producer, link, keys, fork):
    """The producer reconnects even in a child of uWSGI.

    uWSGI forks in C, and by default runs no fork hook of Python.
    """
    producer.send("access", b"parent")
    pid = fork()
    if pid == 0:
        try:
            producer.send("access", b"child")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    producer.send("access", b"parent again")

    assert {entry["payload"] for entry in entries(link, keys, "access")} == {
        b"parent",
        b"child",
        b"parent again",
    }


def test_producer_reads_the_environment_without_arguments(
    server, store: Store, monkeypatch, tmp_path
):
    file = tmp_path / "streamq.toml"
    file.write_text(f'[redis]\nurl = "{server.url}"\n[topics.access]\npartitions = 2\n')
    monkeypatch.setenv("STREAMQ_CONFIG", str(file))

    with Producer() as producer:
        producer.send("access", b"x")

    assert topics.partition_count(store, "access") == 2


@pytest.mark.parametrize("kind", [Producer, BufferedProducer])
def test_producer_reads_the_default_configuration_file(
    server, store: Store, monkeypatch, tmp_path, kind
):
    """A producer reads the default file, so it connects to the same Redis as the command line."""
    (tmp_path / "streamq.toml").write_text(
        f'[redis]\nurl = "{server.url}"\n[topics.access]\npartitions = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STREAMQ_CONFIG", raising=False)

    with kind() as producer:
        producer.send("access", b"x")

    assert topics.partition_count(store, "access") == 3
    shown = CliRunner().invoke(cli, ["topic", "list", "--json"])
    assert [each["topic"] for each in json.loads(shown.stdout)["rows"]] == ["access"], shown.stdout


def test_explicit_configuration_file_overrides_the_default(
    server, store: Store, monkeypatch, tmp_path
):
    """An explicit file overrides the default one, just as on the command line."""
    (tmp_path / "streamq.toml").write_text('[redis]\nurl = "redis://nowhere.invalid:1/0"\n')
    named = tmp_path / "named.toml"
    named.write_text(f'[redis]\nurl = "{server.url}"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMQ_CONFIG", str(named))

    with Producer() as producer:
        producer.send("access", b"x")

    assert topics.partition_count(store, "access") == 1
