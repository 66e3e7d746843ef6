"""Build the fields that a dead letter or a retry has in addition to those of its message."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from streamqd.message import (
    CRASH_COUNT,
    FORGIVEN_AT,
    LAST_ERROR,
    LAST_ERROR_PLACE,
    LAST_RUN,
    ORIGINAL_ID,
    REPLAY_COUNT,
    RETRY_COUNT,
    Delivery,
    Message,
    has_field,
)
from streamqd.policy.fingerprint import fingerprint

BOOKKEEPING = 2048  # allowance in bytes for names and for streamqd's own fields
ERROR_BYTES_MAX = 500  # bytes of error text in a waiting retry
PLACE_BYTES_MAX = 200

# A script cannot pass 8,000 values to one command. If an entry has more names and values than this
# limit, only the fields that streamqd knows are kept. No producer writes such an entry.
BODY_VALUES_MAX = 7000
ADDED_VALUES_MAX = (
    100  # names and values that `bookkeeping_fields`, `build_fields` and `crash_fields` add at most
)
KNOWN = (
    b"payload",
    b"key",
    b"headers",
    b"sentAt",
    ORIGINAL_ID,
    RETRY_COUNT,
    CRASH_COUNT,
    REPLAY_COUNT,
)


def within_limit(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the fields, or only the KNOWN fields if a script cannot write every field."""
    if 2 * len(fields) <= BODY_VALUES_MAX:
        return fields
    return {name: fields[name] for name in KNOWN if name in fields}


def bookkeeping_fields(message: Message, *, retries: int, crashes: int) -> dict[bytes, bytes]:
    """Return the bookkeeping fields that an entry takes to the retry or dead-letter stream."""
    fields = {
        b"originalId": (
            message.original_id.encode() if has_field(message, ORIGINAL_ID) else message.id_bytes
        ),
        b"retryCount": b"%d" % retries,
        b"crashCount": b"%d" % crashes,
    }
    if has_field(message, REPLAY_COUNT):
        # Overwrite a value that a producer may have written, because readers of the retry stream
        # trust this field.
        fields[REPLAY_COUNT] = str(message.replay_count).encode()
    if _is_forgiven(message):
        fields[FORGIVEN_AT] = str(int(message.forgiven_at * 1000)).encode()
    return fields


def last_error(message: Message, error: str, place: str) -> dict[bytes, bytes]:
    """Return the fields of a waiting retry that describe the last failure, only for display."""
    fields = {}
    # A producer may have written fields with these names, so overwrite them.
    if error or has_field(message, LAST_ERROR):
        fields[LAST_ERROR] = _cut(error, ERROR_BYTES_MAX)
    if place or has_field(message, LAST_ERROR_PLACE):
        fields[LAST_ERROR_PLACE] = _cut(place, PLACE_BYTES_MAX)
    return fields


def last_run(message: Message, span: str) -> dict[bytes, bytes]:
    """Return the field with the span of the failed run. `span` is '' without tracing."""
    if span or has_field(message, LAST_RUN):
        return {LAST_RUN: span.encode()}
    return {}


def _cut(text: str, size: int) -> bytes:
    raw = text[:size].encode("utf-8", "replace")
    if len(raw) <= size:
        return raw
    # Drop a character that the limit cut in half.
    return raw[:size].decode("utf-8", "ignore").encode()


def _is_forgiven(message: Message) -> bool:
    """Return True if a failure of the message was not counted as an attempt, now or earlier."""
    return has_field(message, FORGIVEN_AT) or bool(vars(message).get("forgiven_at"))


def build_fields(
    message: Message,
    delivery: Delivery,
    handler: str,
    reason: str,
    *,
    error_class: str,
    error: str,
    traceback: str,
    attempts: int,
    crashes: int,
    fingerprint: str,
) -> dict[bytes, bytes]:
    """Return the context of a dead letter. The script adds `failedAt`, from the server's clock.

    `error` is the text of the exception. All texts may be "".
    """
    topic, partition = message.origin
    fields = {
        b"originalTopic": topic.encode(),
        b"originalPartition": str(partition).encode(),
        b"timestamp": str(int(message.timestamp * 1000)).encode(),
        b"group": delivery.assignment.group.encode(),
        b"instance": delivery.instance.encode("utf-8", "replace"),
        b"handler": handler.encode("utf-8", "replace"),
        b"attempts": str(attempts).encode(),
        b"crashes": str(crashes).encode(),
        b"reason": reason.encode("utf-8", "replace"),
        b"errorClass": error_class.encode("utf-8", "replace"),
        b"errorMessage": error.encode("utf-8", "replace"),
        b"traceback": traceback.encode("utf-8", "replace"),
        b"fingerprint": fingerprint.encode(),
    }
    if _is_forgiven(message):
        fields[FORGIVEN_AT] = b"0"  # a replay starts with a clean record
    return fields


def build_fields_without_run(
    message: Message, delivery: Delivery, handler: str, why: tuple[str, str, str], *, crashes: int
) -> dict[bytes, bytes]:
    """Return the fields of a dead letter whose message did not run.

    `why` contains the reason code, the input of the fingerprint, and a sentence.
    """
    reason, what, text = why
    retries = message.attempt - 1
    return bookkeeping_fields(message, retries=retries, crashes=crashes) | build_fields(
        message,
        delivery,
        handler,
        reason,
        error_class="",
        error=text,
        traceback="",
        attempts=retries,
        crashes=crashes,
        fingerprint=fingerprint(what, "", handler),
    )


def find_oversize(message: Message, bytes_max: int) -> str:
    """Return a description if a message exceeds `max_message_bytes` for producers, else ''."""
    size = len(message.payload)
    beside = sum(len(name) + len(value) for name, value in message.fields.items()) - size
    if max(size, beside - BOOKKEEPING) <= bytes_max:
        return ""
    what = "its payload has" if size > bytes_max else "besides its payload it has"
    found = size if size > bytes_max else beside
    return f"{what} {found:,} bytes, and daemon.max_message_bytes is {bytes_max:,}"


def replacement_fields(message: Message, policy: str) -> dict[bytes, bytes]:
    """Return the fields that replace the body in a dead letter, as the setting `dlq_body` requires.

    All other fields of the message are included, because the entry may have been trimmed away.
    """
    if policy == "full":
        return {}
    size = str(len(message.payload)).encode()
    found = within_limit(message.fields) | {b"payload": b"", b"payloadBytes": size}
    if policy == "hash":
        found[b"payloadSha256"] = hashlib.sha256(message.payload).hexdigest().encode()
    return found


def crash_fields(context: bytes) -> tuple[str, dict[bytes, bytes]]:
    """Return how the process exited, and the dead letter's fields.

    `context` is the supervisor's record.
    """
    try:
        found: dict[str, Any] = dict(json.loads(context or b"{}"))
    except (ValueError, TypeError, RecursionError):
        # The record is not from a supervisor. Dead-letter the message anyway.
        found = {}
    fields = {
        name.encode(): str(found[name]).encode()
        for name in ("signal", "exitCode", "rss", "pid")
        if found.get(name) is not None
    }
    # When the mark of a lost owner is charged, no supervisor has recorded the crash.
    unseen = "an unknown cause" if context else "the loss of its host"
    return str(found.get("what", unseen)), fields
