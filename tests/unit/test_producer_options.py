"""The options of producers accept durations and sizes in every spelling, and explain mistakes."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from streamqd import AsyncProducer, BufferedProducer, Producer, RedisUnavailableError
from streamqd.producer import options

NOWHERE = "redis://127.0.0.1:1/0"  # these tests send nothing

WRONG = [
    ("timeout", -1, ValueError),
    ("timeout", 0, ValueError),
    ("timeout", "soon", ValueError),
    ("timeout", True, TypeError),
    ("timeout", None, TypeError),
    ("timeout", 10**9, ValueError),
    ("dedup_window", -1, ValueError),
    ("dedup_window", 0, ValueError),
    ("dedup_window", b"5m", TypeError),
    ("backlog_wait", float("nan"), ValueError),
    ("backlog_wait", "-1s", ValueError),
    ("max_backlog", True, TypeError),
    ("max_backlog", "10", TypeError),
    ("max_backlog", 0, ValueError),
    ("max_backlog", 2.5, TypeError),
    ("create", "yes", TypeError),
]
WRONG_BUFFER = [
    ("max_messages", 0, ValueError),
    ("max_messages", "9", TypeError),
    ("max_bytes", -1, ValueError),
    ("max_bytes", "many", ValueError),
    ("max_bytes", 1.5, TypeError),
    ("max_bytes", True, TypeError),
]
WRONG_BUFFERED = [
    ("linger", -1, ValueError),
    ("linger", float("inf"), ValueError),
    ("linger", None, TypeError),
    ("block", timedelta(seconds=-1), ValueError),
    ("max_batch", 2.5, TypeError),
    ("max_batch", 0, ValueError),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    [
        *((kind, *each) for each in WRONG for kind in (Producer, BufferedProducer, AsyncProducer)),
        *((kind, *each) for each in WRONG_BUFFER for kind in (BufferedProducer, AsyncProducer)),
        *((BufferedProducer, *each) for each in WRONG_BUFFERED),
    ],
)
def test_invalid_producer_option_is_named(kind: Any, name: str, value: object, error: type):
    with pytest.raises(error) as caught:
        kind(NOWHERE, **{name: value})
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{name} must be ")
    assert str(caught.value).endswith(f", not {value!r}")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"linger": "5ms"}, 0.005),
        ({"timeout": timedelta(seconds=2)}, 2.0),
        ({"dedup_window": "10m"}, 600.0),
        ({"backlog_wait": 0}, 0.0),
        ({"block": 1.5}, 1.5),
        ({"max_bytes": "64MiB"}, 64 << 20),
        ({"max_bytes": 7}, 7),
        ({"max_backlog": None}, None),
        ({"create": False}, False),
    ],
)
def test_producer_options_accept_every_spelling(given: dict[str, Any], found: object):
    assert list(options.parse_options(**given).values()) == [found]


def test_every_option_has_a_check_except_the_partitioner():
    told = {**get_type_hints(options.ProducerOptions), **get_type_hints(options.BufferOptions)}
    for name in told.keys() - {"partitioner"}:
        with pytest.raises(TypeError, match=name):
            options.parse_options(**{name: object()})


def test_producers_accept_durations_and_sizes_as_strings():
    Producer(NOWHERE, timeout="5s", dedup_window="10m", backlog_wait="1s", max_backlog=1).close()
    BufferedProducer(NOWHERE, linger="5ms", max_bytes="64MiB", block="1m", timeout="5s").close()
    AsyncProducer(NOWHERE, max_bytes="64MiB", timeout="5s")


@pytest.mark.parametrize("topic", [5, None, b"access", ["access"]])
def test_topic_that_is_not_a_string_is_refused(topic: Any):
    async def send() -> None:
        await AsyncProducer(NOWHERE).send(topic, b"x")

    with BufferedProducer(NOWHERE) as buffered:
        for call in (
            lambda: Producer(NOWHERE).send(topic, b"x"),
            lambda: Producer(NOWHERE).send_many(topic, [b"x"]),
            lambda: buffered.send(topic, b"x"),
            lambda: asyncio.run(send()),
        ):
            with pytest.raises(TypeError, match="a topic must be a string, not "):
                call()


def test_unknown_partition_count_error_is_one_sentence():
    with Producer(NOWHERE) as producer, pytest.raises(RedisUnavailableError) as caught:
        producer.send("access", b"x")
    assert str(caught.value).count("cannot read the partition count of topic access") == 1
    assert not caught.value.sent
