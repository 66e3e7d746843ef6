"""What a producer writes: values, keys and headers as the fields of an entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from streamqd.errors import MessageTooLarge

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Outgoing(NamedTuple):
    """A message for `send_many` that is more than its value. Fields as those of `send`."""

    value: Any
    key: str | bytes | None = None
    headers: Mapping[str, str] | None = None
    partition: int | None = None


def fields_of(item: Outgoing, max_bytes: int) -> list[bytes]:
    """Encode an item into the names and values of its entry.

    Raises MessageTooLarge, TypeError, ValueError.
    """
    payload = _encoded(item.value)
    fields = [b"payload", payload]
    extra = 0
    if item.key is not None:
        raw_key = encoded_key(item.key)
        fields += (b"key", raw_key)
        extra += len(raw_key)
    if item.headers:
        raw_headers = _encoded_headers(item.headers)
        fields += (b"headers", raw_headers)
        extra += len(raw_headers)
    if len(payload) > max_bytes or extra > max_bytes:
        what = "payload takes" if len(payload) > max_bytes else "key and headers take"
        raise MessageTooLarge(
            f"the {what} {max(len(payload), extra):,} bytes, and max_message_bytes is"
            f" {max_bytes:,}: store the body elsewhere and send a reference to it"
        )
    return fields


def _encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return _to_json(value).encode()


def encoded_key(key: str | bytes) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes):
        return key
    raise TypeError(f"a key is str or bytes, not {type(key).__name__}")


def _encoded_headers(headers: Mapping[str, str]) -> bytes:
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"names and values of headers are str; {name!r} is not, or its value")
    return _to_json(dict(headers)).encode()
