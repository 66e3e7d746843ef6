"""Send a new message, or an edited copy of a dead letter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from streamqd.admin import dead_letters
from streamqd.admin.topics import partition_count
from streamqd.admin.trace import EDITED_FROM
from streamqd.console.access import Role
from streamqd.console.view import Act, ActResult, AuditNote, FormField, Preview, Visit
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.policy.partitioning import crc32_partition
from streamqd.producer.producer import Producer

DELAY_MAX = 1_000_000_000  # seconds
NOT_EDITABLE = "is hidden from your role or is not text, so it cannot be edited"

# --- send -----------------------------------------------------------------------------------------


def _send_fields(visit: Visit) -> Sequence[FormField]:
    return (
        FormField("payload", "Payload", visit.query.get("payload", ""), rows=8),
        visit.field("key", "Key", "Empty: round-robin over the partitions."),
        visit.field("headers", "Headers", "A JSON object of strings."),
        visit.field("delay", "Delay", "Seconds. Empty: no delay."),
    )


def _read_form(visit: Visit) -> tuple[dict[str, str], float | None]:
    headers = stated_headers(visit)
    text = visit.text("delay")
    try:
        delay = float(text) if text else None
    except ValueError:
        delay = -1.0
    if delay is not None and not 0 <= delay <= DELAY_MAX:
        raise InvalidRequestError(f'"Delay" must be a number of seconds from 0 to {DELAY_MAX:,}')
    return headers, delay


def preview_send(visit: Visit) -> Preview:
    """Return the effect of sending the message."""
    topic = visit.path["topic"]
    count = partition_count(visit.resources.store, topic)
    _, delay = _read_form(visit)
    key = visit.text("key")
    where = f"partition {crc32_partition(key.encode(), count)}" if key else "the next partition"
    size = len(visit.query.get("payload", "").encode())
    when = f" in {delay:g} s" if delay else ""
    return Preview([f"A message of {size:,} bytes would be sent to {where} of {topic}{when}."])


def send_message(visit: Visit) -> ActResult:
    """Send the message."""
    topic = visit.path["topic"]
    headers, delay = _read_form(visit)
    uid = send(visit, topic, visit.query.get("payload", ""), visit.text("key"), headers, delay)
    note = AuditNote([topic], "produce", {"uid": uid}, {"sent": 1})
    return ActResult(f"Sent as {uid}.", note, "message", {"topic": topic, "uid": uid})


# --- edit and send --------------------------------------------------------------------------------


def _edit_fields(visit: Visit) -> Sequence[FormField]:
    dead_letter = dead_letters.show(
        visit.resources.store, visit.path["topic"], visit.path["dead_letter"]
    )
    try:
        text, key = dead_letter.payload.decode(), (dead_letter.key or b"").decode()
    except UnicodeDecodeError:
        return ()
    if "\0" in text + key or visit.person.bodies != "show":  # a form cannot contain a NUL character
        return ()
    return (
        FormField("payload", "Payload", visit.query.get("payload", text), rows=12),
        FormField("key", "Key", visit.query.get("key", key)),
        FormField(
            "headers",
            "Headers",
            visit.query.get("headers", json.dumps(dict(dead_letter.headers or {}))),
            "A JSON object of strings.",
        ),
    )


def stated_headers(visit: Visit) -> dict[str, str]:
    """Parse the headers that were entered in a form. Raises InvalidRequestError."""
    try:
        found = json.loads(visit.text("headers") or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequestError('"Headers" must be a JSON object of strings') from None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise InvalidRequestError('"Headers" must be a JSON object of strings')
    return found


def preview_edit(visit: Visit) -> Preview:
    """Return the effect of sending the edited message."""
    topic, name = visit.path["topic"], visit.path["dead_letter"]
    if not _edit_fields(visit):
        return Preview([], refusal=f"Part of the dead letter {NOT_EDITABLE}.")
    stated_headers(visit)
    return Preview(
        [
            f"A new message with this payload would be sent to every group of {topic}.",
            f"The message has the {EDITED_FROM} header. Dead letter {name} is kept until a purge.",
        ]
    )


def edit(visit: Visit) -> ActResult:
    """Send the edited message.

    Raises RequestRefusedError if the dead letter is hidden from the person, or is not text.
    """
    topic, name = visit.path["topic"], visit.path["dead_letter"]
    if not _edit_fields(visit):
        raise RequestRefusedError(f"part of the dead letter {NOT_EDITABLE}")
    dead_letter = dead_letters.show(visit.resources.store, topic, name)
    headers = stated_headers(visit) | {EDITED_FROM: dead_letter.uid or f"{topic} {name}"}
    payload = visit.query.get("payload", "")
    if b"\r\n" in dead_letter.payload:
        payload = payload.replace("\n", "\r\n")
    uid = send(visit, topic, payload, visit.query.get("key", ""), headers)
    note = AuditNote([topic], "dlq edit", {"dead_letter": name, "uid": uid}, {"sent": 1})
    return ActResult(f"Sent as {uid}.", note)


def send(
    visit: Visit,
    topic: str,
    payload: str,
    key: str,
    headers: Mapping[str, str],
    delay: float | None = None,
) -> str:
    """Send one message and return its uid. The topic must already exist.

    Raises InvalidRequestError if the message cannot be encoded.
    """
    partition_count(visit.resources.store, topic)
    with Producer(None, visit.resources.settings, create=False) as producer:
        try:
            return producer.send(
                topic, payload, key=key or None, headers=dict(headers) or None, delay=delay
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequestError(f"nothing was sent: {error}") from None


ACTS = (
    Act(
        "send",
        "/topics/{topic}/send",
        "Send a message",
        "Send",
        Role.OPERATOR,
        preview_send,
        send_message,
        _send_fields,
        back="messages",
    ),
    Act(
        "edit",
        "/topics/{topic}/dead/{dead_letter}/edit",
        "Edit and send",
        "Send",
        Role.OPERATOR,
        preview_edit,
        edit,
        _edit_fields,
        back="dead_letter",
    ),
)
