"""What a handler sees of an entry. Fields are decoded when they are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from streamqd.config.setting import NAME
from streamqd.dead_letter import DeadLetter
from streamqd.model import RawEntry, Unit

# Bookkeeping fields. They are believed in the retry stream only, which streamqd alone writes; in
# the partition stream a producer could have written anything into them. Where a message was written
# first is believed everywhere: it names the message and decides nothing.
ORIGINAL_ID = b"originalId"
ORIGINAL_TOPIC = b"originalTopic"
ORIGINAL_PARTITION = b"originalPartition"
RETRY_COUNT = b"retryCount"
CRASH_COUNT = b"crashCount"
REPLAY_COUNT = b"replayCount"
FORGIVEN_AT = b"forgivenAt"
# For people: what the last failed run said, and where. They decide nothing.
LAST_ERROR = b"lastError"
LAST_ERROR_PLACE = b"lastErrorPlace"
# A producer's own word, believed everywhere.
EXPIRES_AT = b"expiresAt"
EXPIRES_AFTER = b"expiresAfter"


_DIGITS_MAX = 18  # of a count; a longer one is nothing that we have written
_ENTRY_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
_TOPIC = re.compile(NAME.pattern.encode())
_NUMBER = re.compile(rb"[0-9]{1,9}")


def _unwatched() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where and to whom entries are delivered: the same for all messages of one worker."""

    unit: Unit
    instance: str
    epoch: int
    progress: Callable[[], None] = _unwatched  # reports to the daemon that a run makes progress


class Message:
    """One message, as handed to a handler.

    `payload` is the bytes that the producer sent. `uid` is the idempotency key: it stays the same
    over retries and replays, while `id` is the id of this entry.
    """

    __slots__ = ("__dict__", "_delivery", "_fields", "_retried", "id_bytes")

    failures_in_place = 0  # runs that have failed since it was fetched, where it is kept in flight
    due_in_place_ns = 0  # when it runs again (`now_ns`), where an owner before has kept it

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
        """All fields of the entry, as stored. Of fields with the same name the last counts."""
        return dict(zip(self._fields[::2], self._fields[1::2], strict=False))

    @property
    def payload(self) -> bytes:
        """The body, as sent. Empty when the entry has none."""
        fields = self._fields
        # A second one may follow. A value of that name only makes this look again.
        if (
            fields
            and fields[0] == b"payload"
            and (len(fields) == 2 or fields.count(b"payload") < 2)
        ):
            return fields[1]
        return self.fields.get(b"payload", b"")

    @property
    def id(self) -> str:
        """The id of this entry, `ms-seq`. A retried message has a new one; see `original_id`."""
        return self.id_bytes.decode()

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self._delivery.unit.topic

    @property
    def partition(self) -> int:
        """The partition's number, from 0."""
        return self._delivery.unit.partition

    @property
    def group(self) -> str:
        """The consumer group that this run belongs to; of dead letters `<name>@dlq`."""
        return self._delivery.unit.group

    @property
    def epoch(self) -> int:
        """The fencing number of this owner: it grows with each change of owner of the unit."""
        return self._delivery.epoch

    @property
    def key(self) -> bytes | None:
        """The key that chose the partition, or None."""
        fields = self._fields
        if len(fields) > 3 and fields[2] == b"key" and fields.count(b"key") < 2:
            return fields[3]  # where producers put it
        return self.fields.get(b"key") if b"key" in fields else None

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers. Raises ValueError when they are not a JSON object."""
        raw = self.fields.get(b"headers")
        if raw is None:
            return {}
        headers = _parsed("headers", raw)
        if not isinstance(headers, dict):
            raise ValueError("the headers of the message are not a JSON object")
        return headers

    @property
    def attempt(self) -> int:
        """Which run this is, from 1. Crashes of the process and releases do not count."""
        return self.retry_count + self.failures_in_place + 1

    @property
    def retry_count(self) -> int:
        """How many runs had failed when it was fetched."""
        return self._count(RETRY_COUNT)

    @property
    def crash_count(self) -> int:
        """How many processes this message has taken down before its last retry."""
        return self._count(CRASH_COUNT)

    @property
    def replay_count(self) -> int:
        """How many times an operator has brought it back from the dead letters."""
        return self._count(REPLAY_COUNT, believed=self._delivery.unit.reads_letters)

    @cached_property
    def forgiven_at(self) -> float:
        """When a failure last cost no attempt as an outage's, unix seconds; 0.0 for never."""
        return self._count(FORGIVEN_AT) / 1000

    @cached_property
    def letter(self) -> DeadLetter | None:
        """Why, where and when it died, for a consumer with `source = "dlq"`; None for others."""
        return DeadLetter.read(self.fields) if self._delivery.unit.reads_letters else None

    @property
    def original_id(self) -> str:
        """The id of the first write. A producer's `originalId` counts when it is an entry id."""
        written = self._field(ORIGINAL_ID)
        if written is None or not _ENTRY_ID.fullmatch(written):
            return self.id_bytes.decode()
        return written.decode()

    @property
    def origin(self) -> tuple[str, int]:
        """Topic and partition of the first write: others only for a dead letter moved here."""
        unit, topic = self._delivery.unit, self._field(ORIGINAL_TOPIC)
        if topic is None:
            return unit.topic, unit.partition
        get = self.fields.get
        written, number = get(ORIGINAL_ID, b""), get(ORIGINAL_PARTITION, b"")
        if _ENTRY_ID.fullmatch(written) and _TOPIC.fullmatch(topic) and _NUMBER.fullmatch(number):
            return topic.decode(), int(number)
        return unit.topic, unit.partition

    @property
    def uid(self) -> str:
        """`topic/partition/original_id`: the same on every run, to recognise a repeated one by."""
        topic, partition = self.origin
        return f"{topic}/{partition}/{self.original_id}"

    @property
    def timestamp(self) -> float:
        """When the message was first written, unix seconds by the server's clock."""
        return int(self.original_id.partition("-")[0]) / 1000

    @property
    def expires_at(self) -> float | None:
        """When it is not handled any more, unix seconds; None when the producer did not say.

        A dead letter does not expire.
        """
        names = self._fields
        if len(names) < 3 or (EXPIRES_AT not in names and EXPIRES_AFTER not in names):
            return None  # at the price of a look: this is asked of every message
        if self._delivery.unit.reads_letters:
            return None
        at, after = (self.fields.get(name, b"") for name in (EXPIRES_AT, EXPIRES_AFTER))
        ends = []
        if at.isdigit() and len(at) <= _DIGITS_MAX:
            ends.append(int(at) / 1000)
        if after.isdigit() and len(after) <= _DIGITS_MAX:
            ends.append(self.timestamp + int(after) / 1000)
        return min(ends, default=None)

    def text(self, encoding: str = "utf-8") -> str:
        """Return the payload as text. Raises UnicodeDecodeError when it is not."""
        return self.payload.decode(encoding)

    def json(self) -> Any:
        """Return the payload as parsed JSON. Raises ValueError when it is none, or too deep."""
        return _parsed("payload", self.payload)

    def progress(self) -> None:
        """Say that this run makes progress: `why` and `status --json` tell when it was said last.

        It costs nothing, and extends no limit: `timeout` and `hard_timeout` count from the
        beginning of the run. A long run needs no sign of life to keep its message.
        """
        self._delivery.progress()

    def _field(self, name: bytes) -> bytes | None:
        # Most messages have none of ours, and need no dict of all their fields to say so.
        return self.fields.get(name) if name in self._fields else None

    def _count(self, name: bytes, *, believed: bool = False) -> int:
        if not (self._retried or believed):
            return 0
        raw = self._field(name) or b"0"
        return int(raw) if raw.isdigit() and len(raw) <= _DIGITS_MAX else 0


