"""Fire due ticks, which means to send their messages.

Any housekeeper may fire a tick, and only the first call succeeds. The instance that owns the
partition fires first, and the others try STAGGER_MS later, in case it did not. In this way, usually
only the owner does the work, but the schedule does not depend on a single instance.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from streamqd import logs
from streamqd.config import Schedule
from streamqd.errors import RedisResponseError, RefusalKind
from streamqd.isolate import Isolate, run_directly
from streamqd.model import TopicPartition
from streamqd.schedules import record
from streamqd.schedules.reconciliation import Declaration, relocate
from streamqd.schedules.ticks import offset_ms, steps
from streamqd.store import schedules as calls
from streamqd.store import topics, untrusted
from streamqd.store.schedules import (
    ORPHANED,
    UNREADABLE,
    DuePage,
    DueSchedule,
    DueTick,
    IndexLine,
)
from streamqd.store.scripts import Call
from streamqd.store.store import Store

# The set of all places is read at this interval, and a place without a due schedule is checked at
# this interval.
PLACES_INTERVAL_SECONDS = 1.0
STAGGER_MS = 300  # delay with which instances that do not own a partition fire its schedules
PAGE = 128  # maximum number of schedules in one page
BYTES_MAX = 256 << 10  # limit for the messages in one call, which the last message may exceed
# Pause before a place is checked again after an error, such as a missing topic or a key with the
# wrong type.
REST_SECONDS = 5.0
AHEAD_MS = 5_000  # how long before its due time a specification may be read
AHEAD_MAX = 16_384  # maximum number of specifications of a place that are read ahead
TURN_SECONDS = 0.3  # time limit of one turn
CACHE_MAX = 20_000  # maximum number of specifications in the cache
# After these words of schedule_fire, the schedule has advanced to its next tick.
_MOVED_ON = ("FIRED", "SKIPPED", "SENT", "OVERLAP")


class Outcome(NamedTuple):
    """The outcome of one or more ticks, for the metrics.

    `reason` is '' if the message was sent. Otherwise, it is the reason why none was sent.
    """

    place: TopicPartition
    reason: str
    ticks: int
    late_ms: int


class Firer:
    """Fires all due schedules in Redis, including those of other fleets."""

    def __init__(
        self,
        store: Store,
        owned: Callable[[], set[TopicPartition]],
        note: Callable[[Outcome], None],
        isolate: Isolate[TopicPartition] = run_directly,
        declared: Mapping[str, Schedule] = MappingProxyType({}),
    ) -> None:
        """Prepare to fire the schedules in `store`.

        `owned` returns the partitions that this instance owns. `note` is called with each outcome.
        `declared` maps the hashes of known specifications to their schedules, so that these need
        not be read.
        """
        self._store = store
        self._owned = owned
        self._note = note
        self._isolate = isolate
        self._places: list[TopicPartition] = []
        self._check_at = 0.0
        self._ask_at: dict[TopicPartition, float] = {}  # time of the next check (monotonic)
        self._declared = declared
        self._cache: dict[str, Schedule] = {}  # schedules by the hash of their specification
        self._counts: dict[str, tuple[float, int]] = {}
        # For each place, the time (unix ms) up to which specifications are read ahead, and how many
        # of these were read so far. The number is 0 when all were read.
        self._ahead: dict[TopicPartition, tuple[int, int]] = {}

    def turn(self) -> float:
        """Fire due schedules for one turn. Return the seconds until the next turn."""
        begun = time.monotonic()
        if begun >= self._check_at or not self._places:
            self._check_at = begun + PLACES_INTERVAL_SECONDS
            self._places = calls.places(self._store)
            self._ask_at = {each: self._ask_at.get(each, 0.0) for each in self._places}
            self._ahead = {each: self._ahead.get(each, (0, 0)) for each in self._places}
        owned = self._owned()
        wanted = [each for each in self._places if self._ask_at[each] <= begun]
        for place in sorted(wanted, key=lambda each: self._ask_at[each]):
            self._ask_at[place] = begun + REST_SECONDS  # remains only if an error occurs
            wait = self._isolate(place, self._fire_at, place, place in owned)
            if wait is not None:
                self._ask_at[place] = time.monotonic() + wait
            if time.monotonic() - begun >= TURN_SECONDS:
                return 0.0
        first = min(self._ask_at.values(), default=self._check_at)
        return max(0.0, min(first, self._check_at) - time.monotonic())

    def _fire_at(self, place: TopicPartition, owned: bool) -> float:
        """Fire one page of due schedules of a place. Return the seconds until the next page."""
        keys, behind = self._store.keys, 0 if owned else STAGGER_MS
        try:
            reply = self._store.run(calls.page(keys, place, PAGE))
            page = DuePage.parse(reply, keys.schedules_due(*place))
            rows = [row for row in page.rows if row.due_unix_ms <= page.now_unix_ms - behind]
            fired = self._fire(place, rows, page.now_unix_ms) if rows else []
            unread = fired is not None and len(rows) < PAGE and self._read_ahead(place, page)
        except RedisResponseError as error:
            if error.kind is not RefusalKind.BAD_KEY_OR_COMMAND:
                raise
            logs.event("redis.bad_value", logging.WARNING, error=str(error), topic=place[0])
            return REST_SECONDS
        if fired is None:
            return REST_SECONDS
        if unread or len(rows) == PAGE:
            return 0.0
        later = [row.due_unix_ms for row in page.rows[len(rows) :]] + fired
        if page.following_unix_ms is not None:
            later.append(page.following_unix_ms)
        wait = (min(later) + behind - page.now_unix_ms) / 1000 if later else PLACES_INTERVAL_SECONDS
        return min(PLACES_INTERVAL_SECONDS, max(0.0, wait))

    def _fire(
        self, place: TopicPartition, rows: Sequence[DueSchedule], now: int
    ) -> list[int] | None:
        """Fire due schedules. Return their next due times, or None if the topic does not exist."""
        count = self._count(place[0])
        if not count:
            return None
        known = self._select_local(place, self._readable_schedules(place, rows))
        ticks: list[tuple[str, DueTick]] = []
        following_all: list[int] = []
        for row in rows:
            schedule = known.get(row.name)
            if schedule is None:
                continue
            if record.choose_partition(schedule, count) != place[1]:
                self._move(place, schedule, count)
                continue
            offset = offset_ms(schedule)
            expected: int | None = row.due_unix_ms
            for step in steps(schedule, row.due_unix_ms - offset, now - offset):
                # Only the last step has no following tick, so `expected` is never None here.
                assert expected is not None
                following = None if step.following is None else step.following + offset
                fields = [] if step.tick is None else record.message_fields(schedule, step.tick)
                tick = DueTick(
                    schedule.name, row.hash, expected, step.tick, following, step.skipped, fields
                )
                ticks.append((schedule.overlap_group, tick))
                expected = following
            if expected is not None:
                following_all.append(expected)
        single = self._store.connection.node_for_key(self._store.keys.meta(place[0])) == ""
        for group, batch in _batches(ticks):
            call = calls.fire(
                self._store.keys, place, batch, group=group, partitions=count if single else None
            )
            self._record_reply(place, batch, call)
        return following_all

    def _record_reply(self, place: TopicPartition, batch: Sequence[DueTick], call: Call) -> None:
        reply = self._store.run(call)
        if reply.word == "MOVED":
            self._counts.pop(place[0], None)
            return
        words, raw_now = reply.values
        now = untrusted.integer(raw_now, "the server's time")
        for tick, raw in zip(batch, words, strict=True):
            word = raw.decode()
            if tick.skipped and word in _MOVED_ON:
                self._note(Outcome(place, "misfire", tick.skipped, 0))
                logs.event(
                    "schedule.misfired", schedule=tick.name, topic=place[0], ticks=tick.skipped
                )
            if word == "FIRED":
                self._note(Outcome(place, "", 1, max(0, now - tick.due_unix_ms)))
            elif word == "OVERLAP":
                self._note(Outcome(place, "overlap", 1, 0))
            elif word == "ORPHANED":
                self._store.run(calls.hold(self._store.keys, place, tick.name, ORPHANED))
                logs.event("schedule.orphaned", logging.WARNING, schedule=tick.name, topic=place[0])

    def _read_ahead(self, place: TopicPartition, page: DuePage) -> bool:
        """Read specifications of schedules that will soon be due. Return True if more are left.

        Thousands of schedules may be due at the same time. If all of them were read only then, the
        last ones would be late.
        """
        until, skip = self._ahead[place]
        if skip == 0:
            following = page.following_unix_ms
            if following is None or not until < following <= page.now_unix_ms + AHEAD_MS:
                return False
            until = page.now_unix_ms + AHEAD_MS
        rows = calls.find_due(self._store, place, page.now_unix_ms, until, skip, PAGE)
        self._read(place, rows)  # schedules with invalid specifications are held when they are due
        more = len(rows) == PAGE and skip + PAGE < AHEAD_MAX
        self._ahead[place] = until, skip + PAGE if more else 0
        return more

    def _readable_schedules(
        self, place: TopicPartition, rows: Sequence[DueSchedule]
    ) -> dict[bytes, Schedule]:
        """Return the schedules of these rows by name.

        Schedules that cannot be read are held, so that they do not stop the others.
        """
        found, problems = self._read(place, rows)
        for name, problem in problems.items():
            self._hold_unreadable(place, name, problem)
        return found

    def _read(
        self, place: TopicPartition, rows: Sequence[DueSchedule]
    ) -> tuple[dict[bytes, Schedule], dict[bytes, str]]:
        """Return the schedules of these rows, and the problems of invalid ones, both by name."""
        found, problems, unknown = {}, {}, []
        for row in rows:
            cached = self._declared.get(row.hash) or self._cache.get(row.hash)
            if cached is not None and cached.name.encode() == row.name:
                found[row.name] = cached
            else:
                unknown.append(row)
        if len(self._cache) > CACHE_MAX:
            self._cache.clear()
        key = self._store.keys.schedules(*place)
        texts = self._store.execute("HMGET", key, *(row.name for row in unknown)) if unknown else []
        for row, raw in zip(unknown, texts, strict=True):
            try:
                schedule = _parse_due(row, raw)
            except ValueError as error:
                problems[row.name] = str(error)
                continue
            self._cache[row.hash] = schedule
            found[row.name] = schedule
        return found, problems

    def _select_local(
        self, place: TopicPartition, known: dict[bytes, Schedule]
    ) -> dict[bytes, Schedule]:
        """Return the schedules whose place according to the index is this one, and hold the others.

        With a second copy of a schedule, each tick would be sent twice. A copy can remain if an
        instance reads the index, another instance then moves the schedule, and after that, the
        first one declares it. The index is read after the page, so that its lines are at least as
        recent as the schedules in the page.
        """
        lines = calls.index(self._store, [each.name for each in known.values()])
        found = {}
        for name, schedule in known.items():
            line = lines.get(schedule.name)
            if not isinstance(line, IndexLine) or line.place == place:
                found[name] = schedule
                continue
            # With the reason "unreadable", a later declaration for this place can replace it.
            self._hold_unreadable(
                place, name, f"its name is reserved for {line.place[0]}/{line.place[1]}"
            )
        return found

    def _hold_unreadable(self, place: TopicPartition, name: bytes, error: str) -> None:
        self._store.run(calls.hold(self._store.keys, place, name, UNREADABLE))
        logs.event(
            "schedule.unreadable",
            logging.ERROR,
            schedule=untrusted.label(name[:64]),
            topic=place[0],
            error=error,
        )

    def _count(self, topic: str) -> int:
        read_at, count = self._counts.get(topic, (-PLACES_INTERVAL_SECONDS, 0))
        if time.monotonic() - read_at >= PLACES_INTERVAL_SECONDS:
            count = topics.partition_count(self._store, topic) or 0
            self._counts[topic] = time.monotonic(), count
        return count

    def _move(self, place: TopicPartition, schedule: Schedule, count: int) -> None:
        """Move a schedule to the partition of its key after the topic has grown."""
        partition = record.choose_partition(schedule, count)
        entry = calls.index(self._store, [schedule.name]).get(schedule.name)
        if partition >= count or not isinstance(entry, IndexLine) or entry.place[0] != place[0]:
            return
        declaration = Declaration(schedule, entry.fleet, entry.origin, 0)
        relocate(self._store, declaration, entry, (place[0], partition))


def _parse_due(row: DueSchedule, raw: bytes | None) -> Schedule:
    text = untrusted.label(raw or b"")
    if record.hash_specification(text) != row.hash:
        raise ValueError("it does not match its hash")
    schedule = record.read(text)
    if schedule.name.encode() != row.name:
        raise ValueError(f"specification belongs to schedule {schedule.name}")
    return schedule


def _batches(ticks: Sequence[tuple[str, DueTick]]) -> Iterator[tuple[str, list[DueTick]]]:
    """Divide ticks into calls. Yield the group and the ticks of each call, in order.

    All ticks of a call have the same group. The number of ticks and their total size are limited.
    """
    batch: list[DueTick] = []
    size, of = 0, ""
    for group, tick in ticks:
        full = len(batch) == calls.TICKS_MAX or size >= BYTES_MAX
        if batch and (full or group != of):
            yield of, batch
            batch, size = [], 0
        of = group
        batch.append(tick)
        size += sum(map(len, tick.fields))
    if batch:
        yield of, batch
