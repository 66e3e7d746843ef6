"""Keep the schedules in Redis in line with the declarations in configuration files.

A schedule is stored in the slot of the partition to which it sends. There is no leader, because any
instance may repeat any step at any time. Specifications that have not changed are not written
again, so a deployment does not change due times. While two releases are running, the schedules of
both exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from streamqd import logs
from streamqd.config import Schedule, Topic
from streamqd.errors import InvalidValueError, RedisResponseError, RefusalKind
from streamqd.isolate import Isolate, run_directly
from streamqd.model import TopicPartition
from streamqd.schedules import record
from streamqd.schedules.ticks import next_tick, offset_ms
from streamqd.store import schedules as calls
from streamqd.store import topics
from streamqd.store.replies import check_replies
from streamqd.store.schedules import FILE, MOVING, PAUSED, IndexLine, StoredSchedule
from streamqd.store.store import Store

NAMES_MAX = 500  # maximum number of names in one read of the index
BATCH = 16  # maximum number of scripts in one write

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a schedule, which comes from a configuration file or from an operator."""

    schedule: Schedule
    fleet: str
    origin: str
    since_unix_ms: int

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.schedule.name


class Reconciler:
    """Declares the schedules in this instance's configuration file. Call `run` periodically."""

    def __init__(
        self,
        store: Store,
        fleet: str,
        schedules: Sequence[Schedule],
        since_unix_ms: int,
        settings: Mapping[str, Topic],
        isolate: Isolate[TopicPartition] = run_directly,
    ) -> None:
        """Prepare to declare these schedules.

        `since_unix_ms` is the time at which the configuration file was read. `settings` contains
        the settings of topics, because the first run creates topics that do not exist.
        """
        self._store = store
        self._isolate = isolate
        self._declared = [Declaration(each, fleet, FILE, since_unix_ms) for each in schedules]
        self._hashes = {
            each.name: record.hash_specification(record.serialize(each)) for each in schedules
        }
        self._settings = settings
        self._create = True
        self._refused: dict[str, str] = {}

    @property
    def wanted(self) -> bool:
        """True if there is at least one schedule to declare."""
        return bool(self._declared)

    @property
    def declared(self) -> dict[str, Schedule]:
        """The schedules by the hash of their specification."""
        return {self._hashes[each.name]: each.schedule for each in self._declared}

    def run(self) -> None:
        """Declare the schedules, and move those whose partition has changed.

        This also records that an instance still declares them. Raises RedisUnavailableError,
        RedisResponseError.
        """
        counts = self._counts()
        self._create = False
        here: dict[TopicPartition, list[Declaration]] = {}
        for first in range(0, len(self._declared), NAMES_MAX):
            some = self._declared[first : first + NAMES_MAX]
            entries = calls.index(self._store, [each.name for each in some])
            for each in some:
                entry = entries.get(each.name)
                wanted = _place(each.schedule, counts.get(each.schedule.topic, 0))
                place = self._isolate(
                    wanted, _read_or_log, wanted[0], self._place_or_problem, each, entry, counts
                )
                if place is not None:
                    here.setdefault(place, []).append(each)
        for place, some in here.items():
            for first in range(0, len(some), calls.STAMPS_MAX):
                part = some[first : first + calls.STAMPS_MAX]
                self._isolate(place, _read_or_log, place[0], self._stamp, place, part)

    def _counts(self) -> dict[str, int]:
        named = sorted({each.schedule.topic for each in self._declared})
        return {topic: _read_or_log(topic, self._count, topic) or 0 for topic in named}

    def _count(self, topic: str) -> int:
        if self._create:
            return topics.create(self._store, topic, self._settings.get(topic) or Topic())
        return topics.partition_count(self._store, topic) or 0

    def _place_or_problem(
        self,
        each: Declaration,
        entry: IndexLine | InvalidValueError | None,
        counts: Mapping[str, int],
    ) -> TopicPartition | None:
        """Return the current place of a schedule, moving it to the right place if possible.

        Return None if the schedule cannot be declared. The problem is then logged.
        """
        topic = each.schedule.topic
        count = counts.get(topic, 0)
        place = _place(each.schedule, count)
        if not count:
            problem = f"topic {topic} no longer exists; create it, or restart the daemon"
        elif place[1] >= count:
            problem = topics.no_partition_text(topic, place[1], count)
        else:
            if entry is None:
                wanted = IndexLine(each.fleet, each.origin, place)
                entry = calls.write_index(self._store, each.name, wanted, new=True)
            problem = find_name_conflict(each, entry)
        if problem or not isinstance(entry, IndexLine):
            self._refuse(each, problem)
            return None
        self._refused.pop(each.name, None)
        if entry.place == place and entry.origin_place is None:
            return place
        return place if relocate(self._store, each, entry, place) else entry.place

    def _refuse(self, each: Declaration, reason: str) -> None:
        if self._refused.get(each.name) != reason:
            self._refused[each.name] = reason
            logs.event("schedule.refused", logging.ERROR, schedule=each.name, problem=reason)

    def _stamp(self, place: TopicPartition, some: Sequence[Declaration]) -> None:
        pairs = [(each.name, self._hashes[each.name]) for each in some]
        [words] = self._store.run(calls.stamp(self._store.keys, place, pairs)).values
        left = [each for each, word in zip(some, words, strict=True) if word != b"SAME"]
        for first in range(0, len(left), BATCH):
            batch = left[first : first + BATCH]
            try:
                declare(self._store, place, batch)
            except InvalidValueError:
                for each in batch:
                    self._isolate(
                        place, _read_or_log, place[0], declare, self._store, place, [each]
                    )


