"""The fields that a producer writes, without Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import msgspec
import pydantic
import pytest

from streamqd.errors import MessageTooLargeError
from streamqd.handlers.payloads import decoder
from streamqd.producer.encoding import Encoded, Outgoing, batches, to_encoded, to_envelope

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
NOON_UTC = datetime(2030, 1, 1, 12, tzinfo=UTC)
NOON_UNIX_MS = 1_893_492_000_000
HALF = "a\ud800"  # half of a surrogate pair, which a careless decoder has left
SAID = r"'\\ud800', half of a surrogate pair, which UTF-8 cannot encode; fix the text"


@dataclass
class Order:
    customer: str
    lines: list[Line]


class Line(msgspec.Struct, rename={"count": "n"}):
    article: str
    count: int
    at: datetime


class Model(pydantic.BaseModel):
    customer: str
    at: datetime = pydantic.Field(alias="when")


def encode(item: Outgoing) -> Encoded:
    return to_encoded(to_envelope(item, 1000))


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (
            Order("Ann", [Line("tea", 2, NOON_UTC)]),
            b'{"customer":"Ann","lines":[{"article":"tea","n":2,"at":"2030-01-01T12:00:00Z"}]}',
        ),
        ([Order("Bob", [])], b'[{"customer":"Bob","lines":[]}]'),
        (Model(customer="Ann", when=NOON_UTC), b'{"customer":"Ann","when":"2030-01-01T12:00:00Z"}'),
    ],
)
def test_typed_value_is_decoded_by_a_typed_handler(value: Any, payload: bytes) -> None:
    assert encode(Outgoing(value)).fields == [b"payload", payload]

    handler = decoder(type(value), "json", "a handler") if not isinstance(value, list) else None
    assert handler is None or handler(payload) == value


@pytest.mark.parametrize(
    ("item", "delay", "at_unix_ms"),
    [
        (Outgoing(b"", delay=1.5), 1.5, None),
        (Outgoing(b"", delay=timedelta(minutes=1)), 60.0, None),
        (Outgoing(b"", delay=0), 0.0, None),
        (Outgoing(b"", at=NOON), None, NOON_UNIX_MS),
        (Outgoing(b"", at=NOON_UNIX_MS / 1000), None, NOON_UNIX_MS),
    ],
)
def test_scheduled_message_has_a_due_time_and_a_send_id(
    item: Outgoing, delay: float | None, at_unix_ms: int | None
) -> None:
    found = encode(item)

    assert (found.delay, found.at_unix_ms) == (delay, at_unix_ms)
    assert len(found.send_id) == 32
    assert found.send_id != encode(item).send_id


@pytest.mark.parametrize(
    ("expires", "fields"),
    [
        (30, [b"expiresAfter", b"30000"]),
        (0.5, [b"expiresAfter", b"500"]),
        (timedelta(hours=1), [b"expiresAfter", b"3600000"]),
        (NOON, [b"expiresAt", b"%d" % NOON_UNIX_MS]),
    ],
)
def test_expires_is_a_duration_or_an_instant(expires: Any, fields: list[bytes]) -> None:
    assert encode(Outgoing(b"x", expires=expires)).fields == [b"payload", b"x", *fields]


@pytest.mark.parametrize(
    ("item", "error", "text"),
    [
        (Outgoing(b"", delay=1, at=NOON), ValueError, "cannot be used with"),
        (Outgoing(b"", dedup_id=5), TypeError, "dedup_id must be a string, not 5"),
        (
            Outgoing(b"", headers=[("a", "b")]),
            TypeError,
            "headers must be a mapping of strings, not list",
        ),
        (Outgoing(b"", headers=[]), TypeError, "headers must be a mapping of strings, not list"),
        (Outgoing(b"", partition="0"), TypeError, "partition must be an integer, not '0'"),
        (Outgoing(b"", partition=True), TypeError, "partition must be an integer, not True"),
        (Outgoing(b"", delay=-1), ValueError, "delay must be 0 seconds to 100 years"),
        (Outgoing(b"", delay=float("nan")), ValueError, "delay must be 0 seconds"),
        (Outgoing(b"", delay=1e12), ValueError, "100 years"),
        (Outgoing(b"", delay="5s"), TypeError, "delay must be a number of seconds"),  # type: ignore[arg-type]
        (Outgoing(b"", delay=True), TypeError, "delay must be a number of seconds"),
        (Outgoing(b"", at=NOON.replace(tzinfo=None)), ValueError, "at needs a time zone"),
        (Outgoing(b"", at=float(NOON_UNIX_MS)), ValueError, "at must be in unix seconds"),
        (Outgoing(b"", at="noon"), TypeError, "at must be unix seconds or"),  # type: ignore[arg-type]
        (Outgoing(b"", expires=-1), ValueError, "expires must be 0 seconds"),
        (Outgoing(b"", expires=NOON.replace(tzinfo=None)), ValueError, "expires needs a time zone"),
        (Outgoing(b"", dedup_id=""), ValueError, "dedup_id must not be empty"),
        (Outgoing(b"", key=7), TypeError, "a key must be str or bytes, not int"),  # type: ignore[arg-type]
        (Outgoing(HALF), ValueError, rf"the payload contains {SAID}"),
        (Outgoing({"a": HALF}), ValueError, rf"the payload contains {SAID}"),
        (Outgoing(b"", key=HALF), ValueError, rf"the key contains {SAID}"),
        (Outgoing(b"", headers={"a": HALF}), ValueError, rf"one of the headers contains {SAID}"),
        (Outgoing(b"", headers={HALF: "a"}), ValueError, rf"one of the headers contains {SAID}"),
        (Outgoing(b"", dedup_id=HALF), ValueError, rf"dedup_id contains {SAID}"),
        (Outgoing({1, 2}), TypeError, "of type set cannot be converted to JSON; send bytes"),
        (Outgoing(Order), TypeError, "of type type cannot be converted to JSON; send bytes"),
        (
            Outgoing(b"x" * 1001),
            MessageTooLargeError,
            "takes 1,001 bytes, but max_message_bytes is 1,000",
        ),
    ],
)
def test_unsendable_value_error_is_one_sentence(
    item: Outgoing, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        encode(item)
    assert type(caught.value) is error


def cut_batches(items: Any, *, count: int = 3, size: int = 1000) -> list[list[bytes]]:
    found = batches(items, partial(to_envelope, max_bytes=1000), count=count, size=size)
    return [[to_encoded(each).fields[1] for each in batch] for batch in found]


def test_batches_are_bounded_by_count_and_bytes() -> None:
    assert cut_batches([b"1", b"2", b"3", b"4"]) == [[b"1", b"2", b"3"], [b"4"]]
    assert cut_batches([b"x" * 400] * 4) == [[b"x" * 400] * 3, [b"x" * 400]]
    assert cut_batches([b"x" * 600] * 3) == [[b"x" * 600] * 2, [b"x" * 600]]
    assert cut_batches([]) == []


def test_batch_contains_one_kind_of_message() -> None:
    items = [
        b"1",
        Outgoing(b"2", dedup_id="a"),
        Outgoing(b"3", delay=1),
        Outgoing(b"4", at=1),
        b"5",
    ]

    assert cut_batches(items) == [[b"1"], [b"2"], [b"3", b"4"], [b"5"]]


def test_error_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[object]:
        yield b"1"
        yield b"2"
        raise LookupError("the source is gone")

    found = batches(items(), partial(to_envelope, max_bytes=1000), count=3, size=1000)

    assert [to_encoded(each).fields[1] for each in next(found)] == [b"1", b"2"]
    with pytest.raises(LookupError):
        next(found)
