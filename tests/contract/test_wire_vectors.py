"""The scripts write the published vectors of the wire format."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.message import Delivery, Message
from streamqd.model import Lease
from streamqd.producer import Outgoing, Producer
from streamqd.store import messages
from streamqd.worker.dead_letters import bookkeeping_fields
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.vectors import VECTORS, flat, outgoing


def each(part: str) -> Any:
    return pytest.mark.parametrize("vector", VECTORS[part], ids=lambda one: one["name"])


@each("retried")
def test_settle_retry_writes_the_published_vectors(
    harness: Harness, vector: dict[str, Any]
) -> None:
    harness.groups()
    retried = vector["stream"] == "retry"
    stream = harness.keys.retry_stream(*ASSIGNMENT) if retried else ""
    harness.add(vector["id"], *flat(vector["fields"]), stream=stream)
    harness.fetch(stream=stream)
    harness.own("t1")
    delivery = Delivery(ASSIGNMENT, "one", 1)
    entry = Message(delivery, vector["id"].encode(), flat(vector["fields"]), retried=retried)
    changed = bookkeeping_fields(entry, retries=vector["failures"], crashes=vector["crashes"])
    place = (b"r:" if retried else b"m:") + entry.id_bytes

    call = messages.retry(harness.keys, Lease(ASSIGNMENT, "t1"), [(place, 0.0, changed)])
    harness.expect_entries("settle_retry", ["MOVED"], call)
    harness.expect("message_promote", "OK", messages.promote_retries(harness.keys, ASSIGNMENT, 10))

    [*_, (_, copy)] = harness.do("XRANGE", harness.keys.retry_stream(*ASSIGNMENT), "-", "+")
    wanted = flat(vector["copy"])
    assert sorted(pairs(copy)) == sorted(pairs(wanted))
    assert copy[:2] == wanted[:2], "the payload comes first"


@each("scripted")
def test_scripts_write_the_published_vectors(
    harness: Harness, server: Any, vector: dict[str, Any]
) -> None:
    item: Outgoing = outgoing(vector["send"])
    with Producer(server.url) as producer:
        [told] = producer.send_many(ASSIGNMENT.topic, [item])
    due = messages.promote_delayed(harness.keys, ASSIGNMENT.topic, 0, 10)
    harness.expect("message_promote", "OK", due)

    [(found, fields)] = harness.do("XRANGE", harness.keys.stream(ASSIGNMENT.topic, 0), "-", "+")
    assert [name for name, _ in pairs(fields)] == [
        name for name, _ in pairs(flat(vector["fields"]))
    ]
    for (name, value), (_, wanted) in zip(
        pairs(fields), pairs(flat(vector["fields"])), strict=True
    ):
        if wanted == b"<unix ms>":
            assert abs(int(value) - harness.now_unix_ms()) < 3_600_000, name
        elif wanted == b"<send id>":
            assert value == told.id.encode(), name
        else:
            assert value == wanted, name
    if "dedup_key" in vector:
        assert harness.do("GET", vector["dedup_key"]) == found == told.id.encode()


def pairs(values: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(values[::2], values[1::2], strict=True))
