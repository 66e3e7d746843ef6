"""Dead letters as they are looked at. Their names are `PARTITION:ms-seq`.

The dead letters of a topic are the union of its partitions'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from streamqd.admin import topics
from streamqd.admin.pages import Entry, Place, ask, newest_first, read_fields, read_id, read_place
from streamqd.errors import Refused
from streamqd.store import topics as registry
from streamqd.store.client import Link
from streamqd.store.keys import Keys

SCAN_MAX = 10_000  # letters looked at for the statistics of a topic


@dataclass(frozen=True, slots=True)
class LetterRow:
    """One dead letter of `dlq list`.

    `reason` is attempts, dead, decode, crashes, too-old, not-retried, cancelled or loop. `uid`
    names the message over all its copies. Numbers are null when the letter does not tell them.
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


@dataclass(frozen=True, slots=True)
class Letter(LetterRow):
    """One dead letter with everything that is known of it, as `dlq show` prints it.

    `exit_code` or `signal` say how the process (`pid`) ended that the message took down, `rss` how
    much memory it had, in bytes. `headers` is null when they
    cannot be read; `other` holds fields that streamqd does not know.
    """

    topic: str
    partition: int
    instance: str
    handler: str
    traceback: str
    fingerprint: str
    signal: str
    exit_code: int | None
    pid: int | None
    rss: int | None
    headers: dict[str, str] | None
    payload: bytes
    other: dict[str, str]


@dataclass(frozen=True, slots=True)
class LettersView:
    """A page, the newest letters first. `total` counts all letters of the topic, of all groups.

    `cursor` continues behind the last row; it is '' at the end.
    """

    topic: str
    total: int
    rows: list[LetterRow]
    cursor: str


@dataclass(frozen=True, slots=True)
class TopicLetters:
    """How many dead letters a topic has, and when the oldest and the newest were made."""

    topic: str
    total: int
    oldest_unix_ms: int | None
    newest_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class Cause:
    """Letters that died alike, in `dlq stats`."""

    group: str
    reason: str
    error_class: str
    count: int
    newest: str
    newest_unix_ms: int


@dataclass(frozen=True, slots=True)
class Causes:
    """The letters of a topic by cause, the most frequent first.

    `complete` is false when only the newest `looked_at` letters were counted.
    """

    topic: str
    total: int
    looked_at: int
    complete: bool
    causes: list[Cause]


# --- looking --------------------------------------------------------------------------------------


def overview(link: Link, keys: Keys) -> list[TopicLetters]:
    """The topics that have dead letters."""
    rows = []
    for topic in registry.registered(link, keys):
        streams = streams_of(link, keys, topic)
        infos = ask(link, [("XINFO", "STREAM", stream) for stream in streams.values()])
        found = [dict(zip(info[::2], info[1::2], strict=True)) for info in infos if info]
        total = sum(int(info[b"length"]) for info in found)
        if total:
            firsts = [read_id(i[b"first-entry"][0]).ms for i in found if i[b"first-entry"]]
            lasts = [read_id(i[b"last-entry"][0]).ms for i in found if i[b"last-entry"]]
            rows.append(TopicLetters(topic, total, min(firsts), max(lasts)))
    return rows


def listed(
    link: Link,
    keys: Keys,
    topic: str,
    *,
    group: str | None = None,
    limit: int = 20,
    cursor: str = "",
) -> LettersView:
    """A page of letters, of one group or all. Raises TopicMissing, Refused."""
    streams = streams_of(link, keys, topic)
    before = read_place(cursor, len(streams)) if cursor else None
    found = list(
        newest_first(link, streams, before=before, keep=lambda e: is_of(e, group), limit=limit + 1)
    )
    page = found[:limit]
    return LettersView(
        topic=topic,
        total=total(link, keys, topic),
        rows=[_row(topic, entry) for entry in page],
        cursor=str(page[-1].place) if len(found) > limit else "",
    )


