"""Turn a message into the fields of an entry.

All producers call this module in the thread that sends. It uses no connection, clock or thread.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from streamqd.errors import MessageTooLargeError
from streamqd.message import HEADERS_MAX


def _data(value: Any) -> Any:
    """Convert a value of a type that JSON does not support into JSON data. Raises TypeError."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if hasattr(type(value), "model_dump"):  # a pydantic model
        return value.model_dump(mode="json", by_alias=True)
    if hasattr(type(value), "__struct_fields__"):  # a msgspec Struct, so msgspec is installed
        from msgspec import to_builtins

        return to_builtins(value)
    raise TypeError(
        f"a payload of type {type(value).__name__} cannot be converted to JSON; send bytes"
    )


_to_json = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_data
).encode

CENTURY = 36_525 * 86_400.0  # seconds; a larger number is a mistake, or was given in milliseconds


class Outgoing(NamedTuple):
    """A message for `send_many` that has a key or options.

    Its fields have the same meaning as the arguments of `send`.
    """

    value: Any
    key: str | bytes | None = None
    headers: Mapping[str, str] | None = None
    partition: int | None = None
    delay: float | timedelta | None = None
    at: float | datetime | None = None
    expires: float | timedelta | datetime | None = None
    dedup_id: str | None = None


def to_outgoing(item: Any) -> Outgoing:
    """Return an item of `send_many` as an `Outgoing`."""
    return item if isinstance(item, Outgoing) else Outgoing(item)


_ALONE = Outgoing(b"")[1:]  # the other fields, if no key or option is given
_PAYLOAD = b"payload"


@dataclasses.dataclass(slots=True)
class Encoded:
    """An encoded message: the fields of its entry, and where and when to write it.

    A delayed send has a `send_id`, and either `delay` (seconds) or `at_unix_ms`.
    """

    fields: list[bytes]
    size: int  # size of the names and values in bytes
    key: bytes | None = None
    partition: int | None = None
    dedup_id: str | None = None
    send_id: str = ""
    delay: float | None = None
    at_unix_ms: int | None = None


# A message that has only a payload is represented by that payload. Most messages of a bulk send are
# of this kind, and more objects for the garbage collector to visit would take a sixth of the time.
Envelope = Encoded | bytes


def to_encoded(envelope: Envelope) -> Encoded:
    """Return a message as an Encoded, even if it is represented by its payload."""
    if isinstance(envelope, bytes):
        return Encoded([_PAYLOAD, envelope], envelope_size(envelope))
    return envelope


def envelope_size(envelope: Envelope) -> int:
    """Return the size of a message: the bytes of its field names and values."""
    return len(_PAYLOAD) + len(envelope) if isinstance(envelope, bytes) else envelope.size


def to_envelope(item: Any, max_bytes: int) -> Envelope:
    """Encode a message, which is an `Outgoing` or a plain value.

    Raises MessageTooLargeError, TypeError, ValueError.
    """
    outgoing = isinstance(item, Outgoing)
    if not outgoing or item[1:] == _ALONE:
        value = item.value if outgoing else item
        payload = value if type(value) is bytes else _encode_value(value)
        if len(payload) <= max_bytes:
            return payload
        item = Outgoing(payload)  # `encode_fields` raises the error
    if item.dedup_id is not None and not isinstance(item.dedup_id, str):
        raise TypeError(f"dedup_id must be a string, not {item.dedup_id!r}")
    if item.dedup_id == "":
        raise ValueError("dedup_id must not be empty")
    if item.dedup_id is not None:
        _utf8("dedup_id", item.dedup_id)
    if item.partition is not None and (
        isinstance(item.partition, bool) or not isinstance(item.partition, int)
    ):
        raise TypeError(f"partition must be an integer, not {item.partition!r}")
    if item.delay is not None and item.at is not None:
        raise ValueError("delay= cannot be used with at=")
    fields = encode_fields(item, max_bytes)
    delay = None if item.delay is None else _seconds("delay", item.delay)
    at_unix_ms = None if item.at is None else _unix_ms("at", item.at)
    return Encoded(
        fields,
        sum(map(len, fields)),
        None if item.key is None else encoded_key(item.key),
        item.partition,
        item.dedup_id,
        "" if delay is None and at_unix_ms is None else secrets.token_hex(16),
        delay,
        at_unix_ms,
    )


