"""The message that a handler receives for an entry. Fields are decoded when they are first used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from streamqd.config.setting import NAME
from streamqd.dead_letter import DeadLetter
from streamqd.model import Assignment, RawEntry

# Bookkeeping fields. They are trusted only in the retry stream, to which only streamqd writes. In a
# partition, a producer can write any value to them. The fields that contain a message's origin are
# trusted everywhere, because they only name the message and affect no decision.
ORIGINAL_ID = b"originalId"
ORIGINAL_TOPIC = b"originalTopic"
ORIGINAL_PARTITION = b"originalPartition"
RETRY_COUNT = b"retryCount"
CRASH_COUNT = b"crashCount"
REPLAY_COUNT = b"replayCount"
FORGIVEN_AT = b"forgivenAt"
# The error of the last failed run and its place in the code, for display only.
LAST_ERROR = b"lastError"
LAST_ERROR_PLACE = b"lastErrorPlace"
# The span of the last failed run, as a traceparent, to which the span of the next run links.
LAST_RUN = b"lastRun"
RUN_REFERENCE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # trace, span, flags
HEADERS_MAX = 256  # maximum number of headers in one message
REPLAY_OF = "x-replay-of"  # header that `pipeline replay` sets to the original message
# Fields that a producer sets. They are trusted everywhere.
EXPIRES_AT = b"expiresAt"
EXPIRES_AFTER = b"expiresAfter"


_DIGITS_MAX = 18  # maximum number of digits, because streamqd never writes a longer count
_ENTRY_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
_TOPIC = re.compile(NAME.pattern.encode())
_NUMBER = re.compile(rb"[0-9]{1,9}")


def _ignore_progress() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Delivery:
    """The worker to which entries are delivered. All messages of a worker share this."""

    assignment: Assignment
    instance: str
    epoch: int
    progress: Callable[[], None] = (
        _ignore_progress  # reports to the daemon that a run is making progress
    )


class Message:
    """One message, as passed to a handler.

    `payload` contains the bytes that the producer sent. `uid` is the idempotency key: it stays the
    same across retries and replays, while `id` is the ID of this entry.
    """

    __slots__ = ("__dict__", "_delivery", "_fields", "_retried", "id_bytes")

    failures_in_place = 0  # failed runs since it was fetched, if it has stayed in flight
    due_in_place_ns = 0  # `now_ns` time of its next run, if an earlier owner kept it in flight

    def __init__(
        self, delivery: Delivery, id_bytes: bytes, fields: list[bytes], *, retried: bool
    ) -> None:
        self._delivery = delivery
        self.id_bytes = id_bytes
        self._fields = fields
        self._retried = retried

    def __repr__(self) -> str:
        return f"<Message {self.uid} attempt {self.attempt}>"

    @cached_property
    def fields(self) -> dict[bytes, bytes]:
        """All fields of the entry, as stored. If a name occurs twice, its last value is used."""
        return dict(zip(self._fields[::2], self._fields[1::2], strict=False))

    @property
    def payload(self) -> bytes:
        """The body, exactly as it was sent. It is empty if the entry has no payload."""
        fields = self._fields
        # The shortcut cannot be used if another field or a value is also named `payload`.
        if (
            fields
            and fields[0] == b"payload"
            and (len(fields) == 2 or fields.count(b"payload") < 2)
        ):
            return fields[1]
        return self.fields.get(b"payload", b"")

    @property
    def id(self) -> str:
        """The ID of this entry, `ms-seq`. A retry has a new ID, but keeps its `original_id`."""
        return self.id_bytes.decode()

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._delivery.assignment.topic

    @property
    def partition(self) -> int:
        """The number of the partition, starting at 0."""
        return self._delivery.assignment.partition

    @property
    def group(self) -> str:
        """The consumer group of this run. For dead letters, it is `NAME@dlq`."""
        return self._delivery.assignment.group

    @property
    def epoch(self) -> int:
        """The fencing number of this owner, which increases with each change of owner."""
        return self._delivery.epoch

    @property
    def key(self) -> bytes | None:
        """The key that determined the partition, or None."""
        fields = self._fields
        if len(fields) > 3 and fields[2] == b"key" and fields.count(b"key") < 2:
            return fields[3]  # producers put the key here
        return self.fields.get(b"key") if b"key" in fields else None

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of the message. Raises ValueError if they are not a JSON object."""
        raw = self.fields.get(b"headers")
        if raw is None:
            return {}
        headers = _parse_json("headers", raw)
        if not isinstance(headers, dict):
            raise ValueError("the headers of the message are not a JSON object")
        return headers

    @property
    def attempt(self) -> int:
        """The number of this run, starting at 1. Process crashes and releases are not counted."""
        return self.retry_count + self.failures_in_place + 1

    @property
    def retry_count(self) -> int:
        """The number of failed runs before the message was fetched."""
        return self._count(RETRY_COUNT)

    @property
    def crash_count(self) -> int:
        """The number of worker processes that this message crashed before its last retry."""
        return self._count(CRASH_COUNT)

    @property
    def replay_count(self) -> int:
        """The number of times that an operator replayed the message from the dead letters."""
        return self._count(REPLAY_COUNT, believed=self._delivery.assignment.reads_dead_letters)

    @cached_property
    def forgiven_at(self) -> float:
        """The time (unix seconds) of the last failure that an outage caused, or 0.0.

        Such a failure does not count as an attempt.
        """
        return self._count(FORGIVEN_AT) / 1000

    @cached_property
    def dead_letter(self) -> DeadLetter | None:
        """The details of the dead letter, or None unless the consumer has `source = "dlq"`."""
        return (
            DeadLetter.read(self.fields) if self._delivery.assignment.reads_dead_letters else None
        )

    @property
    def original_id(self) -> str:
        """The ID of the first write.

        This is the field `originalId` if it contains an entry ID, and otherwise `id`.
        """
        written = self._field(ORIGINAL_ID)
        if written is None or not _ENTRY_ID.fullmatch(written):
            return self.id_bytes.decode()
        return written.decode()

    @property
    def origin(self) -> tuple[str, int]:
        """The topic and partition of the first write.

        They differ from `topic` and `partition` only after a replay from another partition.
        """
        assignment, topic = self._delivery.assignment, self._field(ORIGINAL_TOPIC)
        if topic is None:
            return assignment.topic, assignment.partition
        get = self.fields.get
        written, number = get(ORIGINAL_ID, b""), get(ORIGINAL_PARTITION, b"")
        if _ENTRY_ID.fullmatch(written) and _TOPIC.fullmatch(topic) and _NUMBER.fullmatch(number):
            return topic.decode(), int(number)
        return assignment.topic, assignment.partition

    @property
    def uid(self) -> str:
        """`topic/partition/original_id`, which is the same in every run of the message."""
        topic, partition = self.origin
        return f"{topic}/{partition}/{self.original_id}"

    @property
    def timestamp(self) -> float:
        """The time of the first write, in unix seconds on the server's clock."""
        return int(self.original_id.partition("-")[0]) / 1000

    @property
    def expires_at(self) -> float | None:
        """The time (unix seconds) after which the message is dropped, or None if it never expires.

        A dead letter does not expire.
        """
        names = self._fields
        if len(names) < 3 or (EXPIRES_AT not in names and EXPIRES_AFTER not in names):
            return None  # a cheap check comes first, because this runs for every message
        if self._delivery.assignment.reads_dead_letters:
            return None
        at, after = (self.fields.get(name, b"") for name in (EXPIRES_AT, EXPIRES_AFTER))
        ends = []
        if at.isdigit() and len(at) <= _DIGITS_MAX:
            ends.append(int(at) / 1000)
        if after.isdigit() and len(after) <= _DIGITS_MAX:
            ends.append(self.timestamp + int(after) / 1000)
        return min(ends, default=None)

    def text(self, encoding: str = "utf-8") -> str:
        """Return the payload as a string. Raises UnicodeDecodeError if it cannot be decoded."""
        return self.payload.decode(encoding)

    def json(self) -> Any:
        """Return the payload as parsed JSON.

        Raises ValueError if the payload is not valid JSON, or is nested too deeply.
        """
        return _parse_json("payload", self.payload)

    def progress(self) -> None:
        """Report progress of this run. `why` and `status --json` show the time of the last report.

        The call is cheap. It does not extend `timeout` or `hard_timeout`, which count from the
        start of the run. Even without any reports, a long run keeps its message.
        """
        self._delivery.progress()

    def _field(self, name: bytes) -> bytes | None:
        # Most messages do not have such a field, so this is checked before the dict of all fields
        # is built.
        return self.fields.get(name) if name in self._fields else None

    def _count(self, name: bytes, *, believed: bool = False) -> int:
        if not (self._retried or believed):
            return 0
        raw = self._field(name) or b"0"
        return int(raw) if raw.isdigit() and len(raw) <= _DIGITS_MAX else 0


