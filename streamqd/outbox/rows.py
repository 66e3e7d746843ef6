"""Encode a message as a row of the outbox, and decode rows whose columns are not trusted.

This module uses no connection. If a row cannot be decoded, it gets a fault, and other rows are not
affected.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from streamqd.config.setting import NAME, NAME_HINT
from streamqd.message import EXPIRES_AFTER, EXPIRES_AT, HEADERS_MAX
from streamqd.producer.encoding import Encoded
from streamqd.words import escape_unprintable

UID = re.compile(r"[0-9a-f]{32}")
_UID_BYTES = re.compile(UID.pattern.encode())
_EXPIRY = re.compile(r"(expiresAt|expiresAfter)=([0-9]{1,15})")
_EXPIRY_NAMES = {"expiresAt": EXPIRES_AT, "expiresAfter": EXPIRES_AFTER}
_UNIX_MS_MAX = 10**15
_PARTITION_MAX = 2**31 - 1
_NOT_TOO_LARGE = [None, None]
SHOWN_MAX = 40  # characters that are shown of an invalid ID


class OutboxRow(NamedTuple):
    """One row, as the relay has read it.

    If `fault` (a sentence) is set, the row cannot be sent. Then only `id` is certain, and fields
    that could not be read are empty. `expires` contains the name and the value of the message's
    expiry field.
    """

    id: int
    uid: str = ""
    topic: str = ""
    key: bytes | None = None
    partition: int | None = None
    payload: bytes = b""
    headers: bytes | None = None
    expires: tuple[bytes, bytes] | None = None
    due_unix_ms: int | None = None
    created_unix_ms: int = 0
    fault: str = ""

    @property
    def fields(self) -> list[bytes]:
        """The names and values of the entry as a producer writes them, without the send ID."""
        fields = [b"payload", self.payload]
        if self.key is not None:
            fields += (b"key", self.key)
        if self.headers is not None:
            fields += (b"headers", self.headers)
        if self.expires is not None:
            fields += self.expires
        return fields

    @property
    def size(self) -> int:
        """The size in bytes of the names and values of its fields."""
        size = len(b"payload") + len(self.payload)
        if self.key is not None:
            size += len(b"key") + len(self.key)
        if self.headers is not None:
            size += len(b"headers") + len(self.headers)
        if self.expires is not None:
            size += sum(map(len, self.expires))
        return size


class DeadRow(NamedTuple):
    """One row that could not be sent, in printable form.

    `failed_unix_ms` is a time on the relay's clock.
    """

    id: int
    uid: str
    topic: str
    error: str
    failed_unix_ms: int


class SentRow(NamedTuple):
    """The columns of a message to be sent, in the order of `table.SENT_COLUMNS`."""

    uid: str
    topic: str
    key: bytes | None
    partition: int | None
    payload: bytes
    headers: str | None
    expires: str | None
    due_unix_ms: int | None
    created_unix_ms: int


def new_uid(unix_ms: int) -> str:
    """Return a new UUIDv7 as 32 hex digits, of which the first 12 contain the time."""
    chance = int.from_bytes(os.urandom(10), "big")
    high = (unix_ms & (1 << 48) - 1) << 80
    return f"{high | 7 << 76 | (chance >> 68) << 64 | 2 << 62 | chance & (1 << 62) - 1:032x}"


def uid_unix_ms(uid: str) -> int:
    """Return the time in a uid (Unix ms, sender's clock). This accepts any 32 hex digits."""
    return int(uid[:12], 16)


def encode(topic: str, message: Encoded, now_unix_ms: int | None = None) -> SentRow:
    """Return an encoded message as columns. `now_unix_ms` is the time on the sender's clock."""
    now = time.time_ns() // 1_000_000 if now_unix_ms is None else now_unix_ms
    fields = dict(zip(message.fields[::2], message.fields[1::2], strict=True))
    due = message.at_unix_ms
    if message.delay is not None:
        due = now + round(message.delay * 1000)
    headers = fields.get(b"headers")
    expires = None
    for text, name in _EXPIRY_NAMES.items():
        if name in fields:
            expires = f"{text}={fields[name].decode()}"
    return SentRow(
        new_uid(now),
        topic,
        message.key,
        message.partition,
        fields[b"payload"],
        None if headers is None else headers.decode(),
        expires,
        due,
        now,
    )


def decode_all(rows: Iterable[Sequence[Any]], max_bytes: int) -> list[OutboxRow]:
    """Decode rows whose columns are not trusted, each as `decode` does."""
    topics: dict[bytes, str] = {}  # names already checked in this batch
    return [_decode_usual(columns, topics) or decode(columns, max_bytes) for columns in rows]


def _decode_usual(columns: Sequence[Any], topics: dict[bytes, str]) -> OutboxRow | None:
    """Return the row of an ordinary message, or None if `decode` must check each column."""
    number, uid, topic, key, partition, payload, headers, expires, due, created, *sizes = columns
    if not (
        type(number) is int
        and type(uid) is bytes
        and _UID_BYTES.fullmatch(uid)
        and type(topic) is bytes
        and (key is None or type(key) is bytes)
        and type(payload) is bytes
        and partition is headers is expires is due is None
        and type(created) is int
        and 0 <= created <= _UNIX_MS_MAX
        and sizes == _NOT_TOO_LARGE
    ):
        return None
    name = topics.get(topic)
    if name is None:
        try:
            name = topics[topic] = _topic("topic", topic)
        except ValueError:
            return None
    return OutboxRow(number, uid.decode(), name, key, None, payload, None, None, None, created)


def decode(columns: Sequence[Any], max_bytes: int) -> OutboxRow:
    """Decode a row whose columns are not trusted: `table.COLUMNS`, followed by two sizes in bytes.

    A size is None if it is within the limit. If the ID is not a 64-bit integer, the row can neither
    be deleted nor moved, so ValueError is raised.
    """
    *values, payload_size, other_size = columns
    number = values[0]
    if isinstance(number, bool) or not isinstance(number, int) or not -(2**63) <= number < 2**63:
        raise ValueError(f"id {_shorten(number)} is not an integer of 64 bits")
    found: dict[str, Any] = {"id": number}
    fault = ""
    for what, size in (("payload takes", payload_size), ("key and headers take", other_size)):
        if size is not None and size > max_bytes:
            fault = f"the {what} {size:,} bytes, but max_message_bytes is {max_bytes:,}"
    for name, value in zip(_READ, values[1:], strict=True):
        try:
            found[name] = _READ[name](name, value)
        except ValueError as error:
            fault = fault or str(error)
    return OutboxRow(**found, fault=fault)


def decode_dead(columns: Sequence[Any]) -> DeadRow:
    """Decode a dead-lettered row. Invalid strings are returned in printable form."""
    number, uid, topic, error, failed = columns
    return DeadRow(
        number if isinstance(number, int) else 0,
        _printable(uid),
        _printable(topic),
        _printable(error),
        failed if isinstance(failed, int) else 0,
    )


def readable_uid(value: Any) -> str:
    """Return a uid as it is in decoded rows, or '' if it is not 32 hex digits."""
    try:
        return _uid("uid", value)
    except ValueError:
        return ""


def _shorten(value: Any) -> str:
    text = _printable(value)
    return escape_unprintable(text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…")


def _printable(value: Any) -> str:
    if isinstance(value, bytes | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    return "" if value is None else str(value)


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is not an integer from {least} to {most}")
    return value


def _bytes(name: str, value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValueError(f"{name} is not bytes")


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return _bytes(name, value).decode()
    except ValueError:
        raise ValueError(f"{name} is not valid UTF-8") from None


def _uid(name: str, value: Any) -> str:
    text = _text(name, value)
    if not UID.fullmatch(text):
        raise ValueError(f"{name} is not 32 hex digits")
    return text


def _topic(name: str, value: Any) -> str:
    text = _text(name, value)
    if not NAME.fullmatch(text):
        raise ValueError(f"{name} is not a valid topic name ({NAME_HINT})")
    return text


def _key(name: str, value: Any) -> bytes | None:
    return None if value is None else _bytes(name, value)


def _partition(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 0, _PARTITION_MAX)


def _headers(name: str, value: Any) -> bytes | None:
    if value is None:
        return None
    text = _text(name, value)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError(f"{name} is not a JSON object of strings")
    if len(found) > HEADERS_MAX:
        raise ValueError(f"{name} has {len(found):,} names (maximum: {HEADERS_MAX})")
    return text.encode()


def _expires(name: str, value: Any) -> tuple[bytes, bytes] | None:
    if value is None:
        return None
    found = _EXPIRY.fullmatch(_text(name, value))
    if found is None:
        raise ValueError(f"{name} is not expiresAt=UNIX_MS or expiresAfter=MS")
    return _EXPIRY_NAMES[found[1]], found[2].encode()


def _due(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 0, _UNIX_MS_MAX)


def _created_at(name: str, value: Any) -> int:
    return _integer(name, value, 0, _UNIX_MS_MAX)


_READ: dict[str, Callable[[str, Any], Any]] = {
    "uid": _uid,
    "topic": _topic,
    "key": _key,
    "partition": _partition,
    "payload": _bytes,
    "headers": _headers,
    "expires": _expires,
    "due_unix_ms": _due,
    "created_unix_ms": _created_at,
}
