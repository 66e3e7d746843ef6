"""Build the fields that a dead letter or retry has in addition to those of its message."""

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

# A script cannot pass 8,000 values to one command. If the fields of an entry have more names and
# values than this limit, only the fields that streamqd knows are kept. Producers of streamqd do not
# write such entries.
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
    """Return the fields, or only the KNOWN ones if there are too many for a script to write."""
    if 2 * len(fields) <= BODY_VALUES_MAX:
        return fields
    return {name: fields[name] for name in KNOWN if name in fields}


def bookkeeping_fields(message: Message, *, retries: int, crashes: int) -> dict[bytes, bytes]:
    """Return the fields with the counters and the original ID of a message that is moved.

    The message keeps them when it is moved to the waiting retries or to a dead-letter stream.
    """
    fields = {
        b"originalId": (
            message.original_id.encode() if has_field(message, ORIGINAL_ID) else message.id_bytes
        ),
        b"retryCount": b"%d" % retries,
        b"crashCount": b"%d" % crashes,
    }
    if has_field(message, REPLAY_COUNT):
        # Write this field again, because a producer may have written an arbitrary value, and
        # readers of the retry stream trust the field.
        fields[REPLAY_COUNT] = str(message.replay_count).encode()
    if _is_forgiven(message):
        fields[FORGIVEN_AT] = str(int(message.forgiven_at * 1000)).encode()
    return fields


def last_error(message: Message, error: str, place: str) -> dict[bytes, bytes]:
    """Return the fields that describe the last failure of a waiting retry.

    They are only shown to people. `place` is the place of the error in the code.
    """
    fields = {}
    # Overwrite existing fields with these names even if the new value is '', because a producer may
    # have written them.
    if error or has_field(message, LAST_ERROR):
        fields[LAST_ERROR] = _cut(error, ERROR_BYTES_MAX)
    if place or has_field(message, LAST_ERROR_PLACE):
        fields[LAST_ERROR_PLACE] = _cut(place, PLACE_BYTES_MAX)
    return fields


def last_run(message: Message, span: str) -> dict[bytes, bytes]:
    """Return the field that holds the trace span of the failed run.

    `span` is '' without tracing. The field is then returned only if it must overwrite another
    value.
    """
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
    """Return True if any failure of the message so far did not count as an attempt."""
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
    """Return the fields of a dead letter that describe why its message failed.

    `reason` is a code such as "too-large", and `error` is the text of the exception. All texts may
    be ''. The script that writes the dead letter adds `failedAt` from the server's clock.
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
    """Return a text that describes how a message exceeds the limit in bytes, or '' if it fits."""
    size = len(message.payload)
    beside = sum(len(name) + len(value) for name, value in message.fields.items()) - size
    if max(size, beside - BOOKKEEPING) <= bytes_max:
        return ""
    what = "its payload has" if size > bytes_max else "besides its payload it has"
    found = size if size > bytes_max else beside
    return f"{what} {found:,} bytes, and daemon.max_message_bytes is {bytes_max:,}"


def replacement_fields(message: Message, policy: str) -> dict[bytes, bytes]:
    """Return the fields to write in place of a dead letter's body, or {} to keep the body.

    `policy` is the value of the setting `dlq_body`. The result contains all fields of the message
    except the payload, because the entry may have been trimmed and cannot be copied then.
    """
    if policy == "full":
        return {}
    size = str(len(message.payload)).encode()
    found = within_limit(message.fields) | {b"payload": b"", b"payloadBytes": size}
    if policy == "hash":
        found[b"payloadSha256"] = hashlib.sha256(message.payload).hexdigest().encode()
    return found


def crash_fields(context: bytes) -> tuple[str, dict[bytes, bytes]]:
    """Return a text and the fields of a dead letter that describe how its process crashed.

    `context` is the JSON in which the supervisor has recorded the crash, or b'' if it could not.
    """
    try:
        found: dict[str, Any] = dict(json.loads(context or b"{}"))
    except (ValueError, TypeError, RecursionError):
        # The record is invalid, so it does not come from a supervisor. Dead-letter the message
        # without the details.
        found = {}
    fields = {
        name.encode(): str(found[name]).encode()
        for name in ("signal", "exitCode", "rss", "pid")
        if found.get(name) is not None
    }
    # If the whole host was lost, no supervisor was left to record the crash.
    unseen = "an unknown cause" if context else "the loss of its host"
    return str(found.get("what", unseen)), fields