def messages_of_read(
    delivery: Delivery, entries: list[RawEntry], retried: bool
) -> tuple[list[Message], bool]:
    """Return messages for the entries of one stream, and True if any of them may expire."""
    new, messages, may_expire = Message.__new__, [], False
    for entry_id, fields in entries:
        message = new(Message)  # like a constructor, in a third of the time
        message._delivery = delivery  # noqa: SLF001 - it is our own class
        message.id_bytes = entry_id
        message._fields = fields
        message._retried = retried  # noqa: SLF001
        messages.append(message)
        if len(fields) > 2 and (EXPIRES_AT in fields or EXPIRES_AFTER in fields):
            may_expire = True
    return messages, may_expire


def has_field(message: Message, name: bytes) -> bool:
    """Return True if the entry has a field with this name."""
    # This list also contains values, but it is enough to rule out the field for most messages.
    return name in message._fields and name in message.fields


def export_notes(message: Message) -> dict[str, Any]:
    """Return the worker's notes on a message that stays in flight, for `restore_message`."""
    return {name: value for name, value in vars(message).items() if name in _NOTE_FIELDS}


_NOTE_FIELDS = ("failures_in_place", "due_in_place_ns", "forgiven_at")


def restore_message(
    message: Message, id_bytes: bytes, *, retried: bool, noted: dict[str, Any] | None = None
) -> Message:
    """Return a copy of a message as it was before the handler ran.

    A handler may assign to any attribute of its message, so the worker settles this copy instead.
    `noted` is the result of `export_notes` from before the run.
    """
    own = Message.__new__(Message)  # as in `messages_of_read`
    own._delivery = message._delivery  # noqa: SLF001 - it is our own class
    own.id_bytes = id_bytes
    own._fields = message._fields
    own._retried = retried  # noqa: SLF001
    if noted:
        vars(own).update(noted)
    return own


def _parse_json(what: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError(f"the {what} of the message is nested too deeply") from None
