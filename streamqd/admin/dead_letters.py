"""Dead letters as they are looked at. Their names are `PARTITION:ms-seq`.

The dead letters of a topic are the union of its partitions'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from streamqd.admin import topics
from streamqd.admin.dead_choice import EVERY_LETTER, DeadLetterFilter
from streamqd.admin.dead_letters_reading import (
    KNOWN,
    Fields,
    find,
    origin_of,
    replays_of,
    streams_of,
    total,
)
from streamqd.admin.pages import Entry, Id, Place, newest_first, read_id, read_place
from streamqd.admin.unreadable import BadValues, Unreadable, ask_each
from streamqd.policy.fingerprint import frame_of, of_letter
from streamqd.store import topics as registry
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

MASK = "***"


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """One dead letter of `dlq list`.

    `reason` is attempts, dead, undecodable, crashes, too-old, too-large, not-retried or cancelled.
    `uid` names the message over all its copies, `fingerprint` the failure, the same for
    letters that died alike. Numbers are null when the letter does not tell them.
    """

    id: str
    group: str
    reason: str
    error_class: str
    error_message: str
    attempts: int | None
    crashes: int | None
    replays: int
    uid: str
    key: bytes | None
    failed_unix_ms: int | None
    original_unix_ms: int | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class DeadLetterDetail(DeadLetterRow):
    """One dead letter with everything that is known of it, as `dlq show` prints it.

    `exit_code` or `signal` say how the process (`pid`) ended that the message took down, `rss` how
    much memory it had, in bytes. `frame` is the innermost frame of user code, `file:function`.
    `moving_to` is where a replay that was interrupted was taking it. `headers` is null when they
    cannot be read; `other` holds fields that streamqd does not know.
    """

    topic: str
    partition: int
    instance: str
    handler: str
    traceback: str
    frame: str
    moving_to: str
    signal: str
    exit_code: int | None
    pid: int | None
    rss: int | None
    headers: dict[str, str] | None
    payload: bytes
    other: dict[str, str]


@dataclass(frozen=True, slots=True)
class DeadLettersView:
    """A page, the newest letters first. `total` counts all letters of the topic, of all groups.

    `cursor` continues behind the last row; it is '' at the end.
    """

    topic: str
    total: int
    rows: list[DeadLetterRow]
    cursor: str


@dataclass(frozen=True, slots=True)
class TopicDeadLetters:
    """How many dead letters a topic has, and when the oldest and the newest were made.

    `unreadable` are values of its keys that cannot be read; a topic that they hide has no times.
    """

    topic: str
    total: int
    oldest_unix_ms: int | None
    newest_unix_ms: int | None
    unreadable: list[Unreadable]


# --- looking --------------------------------------------------------------------------------------


def overview(link: Connection, keys: Keys) -> list[TopicDeadLetters]:
    """The topics that have dead letters."""
    rows = []
    names, strange = registry.registry(link, keys)
    for error in strange:
        bad = BadValues()
        bad.add(error)
        rows.append(TopicDeadLetters(error.found, 0, None, None, bad.rows))
    for topic in names:
        bad = BadValues()
        streams = [
            keys.dlq(topic, number)
            for number in range(topics.known_count(link, keys, topic, bad) or 0)
        ]
        infos = ask_each(link, [("XINFO", "STREAM", stream) for stream in streams], bad)
        found = [dict(zip(info[::2], info[1::2], strict=True)) for info in infos if info]
        total = sum(int(info[b"length"]) for info in found)
        if total or bad.rows:
            firsts = [read_id(i[b"first-entry"][0]).ms for i in found if i[b"first-entry"]]
            lasts = [read_id(i[b"last-entry"][0]).ms for i in found if i[b"last-entry"]]
            oldest, newest = min(firsts, default=None), max(lasts, default=None)
            rows.append(TopicDeadLetters(topic, total, oldest, newest, bad.rows))
    return rows


def listed(
    link: Connection,
    keys: Keys,
    topic: str,
    *,
    choice: DeadLetterFilter = EVERY_LETTER,
    limit: int = 20,
    cursor: str = "",
) -> DeadLettersView:
    """A page of the letters chosen. Raises TopicMissing, Refused."""
    streams = streams_of(link, keys, topic)
    before = read_place(cursor, len(streams)) if cursor else None
    found = list(newest(link, streams, choice, limit + 1, before))
    page = found[:limit]
    return DeadLettersView(
        topic=topic,
        total=total(link, keys, topic),
        rows=[_row(topic, entry) for entry in page],
        cursor=str(page[-1].place) if len(found) > limit else "",
    )


def newest(
    link: Connection,
    streams: dict[int, str],
    choice: DeadLetterFilter,
    limit: int,
    before: Place | None = None,
) -> Iterator[Entry]:
    """Yield the letters chosen, at most `limit`, the newest first, behind the place `before`."""
    since = None if choice.since_unix_ms is None else Id(max(0, choice.since_unix_ms), 0)
    if choice.until_unix_ms is not None:
        # Redis has no range that ends before 0-0.
        end = Place(0, max(Id(choice.until_unix_ms, 0), Id(0, 1)))
        before = end if before is None else min(before, end, key=lambda p: (p.id, p.partition))
    keep = choice.takes if choice.narrows else None
    return newest_first(link, streams, before=before, since=since, keep=keep, limit=limit)


def show(link: Connection, keys: Keys, topic: str, letter_id: str) -> DeadLetterDetail:
    """One letter in full. Raises TopicMissing, Refused when there is no such letter."""
    entry = find(link, streams_of(link, keys, topic), letter_id)
    told, row = Fields(entry.fields), _row(topic, entry)
    mark = link.execute("HGET", keys.moving(topic, entry.partition), str(entry.id)) or b""
    return DeadLetterDetail(
        topic=topic,
        partition=entry.partition,
        **{each.name: getattr(row, each.name) for each in fields(row)},
        instance=told.text(b"instance"),
        handler=told.text(b"handler"),
        traceback=told.text(b"traceback"),
        frame=frame_of(told.text(b"traceback")),
        moving_to=mark.decode("utf-8", "replace").partition(" ")[2],
        signal=told.text(b"signal"),
        exit_code=told.number(b"exitCode"),
        pid=told.number(b"pid"),
        rss=told.number(b"rss"),
        headers=entry.headers,
        payload=entry.fields.get(b"payload", b""),
        other={
            name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for name, value in entry.fields.items()
            if name not in KNOWN
        },
    )


def masked(letter: DeadLetterDetail) -> DeadLetterDetail:
    """The letter without what users wrote: `***` for each key, header and text."""
    return replace(
        letter,
        key=letter.key and MASK.encode(),
        error_message=letter.error_message and MASK,
        traceback=letter.traceback and MASK,
        headers=letter.headers and dict.fromkeys(letter.headers, MASK),
        payload=letter.payload and MASK.encode(),
        other=dict.fromkeys(letter.other, MASK),
    )


def _row(topic: str, entry: Entry) -> DeadLetterRow:
    told = Fields(entry.fields)
    origin, number, original = origin_of(topic, entry)
    return DeadLetterRow(
        id=str(entry.place),
        group=told.text(b"group"),
        reason=told.text(b"reason"),
        error_class=told.text(b"errorClass"),
        error_message=told.text(b"errorMessage"),
        attempts=told.number(b"attempts"),
        crashes=told.number(b"crashes"),
        replays=replays_of(entry),
        uid=f"{origin}/{number}/{original}" if original else "",
        key=entry.fields.get(b"key"),
        failed_unix_ms=told.number(b"failedAt"),
        original_unix_ms=told.number(b"timestamp"),
        fingerprint=of_letter(entry.fields),
    )
