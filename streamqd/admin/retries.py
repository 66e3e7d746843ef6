"""List the waiting retries of a group in the order of their due times, run them now or cancel them.

The ID of a retry is `PARTITION:place`, such as `3:m:1700000000000-0`. Its place identifies the
entry whose run failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamqd.admin import due, groups, topics
from streamqd.admin.messages import (
    FoundMessage,
    MessageFilter,
    MessageList,
    count_in,
    waiting_attempt,
)
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.message import LAST_ERROR, LAST_ERROR_PLACE
from streamqd.model import DLQ_SUFFIX, Assignment
from streamqd.store import retries as retry_calls
from streamqd.store.items import portions
from streamqd.store.retries import Delayed
from streamqd.store.store import Store

TEXT_BYTES_MAX = 1000  # maximum number of bytes of an error that are shown
_NAME = re.compile(r"([0-9]{1,9}):([mr]:[0-9]{1,20}-[0-9]{1,20})")


@dataclass(frozen=True, slots=True)
class RetryRow:
    """A waiting retry.

    `id` is its partition and place, such as `3:m:1700000000000-0`. `attempt` is the number of its
    next attempt, starting at 1. `crashes` is the number of worker processes that the message has
    crashed so far. `uid` identifies the message in all its copies. `key` is '' if the message has
    no key. `payload_bytes` is null if the stored retry is invalid. `error` is the error of the last
    run, and `at` is the line of code that raised it. If the setting `dlq_error` or `redact_error`
    removes them, both are ''.
    """

    id: str
    due_unix_ms: int
    attempt: int
    crashes: int
    key: str
    uid: str
    payload_bytes: int | None
    error: str = ""
    at: str = ""


@dataclass(frozen=True, slots=True)
class RetriesMadeDue:
    """The result of `retry now`.

    `due` is the number of retries that are due now. `missing` is the number of retries that were no
    longer waiting.
    """

    topic: str
    group: str
    due: int
    missing: int


@dataclass(frozen=True, slots=True)
class RetriesCanceled:
    """The result of `retry cancel`.

    `dead_letters` is the number of retries that became dead letters, and `dead_letter_ids` contains
    the IDs of these dead letters. `dropped` is the number of retries that were deleted without a
    dead letter. `missing` is the number of retries that were no longer waiting. `unreadable` is the
    number of retries that cannot be read. They are still waiting, and can only be dropped.
    """

    topic: str
    group: str
    dead_letters: int
    dropped: int
    missing: int
    unreadable: int
    dead_letter_ids: list[str]


def messages(store: Store, topic: str, group: str) -> MessageList[Delayed, RetryRow]:
    """Return the waiting retries of a group, sorted by due time.

    Raises TopicNotFoundError and RequestRefusedError.
    """
    count = groups.partition_count(store, topic, group)
    return due.messages(store, topic, group, count, lambda found: _row(topic, found))


def select_rows(store: Store, topic: str, group: str, choice: MessageFilter) -> list[RetryRow]:
    """Return the retries with the IDs in a filter or, if it has no IDs, all that match it.

    They are sorted by partition. Raises TopicNotFoundError. Raises RequestRefusedError if an ID is
    invalid or its retry is no longer waiting.
    """
    waiting = messages(store, topic, group)
    if not choice.ids:
        found = list(waiting.iterate(choice))
    else:
        named = dict.fromkeys(choice.ids)
        found = [_find(store, topic, group, waiting.partitions, name) for name in named]
    return [
        _row(topic, message)
        for message in sorted(found, key=lambda message: message.position.partition)
    ]


def make_due(store: Store, topic: str, group: str, rows: Sequence[RetryRow]) -> RetriesMadeDue:
    """Make retries due now. The owner's housekeeper moves them within a second."""
    due = missing = 0
    for assignment, batch in _batches(topic, group, rows):
        reply = store.run(
            retry_calls.make_due(store.keys, assignment, [_place(row) for row in batch])
        )
        due += int(reply.values[0])
        missing += int(reply.values[1])
    return RetriesMadeDue(topic, group, due, missing)


