"""List, add, edit, pause, run and remove schedules in Redis, and compute their next ticks.

A schedule is either declared in the files of a fleet or added by an operator. Only schedules that
operators added can be edited here, because a fleet would soon declare the others again with the
settings in its files.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from streamqd.admin import topics
from streamqd.admin.reading import Unreadable, ViewReader, server_unix_ms
from streamqd.config import Schedule
from streamqd.config.schedules import PER_TOPIC_MAX, SCHEDULE_NAME
from streamqd.errors import (
    InvalidRequestError,
    InvalidValueError,
    RedisResponseError,
    RequestRefusedError,
)
from streamqd.model import TopicPartition, Uid
from streamqd.schedules import record
from streamqd.schedules.reconciliation import Declaration, declare, relocate
from streamqd.schedules.ticks import format_tick, next_tick, offset_ms
from streamqd.store import schedules as calls
from streamqd.store.schedules import (
    FILE,
    MOVING,
    OPERATOR,
    ORPHAN_MS,
    ORPHANED,
    PAUSED,
    REASONS,
    TAKEOVER_MS,
    UNREADABLE,
    IndexLine,
    StoredSchedule,
)
from streamqd.store.store import Store

ACTIVE, FINISHED, MISSING = "active", "finished", "missing"
LATE_MS = 60_000  # ms after the due time at which a schedule counts as late
COUNTED_MAX = 1_000  # maximum number of schedules that `status` reads
TRIES = 5  # attempts of `run`, if the schedule sent another message in the same millisecond
_WHEN = ("cron", "every", "at")


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule in a list.

    `origin` is file (declared in a configuration file or by `@schedule`) or operator (added by
    `schedule add`), and `fleet` is the fleet that declared or added it. `when` is its `cron`,
    `every` or `at` setting, or null if the specification is invalid.

    `state` is active, paused, orphaned (no instance declares it), unreadable, moving (to another
    partition), finished (no tick follows) or missing (its topic was deleted). `due_unix_ms` is null
    if no tick follows. `last_tick` is the `x-scheduled-for` header of the last message that the
    schedule sent, and `late_ms` is the delay of this message. Both are null if it has sent none.
    `fired` is the number of messages that it has sent, and `skipped` the number of ticks for which
    it sent no message.
    """

    name: str
    topic: str
    partition: int
    fleet: str
    origin: str
    when: str | None
    state: str
    due_unix_ms: int | None
    last_tick: str | None
    late_ms: int | None
    fired: int
    skipped: int


