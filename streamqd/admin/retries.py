"""Messages that wait for their next attempt: one list over all partitions, by due time.

A retry is named `PARTITION:place`, such as `3:m:1700000000000-0`: its place before the retry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamqd.admin import due, groups, topics
from streamqd.admin.due import DueFilter, WaitingList
from streamqd.admin.reading import BadValues, Unreadable, server_unix_ms
from streamqd.errors import BadValue, Malformed, Refused
from streamqd.message import LAST_ERROR, LAST_ERROR_PLACE
from streamqd.model import LETTERS, Unit
from streamqd.store import retries as retry_calls
from streamqd.store import untrusted
from streamqd.store.items import portions
from streamqd.store.store import Store

TEXT_BYTES_MAX = 1000  # of an error that is shown
_NAME = re.compile(r"([0-9]{1,9}):([mr]:[0-9]{1,20}-[0-9]{1,20})")


@dataclass(frozen=True, slots=True)
class RetryRow:
    """One delayed retry. `attempt` is the number of the attempt it waits for, from 1.

    `uid` names the message in all its copies. `key` is '' without a key. `payload_bytes` is null
    when the stored retry cannot be read. `error` is the error of the last run and `at` its line of
    code, if `dlq_error` and `redact_error` allow it, else ''.
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
class RetriesView:
    """A page, earliest due time first. `total` counts all delayed retries of the group.

    Pass `cursor` for the next page ('' on the last one). `unreadable` are due times and counts in
    Redis that cannot be read. A retry without a due time has no row.
    """

    topic: str
    group: str
    now_unix_ms: int
    total: int
    rows: list[RetryRow]
    cursor: str
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class Hastened:
    """The result of `retry now`: `due` run now, `missing` had run or were cancelled by then."""

    topic: str
    group: str
    due: int
    missing: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result of `retry cancel`.

    `dead_letters` became dead letters (`dead_letter_ids` are their IDs), or `dropped` were deleted
    for good. `missing` had run by then. `unreadable` ones stay, and can only be dropped.
    """

    topic: str
    group: str
    dead_letters: int
    dropped: int
    missing: int
    unreadable: int
    dead_letter_ids: list[str]


def listed(
    store: Store,
    topic: str,
    group: str,
    *,
    choice: DueFilter = due.EVERY,
    limit: int = 50,
    cursor: str = "",
) -> RetriesView:
    """Return a page of the chosen retries. Raises TopicMissing, Refused."""
    waiting, bad = _waiting(store, topic, group), BadValues()
    partitions = choice.partitions(topic, waiting.count)
    after, now = due.read_cursor(cursor), server_unix_ms(store.connection)
    rows, following = due.page(waiting.chosen(partitions, choice, now, bad, after), limit)
    return RetriesView(topic, group, now, waiting.total(bad), rows, following, bad.rows)


def chosen(
    store: Store, topic: str, group: str, choice: DueFilter, ids: Sequence[str] = ()
) -> dict[int, list[RetryRow]]:
    """Return the named retries, or all that pass the filter, by partition.

    Raises TopicMissing, and Refused for a name that is not valid.
    """
    waiting = _waiting(store, topic, group)
    partitions = choice.partitions(topic, waiting.count)
    if ids:
        return _named(store, topic, group, waiting.count, ids)
    now = server_unix_ms(store.connection)
    found: dict[int, list[RetryRow]] = {}
    for partition, row in waiting.chosen(partitions, choice, now, BadValues()):
        found.setdefault(partition, []).append(row)
    return found


def hasten(store: Store, topic: str, group: str, rows: dict[int, list[RetryRow]]) -> Hastened:
    """Make retries due now. The owner's housekeeper moves them within a second."""
    hastened = gone = 0
    for unit, batch in _batches(topic, group, rows):
        reply = store.run(retry_calls.hasten(store.keys, unit, [_place(row) for row in batch]))
        hastened += int(reply.rest[0])
        gone += int(reply.rest[1])
    return Hastened(topic, group, hastened, gone)