def cancel(
    store: Store, topic: str, group: str, rows: Sequence[RetryRow], *, drop: bool = False
) -> RetriesCanceled:
    """Cancel waiting retries, which turns them into dead letters with the reason `canceled`.

    If `drop` is True, delete them instead. The retries of a group that reads dead letters are
    always deleted, because the dead letters for which they were made still exist.
    """
    drop = drop or group.endswith(DLQ_SUFFIX)
    words: list[str] = []
    dead_letters: list[str] = []
    for assignment, batch in _batches(topic, group, rows):
        items = [(_place(row), {} if drop else _context(assignment, row)) for row in batch]
        found, ids = store.run(retry_calls.cancel(store.keys, assignment, items, drop=drop)).values
        words += [word.decode() for word in found]
        dead_letters += [f"{assignment.partition}:{each.decode()}" for each in ids if each]
    moved = words.count("MOVED")
    return RetriesCanceled(
        topic=topic,
        group=group,
        dead_letters=0 if drop else moved,
        dropped=moved if drop else 0,
        missing=words.count("GONE"),
        unreadable=words.count("UNREADABLE"),
        dead_letter_ids=dead_letters,
    )


def _context(assignment: Assignment, row: RetryRow) -> dict[bytes, bytes]:
    """Return the fields that the dead letter gets in addition to those of its message."""
    topic, partition, original = row.uid.rsplit("/", 2)
    texts = {
        "originalTopic": topic,
        "originalPartition": partition,
        "originalId": original,
        "timestamp": original.partition("-")[0],
        "group": assignment.group,
        "attempts": str(row.attempt - 1),
        "crashes": str(row.crashes),
        "reason": "canceled",
    }
    return {name.encode(): text.encode() for name, text in texts.items()}


# --- reading --------------------------------------------------------------------------------------


def _row(topic: str, found: FoundMessage[Delayed]) -> RetryRow:
    position, one = found.position, found.item
    original = one.fields.get(b"originalId", b"").decode("utf-8", "replace")
    return RetryRow(
        id=position.name,
        due_unix_ms=one.due_unix_ms,
        attempt=waiting_attempt(one.fields),
        crashes=count_in(one.fields, b"crashCount"),
        key=one.fields.get(b"key", b"").decode("utf-8", "replace"),
        uid=f"{topic}/{position.partition}/{original or one.place[2:]}",
        payload_bytes=None if one.payload_bytes < 0 else one.payload_bytes,
        error=_text(one.fields.get(LAST_ERROR)),
        at=_text(one.fields.get(LAST_ERROR_PLACE)),
    )


def _text(raw: bytes | None) -> str:
    """Decode a stored error, limited to `TEXT_BYTES_MAX` bytes."""
    return (raw or b"")[:TEXT_BYTES_MAX].decode("utf-8", "replace")


def _find(store: Store, topic: str, group: str, count: int, name: str) -> FoundMessage[Delayed]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidRequestError(f"{name!r} is not the id of a retry, such as 3:m:1700000000000-0")
    assignment = Assignment(topic, int(match[1]), group)
    topics.check_partition(topic, assignment.partition, count)
    found = due.find(store, assignment, match[2])
    if found is None:
        raise RequestRefusedError(
            f"retry {name} not found for {group}: it ran already, or never existed"
        )
    return found


def _batches(
    topic: str, group: str, rows: Sequence[RetryRow]
) -> Iterator[tuple[Assignment, list[RetryRow]]]:
    placed = ((int(row.id.partition(":")[0]), row) for row in rows)
    for partition, batch in due.batches(placed):
        for part in portions(batch, lambda row: row.payload_bytes or 0, due.BATCH):
            yield Assignment(topic, partition, group), part


def _place(row: RetryRow) -> str:
    return row.id.partition(":")[2]
