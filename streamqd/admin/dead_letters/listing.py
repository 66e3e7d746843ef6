"""List dead letters, show one in full, and count them by cause.

The ID of a dead letter is `PARTITION:ms-seq`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from streamqd.admin import topics
from streamqd.admin.dead_letters.selection import (
    KNOWN,
    DeadLetterFields,
    Stop,
    count_replays,
    dead_letter_streams,
    find,
    find_origin,
    never_stop,
)
from streamqd.admin.messages import (
    MATCH_ALL,
    FoundMessage,
    MessageFilter,
    MessageList,
    MessagePage,
    MessagePosition,
    newest_first,
)
from streamqd.admin.reading import (
    PAGE_MAX,
    Entry,
    Unreadable,
    ViewReader,
    pairs,
    read_id,
    server_unix_ms,
)
from streamqd.message import LAST_RUN, RUN_REFERENCE
from streamqd.policy.fingerprint import dead_letter_fingerprint, innermost_user_frame
from streamqd.store import topics as registry
from streamqd.store.store import Store

MASK = "***"


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter in `dlq list`.

    `reason` is attempts, dead, undecodable, crashes, too-old, too-large, not-retried or canceled.
    `attempts` is the number of failed runs, and `crashes` the number of worker processes that the
    message crashed. `replays` is the number of times that the message was already replayed from the
    dead letters. `uid` identifies the message in all its copies. The message was first written at
    `original_unix_ms` and dead-lettered at `failed_unix_ms`. Dead letters with the same cause have
    the same `fingerprint`. A number is null if the dead letter does not contain it.
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
    """A dead letter with all its fields, as `dlq show` prints it.

    If the message crashed its worker, `pid`, `exit_code` or `signal`, and `rss` (in bytes) describe
    the crashed process. `frame` is the innermost frame of user code, written `file:function`.
    `moving_to` is the destination of a replay that was interrupted. `trace_id` and `span_id`
    identify the span of the last run, and are '' without tracing. `headers` is null if the field is
    invalid. `other` contains fields that streamqd does not write.
    """

    topic: str
    partition: int
    instance: str
    handler: str
    traceback: str
    frame: str
    moving_to: str
    trace_id: str
    span_id: str
    signal: str
    exit_code: int | None
    pid: int | None
    rss: int | None
    headers: dict[str, str] | None
    payload: bytes
    other: dict[str, str]


@dataclass(frozen=True, slots=True)
class TopicDeadLetters:
    """The number of a topic's dead letters, and the times of the oldest and the newest one.

    `unreadable` lists invalid values in the topic's keys. If the dead letters cannot be counted
    because of them, `total` is 0 and both times are None.
    """

    topic: str
    total: int
    oldest_unix_ms: int | None
    newest_unix_ms: int | None
    unreadable: list[Unreadable]


# --- lists and details ----------------------------------------------------------------------------


def overview(store: Store) -> list[TopicDeadLetters]:
    """Return the topics that have dead letters, or invalid values that prevent counting them."""
    rows = []
    names, invalid = registry.read_registry(store)
    for error in invalid:
        reader = ViewReader(store)
        reader.add(error)
        rows.append(TopicDeadLetters(error.found, 0, None, None, reader.rows))
    for topic in names:
        reader = ViewReader(store)
        streams = [
            store.keys.dlq(topic, number)
            for number in range(topics.known_count(reader, topic) or 0)
        ]
        infos = reader.ask([("XINFO", "STREAM", stream) for stream in streams])
        found = [pairs(info) for info in infos if info]
        total = sum(int(info[b"length"]) for info in found)
        if total or reader.rows:
            firsts = [read_id(i[b"first-entry"][0]).ms for i in found if i[b"first-entry"]]
            lasts = [read_id(i[b"last-entry"][0]).ms for i in found if i[b"last-entry"]]
            oldest, newest = min(firsts, default=None), max(lasts, default=None)
            rows.append(TopicDeadLetters(topic, total, oldest, newest, reader.rows))
    return rows


def messages(store: Store, topic: str) -> MessageList[Entry, DeadLetterRow]:
    """Return the dead letters of a topic, for all groups, newest first.

    Raises TopicNotFoundError.
    """
    streams = list(dead_letter_streams(store, topic).values())
    return newest_first(store, topic, streams, lambda entry: _row(topic, entry))


def show(store: Store, topic: str, dead_letter_id: str) -> DeadLetterDetail:
    """Return one dead letter with all its fields.

    Raises TopicNotFoundError, and RequestRefusedError if the ID is not found.
    """
    entry = find(store, dead_letter_streams(store, topic), dead_letter_id)
    row = _row(topic, entry)
    known = DeadLetterFields(entry.fields).fields_for(DeadLetterDetail)
    span = RUN_REFERENCE.fullmatch(entry.fields.get(LAST_RUN, b"").decode("utf-8", "replace"))
    mark = store.execute("HGET", store.keys.moving(topic, entry.partition), str(entry.id)) or b""
    return DeadLetterDetail(
        topic=topic,
        partition=entry.partition,
        **known | {each.name: getattr(row, each.name) for each in fields(row)},
        frame=innermost_user_frame(known["traceback"]),
        moving_to=mark.decode("utf-8", "replace").partition(" ")[2],
        trace_id=span[1] if span else "",
        span_id=span[2] if span else "",
        headers=entry.headers,
        payload=entry.fields.get(b"payload", b""),
        other={
            name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for name, value in entry.fields.items()
            if name not in KNOWN
        },
    )


def mask_dead_letter(dead_letter: DeadLetterDetail) -> DeadLetterDetail:
    """Return a dead letter with `***` in place of every value that may contain user data."""
    return replace(
        dead_letter,
        key=dead_letter.key and MASK.encode(),
        error_message=dead_letter.error_message and MASK,
        traceback=dead_letter.traceback and MASK,
        headers=dead_letter.headers and dict.fromkeys(dead_letter.headers, MASK),
        payload=dead_letter.payload and MASK.encode(),
        other=dict.fromkeys(dead_letter.other, MASK),
    )


def _row(topic: str, entry: Entry) -> DeadLetterRow:
    origin, number, original = find_origin(topic, entry)
    return DeadLetterRow(
        id=str(entry.place),
        **DeadLetterFields(entry.fields).fields_for(DeadLetterRow),
        replays=count_replays(entry),
        uid=f"{origin}/{number}/{original}" if original else "",
        key=entry.fields.get(b"key"),
        fingerprint=dead_letter_fingerprint(entry.fields),
    )


CAUSES_MAX = 1_000
INSTANCES_MAX = 8  # instances listed for each cause
_EVERY = 1 << 62


@dataclass(frozen=True, slots=True)
class FailureCause:
    """The dead letters of one group that have the same cause.

    `fingerprint` is computed from the exception class, the frame of user code and the handler.
    `frame` is written `file:function`, and is '' if it is unknown. `first_unix_ms` and
    `last_unix_ms` are the times of the oldest and the newest dead letter, and `example` is the ID
    of the newest one. `instances` lists up to 8 instances on which the messages failed. `replayed`
    is the number of these dead letters whose messages were replayed before, and `replays` is the
    maximum number of times that one of the messages was replayed.
    """

    fingerprint: str
    group: str
    reason: str
    error_class: str
    error_message: str
    frame: str
    handler: str
    count: int
    first_unix_ms: int
    last_unix_ms: int
    example: str
    instances: list[str]
    replayed: int
    replays: int


@dataclass(frozen=True, slots=True)
class Causes:
    """The matching dead letters by cause, most frequent first."""

    topic: str
    #: The number of dead letters of the topic.
    total: int
    #: The number of dead letters that were read, starting with the newest.
    examined: int
    #: The number of dead letters that match.
    looked_at: int
    #: False if older dead letters can match too, so that counts are lower bounds.
    complete: bool
    #: The number of matches with a cause that is not among the first 1,000 causes.
    others: int
    causes: list[FailureCause]
    #: Invalid values in Redis.
    unreadable: list[Unreadable]


class FailureTally:
    """Counts dead letters by cause, with up to CAUSES_MAX causes to limit its memory."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _CauseTally] = {}
        self.count = 0
        self.others = 0

    def add(self, entry: Entry) -> None:
        """Count a dead letter."""
        name = (
            dead_letter_fingerprint(entry.fields),
            DeadLetterFields(entry.fields).text(b"group"),
        )
        self.count += 1
        tally = self._found.get(name)
        if tally is None:
            if len(self._found) >= CAUSES_MAX:
                self.others += 1
                return
            tally = self._found[name] = _CauseTally(entry)
        tally.add(entry)

    def causes(self) -> list[FailureCause]:
        """Return the counted causes, most frequent first."""
        rows = [tally.cause(*name) for name, tally in self._found.items()]
        return sorted(rows, key=lambda each: (-each.count, -each.last_unix_ms, each.fingerprint))


