"""The published vectors of the wire format: our producers write them, our messages read them."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.message import Delivery, Message
from streamqd.model import Assignment
from streamqd.policy.partitioning import crc32_partition
from streamqd.producer.encoding import encode_fields
from streamqd.worker.dead_letters import bookkeeping_fields
from tests.support.vectors import VECTORS, flat, outgoing, raw
from tests.unit.test_partitioning import bitwise_crc32

DELIVERY = Delivery(Assignment("access", 3, "hits"), "one", 1)


def each(part: str) -> Any:
    return pytest.mark.parametrize("vector", VECTORS[part], ids=lambda one: one.get("name", ""))


def message(vector: dict[str, Any], fields: str = "fields", stream: str = "") -> Message:
    retried = (stream or vector["stream"]) == "retry"
    return Message(DELIVERY, vector["id"].encode(), flat(vector[fields]), retried=retried)


@each("partition")
def test_key_partitions_match_the_wire_vectors(vector: dict[str, Any]) -> None:
    key = raw(vector["key"])
    assert bitwise_crc32(key) == vector["crc32"]
    assert {int(count) for count in vector["partition"]} >= {1, 3, 8, 12}
    for count, partition in vector["partition"].items():
        assert crc32_partition(key, int(count)) == vector["crc32"] % int(count) == partition


@each("write")
def test_producers_write_the_wire_vectors(vector: dict[str, Any]) -> None:
    assert encode_fields(outgoing(vector["send"]), 1000) == flat(vector["fields"])


@each("write")
def test_messages_round_trip_through_producers(vector: dict[str, Any]) -> None:
    item = outgoing(vector["send"])
    found = Message(DELIVERY, b"5-1", flat(vector["fields"]), retried=False)
    assert (found.key, found.headers) == (item.key, dict(item.headers or {}))
    assert found.json() == item.value if "json" in vector["send"] else found.payload == item.value


@each("read")
def test_messages_read_the_wire_vectors(vector: dict[str, Any]) -> None:
    found, wanted = message(vector), vector["message"]
    assert found.payload == raw(wanted["payload"])
    assert found.key == (None if wanted["key"] is None else raw(wanted["key"]))
    for name in ("uid", "attempt", "crash_count", "expires_at"):
        assert getattr(found, name) == wanted[name], name
    if wanted["headers"] is None:
        with pytest.raises(ValueError):  # noqa: PT011 - whichever kind the parser raises
            _ = found.headers
    else:
        assert found.headers == wanted["headers"]


@each("retried")
def test_retried_copy_contains_its_history(vector: dict[str, Any]) -> None:
    first = message(vector)
    changed = bookkeeping_fields(first, retries=vector["failures"], crashes=vector["crashes"])
    copy = message(vector, "copy", "retry")
    assert first.fields | changed == copy.fields
    assert copy.uid == first.uid
    assert (copy.attempt, copy.crash_count) == (vector["failures"] + 1, vector["crashes"])