def _read_or_log(topic: str, do: Callable[..., T], /, *args: object) -> T | None:
    """Return the result of `do`. If it meets an invalid value, log the error and return None."""
    try:
        return do(*args)
    except InvalidValueError as error:
        logs.bad_value(error, topic=topic)
    except RedisResponseError as error:
        if error.kind is not RefusalKind.BAD_KEY_OR_COMMAND:
            raise
        logs.event("redis.bad_value", logging.WARNING, error=str(error), topic=topic)
    return None


def _place(schedule: Schedule, count: int) -> TopicPartition:
    """Return the place of a schedule in a topic of `count` partitions. A count of 0 counts as 1."""
    return schedule.topic, record.choose_partition(schedule, max(count, 1))


def find_name_conflict(each: Declaration, entry: IndexLine | InvalidValueError) -> str:
    """Return the reason why a schedule cannot use its name, or '' if it can."""
    if isinstance(entry, InvalidValueError):
        return str(entry)
    if entry.fleet != each.fleet:
        return f"fleet {entry.fleet} has a schedule of this name; give this one another"
    if entry.origin != each.origin:
        return "an operator added a schedule of this name; remove it, or rename this one"
    return ""


def declare(
    store: Store, place: TopicPartition, some: Sequence[Declaration], *, force: bool = False
) -> list[str]:
    """Store schedules in a place, and return the words with which schedule_declare replied."""
    known = read_stored(store, [(each.name, place) for each in some])
    now = server_unix_ms(store)
    built = []
    for each, before in zip(some, known, strict=True):
        text = record.serialize(each.schedule)
        built.append(
            calls.declare(
                store.keys,
                place,
                each.name,
                record.hash_specification(text),
                text,
                origin=each.origin,
                since_unix_ms=each.since_unix_ms,
                next_unix_ms=next_due(each.schedule, now, before),
                force=force,
            )
        )
    words = []
    for each, reply in zip(some, check_replies(store.run_many(built)), strict=True):
        assert not isinstance(reply, RedisResponseError)
        words.append(reply.word)
        if reply.word == "ADDED":
            logs.event("schedule.added", schedule=each.name, topic=place[0])
        elif reply.word == "REPLACED":
            logs.event("schedule.changed", schedule=each.name, topic=place[0])
    return words


def next_due(schedule: Schedule, now_unix_ms: int, before: StoredSchedule | None) -> int | None:
    """Return the first due time of a new or changed schedule, or None if it has no more ticks.

    `before` is the stored state of the schedule. Ticks that were already sent are left out.
    """
    offset = offset_ms(schedule)
    sent = before.tick if before is not None and before.tick is not None else 0
    tick = next_tick(schedule, max(now_unix_ms - offset, sent))
    return None if tick is None else tick + offset


