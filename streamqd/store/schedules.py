"""Script calls that store, fire and pause schedules, and the index that maps names to partitions.

A schedule is stored in the same cluster slot as the partition to which it sends. The index contains
the partition of each schedule, so that a schedule can be found by its name. Because the index is in
another slot, it cannot be written in the same step, and is written before the schedule itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from streamqd.config.schedules import LAST_UNIX_MS
from streamqd.config.setting import NAME
from streamqd.errors import ContractError, InvalidValueError
from streamqd.model import Assignment, TopicPartition
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys, key_by_name
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store
from streamqd.store.topics import PARTITIONS_MAX

FILE, OPERATOR = "file", "operator"
PAUSED, ORPHANED, UNREADABLE, MOVING = "paused", "orphaned", "unreadable", "moving"
REASONS = (PAUSED, ORPHANED, UNREADABLE, MOVING)
ORPHAN_MS = 600_000  # a schedule from a file that no instance declares for this time does not fire
TAKEOVER_MS = 60_000  # a specification that no instance declares for this time can be replaced
TICKS_MAX = 64  # maximum number of ticks in one call
LINE_BYTES_MAX = 512  # maximum length of a line in the index
STAMPS_MAX = 256  # maximum number of declared schedules in one call
FIELDS_MAX = 8  # maximum number of names and values in one message
_TEXTS_MAX = 128 << 10


class DueSchedule(NamedTuple):
    """A schedule that is due. `hash` is the hash of its specification, or '' if it has none."""

    name: bytes
    due_unix_ms: int
    hash: str


class DuePage(NamedTuple):
    """The schedules of a partition that are due, and the server time.

    `following_unix_ms` is the due time of the next schedule that is not due yet, or None.
    """

    now_unix_ms: int
    rows: list[DueSchedule]
    following_unix_ms: int | None

    @classmethod
    def parse(cls, reply: Reply, key: str) -> DuePage:
        """Parse an OK reply. Raises InvalidValueError."""
        now, flat, following = reply.values
        rows = [
            DueSchedule(
                name, untrusted.integer(due, key, low=-untrusted.INTEGER_MAX), _label(digest)
            )
            for name, due, digest in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        ]
        later = untrusted.integer(following, key) if following else None
        return cls(untrusted.integer(now, key), rows, later)


class DueTick(NamedTuple):
    """A due tick to pass to `fire`.

    `tick` is the time for which a message is sent, or None to advance the schedule without sending
    a message. `following_unix_ms` is the next due time, or None after the last tick. `skipped` is
    the number of earlier ticks for which no message is sent.
    """

    name: str
    hash: str
    due_unix_ms: int
    tick: int | None
    following_unix_ms: int | None
    skipped: int
    fields: Sequence[str | bytes]


class IndexLine(NamedTuple):
    """A line of the index, which contains the place (topic and partition) of one schedule.

    While a schedule is moving to another partition, `origin_place` is its old place.
    """

    fleet: str
    origin: str
    place: TopicPartition
    origin_place: TopicPartition | None = None

    @classmethod
    def parse(cls, raw: bytes, key: str, name: str) -> IndexLine:
        """Parse the line for the schedule `name`. Raises InvalidValueError for an invalid line."""
        found = _line(raw) if len(raw) <= LINE_BYTES_MAX else None
        if found is None:
            raise InvalidValueError(
                key, name, untrusted.format_value(raw), "`fleet origin topic partition`"
            )
        return found

    def text(self) -> str:
        """Return the line in the form in which it is stored."""
        places = [self.place] if self.origin_place is None else [self.place, self.origin_place]
        return " ".join([self.fleet, self.origin, *(f"{topic} {at}" for topic, at in places)])


@functools.lru_cache(maxsize=1024)  # many schedules may have the same line
def _line(raw: bytes) -> IndexLine | None:
    parts = _label(raw).split(" ")
    places = [
        (topic, int(number))
        for topic, number in zip(parts[2::2], parts[3::2], strict=False)
        if NAME.fullmatch(topic) and number.isdigit() and int(number[:6]) < PARTITIONS_MAX
    ]
    names = len(parts) in (4, 6) and len(places) == len(parts) // 2 - 1
    if not names or not NAME.fullmatch(parts[0]) or parts[1] not in (FILE, OPERATOR):
        return None
    return IndexLine(parts[0], parts[1], places[0], places[1] if places[1:] else None)


def page(keys: Keys, place: TopicPartition, count: int) -> Call:
    """Build a call that lists up to `count` due schedules of a partition."""
    return scripts.build_call("schedule_page", keys, place, count=count)


def find_due(
    store: Store, place: TopicPartition, after: int, until: int, skip: int, count: int
) -> list[DueSchedule]:
    """Return the schedules that are due later than `after` and no later than `until` (unix ms).

    The schedules are sorted by due time. The result leaves out the first `skip` of them, and
    contains up to `count` others. Raises InvalidValueError, RedisResponseError,
    RedisUnavailableError.
    """
    key = store.keys.schedules_due(*place)
    limits = (f"({after}", until, "WITHSCORES", "LIMIT", skip, count)
    found = store.execute("ZRANGEBYSCORE", key, *limits)
    rows = [(raw, int(float(score))) for raw, score in zip(found[::2], found[1::2], strict=True)]
    if not rows:
        return []
    names = [raw + b":hash" for raw, _ in rows]
    hashes = store.execute("HMGET", store.keys.schedules(*place), *names)
    return [
        DueSchedule(raw, due, _label(digest or b""))
        for (raw, due), digest in zip(rows, hashes, strict=True)
    ]


def fire(
    keys: Keys,
    place: TopicPartition,
    ticks: Sequence[DueTick],
    *,
    group: str = "",
    partitions: int | None = None,
    orphan_ms: int = ORPHAN_MS,
) -> Call:
    """Build a call that sends the messages of due ticks and advances their schedules.

    If `partitions` is given and the topic has another partition count, the call does nothing. Pass
    None on a cluster, where the script cannot read the count. If `group` is given, no message is
    sent for a tick while that group has not finished the schedule's previous message.
    """
    if not 1 <= len(ticks) <= TICKS_MAX:
        raise ContractError(f"{len(ticks)} ticks in one call, not 1 to {TICKS_MAX}")
    of_place = ("due", "schedules", "last", "stream", *_count_keys(partitions))
    found = {each: key_by_name(keys, each, place) for each in of_place}
    if group:
        assignment = Assignment(*place, group)
        found |= {
            "retry": keys.retry_stream(*assignment),
            "delayed": keys.retry(*assignment),
            "items": keys.retry_items(*assignment),
        }
    flat: list[object] = []
    for each in ticks:
        if len(each.fields) > FIELDS_MAX:
            raise ContractError(f"a message of {len(each.fields)} names and values")
        flat += (each.name, each.hash, each.due_unix_ms)
        flat.append("" if each.tick is None else each.tick)
        flat.append("" if each.following_unix_ms is None else each.following_unix_ms)
        flat += (each.skipped, len(each.fields), *each.fields)
    return scripts.get("schedule_fire").call(
        found, partitions=partitions or 0, group=group, orphan_ms=orphan_ms, ticks=flat
    )


def run(
    keys: Keys,
    place: TopicPartition,
    name: str,
    digest: str,
    instant_unix_ms: int,
    fields: Sequence[str | bytes],
    partitions: int | None = None,
) -> Call:
    """Build a call that sends one message of a schedule immediately.

    `digest` is the hash of the specification, and `instant_unix_ms` the time in the message's
    headers. `partitions` has the same meaning as in `fire`.
    """
    if len(fields) > FIELDS_MAX:
        raise ContractError(f"a message of {len(fields)} names and values")
    return scripts.build_call(
        "schedule_run",
        keys,
        place,
        optional=_count_keys(partitions),
        name=name,
        hash=digest,
        partitions=partitions or 0,
        instant=instant_unix_ms,
        fields=fields,
    )


def declare(
    keys: Keys,
    place: TopicPartition,
    name: str,
    digest: str,
    text: str,
    *,
    origin: str,
    since_unix_ms: int,
    next_unix_ms: int | None,
    force: bool = False,
    takeover_ms: int = TAKEOVER_MS,
) -> Call:
    """Build a call that stores a schedule, or replaces its specification if it has changed.

    `text` is the specification, and `digest` its hash. `since_unix_ms` is the time at which the
    file was read or the operator edited the schedule. If two files declare different
    specifications, the one that was read later replaces the other, which can replace it only after
    no instance has declared the later one for `takeover_ms`. If `force` is True, any existing
    schedule is replaced.
    """
    return scripts.build_call(
        "schedule_declare",
        keys,
        place,
        name=name,
        hash=digest,
        spec=text,
        origin=origin,
        since_ms=since_unix_ms,
        takeover_ms=takeover_ms,
        next="" if next_unix_ms is None else str(next_unix_ms),
        force=force,
    )


def stamp(keys: Keys, place: TopicPartition, declared: Sequence[tuple[str, str]]) -> Call:
    """Build a call which records that an instance declares these schedules.

    Each schedule is given as its name and the hash of its specification.
    """
    if not 1 <= len(declared) <= STAMPS_MAX:
        raise ContractError(f"{len(declared)} schedules in one call, not 1 to {STAMPS_MAX}")
    flat = [part for pair in declared for part in pair]
    return scripts.build_call("schedule_stamp", keys, place, declared=flat)


def hold(keys: Keys, place: TopicPartition, name: str | bytes, reason: str) -> Call:
    """Build a call that stops a schedule and keeps its due time for later.

    `reason` must be one of REASONS.
    """
    if reason not in REASONS:
        raise ContractError(f"schedule_hold: reason {reason!r}")
    return scripts.build_call("schedule_hold", keys, place, name=name, reason=reason)


def release(keys: Keys, place: TopicPartition, name: str) -> Call:
    """Build a call that makes a held schedule due again at its stored due time."""
    return scripts.build_call("schedule_release", keys, place, name=name)


def drop(keys: Keys, place: TopicPartition, name: str) -> Call:
    """Build a call that removes a schedule with all its state."""
    return scripts.build_call("schedule_drop", keys, place, name=name)


def _count_keys(partitions: int | None) -> tuple[str, ...]:
    """Return the optional keys that a script needs to compare the partition count."""
    return () if partitions is None else ("meta",)


# --- the index ---


def index(store: Store, names: Sequence[str]) -> dict[str, IndexLine | InvalidValueError]:
    """Return the index lines of these schedules by name. Unknown names are left out.

    If a line is invalid, the value is an error.
    """
    key = store.keys.schedule_index()
    raws = store.execute("HMGET", key, *names) if names else []
    pairs = zip(names, raws, strict=True)
    return {name: _entry(raw, key, name) for name, raw in pairs if raw is not None}


def read_index(store: Store) -> dict[str, IndexLine | InvalidValueError]:
    """Return all lines of the index by name. If a line is invalid, the value is an error."""
    key = store.keys.schedule_index()
    flat: list[Any] = store.execute("HGETALL", key)
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {_label(name): _entry(raw, key, _label(name)) for name, raw in pairs}


def write_index(
    store: Store, name: str, entry: IndexLine, *, new: bool
) -> IndexLine | InvalidValueError:
    """Write a line of the index, and return the line that the index now contains.

    If `new` is True, an existing line is kept. Before the line, the place is written to the set of
    places in which housekeepers look for schedules, so that none is missed.
    """
    keys = store.keys
    topic, partition = entry.place
    store.execute("SADD", keys.schedule_places(), f"{topic}/{partition}")
    if not new:
        store.execute("HSET", keys.schedule_index(), name, entry.text())
        return entry
    if store.execute("HSETNX", keys.schedule_index(), name, entry.text()):
        return entry
    return index(store, [name]).get(name, entry)


def remove_index(store: Store, name: str) -> None:
    """Remove a schedule from the index."""
    store.execute("HDEL", store.keys.schedule_index(), name)


def forget_topic(store: Store, topic: str, partitions: int) -> None:
    """Remove the schedules of a deleted topic from the index and from the set of places.

    A schedule that is moving from or to another topic remains in the index until the move is
    finished.
    """
    for name, line in read_index(store).items():
        if isinstance(line, IndexLine):
            topics = {each[0] for each in (line.place, line.origin_place) if each is not None}
            if topics == {topic}:
                remove_index(store, name)
    gone = [f"{topic}/{number}" for number in range(partitions)]
    store.execute("SREM", store.keys.schedule_places(), *gone)


def places(store: Store) -> list[TopicPartition]:
    """Return all places that may have schedules, sorted. Invalid entries are skipped."""
    found = []
    for raw in store.execute("SMEMBERS", store.keys.schedule_places()):
        topic, _, number = _label(raw).partition("/")
        if NAME.fullmatch(topic) and number.isdigit() and int(number[:6]) < PARTITIONS_MAX:
            found.append((topic, int(number)))
    return sorted(found)


def _entry(raw: bytes, key: str, name: str) -> IndexLine | InvalidValueError:
    try:
        return IndexLine.parse(raw, key, name)
    except InvalidValueError as error:
        return error


def _label(raw: bytes) -> str:
    return untrusted.label(raw)


# --- one schedule ---


class StoredSchedule(NamedTuple):
    """The stored state of one schedule. A missing part is None, 0 or ''.

    `text` is the specification, and `hash` its hash. `held` is the reason why the schedule is
    stopped (one of REASONS), or '' if it is not. `tick`, `entry_id` and `late_ms` describe the last
    tick for which a message was sent: its time, the ID of the entry, and its delay.
    """

    text: str | None
    hash: str
    origin: str
    since_unix_ms: int
    seen_unix_ms: int | None
    held: str
    due_unix_ms: int | None
    tick: int | None
    entry_id: str
    late_ms: int | None
    fired: int
    skipped: int
    ran: int | None


_PARTS = ("hash", "origin", "since", "seen", "held")
_LAST = ("tick", "id", "late", "fired", "skipped", "ran")


def read_commands(keys: Keys, place: TopicPartition, name: str) -> list[tuple[Any, ...]]:
    """Return the three commands whose replies `parse_schedule` parses."""
    return [
        ("HMGET", keys.schedules(*place), name, *(f"{name}:{part}" for part in _PARTS)),
        ("HMGET", keys.schedules_last(*place), *(f"{name}:{part}" for part in _LAST)),
        ("ZSCORE", keys.schedules_due(*place), name),
    ]


def copy_commands(
    keys: Keys, place: TopicPartition, name: str, from_: StoredSchedule
) -> list[tuple[Any, ...]]:
    """Return the commands that copy the counts and the last tick of a moving schedule to `place`.

    The commands do not replace existing values, so they may be repeated. They do not copy the ID of
    the last message, because that message is in another stream.
    """
    values = {
        "tick": from_.tick,
        "late": from_.late_ms,
        "fired": from_.fired,
        "skipped": from_.skipped,
        "ran": from_.ran,
    }
    last = keys.schedules_last(*place)
    return [("HSETNX", last, f"{name}:{part}", each) for part, each in values.items() if each]


def parse_schedule(key: str, name: str, replies: Sequence[Any]) -> StoredSchedule | None:
    """Parse the stored state of a schedule. Return None if it does not exist.

    Raises InvalidValueError if a part of the state is invalid.
    """
    (raw, digest, origin, since, seen, held), last, score = replies
    if digest is None and score is None:
        return None
    tick, entry_id, late, fired, skipped, ran = last
    reason, _, at = _label(held or b"").partition(" ")
    due = _number(score, key, name) if score is not None else None
    if due is None and at.isdigit():
        due = int(at[:16])
    if raw is not None and len(raw) > _TEXTS_MAX:
        raise InvalidValueError(
            key, name, untrusted.format_value(raw), "a specification of at most 128 KiB"
        )
    return StoredSchedule(
        text=None if raw is None else _label(raw),
        hash=_label(digest or b""),
        origin=_label(origin or b""),
        since_unix_ms=untrusted.integer(since, key, f"{name}:since", default=0),
        seen_unix_ms=None if seen is None else untrusted.integer(seen, key, f"{name}:seen"),
        held=reason,
        due_unix_ms=due,
        tick=_instant(tick, key, f"{name}:tick"),
        entry_id=_label(entry_id or b""),
        late_ms=None if late is None else untrusted.integer(late, key, f"{name}:late"),
        fired=untrusted.integer(fired, key, f"{name}:fired", default=0),
        skipped=untrusted.integer(skipped, key, f"{name}:skipped", default=0),
        ran=_instant(ran, key, f"{name}:ran"),
    )


def _instant(raw: bytes | None, key: str, field: str) -> int | None:
    return None if raw is None else untrusted.integer(raw, key, field, high=LAST_UNIX_MS)


def _number(raw: bytes, key: str, name: str) -> int:
    return int(untrusted.number(raw, key, name, low=-float(untrusted.INTEGER_MAX)))
