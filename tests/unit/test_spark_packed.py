"""A Msgpack payload becomes JSON with equal values, or a reason why it cannot."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("pyspark")

from pyspark.sql.types import (  # noqa: E402
    ArrayType,
    BinaryType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructType,
)

from streamqd.spark.pipelines import packed  # noqa: E402
from streamqd.spark.pipelines.packed import MsgpackTexts, reader  # noqa: E402

KIND = (
    StructType()
    .add("id", LongType())
    .add("note", StringType())
    .add("raw", BinaryType())
    .add("money", DecimalType(10, 2))
    .add("many", ArrayType(BinaryType()))
    .add("tags", MapType(StringType(), StructType().add("n", LongType()).add("b", BinaryType())))
)
pack = msgspec.msgpack.encode
DEEPEST: Any = 1
for _ in range(packed.DEPTH_MAX - 1):
    DEEPEST = [DEEPEST]


def read(payload: bytes | None) -> tuple[bytes | None, str | None]:
    (text,), (why,) = MsgpackTexts(KIND)([payload])
    assert (text is None) != (why is None)
    return text, why


def pack_field(value: bytes, name: bytes = b"x") -> bytes:
    """Return a map that has one name, with this encoded value."""
    return b"\x81" + bytes([0xA0 + len(name)]) + name + value


def timestamp(seconds: int, nanoseconds: int = 0) -> bytes:
    return b"\xc7\x0c\xff" + struct.pack(">Iq", nanoseconds, seconds)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"\x80", "{}"),
        (pack({"a": [None, True, -1, 2**64 - 1, 1.5, "ü\x00"], "b": {"c": {}}}), None),
        (pack_field(b"\xca\x3f\x80\x00\x00"), '{"x":1.0}'),  # a float in 4 bytes
        (pack_field(b"\xca\x3d\xcc\xcc\xcd"), '{"x":0.10000000149011612}'),
        (
            pack_field(b"\xd3" + struct.pack(">q", 5)),
            '{"x":5}',
        ),  # an encoding that is longer than necessary
        (pack_field(b"\xd9\x01a"), '{"x":"a"}'),
        (pack_field(b"\xdd\x00\x00\x00\x01\xde\x00\x01\xa1a\xcc\x01"), '{"x":[{"a":1}]}'),
        (pack_field(b"\xc4\x02hi"), '{"x":"aGk="}'),  # a value whose name is not a column
        (pack_field(b"\xc4\x02hi", b"raw"), '{"raw":"aGk="}'),
        (pack_field(b"\xc5\x00\x02hi", b"raw"), '{"raw":"aGk="}'),
        (pack_field(b"\x92\xc4\x02hi\xc0", b"many"), '{"many":["aGk=",null]}'),
        (pack_field(b"\x81\xa1k\x81\xa1b\xc4\x02hi", b"tags"), '{"tags":{"k":{"b":"aGk="}}}'),
        (pack_field(b"\xd6\xff\x00\x00\x00\x01"), '{"x":"1970-01-01T00:00:01Z"}'),
        (
            pack_field(b"\xd7\xff" + struct.pack(">Q", 123_456_789 << 34 | 1)),
            '{"x":"1970-01-01T00:00:01.123456789Z"}',
        ),
        (pack_field(timestamp(-1, 500_000_000)), '{"x":"1969-12-31T23:59:59.500000Z"}'),
        (pack_field(timestamp(-1, 999_999_999)), '{"x":"1969-12-31T23:59:59.999999999Z"}'),
        (pack_field(timestamp(-62_135_596_800)), '{"x":"0001-01-01T00:00:00Z"}'),
        (pack_field(timestamp(253_402_300_799, 1)), '{"x":"9999-12-31T23:59:59.000000001Z"}'),
        (pack({"x": DEEPEST}), None),
    ],
)
def test_msgpack_is_converted_to_equal_json(payload: bytes, text: str | None) -> None:
    wanted = msgspec.msgpack.decode(payload) if text is None else json.loads(text)
    found, why = read(payload)
    assert (json.loads(found or b"null"), why) == (wanted, None)
    if text is not None:
        assert found == text.encode()


BROKEN = "it is not msgpack"
KEY = "it contains a map with a key that is not a string"
NUMBER = "it contains NaN or an infinity"
DEEP = "it is nested more than 200 levels deep"
YEARS = "it contains a timestamp outside the years 1 to 9999"
TEXT = "it contains a string that is not UTF-8"
HOSTILE = [
    (None, "it has no payload"),
    (b"", "it has no payload"),
    (b"\xc1", BROKEN),
    (b'{"id": 1}', BROKEN),  # JSON; read as Msgpack, it is an integer followed by more bytes
    (b"\x81\xa1x", BROKEN),
    (pack({"x": "text"})[:-1], BROKEN),
    (b"\x80\x80", BROKEN),
    (b"\x80\n", BROKEN),
    (pack_field(b"\xc1"), BROKEN),
    (pack_field(b"\xdb\xff\xff\xff\xff"), BROKEN),
    (pack_field(b"\xc6\xff\xff\xff\xff"), BROKEN),
    (b"\xdd\xff\xff\xff\xff" * 100, BROKEN),
    (b"\xdf\xff\xff\xff\xff", BROKEN),
    (b"\x91" * 100_000, DEEP),
    (b"\x81\xa1x" * 100_000, DEEP),
    (pack({"x": [DEEPEST]}), DEEP),
    (pack([{"id": 1}]), "it is msgpack, but not a map"),
    (b"\xc0", "it is msgpack, but not a map"),
    (b"\x82\xa2id\x01\xa2id\x02", "the name 'id' occurs twice"),
    (b"\x82\xa2id\x01\xd9\x02id\x02", "the name 'id' occurs twice"),
    # This is as long as the map without its first value, because a float in 4 bytes becomes one in
    # 8.
    (b"\x82\xa1a\xcd\x01\x00\xa1a\xca\x3f\x80\x00\x00", "the name 'a' occurs twice"),
    (pack_field(b"\x82\xa2\xc3\xbc\x01\xa2\xc3\xbc\x02"), "the name '\\xfc' occurs twice"),
    (b"\x81\x01\x02", KEY),
    (b"\x81\xc4\x01a\x02", KEY),
    (b"\x81\xc0\x02", KEY),
    (pack_field(b"\x91\x81\x01\x02"), KEY),
    (b"\x81\x91\x01\x02", KEY),
    (b"\x81\x80\x02", KEY),
    (pack({"x": math.nan}), NUMBER),
    (pack({"x": [{"y": -math.inf}]}), NUMBER),
    (pack_field(b"\xca\x7f\x80\x00\x00"), NUMBER),
    (pack_field(b"\xa1\xff"), TEXT),
    (b"\x81\xa1\xff\x01", TEXT),
    (pack_field(b"\xa3\xed\xa0\x80"), TEXT),  # half of a surrogate pair
    (pack_field(b"\xd4\x05\x00"), "it contains a value of the extension type 5"),
    (pack_field(b"\xc7\x00\x80"), "it contains a value of the extension type -128"),
    (pack_field(b"\xd4\xff\x00"), BROKEN),  # a timestamp in one byte
    (pack_field(timestamp(1, 1_000_000_000)), BROKEN),
    (pack_field(timestamp(1 << 62)), YEARS),
    (pack_field(timestamp(-62_135_596_801)), YEARS),
    (pack_field(b"\xc4\x02hi", b"note"), "note is not string"),
    (
        pack_field(b"\xc4\x03\xd7\x6d\xf8", b"money"),
        "money is not decimal(10,2)",
    ),  # "1234" in base64
    (
        b"\x82\xa2id\xc4\x00\xa4tags\x81\xa1k\x81\xa1n\xc4\x00",
        "id is not bigint; tags is not map<string,struct<n:bigint,b:binary>>",
    ),
]


@pytest.mark.parametrize(("payload", "reason"), HOSTILE)
def test_msgpack_without_a_json_form_has_a_reason(payload: bytes | None, reason: str) -> None:
    assert read(payload) == (None, reason)


def test_invalid_payload_affects_only_its_own_row() -> None:
    payloads = [each for each, _ in HOSTILE]
    found = reader("msgpack", KIND)([b"\x80", *payloads, b"\x80"])
    assert (found.texts[0], found.texts[-1]) == (b"{}", b"{}")
    assert found.faults[1:-1] == [read(each)[1] for each in payloads]


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60))
def test_any_payload_is_converted_or_has_a_reason(payload: bytes) -> None:
    for each in (payload, pack_field(payload), b"\x82" + payload):
        text, _ = read(each)
        if text is not None:
            assert isinstance(json.loads(text), dict)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.text(max_size=3), VALUES))
def test_both_readers_return_the_same_values(value: dict[str, Any]) -> None:
    payload = pack(value)
    assert packed._read(payload) == (value, False)
    assert packed._ExactReader(payload).document() == value
    text, _ = read(payload)
    assert msgspec.json.decode(text) == value