def encode_fields(item: Outgoing, max_bytes: int) -> list[bytes]:
    """Encode an item as the names and values of its entry.

    Raises MessageTooLargeError, TypeError, ValueError.
    """
    payload = _encode_value(item.value)
    fields = [_PAYLOAD, payload]
    extra = 0
    if item.key is not None:
        raw_key = encoded_key(item.key)
        fields += (b"key", raw_key)
        extra += len(raw_key)
    if item.headers is not None and not isinstance(item.headers, Mapping):
        raise TypeError(f"headers must be a mapping of strings, not {type(item.headers).__name__}")
    if item.headers:
        raw_headers = _encoded_headers(item.headers)
        fields += (b"headers", raw_headers)
        extra += len(raw_headers)
    if item.expires is not None:
        fields += _expiry(item.expires)
    if len(payload) > max_bytes or extra > max_bytes:
        what = "payload takes" if len(payload) > max_bytes else "key and headers take"
        raise MessageTooLargeError(
            f"the {what} {max(len(payload), extra):,} bytes, but max_message_bytes is"
            f" {max_bytes:,}; store the body elsewhere and send a reference to it"
        )
    return fields


def batches(
    items: Iterable[Any], encode: Callable[[Any], Envelope], *, count: int, size: int
) -> Iterator[list[Envelope]]:
    """Encode items, and split them into batches for one transaction each.

    A batch contains only one kind of message. It is full when it has `count` messages or at least
    `size` bytes. If an item or the iteration itself raises an error, all batches with earlier items
    are yielded before the error is raised.
    """
    batch: list[Envelope] = []
    held = 0
    kind = ""
    failure: Exception | None = None
    try:
        for item in items:
            envelope = encode(item)
            if type(envelope) is bytes:  # like the two calls below, but much cheaper
                own, taken = "plain", len(_PAYLOAD) + len(envelope)
            else:
                own, taken = envelope_kind(envelope), envelope_size(envelope)
            if own != kind and batch:
                yield batch
                batch, held = [], 0
            kind = own
            batch.append(envelope)
            held += taken
            if held >= size or len(batch) >= count:
                yield batch
                batch, held = [], 0
    except Exception as error:  # noqa: BLE001 - raised below, after the earlier items
        failure = error
    if batch:
        yield batch
    if failure is not None:
        raise failure


def check_topic(topic: object) -> None:
    """Raise TypeError if the topic is not a string.

    The name itself is checked when it is routed.
    """
    if not isinstance(topic, str):
        raise TypeError(f"a topic must be a string, not {topic!r}")


def envelope_kind(envelope: Envelope) -> str:
    """Return the kind: `plain`, `deduplicated` or `scheduled`. A transaction has only one kind."""
    if isinstance(envelope, bytes):
        return "plain"
    if envelope.send_id:
        return "scheduled"
    return "plain" if envelope.dedup_id is None else "deduplicated"


def encoded_key(key: str | bytes) -> bytes:
    if isinstance(key, str):
        return _utf8("the key", key)
    if isinstance(key, bytes):
        return key
    raise TypeError(f"a key must be str or bytes, not {type(key).__name__}")


def _encode_value(value: Any) -> bytes:
    if isinstance(value, str):
        return _utf8("the payload", value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return _utf8("the payload", _to_json(value))


def _encoded_headers(headers: Mapping[str, str]) -> bytes:
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"a message can have at most {HEADERS_MAX} headers, not {len(headers):,}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"names and values of headers are str; {name!r} is not, or its value")
    return _utf8("one of the headers", _to_json(dict(headers)))


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise ValueError(
            f"{what} contains {found!r}, half of a surrogate pair, which UTF-8 cannot encode; fix"
            " the text where it was decoded"
        ) from None


def _expiry(expires: float | timedelta | datetime) -> tuple[bytes, bytes]:
    """Return the name and the value of the expiry field.

    A duration is not converted to a time, because it starts at the delivery, on Redis's clock.
    """
    if isinstance(expires, datetime):
        return b"expiresAt", b"%d" % _unix_ms("expires", expires)
    return b"expiresAfter", b"%d" % round(_seconds("expires", expires) * 1000)


def _seconds(name: str, span: float | timedelta) -> float:
    seconds = span.total_seconds() if isinstance(span, timedelta) else span
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, not {span!r}")
    if not 0 <= seconds <= CENTURY:
        raise ValueError(f"{name} must be 0 seconds to 100 years, not {seconds}")
    return float(seconds)


def _unix_ms(name: str, instant: float | datetime) -> int:
    if isinstance(instant, datetime):
        if instant.tzinfo is None:
            raise ValueError(f"{name} needs a time zone, as in datetime.now(timezone.utc)")
        instant = instant.timestamp()
    if isinstance(instant, bool) or not isinstance(instant, int | float):
        raise TypeError(f"{name} must be unix seconds or a datetime, not {instant!r}")
    if not 0 <= instant <= 4 * CENTURY:
        raise ValueError(f"{name} must be in unix seconds, but {instant} is out of range")
    return round(instant * 1000)
