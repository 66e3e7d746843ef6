"""Cancel a delayed send without a script, and parse the stored form of delayed messages.

See `store.retries` for the calls that apply to delayed sends and waiting retries alike.
"""

from __future__ import annotations

from streamqd.errors import InvalidValueError
from streamqd.store.keys import Keys
from streamqd.store.untrusted import format_value


def withdraw(keys: Keys, topic: str, partition: int, send_id: str) -> list[tuple[str, ...]]:
    """Build a transaction that cancels one delayed send, for users who may not run scripts.

    The first reply in the result of EXEC is 1 if the send was still waiting, and 0 otherwise.
    """
    return [
        ("MULTI",),
        ("ZREM", keys.delayed_sends(topic, partition), send_id),
        ("HDEL", keys.delayed_send_items(topic, partition), send_id),
        ("EXEC",),
    ]


def unpack_fields(raw: bytes | None, key: str, send_id: str) -> dict[bytes, bytes]:
    """Return the fields of a delayed message from the form in which a script has packed them.

    Raises InvalidValueError if they cannot be unpacked.
    """
    try:
        texts = _texts(raw or b"")
    except (IndexError, ValueError):
        texts = []
    if not texts or len(texts) % 2:
        raise InvalidValueError(key, send_id, format_value(raw), "the packed fields of a message")
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _texts(raw: bytes) -> list[bytes]:
    """Decode a MessagePack list of strings. The scripts pack no other types."""
    count, at = _length(raw, 0, {0xDC: 2, 0xDD: 4}, short=(0x90, 0x0F))
    found = []
    for _ in range(count):
        size, at = _length(raw, at, {0xD9: 1, 0xDA: 2, 0xDB: 4}, short=(0xA0, 0x1F))
        if at + size > len(raw):
            raise ValueError("it is truncated")
        found.append(raw[at : at + size])
        at += size
    return found


def _length(raw: bytes, at: int, wide: dict[int, int], short: tuple[int, int]) -> tuple[int, int]:
    """Decode the length at position `at`, and return it together with the position after it.

    MessagePack stores a small length in the tag byte itself. `short` is the pair of that tag and
    the mask for its length bits. A larger length follows its tag, and `wide` maps each such tag to
    the number of bytes in the length.
    """
    head, (tag, mask) = raw[at], short
    if head & ~mask == tag:
        return head & mask, at + 1
    if head not in wide:
        raise ValueError("it has another type")
    end = at + 1 + wide[head]
    return int.from_bytes(raw[at + 1 : end], "big"), end
