"""List, show and cancel the delayed sends of a topic, or send them now.

The ID of a delayed send is `PARTITION:send-id`. A call of `send` with `delay` or `at` returns the
uid of the delayed send, which is `topic/partition/send-id`. When the send is due, the message is
written to the topic and gets another uid.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from streamqd.admin import due, topics
from streamqd.admin.messages import FoundMessage, MessageFilter, MessageList
from streamqd.admin.reading import PAGE_MAX, ask, parse_headers, read_backwards
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.store import retries, scheduled
from streamqd.store.retries import Delayed
from streamqd.store.store import Store

SEARCH_MAX = 10_000  # newest entries of a partition that are searched for a sent message
_NAME = re.compile(r"([0-9]{1,9}):([!-~]{1,200})")
_UID = re.compile(r"(?P<topic>[^/]+)/([0-9]{1,9})/([!-~]{1,200})")


@dataclass(frozen=True, slots=True)
class DelayedRow:
    """A delayed send in a list, which is sorted by due time.

    `key` is '' if the message has no key. Unknown numbers are null. `payload_bytes` is also null if
    the stored send is invalid.
    """

    id: str
    due_unix_ms: int
    sent_unix_ms: int | None
    key: str
    payload_bytes: int | None


@dataclass(frozen=True, slots=True)
class DelayedSend:
    """All details of a delayed send. `headers` is null if they are not a JSON object."""

    topic: str
    id: str
    due_unix_ms: int
    sent_unix_ms: int | None
    key: bytes | None
    headers: dict[str, str] | None
    payload: bytes
    other: dict[str, str]


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A delayed send that was already sent, with the uid of the message in the topic."""

    id: str
    uid: str


@dataclass(frozen=True, slots=True)
class DelayedChanged:
    """The result of an action on delayed sends.

    `changed` is the number of delayed sends that were changed. The others were no longer waiting:
    `sent` lists those whose messages were found in the topic, with their uids. `unknown` lists the
    IDs whose messages are not among the newest 10,000 entries of their partitions. These sends were
    canceled, were sent earlier, or never existed.
    """

    changed: int
    sent: list[SentMessage]
    unknown: list[str]


def messages(store: Store, topic: str) -> MessageList[Delayed, DelayedRow]:
    """Return the delayed sends of a topic, sorted by due time. Raises TopicNotFoundError."""
    return due.messages(store, topic, "", topics.partition_count(store, topic), _row)


def select_ids(store: Store, topic: str, choice: MessageFilter) -> Iterator[str]:
    """Yield the IDs of the delayed sends that match a filter, page by page.

    Raises TopicNotFoundError, and RequestRefusedError if the filter cannot be used.
    """
    return (message.position.name for message in messages(store, topic).iterate(choice))


def show(store: Store, topic: str, name: str) -> DelayedSend:
    """Return a delayed send.

    Raises RequestRefusedError if it is no longer waiting. If it was already sent and its message is
    found, the text of the error contains the message's uid.
    """
    [(partition, send_id)] = _read(store, topic, [name])
    score = store.execute("ZSCORE", store.keys.delayed_sends(topic, partition), send_id)
    items = store.keys.delayed_send_items(topic, partition)
    raw = None if score is None else store.execute("HGET", items, send_id)
    if score is None or raw is None:
        missed = find_sent(store, topic, [f"{partition}:{send_id}"])
        raise RequestRefusedError(
            f"{name} was already sent, as {missed.sent[0].uid}"
            if missed.sent
            else (
                f"delayed send {name} not found in {topic}: it was sent or canceled, or never"
                " existed"
            )
        )
    fields = scheduled.unpack_fields(raw, items, send_id)
    known = (b"payload", b"key", b"headers", b"sentAt", b"sendId")
    return DelayedSend(
        topic=topic,
        id=name,
        due_unix_ms=int(float(score)),
        sent_unix_ms=_number(fields.get(b"sentAt")),
        key=fields.get(b"key"),
        headers=parse_headers(fields),
        payload=fields.get(b"payload", b""),
        other={
            field.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for field, value in fields.items()
            if field not in known
        },
    )


