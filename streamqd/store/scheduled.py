"""Delayed sends of a partition, as the administration looks at and changes them.

They are kept as delayed retries are, so the scripts of those serve them too.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.errors import BadValue
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.retries import bounded
from streamqd.store.scripts import Call
from streamqd.store.untrusted import shown


def page(keys: Keys, topic: str, partition: int, after: tuple[int, str], count: int) -> Call:
    """Ask for the next delayed sends by due time behind `after` (due, send id), as `retries.page`.

    `retries.rows` reads the answer: the place of a row is its send id.
    """
    due, send_id = after
    return scripts.on(
        "retry_page",
        keys,
        (topic, partition),
        after_due=due,
        after_place=send_id,
        count=bounded(count),
    )


def hasten(keys: Keys, topic: str, partition: int, send_ids: Sequence[str]) -> Call:
    """Let delayed sends be due now. Answers how many are due, and how many are not delayed."""
    bounded(len(send_ids))
    return scripts.on("retry_hasten", keys, (topic, partition), places=send_ids)


def cancel(keys: Keys, topic: str, partition: int, send_ids: Sequence[str]) -> Call:
    """Lose delayed sends. Answers a word for each: MOVED when it is gone now, GONE when it was."""
    bounded(len(send_ids))
    flat: list[object] = []
    for send_id in send_ids:
        flat += (send_id, 0)
    return scripts.on("retry_cancel", keys, (topic, partition), drop=True, entries=flat)


def withdraw(keys: Keys, topic: str, partition: int, send_id: str) -> list[tuple[str, ...]]:
    """Make the transaction that cancels one delayed send, for a user without scripts.

    The first reply of EXEC is 1 if the send was waiting. A second call answers 0.
    """
    return [
        ("MULTI",),
        ("ZREM", keys.scheduled(topic, partition), send_id),
        ("HDEL", keys.scheduled_items(topic, partition), send_id),
        ("EXEC",),
    ]


def fields_of(raw: bytes | None, key: str, send_id: str) -> dict[bytes, bytes]:
    """Read an item: the fields of the message, as a script has packed them. Raises BadValue."""
    try:
        texts = _texts(raw or b"")
    except (IndexError, ValueError):
        texts = []
    if not texts or len(texts) % 2:
        raise BadValue(key, send_id, shown(raw), "the packed fields of a message")
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _texts(raw: bytes) -> list[bytes]:
    """A list of texts in MessagePack, which is all that cmsgpack.pack makes of our fields."""
    count, at = _length(raw, 0, {0xDC: 2, 0xDD: 4}, short=(0x90, 0x0F))
    found = []
    for _ in range(count):
        size, at = _length(raw, at, {0xD9: 1, 0xDA: 2, 0xDB: 4}, short=(0xA0, 0x1F))
        if at + size > len(raw):
            raise ValueError("it is cut off")
        found.append(raw[at : at + size])
        at += size
    return found


def _length(raw: bytes, at: int, wide: dict[int, int], short: tuple[int, int]) -> tuple[int, int]:
    """The length at a place, and the place behind it."""
    head, (tag, mask) = raw[at], short
    if head & ~mask == tag:
        return head & mask, at + 1
    if head not in wide:
        raise ValueError("it is something else")
    end = at + 1 + wide[head]
    return int.from_bytes(raw[at + 1 : end], "big"), end
