"""A message that has only a payload is its own envelope."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.errors import MessageTooLargeError
from streamqd.producer.encoding import Outgoing, envelope_size, to_encoded, to_envelope

PAYLOADS = st.binary(max_size=300)


@given(PAYLOADS)
def test_bare_payload_needs_no_envelope(payload: bytes) -> None:
    for found in (to_envelope(payload, 1000), to_envelope(Outgoing(payload), 1000)):
        assert found is payload, "no copy, and nothing that the collector would visit"
        assert to_encoded(found).fields == [b"payload", payload]
        assert envelope_size(found) == to_encoded(found).size == len(b"payload") + len(payload)


class Padded(bytes):
    def __bytes__(self) -> bytes:
        return self[:] + b" and more"


def test_measured_size_equals_the_written_size() -> None:
    with pytest.raises(MessageTooLargeError):
        to_envelope(Padded(b"x" * 5), 5)
    found = to_envelope(Padded(b"x"), 1000)
    assert type(found) is bytes
    assert to_encoded(found).fields == [b"payload", b"x and more"]
