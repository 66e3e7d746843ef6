"""Commands as the bytes that the server reads."""

from __future__ import annotations

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.errors import MessageTooLarge
from streamqd.producer.encoding import (
    Outgoing,
    appends,
    envelope_of,
    expanded,
    packed_appends,
    size_of,
)

STREAMS = st.sampled_from(["stream:topic:{access:p:0}", "stream:topic:{access:p:1}", "s"])
PAYLOADS = st.binary(max_size=300)
MESSAGES = st.one_of(
    PAYLOADS,
    PAYLOADS.map(Outgoing),
    PAYLOADS.map(lambda payload: Outgoing(payload, b"a key", {"a": "1"})),
)


@given(st.lists(st.tuples(STREAMS, MESSAGES)))
def test_messages_are_packed_as_hiredis_packs_them(
    messages: list[tuple[str, bytes | Outgoing]],
) -> None:
    streams = [each for each, _ in messages]
    envelopes = [envelope_of(each, 1000) for _, each in messages]
    commands = [
        ("XADD", stream, "*", *expanded(each).fields)
        for stream, each in zip(streams, envelopes, strict=True)
    ]
    packed = [hiredis.pack_command(each) for each in commands]

    assert packed_appends(streams, envelopes) == packed
    assert appends(streams, envelopes) == commands


@given(PAYLOADS)
def test_a_payload_alone_is_its_own_envelope(payload: bytes) -> None:
    for found in (envelope_of(payload, 1000), envelope_of(Outgoing(payload), 1000)):
        assert found is payload, "no copy, and nothing that the collector would visit"
        assert expanded(found).fields == [b"payload", payload]
        assert size_of(found) == expanded(found).size == len(b"payload") + len(payload)


class Padded(bytes):
    def __bytes__(self) -> bytes:
        return self[:] + b" and more"


def test_what_is_measured_is_what_is_written() -> None:
    with pytest.raises(MessageTooLarge):
        envelope_of(Padded(b"x" * 5), 5)
    found = envelope_of(Padded(b"x"), 1000)
    assert type(found) is bytes
    assert expanded(found).fields == [b"payload", b"x and more"]
