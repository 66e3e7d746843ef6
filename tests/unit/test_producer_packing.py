"""Commands as the bytes that the server reads."""

from __future__ import annotations

import hiredis
from hypothesis import given
from hypothesis import strategies as st

from streamqd.producer.encoding import Bare, Outgoing, envelope_of
from streamqd.producer.guard import ClusterGuard, Guard
from streamqd.store.keys import Keys

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
        ("XADD", stream, "*", *each.fields) for stream, each in zip(streams, envelopes, strict=True)
    ]
    packed = [hiredis.pack_command(each) for each in commands]

    assert Guard(Keys()).appends(streams, envelopes) == packed
    assert ClusterGuard(Keys()).appends(streams, envelopes) == commands


@given(PAYLOADS)
def test_a_payload_alone_is_the_only_field(payload: bytes) -> None:
    for found in (envelope_of(payload, 1000), envelope_of(Outgoing(payload), 1000)):
        assert type(found) is Bare
        assert found.fields == [b"payload", payload]
        assert found.size == len(b"payload") + len(payload)
