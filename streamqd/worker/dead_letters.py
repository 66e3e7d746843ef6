"""Build the fields that a dead letter or retry has in addition to the fields of its message."""

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

BOOKKEEPING = 2048  # bytes allowed for the names of fields and for streamqd's own fields
ERROR_BYTES_MAX = 500  # bytes of error text in a waiting retry
PLACE_BYTES_MAX = 200

# A script cannot pass 8,000 values to one command. If an entry has more names and values than this
# limit, only the fields that streamqd knows are kept. No producer writes such an entry.
BODY_VALUES_MAX = 7000
ADDED_VALUES_MAX = 100  # upper bound for names and values that the functions below add to an entry
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
    """Return the fields, or only the KNOWN ones if a script cannot write all of them."""
    if 2 * len(fields) <= BODY_VALUES_MAX:
        return fields
    return {name: fields[name] for name in KNOWN if name in fields}


def bookkeeping_fields(message: Message, *, retries: int, crashes: int) -> dict[bytes, bytes]:
    """Return the counters and the original ID that an entry keeps when it is moved.

    The entry moves to the waiting retries or to a dead-letter stream.
    """
    fields = {
        b"originalId": (
            message.original_id.encode() if has_field(message, ORIGINAL_ID) else message.id_bytes
        ),
        b"retryCount": b"%d" % retries,
        b"crashCount": b"%d" % crashes,
    }
    if has_field(message, REPLAY_COUNT):
        # Overwrite the value, which a producer may have written, because readers of the retry
        # stream trust this field.
        fields[REPLAY_COUNT] = str(message.replay_count).encode()
    if _is_forgiven(message):
        fields[FORGIVEN_AT] = str(int(message.forgiven_at * 1000)).encode()
    return fields


def last_error(message: Message, error: str, place: str) -> dict[bytes, bytes]:
    """Return the fields that describe the last failure of a waiting retry, for display only."""
    fields = {}
    # Overwrite fields with these names, because a producer may have written them.
    if error or has_field(message, LAST_ERROR):
        fields[LAST_ERROR] = _cut(error, ERROR_BYTES_MAX)
    if place or has_field(message, LAST_ERROR_PLACE):
        fields[LAST_ERROR_PLACE] = _cut(place, PLACE_BYTES_MAX)
    return fields


def last_run(message: Message, span: str) -> dict[bytes, bytes]:
    """Return the field that holds the span of the failed run, which is '' without tracing."""
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
    """Return True if a failure of the message, now or earlier, did not count as an attempt."""
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
    """Return the fields that describe the failure of a dead letter.

    The script adds `failedAt`, which it reads from the server's clock. `error` is the text of the
    exception. Any text may be ''.
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
    """Return the fields of a dead letter whose message was given up without a run.

    `why` contains the reason code, the text from which the fingerprint is computed, and a sentence
    for people.
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
    """Return a text that shows how far a message exceeds `max_message_bytes`, or '' if it fits."""
    size = len(message.payload)
    beside = sum(len(name) + len(value) for name, value in message.fields.items()) - size
    if max(size, beside - BOOKKEEPING) <= bytes_max:
        return ""
    what = "its payload has" if size > bytes_max else "besides its payload it has"
    found = size if size > bytes_max else beside
    return f"{what} {found:,} bytes, and daemon.max_message_bytes is {bytes_max:,}"


def replacement_fields(message: Message, policy: str) -> dict[bytes, bytes]:
    """Return the fields that replace the body of a dead letter, as the setting `dlq_body` requires.

    `policy` is the value of that setting. All other fields of the message are included, because the
    entry itself may have been trimmed.
    """
    if policy == "full":
        return {}
    size = str(len(message.payload)).encode()
    found = within_limit(message.fields) | {b"payload": b"", b"payloadBytes": size}
    if policy == "hash":
        found[b"payloadSha256"] = hashlib.sha256(message.payload).hexdigest().encode()
    return found


def crash_fields(context: bytes) -> tuple[str, dict[bytes, bytes]]:
    """Return how the process exited, and the fields of the dead letter that describe the exit.

    `context` is the supervisor's record of the crash.
    """
    try:
        found: dict[str, Any] = dict(json.loads(context or b"{}"))
    except (ValueError, TypeError, RecursionError):
        # The record is invalid, so no supervisor wrote it. Dead-letter the message anyway.
        found = {}
    fields = {
        name.encode(): str(found[name]).encode()
        for name in ("signal", "exitCode", "rss", "pid")
        if found.get(name) is not None
    }
    # When the mark of a lost owner is charged, no supervisor has recorded the crash.
    unseen = "an unknown cause" if context else "the loss of its host"
    return str(found.get("what", unseen)), fields