class _CauseTally:
    """The counts, the newest dead letter and the instances of one cause."""

    def __init__(self, entry: Entry) -> None:
        self.count = self.replayed = self.replays = 0
        self.first = self.newest = entry.place
        self.fields = entry.fields
        self.instances: dict[str, None] = {}

    def add(self, entry: Entry) -> None:
        self.count += 1
        if entry.id < self.first.id:
            self.first = entry.place
        if entry.id > self.newest.id:
            self.newest, self.fields = entry.place, entry.fields
        instance = DeadLetterFields(entry.fields).text(b"instance")
        if len(self.instances) < INSTANCES_MAX and instance:
            self.instances[instance] = None
        replays = count_replays(entry)
        self.replayed += replays > 0
        self.replays = max(self.replays, replays)

    def cause(self, fingerprint: str, group: str) -> FailureCause:
        newest = DeadLetterFields(self.fields)
        return FailureCause(
            **newest.fields_for(FailureCause) | {"group": group},
            fingerprint=fingerprint,
            frame=innermost_user_frame(newest.text(b"traceback")),
            count=self.count,
            first_unix_ms=self.first.id.ms,
            last_unix_ms=self.newest.id.ms,
            example=str(self.newest),
            instances=sorted(self.instances),
            replayed=self.replayed,
            replays=self.replays,
        )