def of_read(
    delivery: Delivery, entries: list[RawEntry], retried: bool
) -> tuple[list[Message], bool]:
    """Return the messages of the entries of one stream, and whether some may expire."""
    new, messages, may_expire = Message.__new__, [], False
    for entry_id, fields in entries:
        message = new(Message)  # as the constructor does, which costs three times as much
        message._delivery = delivery  # noqa: SLF001 - it is ours
        message.id_bytes = entry_id
        message._fields = fields
        message._retried = retried  # noqa: SLF001
        messages.append(message)
        if len(fields) > 2 and (EXPIRES_AT in fields or EXPIRES_AFTER in fields):
            may_expire = True
    return messages, may_expire


def has_field(message: Message, name: bytes) -> bool:
    """Whether the entry has a field of this name."""
    # The list holds the values too, but tells of most messages that they have none.
    return name in message._fields and name in message.fields


def remembered(message: Message) -> dict[str, Any]:
    """Return what a worker has noted on a message that it keeps in flight; for `restored`."""
    return {name: value for name, value in vars(message).items() if name in _NOTED}


_NOTED = ("failures_in_place", "due_in_place_ns", "forgiven_at")


def restored(
    message: Message, id_bytes: bytes, *, retried: bool, noted: dict[str, Any] | None = None
) -> Message:
    """Return a message as it was before its handler got hold of it.

    A handler may assign to any attribute. What is settled is named by what the worker knew before.
    """
    own = Message.__new__(Message)  # as in `of_read`
    own._delivery = message._delivery  # noqa: SLF001 - it is ours
    own.id_bytes = id_bytes
    own._fields = message._fields
    own._retried = retried  # noqa: SLF001
    if noted:
        vars(own).update(noted)
    return own


def _parsed(what: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError(f"the {what} of the message nests too deep") from None
