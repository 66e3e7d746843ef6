"""Messages survive the columns of an outbox, and a hostile column harms only its own row."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.outbox.rows import (
    UID,
    OutboxRow,
    SentRow,
    decode,
    decode_all,
    encode,
    new_uid,
    uid_unix_ms,
)
from streamqd.outbox.table import COLUMNS, DIALECTS, OutboxTable
from streamqd.producer.encoding import Outgoing, encode_fields, to_encoded, to_envelope

MAX = 1 << 20
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
messages = st.builds(
    Outgoing,
    st.one_of(st.binary(max_size=50), texts, st.dictionaries(texts, st.integers())),
    key=st.none() | st.binary(max_size=20) | texts,
    headers=st.none() | st.dictionaries(texts, texts, max_size=5),
    partition=st.none() | st.integers(0, 4_095),
    delay=st.none() | st.floats(0, 10**6),
    at=st.none(),
    expires=st.none() | st.floats(0, 10**6),
    dedup_id=st.none(),
)
hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(max_size=60),
    st.text(max_size=60),
    st.sampled_from([b"{}", "[" * 5_000, b"expiresAt=1", "0" * 32, '{"a":1}', "orders"]),
)


def read(row: SentRow, at: int = 1) -> OutboxRow:
    columns = [each.encode() if isinstance(each, str) else each for each in row]
    [found] = decode_all([(at, *columns, None, None)], MAX)
    return found


@given(messages)
def test_message_survives_the_columns_unchanged(message: Outgoing) -> None:
    row = read(encode("orders", to_encoded(to_envelope(message, MAX)), 1_700_000_000_000))
    assert row.fault == ""
    assert row.fields == encode_fields(message, MAX)
    assert row.size == sum(map(len, row.fields))
    assert row.partition == message.partition
    assert (row.due_unix_ms is None) == (message.delay is None)


@given(st.lists(hostile, min_size=len(COLUMNS) - 1, max_size=len(COLUMNS) - 1))
def test_hostile_row_is_decoded_or_has_a_fault(values: list[Any]) -> None:
    row = decode((7, *values, None, None), MAX)
    assert decode_all([(7, *values, None, None)], MAX) == [row]
    assert row.id == 7
    assert "\n" not in row.fault
    if row.fault:
        return
    assert UID.fullmatch(row.uid)
    assert all(type(each) is bytes for each in row.fields)
    assert row.partition is None or row.partition >= 0


@given(st.sampled_from(COLUMNS[1:]), hostile)
def test_hostile_column_leaves_the_others_intact(name: str, value: Any) -> None:
    good = encode("orders", to_encoded(to_envelope(Outgoing(b"x", key="k"), MAX)))
    columns = dict(zip(COLUMNS[1:], good, strict=True)) | {name: value}
    row = decode((1, *columns.values(), None, None), MAX)
    raw = [each.encode() if isinstance(each, str) else each for each in columns.values()]
    [quick] = decode_all([(1, *raw, None, None)], MAX)
    assert quick == row or isinstance(value, str)
    if row.fault:
        assert row.fault.startswith(f"{name} ")
    if name != "uid":
        assert row.uid == good.uid


@pytest.mark.parametrize("sizes", [(MAX + 1, None), (None, MAX + 1)])
def test_fault_of_an_oversized_row_names_its_size(sizes: tuple[int, int]) -> None:
    good = encode("orders", to_encoded(to_envelope(b"x", MAX)))
    assert " 1,048,577 bytes" in decode((1, *good, *sizes), MAX).fault


@given(st.integers(0, 2**48 - 1))
def test_uid_is_a_uuid7_of_its_time(unix_ms: int) -> None:
    uid = new_uid(unix_ms)
    assert UID.fullmatch(uid)
    assert uid[12] == "7"
    assert uid[16] in "89ab"
    assert uid_unix_ms(uid) == unix_ms


def test_uids_of_one_millisecond_differ() -> None:
    now = time.time_ns() // 1_000_000
    assert len({new_uid(now) for _ in range(10_000)}) == 10_000


@pytest.mark.parametrize("name", ["", "a.b.c", "a-b", "1a", 'a"', "a\n", "é", "a" * 49, ".a", "a."])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_invalid_table_name_is_refused(name: str, dialect: str) -> None:
    with pytest.raises(ValueError, match="not a valid table name"):
        OutboxTable(name, DIALECTS[dialect])