def causes(
    store: Store,
    topic: str,
    choice: MessageFilter = MATCH_ALL,
    *,
    last: int | None = None,
    budget: int | None = None,
    stop: Stop = never_stop,
) -> Causes:
    """Count the matching dead letters by cause, reading the newest first.

    Counting stops after `last` matching dead letters, after `budget` dead letters have been read,
    or when `stop` returns True. Raises TopicNotFoundError and RequestRefusedError.
    """
    return survey(store, topic, choice, last=last, budget=budget, stop=stop).causes


class DeadLetterSurvey(NamedTuple):
    """The causes of the matching dead letters, and the first page of matches."""

    causes: Causes
    page: MessagePage[DeadLetterRow]


def survey(
    store: Store,
    topic: str,
    choice: MessageFilter = MATCH_ALL,
    *,
    limit: int = 0,
    last: int | None = None,
    budget: int | None = None,
    stop: Stop = never_stop,
) -> DeadLetterSurvey:
    """Count causes as `causes` does, and return the newest `limit` matches, in a single pass."""
    dead_letters, tally, complete, examined = messages(store, topic), FailureTally(), True, 0
    rows: list[FoundMessage[Entry]] = []
    place: MessagePosition | None = None
    bounds = [each for each in (last, budget) if each is not None]
    for each in dead_letters.examine(choice, min(bounds) + 1 if bounds else _EVERY):
        if examined == budget or (examined and examined % PAGE_MAX == 0 and stop()):
            complete = False
            break
        if choice.takes(each.unix_ms, each.fields):
            if tally.count == last:
                complete = False
                break
            tally.add(each.item)
            if len(rows) < limit:
                rows.append(each)
        examined += 1
        place = each.position
    full = len(rows) < tally.count  # more dead letters match than the page has rows
    if full and rows:
        place = rows[-1].position
    found = Causes(
        topic=topic,
        total=dead_letters.total(),
        examined=examined,
        looked_at=tally.count,
        complete=complete,
        others=tally.others,
        causes=tally.causes(),
        unreadable=dead_letters.reader.rows,
    )
    page = MessagePage(
        now_unix_ms=server_unix_ms(store.connection),
        total=found.total,
        rows=dead_letters.rows(rows),
        cursor=str(place or "") if full or not complete else "",
        complete=complete or full,
        unreadable=found.unreadable,
    )
    return DeadLetterSurvey(found, page)