@dataclass(frozen=True, slots=True)
class ScheduleList:
    """A page of schedules, sorted by name.

    `total` is the number of all schedules that match the filter. `cursor` is the cursor of the next
    page, or '' on the last page. `unreadable` lists invalid values in Redis.
    """

    now_unix_ms: int
    total: int
    rows: list[ScheduleRow]
    cursor: str
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class ScheduleDetail:
    """All details of one schedule.

    `specification` contains its settings. If they are invalid, it is null, and `problem` is the
    reason. `declared_unix_ms` is the last time at which an instance declared the schedule, or null
    if an operator added it. `last_uid` is the uid of the last message that it sent.
    """

    now_unix_ms: int
    row: ScheduleRow
    specification: dict[str, Any] | None
    problem: str | None
    declared_unix_ms: int | None
    last_uid: str | None


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick of a schedule.

    `tick` is the value of the message's `x-scheduled-for` header, and `local` is the same time in
    the schedule's time zone. The message is sent at `due_unix_ms`, which is the tick plus a fixed
    offset within the schedule's `jitter`.
    """

    tick: str
    local: str
    tick_unix_ms: int
    due_unix_ms: int


@dataclass(frozen=True, slots=True)
class NextTicks:
    """The next ticks of a schedule.

    `source` is redis, or configuration if the schedule is not in Redis.
    """

    name: str
    timezone: str
    source: str
    rows: list[Tick]


@dataclass(frozen=True, slots=True)
class ScheduleChanged:
    """The result of a command that changes schedules, or of its dry run.

    `changed` maps each schedule to its new state, or to `removed`. `due_unix_ms` is the earliest
    due time of these schedules, or null if none is due.
    """

    changed: dict[str, str]
    due_unix_ms: int | None
    dry_run: bool


@dataclass(frozen=True, slots=True)
class ScheduleRan:
    """The result of `schedule run`. `uid` identifies the message, and is null in a dry run."""

    name: str
    topic: str
    partition: int
    scheduled_for: str
    uid: str | None
    dry_run: bool


@dataclass(frozen=True, slots=True)
class _SeenSchedule:
    """A schedule as it was read.

    `kept` is its stored state. If the partition has no such state, `kept` is None. If the state
    cannot be read, `kept` is None and `readable` is False.
    """

    name: str
    line: IndexLine
    kept: StoredSchedule | None
    readable: bool = True

    @property
    def places(self) -> list[TopicPartition]:
        """The partitions that may contain its state, which are two while it is being moved."""
        return [each for each in (self.line.place, self.line.origin_place) if each is not None]

    @property
    def schedule(self) -> Schedule | None:
        """The specification, or None if it is missing or cannot be read."""
        try:
            return self.specification()
        except ValueError:
            return None

    def specification(self) -> Schedule:
        """Return the specification. Raises ValueError if it is missing or cannot be read."""
        text = self.kept.text if self.kept is not None else None
        if text is None:
            raise ValueError("specification missing")
        if record.hash_specification(text) != (self.kept.hash if self.kept else ""):
            raise ValueError("specification does not match its hash")
        found = record.read(text)
        if found.name != self.name:
            raise ValueError(f"specification belongs to schedule {found.name}")
        return found

    def state(self, now_unix_ms: int) -> str:
        """Return the state, as described in `ScheduleRow`."""
        kept = self.kept
        if kept is None:
            return MISSING if self.readable else UNREADABLE
        if kept.held:
            return kept.held if kept.held in REASONS else UNREADABLE
        if kept.origin == FILE and now_unix_ms - (kept.seen_unix_ms or 0) > ORPHAN_MS:
            return ORPHANED
        if self.schedule is None:
            return UNREADABLE
        return ACTIVE if kept.due_unix_ms is not None else FINISHED

    def row(self, now_unix_ms: int) -> ScheduleRow:
        """Return the row that lists show."""
        kept, schedule = self.kept, self.schedule
        return ScheduleRow(
            name=self.name,
            topic=self.line.place[0],
            partition=self.line.place[1],
            fleet=self.line.fleet,
            origin=self.line.origin,
            when=format_trigger(schedule) if schedule is not None else None,
            state=self.state(now_unix_ms),
            due_unix_ms=kept.due_unix_ms if kept is not None else None,
            last_tick=format_tick(kept.tick)
            if kept is not None and kept.tick is not None
            else None,
            late_ms=kept.late_ms if kept is not None else None,
            fired=kept.fired if kept is not None else 0,
            skipped=kept.skipped if kept is not None else 0,
        )


# --- looking --------------------------------------------------------------------------------------


def list_schedules(
    store: Store, topic: str | None = None, *, limit: int, cursor: str = ""
) -> ScheduleList:
    """Return a page of schedules, of one topic or of all.

    Raises InvalidRequestError if the cursor is invalid.
    """
    if cursor:
        check_name(cursor)
    reader = ViewReader(store)
    lines = index(reader)
    names = [n for n in sorted(lines) if topic in (None, lines[n].place[0])]
    page = [name for name in names if name > cursor][:limit]
    now = server_unix_ms(store.connection)
    rows = [
        schedule.row(now)
        for schedule in read_schedules(reader, {name: lines[name] for name in page})
    ]
    more = bool(page) and page[-1] != names[-1]
    return ScheduleList(now, len(names), rows, page[-1] if more else "", reader.rows)


def show(store: Store, name: str) -> ScheduleDetail:
    """Return the details of a schedule.

    Raises InvalidRequestError, RequestRefusedError and InvalidValueError.
    """
    found = _find_schedule(store, name)
    now, kept, schedule = server_unix_ms(store.connection), found.kept, found.schedule
    problem = None
    try:
        found.specification()
    except ValueError as error:
        problem = str(error)
    return ScheduleDetail(
        now_unix_ms=now,
        row=found.row(now),
        specification=json.loads(record.serialize(schedule)) if schedule is not None else None,
        problem=problem,
        declared_unix_ms=kept.seen_unix_ms if kept is not None else None,
        last_uid=_uid(found.line.place, kept.entry_id) if kept and kept.entry_id else None,
    )


def next_ticks(
    store: Store, configured: Sequence[Schedule], name: str, from_unix_ms: int | None, count: int
) -> NextTicks:
    """Return the next ticks of a schedule from a time on, which is now by default.

    The specification is read from Redis, or from the configuration if Redis does not have the
    schedule. Raises InvalidRequestError, RequestRefusedError, InvalidValueError and
    RedisUnavailableError.
    """
    check_name(name)
    entry = calls.index(store, [name]).get(name)
    found = _find_schedule(store, name).schedule if entry is not None else None
    stated = next((each for each in configured if each.name == name), None)
    schedule = found or stated
    if schedule is None and entry is not None:
        raise RequestRefusedError(
            f"schedule {name} cannot be read; run `streamqd schedule show {name}`"
        )
    if schedule is None:
        raise _not_found_error(store, name)
    if from_unix_ms is None:
        from_unix_ms = server_unix_ms(store.connection) + 1
    return first_ticks(schedule, from_unix_ms, count, "redis" if found else "configuration")


def first_ticks(schedule: Schedule, from_unix_ms: int, count: int, source: str) -> NextTicks:
    """Return the first ticks of a specification at or after a time."""
    rows = compute_ticks(schedule, from_unix_ms, count)
    return NextTicks(schedule.name, schedule.timezone or "UTC", source, rows)


def compute_ticks(schedule: Schedule, from_unix_ms: int, count: int) -> list[Tick]:
    """Return the first ticks of a specification at or after a time, at most `count` of them."""
    rows: list[Tick] = []
    after, offset = from_unix_ms - 1, offset_ms(schedule)
    while len(rows) < count:
        tick = next_tick(schedule, after)
        if tick is None:
            break
        local = datetime.fromtimestamp(tick / 1000, UTC).astimezone(schedule.zone)
        rows.append(Tick(format_tick(tick), local.isoformat(), tick, tick + offset))
        after = tick
    return rows


def format_trigger(schedule: Schedule) -> str:
    """Format the trigger of a schedule, such as `every 15m` or `cron 0 3 * * * (Europe/Berlin)`."""
    stated = json.loads(record.serialize(schedule))
    [name] = [each for each in _WHEN if getattr(schedule, each) is not None]
    zone = f" ({schedule.timezone})" if schedule.timezone else ""
    return f"{name} {stated[name]}{zone}"


@dataclass(frozen=True, slots=True)
class ScheduleTotals:
    """The number of schedules in each state.

    `late` is the number of schedules that were due more than a minute ago. `next_due_unix_ms` is
    the earliest due time of the schedules that are not late, or null if there is none.
    """

    schedules: int
    paused: int
    orphaned: int
    unreadable: int
    missing: int
    late: int
    next_due_unix_ms: int | None


def totals(reader: ViewReader, topic: str | None, now_unix_ms: int) -> ScheduleTotals:
    """Count the schedules of one topic or of all topics.

    Only the states of the first COUNTED_MAX schedules by name are read and counted.
    """
    return count_schedules(reader, topic, now_unix_ms)[0]


def count_schedules(
    reader: ViewReader, topic: str | None, now_unix_ms: int
) -> tuple[ScheduleTotals, list[ScheduleRow]]:
    """Return the totals, and the rows of the first COUNTED_MAX schedules by name."""
    lines = {n: line for n, line in index(reader).items() if topic in (None, line.place[0])}
    some = dict(sorted(lines.items())[:COUNTED_MAX])
    rows = [schedule.row(now_unix_ms) for schedule in read_schedules(reader, some)]
    states = Counter(row.state for row in rows)
    late = [is_late(row, now_unix_ms) for row in rows]
    dues = [
        row.due_unix_ms
        for row, is_it in zip(rows, late, strict=True)
        if row.state == ACTIVE and row.due_unix_ms is not None and not is_it
    ]
    found = ScheduleTotals(
        schedules=len(lines),
        paused=states[PAUSED],
        orphaned=states[ORPHANED],
        unreadable=states[UNREADABLE],
        missing=states[MISSING],
        late=sum(late),
        next_due_unix_ms=min(dues, default=None),
    )
    return found, rows


def is_late(row: ScheduleRow, now_unix_ms: int) -> bool:
    """Return True if a schedule was due over a minute ago, but its message has not been sent."""
    due = row.due_unix_ms
    return row.state == ACTIVE and due is not None and due < now_unix_ms - LATE_MS


# --- changing -------------------------------------------------------------------------------------


def add(
    store: Store, fleet: str, given: Mapping[str, Any], *, dry_run: bool = False
) -> ScheduleChanged:
    """Add a schedule. If it already exists with the same specification, change nothing.

    Raises InvalidRequestError if a setting is invalid, TopicNotFoundError, and RequestRefusedError
    if the name is in use.
    """
    schedule = _build(given)
    place = _place(store, schedule)
    lines = index(ViewReader(store))
    existing = calls.index(store, [schedule.name]).get(schedule.name)
    if isinstance(existing, InvalidValueError):
        raise existing
    wanted = IndexLine(fleet, OPERATOR, place)
    if existing is not None:
        [before] = read_schedules(ViewReader(store), {schedule.name: existing})
        if existing.origin == OPERATOR and before.schedule == schedule:
            return ScheduleChanged({}, before.kept and before.kept.due_unix_ms, dry_run)
        if not before.readable:
            raise RequestRefusedError(
                f"schedule {schedule.name} exists, but cannot be read; run `streamqd schedule"
                f" remove {schedule.name}` first"
            )
        if before.kept is None and existing != wanted:
            raise RequestRefusedError(
                f"schedule {schedule.name} is left over from a deleted topic; run `streamqd"
                f" schedule remove {schedule.name}` first"
            )
        if before.kept is not None:
            hint = (
                f"run `streamqd schedule edit {schedule.name}`"
                if existing.origin == OPERATOR
                else "add this one under another name"
            )
            raise RequestRefusedError(
                f"schedule {schedule.name} exists ({_describe_owner(existing)}); {hint}"
            )
    number = sum(line.place[0] == place[0] for line in lines.values())
    if number >= PER_TOPIC_MAX:
        raise RequestRefusedError(
            f"topic {place[0]} has {number:,} schedules, and {PER_TOPIC_MAX:,} is the maximum;"
            " remove schedules, or send to another topic"
        )
    now = server_unix_ms(store.connection)
    if not dry_run:
        line = calls.write_index(store, schedule.name, wanted, new=True)
        if line != wanted:
            raise RequestRefusedError(
                f"schedule {schedule.name} was added by another client at the same time, so nothing"
                f" was changed; run `streamqd schedule show {schedule.name}`"
            )
        declare(store, place, [Declaration(schedule, fleet, OPERATOR, now)])
        # The line is written again, because a concurrent prune may have deleted it.
        calls.write_index(store, schedule.name, wanted, new=True)
    first = compute_ticks(schedule, now + 1, 1)
    return ScheduleChanged(
        {schedule.name: ACTIVE if first else FINISHED},
        first[0].due_unix_ms if first else None,
        dry_run,
    )


def edit(
    store: Store, name: str, given: Mapping[str, Any], *, dry_run: bool = False
) -> ScheduleChanged:
    """Change settings of a schedule that an operator added. A paused schedule stays paused.

    Raises InvalidRequestError if a setting is invalid, TopicNotFoundError, RequestRefusedError and
    InvalidValueError.
    """
    found = _find_schedule(store, name)
    line = found.line
    if line.origin != OPERATOR:
        raise RequestRefusedError(
            f"schedule {name} is declared by a configuration of fleet {line.fleet}; edit it there"
            " and reload"
        )
    before = found.schedule
    if before is None:
        raise RequestRefusedError(
            f"schedule {name} cannot be read; run `streamqd schedule remove {name}` and add it"
            " again"
        )
    schedule = _build({**json.loads(record.serialize(before)), **_clear_replaced(given)})
    place = _place(store, schedule)
    now = server_unix_ms(store.connection)
    if schedule == before and line.origin_place is None and place == line.place:
        return ScheduleChanged({}, found.kept and found.kept.due_unix_ms, dry_run)
    if not dry_run:
        declaration = Declaration(schedule, line.fleet, OPERATOR, now)
        if line.origin_place is not None:
            relocate(store, declaration, line, place)  # finishes an interrupted move first
            [found] = read_schedules(ViewReader(store), _read_index_line(store, name))
            line = found.line
        if place != line.place:
            relocate(store, declaration, line, place)
        else:
            declare(store, place, [declaration])
        [found] = read_schedules(ViewReader(store), _read_index_line(store, name))
        kept = found.kept
        return ScheduleChanged({name: found.state(now)}, kept and kept.due_unix_ms, dry_run)
    first = compute_ticks(schedule, now + 1, 1)
    return ScheduleChanged(
        {name: found.state(now)}, first[0].due_unix_ms if first else None, dry_run
    )


def pause(store: Store, names: Iterable[str], *, dry_run: bool = False) -> ScheduleChanged:
    """Pause schedules. Each keeps its due time.

    Raises InvalidRequestError, RequestRefusedError and InvalidValueError.
    """
    return _apply_to_each(store, names, _may_pause, PAUSED, _hold, dry_run)


def resume(store: Store, names: Iterable[str], *, dry_run: bool = False) -> ScheduleChanged:
    """Resume paused schedules. Their `misfire` setting determines whether missed ticks are sent.

    Schedules that are already active are not changed. Raises InvalidRequestError and
    InvalidValueError. Raises RequestRefusedError if a schedule is unreadable, missing, orphaned or
    moving.
    """
    return _apply_to_each(store, names, _may_resume, ACTIVE, _release, dry_run)


def find_removable(store: Store, names: Iterable[str]) -> list[ScheduleRow]:
    """Return the schedules with these names.

    Raises InvalidRequestError, and RequestRefusedError if a schedule may not be removed.
    """
    now = server_unix_ms(store.connection)
    return [each.row(now) for each in _find_all(store, names) if _may_remove(store, each)]


def remove(store: Store, names: Iterable[str]) -> ScheduleChanged:
    """Remove schedules and their counts. To finish an interrupted call, repeat it."""
    removed = {}
    for name in names:
        line = calls.index(store, [name]).get(name)
        if line is None:
            continue
        places = calls.places(store)  # an invalid line does not show the place
        if isinstance(line, IndexLine):
            places = [each for each in (line.place, line.origin_place) if each is not None]
        for place in places:
            store.run(calls.drop(store.keys, place, name))
        calls.remove_index(store, name)
        removed[name] = "removed"
    return ScheduleChanged(removed, None, False)


def find_prunable(store: Store) -> list[ScheduleRow]:
    """Return the schedules that `prune` would remove.

    These are the schedules that no instance declares any longer, or whose topic was deleted.
    """
    reader, now = ViewReader(store), server_unix_ms(store.connection)
    rows = [each.row(now) for each in read_schedules(reader, index(reader))]
    gone = [row for row in rows if row.state in (ORPHANED, MISSING)]
    return sorted(gone, key=lambda row: row.name)


def run(store: Store, name: str, *, dry_run: bool = False) -> ScheduleRan:
    """Send a message of a schedule now. The due time of its next tick stays the same.

    Raises InvalidRequestError, RequestRefusedError and InvalidValueError.
    """
    found = _find_schedule(store, name)
    place, schedule, kept = found.line.place, found.schedule, found.kept
    if schedule is None or kept is None:
        state = found.state(server_unix_ms(store.connection))
        raise RequestRefusedError(
            f"schedule {name} is {state}, so nothing was sent; run `streamqd schedule show {name}`"
        )
    count = topics.partition_count(store, place[0])
    single = store.connection.node_for_key(store.keys.meta(place[0])) == ""
    instant = max(kept.tick or 0, kept.ran or 0)
    for _ in range(TRIES):
        instant = _time_between_ticks(schedule, max(server_unix_ms(store.connection), instant + 1))
        if dry_run:
            return ScheduleRan(name, *place, format_tick(instant), None, True)
        reply = store.run(
            calls.run(
                store.keys, place, name, kept.hash, instant,
                record.message_fields(schedule, instant), count if single else None,
            )
        )  # fmt: skip
        if reply.word == "OK":
            uid = _uid(place, reply.values[0].decode())
            return ScheduleRan(name, *place, format_tick(instant), uid, False)
        if reply.word != "AGAIN":
            break
    raise RequestRefusedError(
        f"schedule {name} was changed by another client, so nothing was sent; try again"
    )


def _time_between_ticks(schedule: Schedule, instant: int) -> int:
    """Return this time or, if it is a tick of the schedule, the first later time that is not."""
    while next_tick(schedule, instant - 1) == instant:
        instant += 1
    return instant


# --- parts ----------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Raise InvalidRequestError if this is not a valid name for a schedule."""
    if not SCHEDULE_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} is not a valid schedule name; use 1 to 64 characters from a-z 0-9 . _ - and"
            " no leading dot"
        )