def relocate(store: Store, each: Declaration, entry: IndexLine, place: TopicPartition) -> bool:
    """Move a schedule to another place, and keep its due time.

    If a move was interrupted, the call continues where it stopped. Return False if the schedule was
    not moved, because the specification of another release is in force.
    """
    origin = entry.origin_place or entry.place
    [before] = read_stored(store, [(each.name, origin)])
    if entry.origin_place is None:
        if before is not None and not _may_move(store, each, before):
            return False
        # Write the index before the schedule is held, so that an interrupted move can be found.
        calls.write_index(
            store, each.name, IndexLine(entry.fleet, entry.origin, place, origin), new=False
        )
    elif entry.place != place:
        place = entry.place  # finish the earlier move first
    store.run(calls.hold(store.keys, origin, each.name, _reason(before)))
    [before] = read_stored(store, [(each.name, origin)])
    text = record.serialize(each.schedule)
    digest = record.hash_specification(text)
    same = before is not None and before.hash == digest
    now = server_unix_ms(store)
    due = before.due_unix_ms if same and before else next_due(each.schedule, now, before)
    carried = calls.copy_commands(store.keys, place, each.name, before) if before else []
    if carried:  # this must be copied before the schedule can fire in the new place
        check_replies(store.pipeline(carried))
    store.run(
        calls.declare(
            store.keys,
            place,
            each.name,
            digest,
            text,
            origin=each.origin,
            since_unix_ms=each.since_unix_ms,
            next_unix_ms=due,
        )
    )
    if before is not None and before.held == PAUSED:
        store.run(calls.hold(store.keys, place, each.name, PAUSED))
    store.run(calls.drop(store.keys, origin, each.name))
    calls.write_index(store, each.name, IndexLine(entry.fleet, entry.origin, place), new=False)
    logs.event("schedule.moved", schedule=each.name, topic=place[0], partition=place[1])
    return True


class MoveFinisher:
    """Finishes moves that a killed process started, if no live instance declares the schedules.

    Each check finishes the moves that have not advanced since the previous check. Checks must
    therefore be far enough apart.
    """

    def __init__(self, store: Store, isolate: Isolate[TopicPartition] = run_directly) -> None:
        self._store = store
        self._isolate = isolate
        self._seen: dict[str, IndexLine] = {}

    def run(self) -> None:
        """Check all schedules once. Raises RedisUnavailableError, RedisResponseError."""
        moving = {
            name: line
            for name, line in calls.read_index(self._store).items()
            if isinstance(line, IndexLine) and line.origin_place is not None
        }
        for name, line in moving.items():
            if self._seen.get(name) == line:
                self._isolate(line.place, _read_or_log, line.place[0], self._finish, name, line)
        self._seen = moving

    def _finish(self, name: str, line: IndexLine) -> None:
        assert line.origin_place is not None
        new, old = read_stored(self._store, [(name, line.place), (name, line.origin_place)])
        found = new or old
        try:
            schedule = record.read(found.text or "") if found is not None else None
        except ValueError:
            return
        # A move to another topic can be finished only by the client that started it, because only
        # this client has the new specification.
        if found is not None and schedule is not None and schedule.topic == line.place[0]:
            declaration = Declaration(schedule, line.fleet, line.origin, found.since_unix_ms)
            relocate(self._store, declaration, line, line.place)


def _reason(before: StoredSchedule | None) -> str:
    return PAUSED if before is not None and before.held == PAUSED else MOVING


def _may_move(store: Store, each: Declaration, before: StoredSchedule) -> bool:
    """Return True if this specification is in force, or would replace the stored one.

    The rule is the same as in schedule_declare.
    """
    if before.hash == record.hash_specification(record.serialize(each.schedule)):
        return True
    if before.origin != each.origin:
        return False
    stale = server_unix_ms(store) - (before.seen_unix_ms or 0) > calls.TAKEOVER_MS
    return stale or each.since_unix_ms > before.since_unix_ms


def read_stored(
    store: Store, named: Iterable[tuple[str, TopicPartition]]
) -> list[StoredSchedule | None]:
    """Read the stored state of schedules, which are given by name and place.

    The result is in the same order, with None for a schedule that does not exist. Raises
    InvalidValueError.
    """
    wanted = list(named)
    commands = [
        each for name, place in wanted for each in calls.read_commands(store.keys, place, name)
    ]
    replies = check_replies(store.pipeline(commands)) if commands else []
    return [
        calls.parse_schedule(store.keys.schedules(*place), name, replies[3 * at : 3 * at + 3])
        for at, (name, place) in enumerate(wanted)
    ]


def server_unix_ms(store: Store) -> int:
    """Return the time of the server's clock."""
    seconds, micros = store.execute("TIME")
    return int(seconds) * 1000 + int(micros) // 1000
