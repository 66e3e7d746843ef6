"""A handler's message is decoded lazily, and does not trust a producer's bookkeeping fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.message import Delivery, Message
from streamqd.model import Assignment

DELIVERY = Delivery(Assignment("access", 3, "hits"), "west-1", 1_763_640_000_123)
ID = b"1763640000000-7"


def message(*fields: bytes, retried: bool = False, entry_id: bytes = ID) -> Message:
    return Message(DELIVERY, entry_id, list(fields), retried=retried)


def test_plain_entry_has_default_counts():
    plain = message(b"payload", b'{"a": 1}')
    assert plain.payload == b'{"a": 1}'
    assert plain.json() == {"a": 1}
    assert plain.text() == '{"a": 1}'
    assert (plain.id, plain.original_id, plain.attempt) == ("1763640000000-7",) * 2 + (1,)
    assert (plain.topic, plain.partition, plain.group) == ("access", 3, "hits")
    assert plain.uid == "access/3/1763640000000-7"
    assert plain.epoch == 1_763_640_000_123
    assert plain.timestamp == 1_763_640_000.0
    assert plain.key is None
    assert plain.headers == {}
    assert (plain.retry_count, plain.crash_count, plain.replay_count) == (0, 0, 0)


def test_payload_field_may_be_anywhere_or_missing():
    assert message(b"key", b"k", b"payload", b"x").payload == b"x"
    assert message(b"key", b"k").payload == b""
    assert message().payload == b""


def test_field_value_is_not_parsed_as_a_name():
    odd = message(b"key", b"payload", b"payload", b"x")
    assert (odd.key, odd.payload) == (b"payload", b"x")


NAMES = st.sampled_from([b"payload", b"key", b"headers", b"x", b""])


@given(st.lists(st.tuples(NAMES, NAMES | st.binary(max_size=3)), max_size=6))
def test_duplicate_field_names_return_the_last_value(pairs: list[tuple[bytes, bytes]]):
    """If a field occurs twice, every reader returns the last one."""
    flat = [part for pair in pairs for part in pair]
    found = message(*flat)
    assert found.payload == dict(pairs).get(b"payload", b"")
    assert found.key == dict(pairs).get(b"key")
    assert found.fields == dict(pairs)
    assert (message(*flat).payload, message(*flat).key) == (found.payload, found.key)


@pytest.mark.parametrize("topic", [b"..", b".", b".x", b"a/b", b""])
def test_invalid_origin_topic_is_ignored(topic: bytes):
    """An invalid origin is ignored, because handlers may use the origin in file names."""
    fields = (b"originalTopic", topic, b"originalId", b"1-1", b"originalPartition", b"0")
    assert message(b"payload", b"", *fields).origin == ("access", 3)


def test_message_is_decoded_lazily():
    broken = message(b"payload", b"\xff\xfe", b"headers", b"[1]", b"originalId", b"\xff")
    assert broken.payload == b"\xff\xfe"
    assert broken.id == "1763640000000-7"
    assert "fields" not in vars(broken), "the fields were not even paired"
    with pytest.raises(UnicodeDecodeError):
        broken.text()
    with pytest.raises(ValueError, match="not a JSON object"):
        _ = broken.headers
    with pytest.raises(ValueError):  # noqa: PT011 - whichever kind the parser raises
        broken.json()
    assert broken.text("latin-1") == "ÿþ"


def test_headers_are_parsed_once():
    parsed = message(b"payload", b"", b"headers", b'{"a": "b"}')
    assert parsed.headers == {"a": "b"}
    assert parsed.headers is parsed.headers


def test_retried_entry_has_its_history():
    fields = (b"payload", b"x", b"originalId", b"1763000000000-1", b"retryCount", b"2")
    again = message(*fields, b"crashCount", b"1", b"replayCount", b"3", retried=True)
    assert (again.attempt, again.retry_count) == (3, 2)
    assert (again.crash_count, again.replay_count) == (1, 3)
    assert again.original_id == "1763000000000-1"
    assert again.uid == "access/3/1763000000000-1"
    assert again.timestamp == 1_763_000_000.0
    assert again.id == "1763640000000-7"


# --- bookkeeping fields written by a producer -----------------------------------------------------

HOSTILE = (b"retryCount", b"99", b"crashCount", b"99", b"replayCount", b"99")


def test_counts_in_the_partition_stream_are_ignored():
    fresh = message(b"payload", b"x", *HOSTILE)
    assert (fresh.attempt, fresh.crash_count, fresh.replay_count) == (1, 0, 0)
    assert fresh.fields[b"retryCount"] == b"99", "they stay readable, as anything else"


def test_forgiven_at_is_read_only_in_the_retry_stream():
    fields = (b"payload", b"x", b"forgivenAt", b"1763640000123")
    assert message(*fields).forgiven_at == 0.0
    assert message(*fields, retried=True).forgiven_at == 1_763_640_000.123


def test_valid_original_id_is_used():
    assert message(b"originalId", b"5-1").uid == "access/3/5-1"


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"5",
        b"5-",
        b"-1",
        b"5-1 ",
        b"5-1\n",
        b"5-1/../../x",
        b"+5-1",
        b"5-1-1",
        b"\xd9\xa5-1",
        b"1" * 21 + b"-0",
        b"x" * 100_000,
    ],
)
def test_any_other_original_id_is_ignored(written: bytes):
    odd = message(b"payload", b"x", b"originalId", written)
    assert odd.original_id == "1763640000000-7"
    assert odd.timestamp == 1_763_640_000.0


def test_moved_message_keeps_its_original_uid():
    origin = (b"originalTopic", b"orders", b"originalPartition", b"7")
    moved = message(b"payload", b"x", b"originalId", b"5-1", *origin)
    assert moved.uid == "orders/7/5-1"
    assert (moved.topic, moved.partition) == ("access", 3)
    assert message(b"payload", b"x", *origin).uid == "access/3/1763640000000-7"
    for topic, number in ((b"a b", b"7"), (b"", b"7"), (b"a", b""), (b"a", b"-1"), (b"\xff", b"7")):
        fields = (b"originalTopic", topic, b"originalPartition", number)
        assert message(b"originalId", b"5-1", *fields).uid == "access/3/5-1"


@pytest.mark.parametrize("written", [b"", b"-1", b"1.5", b"1e9", b" 1", b"\xb2", b"x", b"9" * 5000])
def test_invalid_retry_count_is_zero(written: bytes):
    assert message(b"retryCount", written, retried=True).attempt == 1


@given(st.lists(st.binary(max_size=30), max_size=12), st.booleans())
def test_counts_are_read_from_any_fields(values: list[bytes], retried: bool):
    names = [b"payload", b"key", b"headers", b"originalId", b"retryCount", b"crashCount"]
    flat = [part for pair in zip(names, values, strict=False) for part in pair]
    odd = Message(DELIVERY, ID, flat, retried=retried)
    assert odd.attempt >= 1
    assert odd.uid.startswith("access/3/")
    assert odd.timestamp >= 0
    assert repr(odd)
    assert isinstance(odd.payload, bytes)


def test_delivery_is_immutable():
    with pytest.raises(AttributeError):
        DELIVERY.epoch = 1  # type: ignore[misc]