def index(reader: ViewReader) -> dict[str, IndexLine]:
    """Return the readable lines of the schedule index, by name."""
    key, found = reader.keys.schedule_index(), {}
    try:
        lines = calls.read_index(reader.store)
    except RedisResponseError as error:
        reader.add_error(error, key, "HGETALL")
        return {}
    for name, line in lines.items():
        if not SCHEDULE_NAME.fullmatch(name):
            reader.add_row(Unreadable(key, name, "a name", "the name of a schedule"))
        elif isinstance(line, InvalidValueError):
            reader.add(line)
        else:
            found[name] = line
    return found


def read_schedules(reader: ViewReader, lines: Mapping[str, IndexLine]) -> list[_SeenSchedule]:
    """Read the stored states of schedules.

    If a state is missing or invalid, the schedule's `kept` is None. The reader records invalid
    states.
    """
    found = _read_stored(reader, [(name, line, line.place) for name, line in lines.items()])
    moving = [
        (name, each.line, each.line.origin_place)
        for name, each in found.items()
        if each.kept is None and each.line.origin_place is not None
    ]
    for name, seen in _read_stored(reader, moving).items():
        # If a state cannot be read at one of the two places, the schedule counts as unreadable.
        found[name] = seen if seen.kept or found[name].readable else found[name]
    return list(found.values())


