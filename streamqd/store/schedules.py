"""Schedules in Redis: the calls that store, fire and pause them, and the index of their names.

A schedule is stored in the slot of the partition to which it sends. The index maps its name to that
partition. The index is in a different slot and is written first.
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
from streamqd.store.keys import Keys, key_of
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store
from streamqd.store.topics import PARTITIONS_MAX

FILE, OPERATOR = "file", "operator"
PAUSED, ORPHANED, UNREADABLE, MOVING = "paused", "orphaned", "unreadable", "moving"
REASONS = (PAUSED, ORPHANED, UNREADABLE, MOVING)
ORPHAN_MS = 600_000  # time after which a file's schedule that no instance declares is not fired
TAKEOVER_MS = 60_000  # time after which a specification that no instance declares can be replaced
TICKS_MAX = 64  # ticks in one call
LINE_BYTES_MAX = 512  # longest valid index line
STAMPS_MAX = 256  # declared schedules in one call
FIELDS_MAX = 8  # names and values of one message
_TEXTS_MAX = 128 << 10


class DueSchedule(NamedTuple):
    """A due schedule. `hash` is '' without a specification."""

    name: bytes
    due_unix_ms: int
    hash: str


class DuePage(NamedTuple):
    """The reply of `page`. `following_unix_ms` is the due time of the next schedule, or None."""

    now_unix_ms: int
    rows: list[DueSchedule]
    following_unix_ms: int | None

    @classmethod
    def parse(cls, reply: Reply, key: str) -> DuePage:
        """Parse the reply OK. Raises InvalidValueError."""
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
    """A due tick for `fire`.

    If `tick` is None, nothing is sent. `following` is None after the last tick.
    """

    name: str
    hash: str
    due_unix_ms: int
    tick: int | None
    following_unix_ms: int | None
    skipped: int
    fields: Sequence[str | bytes]


class IndexLine(NamedTuple):
    """A line of the index. `origin_place` is the old place of a schedule that is moving."""

    fleet: str
    origin: str
    place: TopicPartition
    origin_place: TopicPartition | None = None

    @classmethod
    def parse(cls, raw: bytes, key: str, name: str) -> IndexLine:
        """Parse a line. Raises InvalidValueError."""
        found = _line(raw) if len(raw) <= LINE_BYTES_MAX else None
        if found is None:
            raise InvalidValueError(
                key, name, untrusted.format_value(raw), "`fleet origin topic partition`"
            )
        return found

    def text(self) -> str:
        """Return the stored form of the line."""
        places = [self.place] if self.origin_place is None else [self.place, self.origin_place]
        return " ".join([self.fleet, self.origin, *(f"{topic} {at}" for topic, at in places)])


@functools.lru_cache(maxsize=1024)  # all schedules of a place may have the same line
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
    """Build the call that lists due schedules."""
    return scripts.build_call("schedule_page", keys, place, count=count)


def find_due(
    store: Store, place: TopicPartition, after: int, until: int, skip: int, count: int
) -> list[DueSchedule]:
    """Return schedules that are due after `after` and up to `until` (unix ms), by due time.

    Skip the first `skip`, and return at most `count`. Raises InvalidValueError, RedisResponseError,
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
    """Write the messages of due ticks and advance their schedules.

    With `partitions`, nothing is done unless the topic has this partition count. Pass None on a
    cluster. With `group`, a tick is skipped while the group has not finished the previous message.
    """
    if not 1 <= len(ticks) <= TICKS_MAX:
        raise ContractError(f"{len(ticks)} ticks in one call, not 1 to {TICKS_MAX}")
    of_place = ("due", "schedules", "last", "stream", *_count_keys(partitions))
    found = {each: key_of(keys, each, place) for each in of_place}
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
    """Write one message of a schedule now."""
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
    """Store a schedule, unless its specification is unchanged."""
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
    """Record that an instance declares these schedules, each (name, hash of specification)."""
    if not 1 <= len(declared) <= STAMPS_MAX:
        raise ContractError(f"{len(declared)} schedules in one call, not 1 to {STAMPS_MAX}")
    flat = [part for pair in declared for part in pair]
    return scripts.build_call("schedule_stamp", keys, place, declared=flat)


def hold(keys: Keys, place: TopicPartition, name: str | bytes, reason: str) -> Call:
    """Stop a schedule and keep its due time."""
    if reason not in REASONS:
        raise ContractError(f"schedule_hold: reason {reason!r}")
    return scripts.build_call("schedule_hold", keys, place, name=name, reason=reason)


def release(keys: Keys, place: TopicPartition, name: str) -> Call:
    """Make a held schedule due again."""
    return scripts.build_call("schedule_release", keys, place, name=name)


def drop(keys: Keys, place: TopicPartition, name: str) -> Call:
    """Remove a schedule."""
    return scripts.build_call("schedule_drop", keys, place, name=name)


def _count_keys(partitions: int | None) -> tuple[str, ...]:
    """Return the optional keys of a script that compares the partition count."""
    return () if partitions is None else ("meta",)


# --- the index ---


def index(store: Store, names: Sequence[str]) -> dict[str, IndexLine | InvalidValueError]:
    """Return the index lines of schedules. Names without a line are missing."""
    key = store.keys.schedule_index()
    raws = store.execute("HMGET", key, *names) if names else []
    pairs = zip(names, raws, strict=True)
    return {name: _entry(raw, key, name) for name, raw in pairs if raw is not None}


def read_index(store: Store) -> dict[str, IndexLine | InvalidValueError]:
    """Return all index lines."""
    key = store.keys.schedule_index()
    flat: list[Any] = store.execute("HGETALL", key)
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {_label(name): _entry(raw, key, _label(name)) for name, raw in pairs}


def write_index(
    store: Store, name: str, entry: IndexLine, *, new: bool
) -> IndexLine | InvalidValueError:
    """Write a line of the index. With `new`, keep an existing line. Return the resulting line.

    The place is recorded first, so that housekeepers search it before the line exists.
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
    """Remove a line of the index."""
    store.execute("HDEL", store.keys.schedule_index(), name)


def forget_topic(store: Store, topic: str, partitions: int) -> None:
    """Remove the names and places of schedules whose keys were deleted with their topic.

    The name of a schedule that is moving from or to another topic stays until that move finishes.
    """
    for name, line in read_index(store).items():
        if isinstance(line, IndexLine):
            topics = {each[0] for each in (line.place, line.origin_place) if each is not None}
            if topics == {topic}:
                remove_index(store, name)
    gone = [f"{topic}/{number}" for number in range(partitions)]
    store.execute("SREM", store.keys.schedule_places(), *gone)


def places(store: Store) -> list[TopicPartition]:
    """Return the places that may have schedules. Invalid entries are skipped."""
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
    """The stored state of one schedule. Missing parts are None. `held` is a reason, or ''."""

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
    """Build the commands whose three replies `parse_schedule` parses."""
    return [
        ("HMGET", keys.schedules(*place), name, *(f"{name}:{part}" for part in _PARTS)),
        ("HMGET", keys.schedules_last(*place), *(f"{name}:{part}" for part in _LAST)),
        ("ZSCORE", keys.schedules_due(*place), name),
    ]


def copy_commands(
    keys: Keys, place: TopicPartition, name: str, from_: StoredSchedule
) -> list[tuple[Any, ...]]:
    """Build the commands that copy counts and the last tick to another place, for a move.

    The commands may be repeated, because existing values stay. The ID of the last message is not
    copied, because it belongs to another stream.
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
    """Parse the stored state of a schedule, None if it does not exist. Raises InvalidValueError."""
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