def cancel(store: Store, topic: str, names: Iterable[str]) -> DelayedChanged:
    """Cancel delayed sends. A send that becomes due during the call is either canceled or sent.

    Raises TopicNotFoundError, InvalidRequestError for an invalid ID, and RequestRefusedError if a
    partition does not exist.
    """
    canceled, gone = 0, []
    for partition, batch in _batches(store, topic, names):
        items: list[tuple[str, dict[bytes, bytes]]] = [(send_id, {}) for send_id in batch]
        words, _ = store.run(
            retries.cancel(store.keys, (topic, partition), items, drop=True)
        ).values
        canceled += words.count(b"MOVED")
        gone += [
            f"{partition}:{send_id}"
            for send_id, word in zip(batch, words, strict=True)
            if word != b"MOVED"
        ]
    return find_sent(store, topic, gone, canceled)


def make_due(store: Store, topic: str, names: Iterable[str]) -> DelayedChanged:
    """Make delayed sends due now. A housekeeper sends them within seconds.

    Raises TopicNotFoundError, InvalidRequestError for an invalid ID, and RequestRefusedError if a
    partition does not exist.
    """
    changed, gone = 0, []
    for partition, batch in _batches(store, topic, names):
        due_now, missing = store.run(retries.make_due(store.keys, (topic, partition), batch)).values
        changed += due_now
        if missing:
            key = store.keys.delayed_sends(topic, partition)
            scores = ask(store, [("ZSCORE", key, each) for each in batch])
            gone += [
                f"{partition}:{send_id}"
                for send_id, score in zip(batch, scores, strict=True)
                if score is None
            ]
    return find_sent(store, topic, gone, changed)


def find_sent(store: Store, topic: str, names: Sequence[str], changed: int = 0) -> DelayedChanged:
    """Find the messages of delayed sends that are no longer waiting.

    A message contains the ID of its delayed send, so the newest messages are searched for these
    IDs. `changed` is the number of sends that the caller has changed, for the result.
    """
    wanted: dict[int, dict[bytes, str]] = {}
    for name in names:
        number, _, send_id = name.partition(":")
        wanted.setdefault(int(number), {})[send_id.encode()] = name
    sent = []
    for partition, ids in wanted.items():
        stream = store.keys.stream(topic, partition)
        entries = read_backwards(store, partition, stream, size=PAGE_MAX)
        for entry in itertools.islice(entries, SEARCH_MAX):
            name = ids.pop(entry.fields.get(b"sendId", b""), "")
            if name:
                sent.append(SentMessage(name, f"{topic}/{partition}/{entry.id}"))
            if not ids:
                break
    unknown = [name for ids in wanted.values() for name in ids.values()]
    return DelayedChanged(changed, sent, unknown)


# --- reading --------------------------------------------------------------------------------------


def _row(found: FoundMessage[Delayed]) -> DelayedRow:
    one = found.item
    return DelayedRow(
        id=found.position.name,
        due_unix_ms=one.due_unix_ms,
        sent_unix_ms=_number(one.fields.get(b"sentAt")),
        key=one.fields.get(b"key", b"").decode("utf-8", "replace"),
        payload_bytes=None if one.payload_bytes < 0 else one.payload_bytes,
    )


def _read(store: Store, topic: str, names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Parse IDs, each of which is either `PARTITION:send-id` or the uid that `send` returned.

    Raises TopicNotFoundError, InvalidRequestError and RequestRefusedError.
    """
    count = topics.partition_count(store, topic)
    for name in names:
        match = _NAME.fullmatch(name) or _UID.fullmatch(name)
        if match is None:
            raise InvalidRequestError(
                f"{name!r} is not a delayed send; pass the uid that sending returned, or"
                f" PARTITION:SEND-ID as `streamqd delayed list {topic}` prints it"
            )
        if match.re is _UID and match["topic"] != topic:
            raise InvalidRequestError(
                f"{name!r} is not a delayed send of {topic}; pass {match['topic']} as the topic"
            )
        partition, send_id = match.groups()[-2:]
        topics.check_partition(topic, int(partition), count)
        yield int(partition), send_id


def _batches(store: Store, topic: str, names: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Return the IDs by partition, in batches that each fit into one call.

    If the IDs are given as a list, all of them are parsed before the first batch is returned, so
    that an invalid ID is reported before anything is changed.
    """
    read = _read(store, topic, names)
    if isinstance(names, Sequence):
        read = iter(list(dict.fromkeys(read)))
    return due.batches(read)


def _number(raw: bytes | None) -> int | None:
    return int(raw) if raw is not None and raw.isdigit() and len(raw) < 17 else None