def cancel(
    store: Store,
    topic: str,
    group: str,
    rows: dict[int, list[RetryRow]],
    *,
    drop: bool = False,
) -> Cancelled:
    """Dead-letter retries with the reason cancelled or, with `drop`, delete them.

    Retries of a group that reads dead letters are always dropped, because the letters still exist.
    """
    drop = drop or group.endswith(LETTERS)
    words: list[str] = []
    letters: list[str] = []
    for unit, batch in _batches(topic, group, rows):
        items = [(_place(row), {} if drop else _context(unit, row)) for row in batch]
        found, ids = store.run(retry_calls.cancel(store.keys, unit, items, drop=drop)).rest
        words += [word.decode() for word in found]
        letters += [f"{unit.partition}:{each.decode()}" for each in ids if each]
    moved = words.count("MOVED")
    return Cancelled(
        topic=topic,
        group=group,
        dead_letters=0 if drop else moved,
        dropped=moved if drop else 0,
        missing=words.count("GONE"),
        unreadable=words.count("UNREADABLE"),
        dead_letter_ids=letters,
    )


def _context(unit: Unit, row: RetryRow) -> dict[bytes, bytes]:
    """Return the fields of a dead letter that the message lacks."""
    topic, partition, original = row.uid.rsplit("/", 2)
    texts = {
        "originalTopic": topic,
        "originalPartition": partition,
        "originalId": original,
        "timestamp": original.partition("-")[0],
        "group": unit.group,
        "attempts": str(row.attempt - 1),
        "crashes": str(row.crashes),
        "reason": "cancelled",
    }
    return {name.encode(): text.encode() for name, text in texts.items()}


# --- reading --------------------------------------------------------------------------------------


def _waiting(store: Store, topic: str, group: str) -> WaitingList[RetryRow]:
    keys = store.keys
    return WaitingList(
        store,
        groups.known(store, topic, group),
        due=lambda partition: keys.retry(topic, partition, group),
        items=lambda partition: keys.retry_items(topic, partition, group),
        page=lambda partition, start: retry_calls.page(
            keys, Unit(topic, partition, group), start, due.PAGE
        ),
        row=lambda partition, each: _row(Unit(topic, partition, group), each),
    )


def _row(unit: Unit, each: retry_calls.Delayed) -> RetryRow:
    original = each.fields.get(b"originalId", b"").decode("utf-8", "replace")
    return RetryRow(
        id=f"{unit.partition}:{each.place}",
        due_unix_ms=each.due_unix_ms,
        attempt=_number(each.fields.get(b"retryCount")) + 1,
        crashes=_number(each.fields.get(b"crashCount")),
        key=each.fields.get(b"key", b"").decode("utf-8", "replace"),
        uid=f"{unit.topic}/{unit.partition}/{original or each.place[2:]}",
        payload_bytes=None if each.payload_bytes < 0 else each.payload_bytes,
        error=_text(each.fields.get(LAST_ERROR)),
        at=_text(each.fields.get(LAST_ERROR_PLACE)),
    )


def _text(raw: bytes | None) -> str:
    """Text that a worker has written. Another client may have written more."""
    return (raw or b"")[:TEXT_BYTES_MAX].decode("utf-8", "replace")


def _named(
    store: Store, topic: str, group: str, count: int, ids: Sequence[str]
) -> dict[int, list[RetryRow]]:
    """Return the named retries. All are found before any is changed."""
    found: dict[int, list[RetryRow]] = {}
    for name in dict.fromkeys(ids):
        match = _NAME.fullmatch(name)
        if match is None:
            raise Malformed(f"{name!r} is not the id of a retry, such as 3:m:1700000000000-0")
        unit = Unit(topic, int(match[1]), group)
        topics.check_partition(topic, unit.partition, count)
        score = store.execute("ZSCORE", store.keys.retry(*unit), match[2])
        if score is None:
            raise Refused(f"no retry {name} is delayed for {group}: it has run, or never was")
        # The page that starts just before it. A due time has no fraction.
        [row], _ = retry_calls.rows(
            store.run(retry_calls.page(store.keys, unit, (int(float(score)), match[2][:-1]), 1))
        )
        if row.place == match[2]:
            found.setdefault(unit.partition, []).append(_row(unit, row))
    return found


def _batches(
    topic: str, group: str, rows: dict[int, list[RetryRow]]
) -> Iterator[tuple[Unit, list[RetryRow]]]:
    for partition, found in sorted(rows.items()):
        for part in portions(found, lambda row: row.payload_bytes or 0, due.BATCH):
            yield Unit(topic, partition, group), part


def _place(row: RetryRow) -> str:
    return row.id.partition(":")[2]


def _number(raw: bytes | None) -> int:
    try:
        return untrusted.integer(raw, "", default=0)
    except BadValue:
        return 0
