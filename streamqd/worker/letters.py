"""What a dead letter carries beside the message itself, and what a retried entry does."""

from __future__ import annotations

import json
from typing import Any

from streamqd.message import REPLAY_COUNT, Delivery, Message
from streamqd.model import Failed


def carried(message: Message, *, retries: int, crashes: int) -> dict[bytes, bytes]:
    """Return the bookkeeping fields that travel with an entry to its next place."""
    fields = {
        b"originalId": message.original_id.encode(),
        b"retryCount": str(retries).encode(),
        b"crashCount": str(crashes).encode(),
    }
    if REPLAY_COUNT in message.fields:
        # At its next place it would be believed, whoever wrote it.
        fields[REPLAY_COUNT] = str(message.replay_count).encode()
    return fields


def letter(
    message: Message,
    delivery: Delivery,
    handler: str,
    reason: str,
    failure: Failed,
    *,
    attempts: int,
    crashes: int,
    fingerprint: str,
) -> dict[bytes, bytes]:
    """Return the context of a dead letter. `failedAt` is added by the script, by its clock."""
    topic, partition = message.origin
    texts = {
        "originalTopic": topic,
        "originalPartition": str(partition),
        "timestamp": str(int(message.timestamp * 1000)),
        "group": delivery.unit.group,
        "instance": delivery.instance,
        "handler": handler,
        "attempts": str(attempts),
        "crashes": str(crashes),
        "reason": reason,
        "errorClass": failure.error_class,
        "errorMessage": failure.message,
        "traceback": failure.traceback,
        "fingerprint": fingerprint,
    }
    return {name.encode(): text.encode("utf-8", "replace") for name, text in texts.items()}


def crash_fields(context: bytes) -> tuple[str, dict[bytes, bytes]]:
    """Read the supervisor's record of a crash: how the process ended, and the letter's fields."""
    try:
        found: dict[str, Any] = dict(json.loads(context or b"{}"))
    except (ValueError, TypeError):
        # Not written by a supervisor. The message is buried all the same.
        found = {}
    fields = {
        name.encode(): str(found[name]).encode()
        for name in ("signal", "exitCode", "rss", "pid")
        if found.get(name) is not None
    }
    return str(found.get("what", "an unknown cause")), fields