def _read_stored(
    reader: ViewReader, wanted: Sequence[tuple[str, IndexLine, TopicPartition]]
) -> dict[str, _SeenSchedule]:
    """Read the states of schedules, each at the given place."""
    commands = [
        command
        for name, _, place in wanted
        for command in calls.read_commands(reader.keys, place, name)
    ]
    replies = reader.ask(commands)
    found = {}
    for at, (name, line, place) in enumerate(wanted):
        some = replies[3 * at : 3 * at + 3]
        kept, readable = None, False
        # A missing reply means that the key has another type, which the reader has already
        # recorded.
        if some[0] is not None and some[1] is not None:
            try:
                kept = calls.parse_schedule(reader.keys.schedules(*place), name, some)
                readable = True
            except InvalidValueError as error:
                reader.add(error)
        found[name] = _SeenSchedule(name, line, kept, readable)
    return found


def _find_all(store: Store, names: Iterable[str]) -> list[_SeenSchedule]:
    """Return the schedules with these names.

    Raises InvalidRequestError, and RequestRefusedError if a schedule does not exist.
    """
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        check_name(name)
    lines = calls.index(store, wanted)
    found = []
    for name in wanted:
        line = lines.get(name)
        if line is None:
            raise _not_found_error(store, name)
        if isinstance(line, InvalidValueError):
            # The only possible action on such a schedule is to remove it, which does not need its
            # place.
            line = IndexLine("", OPERATOR, ("", 0))
            found.append(_SeenSchedule(name, line, None, readable=False))
            continue
        found += read_schedules(ViewReader(store), {name: line})
    return found


