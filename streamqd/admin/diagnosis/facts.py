"""Read the facts for the checks of `doctor`, as plain values.

A fact that was not read, or that the Redis user may not read, is empty or None. Checks then report
nothing about it, and `DiagnosisFacts.unseen` describes what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from streamqd import config
from streamqd.admin import backlog, published
from streamqd.admin.assignments import AssignmentRow, published_rows
from streamqd.admin.diagnosis.stream import BlockingGroup, blocking_group
from streamqd.admin.instances import InstanceRow, instance_row
from streamqd.admin.permissions import MissingPermission
from streamqd.admin.published import Fleet, FleetState
from streamqd.admin.reading import Unreadable, ViewReader, lease_view, pairs, read_id
from streamqd.admin.retention import parse_positions
from streamqd.admin.schedules import ScheduleRow
from streamqd.admin.topics import groups_on
from streamqd.admin.topics_settings import valid_settings
from streamqd.config import OutboxSettings, Settings, Topic
from streamqd.model import Assignment
from streamqd.store import leases, members, scripts, statistics, untrusted
from streamqd.store.directives import Directives
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView
from streamqd.store.members import Heartbeat
from streamqd.store.outbox import OutboxView
from streamqd.store.retention import GroupPosition, PartitionPositions
from streamqd.store.retention import measure as measure_retention
from streamqd.store.schedules import IndexLine
from streamqd.store.statistics import AssignmentFigures, PartitionFigures
from streamqd.store.topics import missing_count_error, parse_partition_count


@dataclass(frozen=True, slots=True)
class SlowCommand:
    """An entry in the server's slow log for a command on a key of streamqd."""

    at_unix: int
    milliseconds: float
    command: str
    key: str


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """The state of the server.

    `config` is empty if the user has no permission to read the server's configuration.
    """

    info: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    round_trip_ms: float | None = None  # median of PINGS round trips
    skew_seconds: float | None = None  # the server's clock minus the clock of this host
    slow: Sequence[SlowCommand] = ()
    syncing_seconds: float = 0.0  # observed duration of a sync of the append-only file
    disk_latency_ms: Mapping[str, int] = field(default_factory=dict)  # maximum by LATENCY event

    def number(self, name: str) -> int:
        """Return a number from INFO, or 0 if it is missing."""
        text = self.info.get(name, "0")
        return int(text) if text.isdigit() else 0


