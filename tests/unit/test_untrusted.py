"""Every parser of a value from Redis returns it within bounds or raises InvalidValueError."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.errors import InvalidValueError
from streamqd.store import untrusted

RAW = st.one_of(
    st.none(),
    st.binary(max_size=64),
    st.integers().map(lambda n: str(n).encode()),
    st.floats().map(lambda n: repr(n).encode()),
    st.sampled_from([b"10" * 40, b"1e308", b"inf", b"nan", b"-0", b"+1", b" 1", b"1_0", b"\xb2"]),
)


@given(RAW)
def test_untrusted_integer_is_within_its_bounds(raw: bytes | None):
    try:
        found = untrusted.integer(raw, "k", "f", low=0, high=1000)
    except InvalidValueError:
        return
    assert type(found) is int
    assert 0 <= found <= 1000


@given(RAW)
def test_untrusted_number_is_finite_and_within_its_bounds(raw: bytes | None):
    try:
        found = untrusted.number(raw, "k")
    except InvalidValueError:
        return
    assert math.isfinite(found)
    assert 0 <= found <= untrusted.INTEGER_MAX


@given(st.one_of(RAW, st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_untrusted_text_is_decoded_unchanged(raw: bytes | None):
    try:
        found = untrusted.text(raw, "k")
    except InvalidValueError:
        return
    assert found.encode() == raw


@given(st.one_of(RAW, st.text("./\\ab-_\n\0", max_size=70).map(str.encode)))
def test_untrusted_name_is_one_path_component(raw: bytes | None):
    """Names with `..`, a separator, a leading dot or a line break are rejected."""
    try:
        found = untrusted.name(raw, "k")
    except InvalidValueError:
        return
    assert not found.startswith(".")
    assert set(found).isdisjoint("/\\\n\r\0 ")
    assert 1 <= len(found) <= 64


@pytest.mark.parametrize("raw", [b"..", b".", b".hidden", b"a/b", b"a\n", b"", b"x" * 65, b"\xff"])
def test_untrusted_invalid_name_is_refused(raw: bytes):
    with pytest.raises(InvalidValueError, match="a name of"):
        untrusted.name(raw, "streaming:mq:topics")


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"[]", b"", b"nul", b'"a"', b"\xff", None])
def test_untrusted_invalid_object_is_refused(raw: bytes | None):
    with pytest.raises(InvalidValueError, match="a JSON object"):
        untrusted.json_object(raw, "k", "f")


def test_untrusted_missing_value_has_a_default():
    assert untrusted.integer(None, "k", default=7) == 7
    assert untrusted.number(None, "k", default=0.5) == 0.5
    assert untrusted.text(None, "k", default="") == ""
    assert untrusted.json_object(None, "k", default={}) == {}
    with pytest.raises(InvalidValueError, match="k in Redis is nothing and not an integer"):
        untrusted.integer(None, "k")


@given(st.binary())
def test_printed_value_cannot_forge_a_line(raw: bytes):
    assert untrusted.format_value(raw).isascii()
    assert untrusted.format_value(raw).isprintable()
    assert len(untrusted.format_value(raw)) <= 4 * untrusted.SHOWN_BYTES + 5