def _find_schedule(store: Store, name: str) -> _SeenSchedule:
    """Return a schedule.

    Raises InvalidRequestError, RequestRefusedError if it does not exist, and InvalidValueError if
    it cannot be read.
    """
    check_name(name)
    lines = _read_index_line(store, name)
    reader = ViewReader(store)
    [found] = read_schedules(reader, lines)
    for row in reader.rows:
        raise InvalidValueError(row.key, row.field, row.found, row.wanted)
    return found


def _read_index_line(store: Store, name: str) -> dict[str, IndexLine]:
    line = calls.index(store, [name]).get(name)
    if line is None:
        raise _not_found_error(store, name)
    if isinstance(line, InvalidValueError):
        raise line
    return {name: line}


def _not_found_error(store: Store, name: str) -> RequestRefusedError:
    near = difflib.get_close_matches(name, calls.read_index(store), n=1)
    hint = f"did you mean {near[0]}?" if near else "`streamqd schedule list` prints those that do"
    return RequestRefusedError(f"schedule {name} does not exist; {hint}")


def _build(given: Mapping[str, Any]) -> Schedule:
    try:
        return record.build(dict(given))
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def _clear_replaced(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return these settings, with empty values added for settings that they cannot be used with.

    For example, `every` clears `cron` and `at`, and `key` clears `partition`.
    """
    changed = dict(given)
    chosen = [name for name in _WHEN if name in given]
    if chosen:
        none = {"cron": "", "every": "none", "at": ""}
        changed = {**none, **({} if "cron" in given else {"timezone": ""}), **changed}
    if "key" in given:
        changed = {"partition": "none", **changed}
    if "partition" in given:
        changed = {"key": "", **changed}
    return changed


def _place(store: Store, schedule: Schedule) -> TopicPartition:
    """Return the topic and the partition of a schedule.

    Raises TopicNotFoundError, and RequestRefusedError if the partition does not exist.
    """
    count = topics.partition_count(store, schedule.topic)
    partition = record.choose_partition(schedule, count)
    topics.check_partition(schedule.topic, partition, count)
    return schedule.topic, partition


def _apply_to_each(
    store: Store,
    names: Iterable[str],
    may: Callable[[Store, _SeenSchedule], bool],
    state: str,
    act: Callable[[Store, TopicPartition, str], str],
    dry_run: bool,
) -> ScheduleChanged:
    """Apply an action to schedules, after checking that every one of them allows it.

    Raises RequestRefusedError if one does not allow it. In this case, none is changed. Also raises
    it if another client removes a schedule meanwhile. Earlier ones are then already changed.
    """
    chosen = [found for found in _find_all(store, names) if may(store, found)]
    dues = [found.kept.due_unix_ms for found in chosen if found.kept and found.kept.due_unix_ms]
    if not dry_run:
        for found in chosen:
            if "OK" not in [act(store, place, found.name) for place in found.places]:
                raise RequestRefusedError(
                    f"schedule {found.name} was removed by another client; run"
                    " `streamqd schedule list`"
                )
    changed = {found.name: state for found in chosen}
    return ScheduleChanged(changed, min(dues, default=None), dry_run)


def _hold(store: Store, place: TopicPartition, name: str) -> str:
    return store.run(calls.hold(store.keys, place, name, PAUSED)).word


def _release(store: Store, place: TopicPartition, name: str) -> str:
    return store.run(calls.release(store.keys, place, name)).word


def _may_pause(store: Store, found: _SeenSchedule) -> bool:
    state = found.state(server_unix_ms(store.connection))
    if state in (MISSING, UNREADABLE):
        raise RequestRefusedError(
            f"schedule {found.name} is {state}, so nothing was paused; run"
            f" `streamqd schedule show {found.name}`"
        )
    return state != PAUSED


def _may_resume(store: Store, found: _SeenSchedule) -> bool:
    state = found.state(server_unix_ms(store.connection))
    why = {
        ORPHANED: "no instance declares it; declare it, or remove it",
        UNREADABLE: "declare it again, or remove it",
        MISSING: "its topic was deleted; remove it",
        MOVING: "a housekeeper is moving it to another partition",
    }.get(state)
    if why:
        raise RequestRefusedError(f"schedule {found.name} is {state}, not paused; {why}")
    return state == PAUSED


def _may_remove(store: Store, found: _SeenSchedule) -> bool:
    """Return True. If an instance still declares the schedule, raise RequestRefusedError instead.

    Removing the schedule would be useless, because that instance would add it again within 10 s.
    """
    kept, now = found.kept, server_unix_ms(store.connection)
    if kept is not None and kept.origin == FILE:
        ago = now - (kept.seen_unix_ms or 0)
        if ago <= TAKEOVER_MS:
            raise RequestRefusedError(
                f"schedule {found.name} is declared by an instance of fleet {found.line.fleet};"
                " remove it from the configuration, reload, and repeat the command after"
                f" {TAKEOVER_MS // 1000} s, or run `streamqd schedule pause {found.name}`"
            )
    return True


def _describe_owner(line: IndexLine) -> str:
    who = "added by an operator" if line.origin == OPERATOR else f"a file of fleet {line.fleet}"
    return f"{line.place[0]}, {who}"


def _uid(place: TopicPartition, entry_id: str) -> str:
    return Uid(f"{place[0]}/{place[1]}/{entry_id}")