def _no_fleet() -> FleetState:
    return FleetState(0, 0.0, (), Directives())


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """The members, directives and published summaries of the fleet.

    `changed` contains the instances whose process was replaced during the check. `duplicates`
    contains the summaries of second processes that use the name of another instance.
    """

    state: FleetState = field(default_factory=_no_fleet)
    summaries: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    duplicates: Mapping[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic that is registered, configured or consumed.

    `partitions` is None if Redis has no such topic. `deleting` is True if a deletion was started
    and not finished. `members` is the stored set of the topic's partition streams, and `groups`
    contains all groups that daemons have created on it. `unreadable` describes an invalid value,
    and is '' if there is none. `stored` contains all fields of the topic's hash.
    """

    name: str
    registered: bool
    partitions: int | None
    deleting: bool
    members: frozenset[str]
    groups: frozenset[str]
    holds: Topic
    unreadable: str = ""
    stored: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delays:
    """Delayed messages. One key contains their due times, and another one the messages.

    `lost` lists the due times that have no message, and `stuck` the messages that have no due time.
    If there are too many to compare one by one, both are empty, and `excess` is the number of due
    times minus the number of messages.
    """

    key: str = ""  # key of the due times
    count: int = 0
    next_due_unix_ms: int | None = None
    lost: Sequence[str] = ()
    stuck: Sequence[str] = ()
    excess: int = 0


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """The facts of one partition, for all its groups.

    `wrong_types` maps each key that has an unexpected type to that type.
    `oldest_dead_letter_unix_ms` is read only if dead letters have a retention. `large_bytes` is the
    payload size of the first or the last entry, whichever is larger.
    """

    topic: str
    partition: int
    wrong_types: Mapping[str, str]
    groups: frozenset[str]
    figures: PartitionFigures | None
    delayed_sends: Delays
    positions: PartitionPositions | None
    oldest_dead_letter_unix_ms: int | None
    large_bytes: int | None


@dataclass(frozen=True, slots=True)
class LeaseCheck:
    """The fence and the lease of an assignment, read together.

    `lease_matches` is True if both contain the same token, and None if there is no lease.
    """

    fence: LeaseView
    lease_matches: bool | None


@dataclass(frozen=True, slots=True)
class AssignmentFacts:
    """The facts of one group on one partition.

    `lease_checks` has two items if the fence and the lease differed at the first read.
    """

    assignment: Assignment
    wrong_types: Mapping[str, str]
    figures: AssignmentFigures | None
    held: Mapping[str, int]  # pending entries by the other client that holds them, '' for none
    lease_checks: Sequence[LeaseCheck]
    delays: Delays
    blocking: BlockingGroup | None

    @property
    def other_clients(self) -> dict[str, int]:
        """The number of pending entries of each other client, by its name."""
        return {name: count for name, count in self.held.items() if name}

    @property
    def unowned(self) -> int:
        """The number of pending entries that no client holds."""
        return self.held.get("", 0)

    @property
    def view(self) -> LeaseView | None:
        """The fence and the lease as read last."""
        return self.lease_checks[-1].fence if self.lease_checks else None

    @property
    def pending(self) -> int:
        """The number of entries that were delivered and not acknowledged."""
        return self.figures.pending if self.figures else 0


@dataclass(frozen=True, slots=True)
class OutboxTableState:
    """The state of the tables of an outbox.

    If the tables cannot be read, `problem` is a sentence with the reason. Otherwise, it is ''. No
    more than 10,000 rows are counted. `deleted_rows` is the number of deleted rows that still take
    up space, which only PostgreSQL reports. For other databases, `unused_bytes` is the space that
    no row uses. SQLite reports this space only for its whole file.
    """

    name: str
    problem: str = ""
    dialect: str = ""
    rows: int = 0
    oldest_seconds: float = 0.0
    dead: int = 0
    dead_error: str = ""  # error of the newest dead-lettered row
    deleted_rows: int | None = None
    unused_bytes: int | None = None
    total_bytes: int = 0


ReadTable = Callable[[OutboxSettings], OutboxTableState]


@dataclass(frozen=True, slots=True)
class OutboxFacts:
    """An outbox as its relay published it. `table` is None if its database was not read."""

    view: OutboxView
    configured: bool  # True if it is in the configuration of this command
    table: OutboxTableState | None = None


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """The schedules in Redis: the lines of their index by name, and a row for each.

    `without_group` maps a schedule to the group in its `overlap` setting if that group does not
    read the schedule's topic.
    """

    lines: Mapping[str, IndexLine] = field(default_factory=dict)
    rows: Sequence[ScheduleRow] = ()
    without_group: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnreadableValue:
    """An invalid value in Redis, with its effect and its fix.

    `about` is the affected instance, topic, partition or assignment.
    """

    row: Unreadable
    about: str
    effect: str
    fix: str


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of this host for a daemon with this configuration. None means unknown."""

    state_dir: Path
    state_dir_problem: str = ""
    other_owners: Mapping[str, int] = field(default_factory=dict)  # file -> user id
    free_bytes: int | None = None
    embedded_bytes: int | None = None  # files of the embedded server
    unit_source: str = ""  # source of the service manager's stop timeout, '' if there is none
    stop_seconds: float | None = None
    descriptors: int | None = None
    descriptors_owner: str = ""
    system_descriptors: int | None = None
    assignments: int = 0  # assignments of the configured consumers
    oom_group: str = ""  # control group that the kernel kills as a whole, '' if there is none


@dataclass(frozen=True)
class DiagnosisFacts:
    """All facts for the checks.

    `unseen` contains a sentence for each part that was not examined. `servers` maps the address of
    each master in a cluster to its state. For a single server, it is empty.
    """

    settings: Settings
    now_unix_ms: int
    server: ServerHealth = field(default_factory=ServerHealth)
    servers: Mapping[str, ServerHealth] = field(default_factory=dict)
    missing_permissions: Sequence[MissingPermission] = ()
    fleet: FleetHealth = field(default_factory=FleetHealth)
    topics: Sequence[TopicFacts] = ()
    partitions: Sequence[PartitionFacts] = ()
    assignments: Sequence[AssignmentFacts] = ()
    values: Sequence[UnreadableValue] = ()
    schedules: ScheduleFacts = field(default_factory=ScheduleFacts)
    outboxes: Sequence[OutboxFacts] = ()
    host: Host | None = None
    unseen: Sequence[str] = ()

    @property
    def keys(self) -> Keys:
        """The key names with the configured prefix."""
        return Keys(self.settings.keys.control, self.settings.keys.streams)

    @cached_property
    def instances(self) -> Sequence[InstanceRow]:
        """The members as the rows that views show."""
        state, summaries = self.fleet.state, self.fleet.summaries
        return [
            instance_row(state, heartbeat, summaries.get(heartbeat.instance, {}))
            for heartbeat in state.heartbeats
        ]

    @cached_property
    def published(self) -> Sequence[AssignmentRow]:
        """The assignments in the summaries.

        During a move, an assignment can be in two summaries.
        """
        summaries = self.fleet.summaries.items()
        return [row for name, each in summaries for row in published_rows(name, each)]

    @cached_property
    def live_heartbeats(self) -> Sequence[Heartbeat]:
        """The last heartbeats of the live members."""
        state = self.fleet.state
        return [heartbeat for heartbeat in state.heartbeats if heartbeat.instance in state.live]

    @cached_property
    def offered(self) -> frozenset[tuple[str, str]]:
        """The topic and the group of each consumer that a live instance has."""
        return frozenset().union(*(seen.member.offers for seen in self.fleet.state.live.values()))

    @cached_property
    def configured(self) -> frozenset[tuple[str, str]]:
        """The topic and the group of each consumer in this configuration file."""
        return frozenset((each.topic, each.assignment_group) for each in self.settings.consumers)


PINGS = 5  # number of pings, whose median is the round-trip time
SLOW_MAX = 128  # entries of the slow log that are read
SYNC_SECONDS = 1.0  # maximum seconds to observe how long a sync of the server's file takes
SYNC_POLL_SECONDS = 0.01
DISK_EVENTS = ("aof-fsync-always", "aof-write-pending-fsync")
_SETTINGS = ("appendfsync", "maxclients", "proto-max-bulk-len", "timeout")


def gather_server(reader: ViewReader) -> ServerHealth:
    """Read the server's INFO, configuration, latencies and slow log, and measure the round trip."""
    asked = [("CONFIG", "GET", name) for name in _SETTINGS]
    begun = time.perf_counter()
    info, slow, latest, *settings = reader.ask(
        [("INFO",), ("SLOWLOG", "GET", SLOW_MAX), ("LATENCY", "LATEST"), *asked]
    )
    stated: dict[str, str] = {}
    for flat in settings:
        stated |= {name.decode(): value.decode() for name, value in pairs(flat).items()}
    trip, skew = _measure_round_trip(reader)
    facts = _info(info or b"")
    return ServerHealth(
        info=facts,
        config=stated,
        syncing_seconds=_syncing(reader, begun) if _syncs(facts) else 0.0,
        disk_latency_ms=_disk_latency(latest or ()),
        round_trip_ms=trip,
        skew_seconds=skew,
        slow=_slow_commands(slow or (), reader.keys),
    )


def _info(raw: bytes) -> Mapping[str, str]:
    lines = raw.decode("utf-8", "replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _syncs(info: Mapping[str, str]) -> bool:
    """Return True if the server is syncing its append-only file."""
    return info.get("aof_pending_bio_fsync", "0") != "0"


def _syncing(reader: ViewReader, begun: float) -> float:
    """Wait up to SYNC_SECONDS for the current sync to finish. Return the seconds since `begun`."""
    while (seconds := time.perf_counter() - begun) < SYNC_SECONDS:
        (raw,) = reader.ask([("INFO", "persistence")])
        if not _syncs(_info(raw or b"")):
            break
        time.sleep(SYNC_POLL_SECONDS)
    return seconds


def _disk_latency(events: Sequence[Any]) -> Mapping[str, int]:
    """Return the highest latency in ms of each event that waits for the append-only file."""
    found = {each[0].decode("utf-8", "replace"): int(each[3]) for each in events}
    return {name: worst for name, worst in found.items() if name in DISK_EVENTS}


def _measure_round_trip(reader: ViewReader) -> tuple[float | None, float | None]:
    """Return the median round trip in ms, and the clock skew in seconds, or None for both.

    This measures several round trips, because a single one may be unusually slow. The skew is
    computed from the shortest one, which gives the most exact value.
    """
    taken = []
    for _ in range(PINGS):
        before, begun = time.time(), time.perf_counter()
        (reply,) = reader.ask([("TIME",)])
        if reply is None:
            return None, None
        trip = time.perf_counter() - begun
        # This assumes that the server read its clock in the middle of the round trip.
        taken.append((trip, int(reply[0]) + int(reply[1]) / 1e6 - before - trip / 2))
    return round(median(trip for trip, _ in taken) * 1000, 3), round(min(taken)[1], 3)


def _slow_commands(entries: Sequence[Any], keys: Keys) -> list[SlowCommand]:
    names = {script.sha.encode(): script.name for script in scripts.load().values()}
    ours = (f"{keys.control}:".encode(), f"{keys.streams}:".encode())
    found = []
    for _, at, micros, arguments, *_ in entries:
        key = next((each for each in arguments[1:] if each.startswith(ours)), None)
        if key is None:
            continue
        name = arguments[0].decode("utf-8", "replace").upper()
        if name == "EVALSHA":
            name = f"the script {names.get(arguments[1], 'with the digest ' + repr(arguments[1]))}"
        found.append(SlowCommand(at, micros / 1000, name, key.decode("utf-8", "replace")))
    return found


def gather_fleet(fleet: Fleet, reader: ViewReader) -> FleetHealth:
    """Read the published state of the fleet."""
    state = published.fleet_state(fleet, reader)
    names = [heartbeat.instance for heartbeat in state.heartbeats]
    summaries = published.read_summaries(reader, fleet.name, names)
    duplicates = published.read_duplicates(reader, fleet.name, names)
    return FleetHealth(state, dict(zip(names, summaries, strict=True)), duplicates=duplicates)


def changed_runs(reader: ViewReader, fleet: str, heartbeats: Sequence[Heartbeat]) -> frozenset[str]:
    """Read the heartbeats again, and return the instances whose run ID has changed since then."""
    (infos,) = reader.ask([("HGETALL", reader.keys.info(fleet))])
    scores = [part for heartbeat in heartbeats for part in (heartbeat.instance.encode(), b"0")]
    now = members.heartbeats(scores, infos)
    return frozenset(
        old.instance
        for old, new in zip(heartbeats, now, strict=True)
        if old.info and new.info and old.info.get("nonce") != new.info.get("nonce")
    )


_GROUP = "group:"


def gather_topics(
    reader: ViewReader, settings: Settings, offered: Sequence[str]
) -> list[TopicFacts]:
    """Read the registry, and the stored state of all registered, consumed and configured topics.

    `offered` contains the topics that live instances consume.
    """
    keys = reader.keys
    (names,) = reader.ask([("SMEMBERS", keys.registry())])
    valid = {reader.read(untrusted.name, name, keys.registry()) for name in names or ()}
    registered = {name for name in valid if name is not None}
    consumed = {each.topic for each in settings.consumers} | set(offered)
    every = sorted(registered | consumed | settings.topics.keys())
    commands = [
        command
        for name in every
        for command in (("HGETALL", keys.meta(name)), ("SMEMBERS", keys.partitions(name)))
    ]
    replies = reader.ask(commands)
    return [
        _topic(reader, settings, name, name in registered, *replies[2 * at : 2 * at + 2])
        for at, name in enumerate(every)
    ]


def _topic(
    reader: ViewReader,
    settings: Settings,
    name: str,
    registered: bool,
    meta: Sequence[bytes] | None,
    members: Sequence[bytes] | None,
) -> TopicFacts:
    texts = [each.decode("utf-8", "replace") for each in meta or ()]
    stored = dict(zip(texts[::2], texts[1::2], strict=True))
    count, unreadable = stored.get("partitionCount"), ""
    key = reader.keys.meta(name)
    number = (
        None if count is None else reader.read(parse_partition_count, name, count.encode(), key)
    )
    if count is not None and number is None:
        unreadable = f"its partition count is {count[: untrusted.SHOWN_BYTES]!r}"
    elif meta is None and any(row.key == key for row in reader.rows):
        unreadable = "its key is not a hash"
    elif count is None and registered and "deleting" not in stored:
        reader.add(missing_count_error(key))
    text = stored.get("settings", "{}").encode()
    found = valid_settings(reader, text, key)
    if any((row.key, row.field) == (key, "settings") for row in reader.rows):
        unreadable = unreadable or "its settings do not have the format of `topic create`"
    holds = config.effective(settings.topics.get(name, config.Topic()), found)
    return TopicFacts(
        name=name,
        registered=registered,
        partitions=number or None,
        deleting="deleting" in stored,
        members=frozenset(each.decode("utf-8", "replace") for each in members or ()),
        groups=frozenset(
            field.removeprefix(_GROUP) for field in stored if field.startswith(_GROUP)
        ),
        holds=holds,
        unreadable=unreadable,
        stored=pairs(meta),
    )


COMPARED_MAX = 1_000  # maximum number of due times and messages that are compared one by one
Pair = tuple[str, str]  # the keys of due times and of messages


def gather_delays(reader: ViewReader, pairs: Sequence[Pair]) -> list[Delays]:
    """Compare due times with messages, which are stored in pairs of keys.

    The two keys of a pair are read one after the other, so another client may add or remove a
    message in between. A mismatch is therefore reported only if a second read finds it again.
    """
    found = [_read_delays(reader, pair) for pair in _measure_pairs(reader, pairs)]
    odd = [at for at, delays in enumerate(found) if delays.lost or delays.stuck or delays.excess]
    for at, again in zip(odd, _measure_pairs(reader, [pairs[at] for at in odd]), strict=True):
        found[at] = _merge_delays(found[at], _read_delays(reader, again))
    return found


def _measure_pairs(reader: ViewReader, pairs: Sequence[Pair]) -> list[tuple[Pair, list[Any]]]:
    """Return the pairs with the sizes of both keys, and with the first due time."""
    asked: list[tuple[Any, ...]] = []
    for due, items in pairs:
        asked += [("ZCARD", due), ("HLEN", items), ("ZRANGE", due, 0, 0, "WITHSCORES")]
    replies = reader.ask(asked)
    return [(pair, replies[3 * at : 3 * at + 3]) for at, pair in enumerate(pairs)]


def _read_delays(reader: ViewReader, sized: tuple[Pair, list[Any]]) -> Delays:
    (due, items), (members, messages, first) = sized
    if members is None or messages is None or not (members or messages):
        return Delays()
    earliest = reader.read(untrusted.number, first[1], due) if first else None
    next_due = None if earliest is None else int(earliest)
    if max(members, messages) > COMPARED_MAX:
        return Delays(due, members, next_due, excess=members - messages)
    named, stored = reader.ask([("ZRANGE", due, 0, COMPARED_MAX), ("HKEYS", items)])
    times, kept = _decode_all(named), _decode_all(stored)
    return Delays(due, members, next_due, sorted(times - kept), sorted(kept - times))


def _merge_delays(first: Delays, second: Delays) -> Delays:
    return replace(
        second,
        lost=sorted(set(first.lost) & set(second.lost)),
        stuck=sorted(set(first.stuck) & set(second.stuck)),
        excess=second.excess if first.excess == second.excess else 0,
    )


def _decode_all(raw: Sequence[bytes] | None) -> set[str]:
    return {each.decode("utf-8", "replace") for each in raw or ()}


ABANDONED_SECONDS = 600.0  # seconds without an owner and a reader after which a group is abandoned
PARTITIONS_MAX = 4_096  # limit for all topics together
BODIES_MAX = 64  # partitions whose first and last message are read
BODIES_AT_ONCE = 8  # bodies read in one round trip


def select_partitions(topics: Sequence[TopicFacts]) -> tuple[list[tuple[TopicFacts, int]], int]:
    """Return the partitions to examine, and the total number of partitions.

    If there are too many partitions to examine all, only the first ones of each topic are examined,
    and each topic gets an equal share.
    """
    counted = [(topic, topic.partitions or 0) for topic in topics]
    total = sum(count for _, count in counted)
    share = PARTITIONS_MAX if total <= PARTITIONS_MAX else PARTITIONS_MAX // max(1, len(counted))
    return [(topic, n) for topic, count in counted for n in range(min(count, share))], total


def gather_partitions(
    reader: ViewReader, places: Sequence[tuple[TopicFacts, int]], *, bodies: bool
) -> list[PartitionFacts]:
    """Read the facts of partitions.

    If `bodies` is True, also read the first and last message of some.
    """
    keys, names = reader.keys, [(topic.name, number) for topic, number in places]
    types = reader.wrong_types([_key_types(keys, *name) for name in names])
    groups = groups_on(reader, names)
    figures = reader.measure([statistics.measure_partition(keys, *name) for name in names])
    position_replies = reader.measure([measure_retention(keys, *name) for name in names])
    scheduled = gather_delays(
        reader, [(keys.delayed_sends(*name), keys.delayed_send_items(*name)) for name in names]
    )
    aged = [name for topic, name in zip(places, names, strict=True) if topic[0].holds.dlq_retention]
    dead_letters = _oldest_dead_letters(reader, aged)
    large = _payload_sizes(reader, names[:BODIES_MAX] if bodies else [])
    return [
        PartitionFacts(
            *name,
            wrong_types=types[at],
            groups=groups[at],
            figures=reader.figures(statistics.partition_figures, reply, keys.trim(*name)),
            delayed_sends=scheduled[at] if not types[at] else Delays(),
            positions=parse_positions(reader, *name, position_replies[at]),
            oldest_dead_letter_unix_ms=dead_letters.get(name),
            large_bytes=large.get(name),
        )
        for at, (name, reply) in enumerate(zip(names, figures, strict=True))
    ]


# --- types ----------------------------------------------------------------------------------------


def _key_types(keys: Keys, topic: str, partition: int) -> dict[str, str]:
    return {
        keys.stream(topic, partition): "stream",
        keys.dlq(topic, partition): "stream",
        keys.trim(topic, partition): "hash",
        keys.delayed_sends(topic, partition): "zset",
        keys.delayed_send_items(topic, partition): "hash",
        keys.moving(topic, partition): "hash",
    }


# --- messages -------------------------------------------------------------------------------------


def _oldest_dead_letters(
    reader: ViewReader, names: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    asked = [("XRANGE", reader.keys.dlq(*name), "-", "+", "COUNT", 1) for name in names]
    replies = reader.ask(asked, batch=BODIES_AT_ONCE)
    return {name: read_id(page[0][0]).ms for name, page in zip(names, replies, strict=True) if page}


def _payload_sizes(
    reader: ViewReader, names: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """Return the payload size of the first or last entry of each partition, whichever is larger."""
    asked: list[tuple[Any, ...]] = []
    for name in names:
        stream = reader.keys.stream(*name)
        asked.append(("XRANGE", stream, "-", "+", "COUNT", 1))
        asked.append(("XREVRANGE", stream, "+", "-", "COUNT", 1))
    replies = reader.ask(asked, batch=BODIES_AT_ONCE)
    return {
        name: max(map(_payload_bytes, replies[2 * at : 2 * at + 2]))
        for at, name in enumerate(names)
    }


def _payload_bytes(page: Sequence[Any] | None) -> int:
    return len(pairs(page[0][1]).get(b"payload", b"")) if page else 0


def gather_assignments(
    reader: ViewReader, partitions: Sequence[PartitionFacts]
) -> list[AssignmentFacts]:
    """Read the facts of every group on every partition."""
    keys = reader.keys
    assignments = [
        Assignment(each.topic, each.partition, group)
        for each in partitions
        for group in sorted(each.groups)
    ]
    group_positions = {
        Assignment(each.topic, each.partition, group.name): group
        for each in partitions
        for group in (each.positions.groups if each.positions else ())
    }
    types = reader.wrong_types([_assignment_types(keys, assignment) for assignment in assignments])
    figures = backlog.measure(reader, assignments)
    held = backlog.count_other_clients(reader, assignments)
    lease_checks = _check_leases(reader, assignments)
    delays = gather_delays(
        reader,
        [(keys.retry(*assignment), keys.retry_items(*assignment)) for assignment in assignments],
    )
    return [
        AssignmentFacts(
            assignment=assignment,
            wrong_types=types[at],
            figures=figures[at],
            held=held[at],
            lease_checks=lease_checks[at],
            delays=delays[at],
            blocking=_find_blocking_group(group_positions.get(assignment), lease_checks[at]),
        )
        for at, assignment in enumerate(assignments)
    ]


def _find_blocking_group(
    position: GroupPosition | None, lease_checks: Sequence[LeaseCheck]
) -> BlockingGroup | None:
    lease = lease_checks[-1].fence if lease_checks else None
    return position and blocking_group(position, lease, ABANDONED_SECONDS)


def _assignment_types(keys: Keys, assignment: Assignment) -> dict[str, str]:
    return {
        keys.retry_stream(*assignment): "stream",
        keys.retry(*assignment): "zset",
        keys.retry_items(*assignment): "hash",
        keys.fence(*assignment): "hash",
        keys.lease(*assignment): "string",
        keys.attempts(*assignment): "hash",
    }


def _check_leases(reader: ViewReader, assignments: Sequence[Assignment]) -> list[list[LeaseCheck]]:
    """Read each fence and its lease. If they do not match, read them a second time.

    The fence and the lease are not read at the same time, so a change of owner between the two
    reads looks like a mismatch.
    """
    lease_checks = [
        [lease_check] if lease_check else []
        for lease_check in _check_leases_once(reader, assignments)
    ]
    unusual = [at for at, some in enumerate(lease_checks) if some and _is_unusual(some[0])]
    again = _check_leases_once(reader, [assignments[at] for at in unusual])
    for at, lease_check in zip(unusual, again, strict=True):
        lease_checks[at] += [lease_check] if lease_check else []
    return lease_checks


def _is_unusual(lease_check: LeaseCheck) -> bool:
    return (
        bool(lease_check.fence.token) != (lease_check.fence.ttl is not None)
        or lease_check.lease_matches is False
    )


def _check_leases_once(
    reader: ViewReader, assignments: Sequence[Assignment]
) -> list[LeaseCheck | None]:
    keys = reader.keys
    asked: list[tuple[Any, ...]] = []
    for assignment in assignments:
        asked += [*leases.view_commands(keys, assignment), leases.token_command(keys, assignment)]
    replies = reader.ask(asked)
    found: list[LeaseCheck | None] = []
    for number, assignment in enumerate(assignments):
        fence, ttl, lease = replies[3 * number : 3 * number + 3]
        if fence is None or ttl is None:
            found.append(None)
            continue
        matches = None if lease is None else lease == fence[0]
        found.append(LeaseCheck(lease_view(reader, assignment, fence, ttl), matches))
    return found