def show(link: Link, keys: Keys, topic: str, letter_id: str) -> Letter:
    """One letter in full. Raises TopicMissing, Refused when there is no such letter."""
    entry = find(link, streams_of(link, keys, topic), letter_id)
    told, row = Fields(entry.fields), _row(topic, entry)
    return Letter(
        topic=topic,
        partition=entry.partition,
        **{each.name: getattr(row, each.name) for each in fields(row)},
        instance=told.text(b"instance"),
        handler=told.text(b"handler"),
        traceback=told.text(b"traceback"),
        fingerprint=told.text(b"fingerprint"),
        signal=told.text(b"signal"),
        exit_code=told.number(b"exitCode"),
        pid=told.number(b"pid"),
        rss=told.number(b"rss"),
        headers=entry.headers,
        payload=entry.fields.get(b"payload", b""),
        other={
            name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for name, value in entry.fields.items()
            if name not in _KNOWN
        },
    )


def causes(link: Link, keys: Keys, topic: str) -> Causes:
    """Count the newest letters of a topic by what killed them. Raises TopicMissing."""
    streams = streams_of(link, keys, topic)
    counted: Counter[tuple[str, str, str]] = Counter()
    newest: dict[tuple[str, str, str], Place] = {}
    for entry in newest_first(link, streams, limit=SCAN_MAX):
        told = Fields(entry.fields)
        cause = (told.text(b"group"), told.text(b"reason"), told.text(b"errorClass"))
        counted[cause] += 1
        newest.setdefault(cause, entry.place)
    found = total(link, keys, topic)
    looked_at = counted.total()
    return Causes(
        topic=topic,
        total=found,
        looked_at=looked_at,
        complete=looked_at < SCAN_MAX or found <= SCAN_MAX,
        causes=[
            Cause(
                *cause, count=count, newest=str(newest[cause]), newest_unix_ms=newest[cause].id.ms
            )
            for cause, count in counted.most_common()
        ],
    )


def total(link: Link, keys: Keys, topic: str) -> int:
    """How many letters a topic has. Raises TopicMissing."""
    streams = streams_of(link, keys, topic)
    return sum(ask(link, [("XLEN", stream) for stream in streams.values()]))


def find(link: Link, streams: dict[int, str], letter_id: str) -> Entry:
    place = read_place(letter_id, len(streams))
    page = link.execute("XRANGE", streams[place.partition], str(place.id), str(place.id))
    if not page:
        raise Refused(f"there is no dead letter {letter_id}: it was replayed, purged or never was")
    return Entry(place.partition, place.id, read_fields(page[0][1]))


def streams_of(link: Link, keys: Keys, topic: str) -> dict[int, str]:
    count = topics.partition_count(link, keys, topic)
    return {number: keys.dlq(topic, number) for number in range(count)}


# --- what a letter says ---------------------------------------------------------------------------

_KNOWN = frozenset(
    b"payload key headers originalTopic originalPartition originalId timestamp group instance"
    b" attempts crashes reason errorClass errorMessage traceback fingerprint signal exitCode rss"
    b" pid handler failedAt retryCount crashCount replayCount".split()
)


class Fields:
    """A letter's fields as text and numbers; what cannot be read as that counts as missing."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self._fields = fields

    def text(self, name: bytes) -> str:
        return self._fields.get(name, b"").decode("utf-8", "replace")

    def number(self, name: bytes) -> int | None:
        try:
            return int(self._fields[name])
        except (KeyError, ValueError):
            return None


def _row(topic: str, entry: Entry) -> LetterRow:
    told = Fields(entry.fields)
    original = told.text(b"originalId")
    origin = told.text(b"originalTopic") or topic
    number = told.text(b"originalPartition") or str(entry.partition)
    return LetterRow(
        id=str(entry.place),
        group=told.text(b"group"),
        reason=told.text(b"reason"),
        error_class=told.text(b"errorClass"),
        error_message=told.text(b"errorMessage"),
        attempts=told.number(b"attempts"),
        crashes=told.number(b"crashes"),
        replays=told.number(b"replayCount") or 0,
        uid=f"{origin}/{number}/{original}" if original else "",
        key=entry.fields.get(b"key"),
        failed_unix_ms=told.number(b"failedAt"),
        original_unix_ms=told.number(b"timestamp"),
    )


def is_of(entry: Entry, group: str | None) -> bool:
    return group is None or entry.fields.get(b"group") == group.encode()
