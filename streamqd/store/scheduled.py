"""Delayed sends of a partition: cancel one without a script, and read its item.

`store.retries` has the calls that also apply to waiting retries.
"""

from __future__ import annotations

from streamqd.errors import InvalidValueError
from streamqd.store.keys import Keys
from streamqd.store.untrusted import format_value


def withdraw(keys: Keys, topic: str, partition: int, send_id: str) -> list[tuple[str, ...]]:
    """Build the transaction that cancels one delayed send, for a user without scripts.

    The first reply of EXEC is 1 if the send was waiting, else 0.
    """
    return [
        ("MULTI",),
        ("ZREM", keys.delayed_sends(topic, partition), send_id),
        ("HDEL", keys.delayed_send_items(topic, partition), send_id),
        ("EXEC",),
    ]


def fields_of(raw: bytes | None, key: str, send_id: str) -> dict[bytes, bytes]:
    """Read an item: the fields of a message, packed by a script. Raises InvalidValueError."""
    try:
        texts = _texts(raw or b"")
    except (IndexError, ValueError):
        texts = []
    if not texts or len(texts) % 2:
        raise InvalidValueError(key, send_id, format_value(raw), "the packed fields of a message")
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _texts(raw: bytes) -> list[bytes]:
    """Decode a MessagePack list of strings, the only types that the scripts pack."""
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
    """Return the length at a position, and the position after it."""
    head, (tag, mask) = raw[at], short
    if head & ~mask == tag:
        return head & mask, at + 1
    if head not in wide:
        raise ValueError("it has another type")
    end = at + 1 + wide[head]
    return int.from_bytes(raw[at + 1 : end], "big"), end
