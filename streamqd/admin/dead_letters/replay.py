"""Replay dead letters, and plan a replay.

A replay to the same partition is a single atomic step. A replay to another partition or topic takes
three steps, which can be repeated: mark the dead letter as moving, write it at the destination with
a dedup ID, and delete it. If the replay is interrupted, running it again completes the move, so no
dead letter is lost. The dedup ID ensures that no message is written twice. Because it expires after
`RESUME_SECONDS`, a later replay refuses to complete a move that was interrupted more than half of
this time ago.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from streamqd.admin import topics
from streamqd.admin.assignments import measure_assignments
from streamqd.admin.dead_letters.listing import FailureCause, FailureTally
from streamqd.admin.dead_letters.passes import DONE, LIMIT, Pass, Progress, ignore_progress
from streamqd.admin.dead_letters.selection import (
    DEAD_ONLY,
    REPLAYS_HEADER,
    DeadLetterFields,
    Stop,
    count_replays,
    find_origin,
    limit_pages,
    never_stop,
    page_size,
    pages,
    total,
)
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import Entry, ViewReader, server_unix_ms
from streamqd.errors import RedisResponseError, RedisUnavailableError, RequestRefusedError
from streamqd.model import Assignment
from streamqd.policy.partitioning import crc32_partition
from streamqd.store import dead, directives
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store
from streamqd.words import plural

_RESET_COUNTERS = {
    b"retryCount": b"0",
    b"crashCount": b"0",
}  # initial counters of a replayed message


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a replay. By default, it is each dead letter's own group and partition.

    If `all_groups` is True, a message goes to all groups of its own topic. If `topic` is set, it
    goes to all groups of that topic. `partition` is a partition of the destination topic. If it is
    None, the key of a message determines its partition in another topic. A message without a key
    keeps its partition number, modulo the partition count.
    """

    all_groups: bool = False
    partition: int | None = None
    topic: str | None = None

    def __str__(self) -> str:
        if self.topic is not None:
            where = f"topic {self.topic}"
        else:
            where = "every group" if self.all_groups else "the original group"
        return where if self.partition is None else f"{where}, on partition {self.partition}"


DEFAULT_TARGET = Target()


class Destination(NamedTuple):
    """The stream that a message is written to: a partition, or a group's retry stream for it."""

    topic: str
    partition: int
    group: str | None

    def __str__(self) -> str:
        text = f"{self.topic}/{self.partition}"
        return text if self.group is None else f"{text}/{self.group}"


def read_destination(text: str) -> Destination | None:
    """Parse a destination, as stored in a mark. Return None if it is not valid."""
    topic, _, rest = text.partition("/")
    number, slash, group = rest.partition("/")
    if not (topic and number.isascii() and number.isdigit()):
        return None
    return Destination(topic, int(number), group if slash else None)


class Route:
    """Chooses the destination of each dead letter of a topic.

    Raises TopicNotFoundError. Raises RequestRefusedError if the destination is the topic itself or
    has no such partition.
    """

    def __init__(self, store: Store, topic: str, target: Target) -> None:
        if target.topic == topic:
            raise RequestRefusedError(
                f"{topic} is the topic of the dead letters; omit --to-topic, or pass --all-groups"
            )
        self.topic = topic
        self.target = target
        self.count = topics.partition_count(store, target.topic or topic)
        if target.partition is not None:
            topics.check_partition(target.topic or topic, target.partition, self.count)

    def destination(self, entry: Entry) -> Destination | None:
        """Return a dead letter's destination, or None if it depends on a group that is unknown."""
        target = self.target
        partition = entry.partition if target.partition is None else target.partition
        if target.topic is not None:
            if target.partition is None:
                key = entry.fields.get(b"key")
                many = self.count
                partition = partition % many if key is None else crc32_partition(key, many)
            return Destination(target.topic, partition, None)
        if target.all_groups:
            return Destination(self.topic, partition, None)
        group = DeadLetterFields(entry.fields).text(b"group")
        return Destination(self.topic, partition, group) if group else None

    def stays(self, entry: Entry, to: Destination) -> bool:
        """Return True if the destination is in the same slot as the dead letter.

        In that case, the replay is one atomic step.
        """
        return (to.topic, to.partition) == (self.topic, entry.partition)

    def matches(self, mark: Destination, to: Destination) -> bool:
        """Return True if a replay to `to` may complete an interrupted move to `mark`."""
        same = (mark.topic, mark.group) == (to.topic, to.group)
        return same and (self.target.partition is None or mark.partition == to.partition)


def changed_fields(topic: str, entry: Entry, to: Destination) -> dict[bytes, bytes]:
    """Return the fields that a replay changes or adds: counters, origin and headers."""
    replays = count_replays(entry) + 1
    fields = {**_RESET_COUNTERS, b"replayCount": b"%d" % replays}
    origin_topic, origin_partition, original_id = find_origin(topic, entry)
    origin = (origin_topic, origin_partition)
    if original_id and origin != (to.topic, str(to.partition)):
        # In another partition, the message's uid can be derived only from these fields.
        fields[b"originalTopic"], fields[b"originalPartition"] = (part.encode() for part in origin)
    if to.group is None and entry.headers is not None:
        headers = {**entry.headers, REPLAYS_HEADER: str(replays)}
        fields[b"headers"] = json.dumps(headers, separators=(",", ":")).encode()
    return fields


def moved_fields(topic: str, entry: Entry, to: Destination) -> dict[bytes, bytes]:
    """Return all fields of the message to write for a dead letter that moves to another slot."""
    kept = {name: value for name, value in entry.fields.items() if name not in DEAD_ONLY}
    return kept | changed_fields(topic, entry, to)


Subject = TypeVar("Subject")

MAX_REPLAYS = 3
RESUME_SECONDS = 7 * 86_400.0  # lifetime of the dedup ID of a moved dead letter

NO_GROUP_NAMED = "the dead letter has no group"
GROUP_GONE = "its group no longer exists"
TOO_WIDE = "it has too many fields to move to another slot"
BODY_WITHHELD = "its body was not kept (dlq_body)"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay. All counts are numbers of dead letters.

    `missing` counts the dead letters that another client replayed or purged first. `refused` maps
    each reason why dead letters stay to their number. `unknown` counts those whose calls got no
    reply, because the connection was lost. Each of these was either replayed or stays. `result` is
    done, limit (the limit was reached), stopped or failed, and `error` is the reason for a failure.
    Dead letters newer than `started_unix_ms` were not read. `first_id` and `last_id` identify the
    first and the last replayed dead letter. `audited` is False if the audit log could not be
    written.
    """

    topic: str
    target: str
    replayed: int
    missing: int
    refused: dict[str, int]
    unknown: int
    result: str
    error: str
    started_unix_ms: int
    first_id: str
    last_id: str
    audited: bool


def refuse_replayed(most: int) -> str:
    """Return the reason for refusing a dead letter that was replayed at least `most` times."""
    times = "before" if most == 1 else f"{most} times or more already"
    return f"it was replayed {times}, and was dead-lettered again"


def replay(
    store: Store,
    topic: str,
    choice: MessageFilter,
    *,
    target: Target = DEFAULT_TARGET,
    rate: float | None = None,
    limit: int | None = None,
    max_replays: int = MAX_REPLAYS,
    stop: Stop = never_stop,
    progress: Progress = ignore_progress,
    examining: Progress = ignore_progress,
) -> ReplayResult:
    """Replay dead letters, the oldest of each partition first.

    If `rate` is set, dead letters are replayed at this number per second, at even intervals. The
    replay stops after `limit` dead letters. A dead letter whose message was already replayed
    `max_replays` times stays. `stop` is called between batches, and the replay stops if it returns
    True. `progress` is called with the size of each batch, and `examining` with the number of dead
    letters on each page that was read.

    Raises TopicNotFoundError. Raises RequestRefusedError if a named dead letter does not exist or
    does not match, or if the destination does not exist. Raises RedisUnavailableError if the
    connection is lost before anything is replayed. If it is lost later, the replay stops with the
    result failed.
    """
    route = Route(store, topic, target)
    done = Pass(store, topic, choice, stop, progress, examining)
    started = server_unix_ms(store.connection)
    work = _Replay(store, route, done, max_replays)

    def room() -> int | None:
        return None if limit is None else limit - done.counts["replayed"]

    for piece in done.pieces(rate, room):
        work.run(piece)
        if limit is not None and done.counts["replayed"] >= limit and done.result == DONE:
            done.result = LIMIT
    counts = done.counts
    note = "; ".join(f"{number}: {why}" for why, number in done.refused.items())
    return ReplayResult(
        topic=topic,
        target=str(target),
        replayed=counts["replayed"],
        missing=counts["missing"],
        refused=dict(done.refused),
        unknown=done.unknown,
        result=done.result,
        error=done.error,
        started_unix_ms=started,
        first_id=done.first,
        last_id=done.last,
        audited=done.record("dlq replay", note, to=str(target)),
    )


def refusal(route: Route, entry: Entry, max_replays: int) -> str:
    """Return the reason for refusing a dead letter, or '' if it may be replayed.

    The reason is found from the entry alone, without reading from Redis.
    """
    to = route.destination(entry)
    if to is None:
        return NO_GROUP_NAMED
    if b"payloadBytes" in entry.fields:
        return BODY_WITHHELD
    if count_replays(entry) >= max_replays:
        return refuse_replayed(max_replays)
    if (
        not route.stays(entry, to)
        and 2 * len(moved_fields(route.topic, entry, to)) > dead.DELIVER_MAX
    ):
        return TOO_WIDE
    return ""


class _PendingReplay(NamedTuple):
    """A dead letter and its destination."""

    entry: Entry
    to: Destination


class _Replay:
    """Replays batches of dead letters of one topic."""

    def __init__(self, store: Store, route: Route, done: Pass, max_replays: int) -> None:
        self._store = store
        self._route = route
        self._done = done
        self._max_replays = max_replays

    def run(self, piece: list[Entry]) -> None:
        """Replay the dead letters of one partition."""
        near: list[_PendingReplay] = []
        far: list[_PendingReplay] = []
        for entry in piece:
            why = refusal(self._route, entry, self._max_replays)
            to = self._route.destination(entry)
            if why or to is None:
                self._done.refused[why] += 1
            else:
                (near if self._route.stays(entry, to) else far).append(_PendingReplay(entry, to))
        self._replay_in_slot(near)
        if self._done.result == DONE:
            self._replay_to_other_slot(far)

    # --- within the slot ---

    def _replay_in_slot(self, dead_letters: list[_PendingReplay]) -> None:
        topic = self._route.topic
        calls = [
            dead.replay(
                *(self._store.keys, topic, entry.partition, str(entry.id), to.group),
                changed_fields(topic, entry, to),
            )
            for entry, to in dead_letters
        ]
        for (entry, _), reply in self._ask(dead_letters, calls, len(dead_letters)):
            match reply.word:
                case "OK":
                    self._count_replayed(entry)
                case "GONE":
                    self._done.counts["missing"] += 1
                case "MOVING":
                    self._refuse_unfinished_move(reply.values[0].decode("utf-8", "replace"))
                case _:
                    self._done.refused[GROUP_GONE] += 1

    # --- out of the slot ---

    def _replay_to_other_slot(self, dead_letters: list[_PendingReplay]) -> None:
        keys, topic = self._store.keys, self._route.topic
        marks = [
            dead.mark(keys, topic, entry.partition, str(entry.id), str(to))
            for entry, to in dead_letters
        ]
        going = []
        # If the reply to a mark is lost, the dead letter is still in its stream, so do not count it
        # as unknown.
        for (entry, to), reply in self._ask(dead_letters, marks, 0):
            destination = self._choose_destination(to, reply)
            if destination is not None:
                going.append(_PendingReplay(entry, destination))
        if self._done.result == DONE:
            self._deliver(going)

    def _choose_destination(self, to: Destination, reply: Reply) -> Destination | None:
        """Return the destination to deliver a marked dead letter to, or None if it must stay."""
        if reply.word == "GONE":
            self._done.counts["missing"] += 1
            return None
        marked = dead.Marked.parse(reply)
        destination = read_destination(marked.target)
        if destination is None or not self._route.matches(destination, to):
            self._refuse_unfinished_move(marked.target)
        elif marked.age > RESUME_SECONDS / 2:
            days = round(marked.age / 86_400)
            self._done.refused[
                f"its move to {destination} was interrupted {days} days ago; check whether it"
                " arrived there, then purge it"
            ] += 1
        else:
            return destination
        return None

    def _deliver(self, dead_letters: list[_PendingReplay]) -> None:
        keys, topic = self._store.keys, self._route.topic
        calls = [
            dead.deliver(
                *(keys, *to, moved_fields(topic, entry, to)),
                name=f"dlq:{topic}:{entry.place}",
                window=RESUME_SECONDS,
            )
            for entry, to in dead_letters
        ]
        arrived: list[Entry] = []
        refused: list[Entry] = []
        for (entry, _), reply in self._ask(dead_letters, calls, len(dead_letters)):
            (refused if reply.word == "NOGROUP" else arrived).append(entry)
        self._done.refused.update({GROUP_GONE: len(refused)} if refused else {})
        unmark = [dead.mark(keys, topic, each.partition, str(each.id), "") for each in refused]
        self._ask(refused, unmark, 0)
        self._delete(arrived)

    def _delete(self, dead_letters: list[Entry]) -> None:
        keys, topic = self._store.keys, self._route.topic
        calls = [dead.purge(keys, topic, each.partition, [str(each.id)]) for each in dead_letters]
        for entry, reply in self._ask(dead_letters, calls, len(dead_letters)):
            if dead.PurgeReply.parse(reply).removed:
                self._count_replayed(entry)
            else:
                self._done.counts["missing"] += 1

    # --- both ---

    def _ask(
        self, about: list[Subject], calls: list[Call], under_way: int
    ) -> list[tuple[Subject, Reply]]:
        """Run one call for each item, and return the items with their replies.

        If a call fails, the pass stops, and only the items that have replies are returned.
        """
        try:
            replies = self._store.run_many(calls)
        except RedisUnavailableError as error:
            self._done.fail(error, under_way)
            return []
        found = []
        for each, reply in zip(about, replies, strict=True):
            if isinstance(reply, RedisResponseError):
                self._done.fail(reply)
            else:
                found.append((each, reply))
        return found

    def _count_replayed(self, entry: Entry) -> None:
        self._done.counts["replayed"] += 1
        self._done.mark_handled(entry)

    def _refuse_unfinished_move(self, where: str) -> None:
        self._done.refused[f"its move to {where} is not complete; repeat that replay first"] += 1


GroupPartition = tuple[str, int]  # group, partition


@dataclass(frozen=True, slots=True)
class Receiver:
    """A group that would receive replayed messages, with the state of its destination partitions.

    `partitions` is the number of destination partitions. `owned` of them have a live owner, and
    `paused` of them are paused. `owners` contains the names of the owning instances. `same_worker`
    is the number of partitions whose current worker started before the newest dead letter to replay
    was written. On these, the code that failed would run again.
    """

    group: str
    dead_letters: int
    partitions: int
    owned: int
    paused: int
    same_worker: int
    owners: list[str]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The effects that a replay would have now.

    `dead_letters` is the number of dead letters that would be replayed, and `replayed_before` is
    the number of those whose messages were replayed before. `refused` maps each reason why dead
    letters would stay to their number. `causes` groups the dead letters to replay, as in `dlq
    stats`, and `receivers` contains the groups that would get their messages. `notes` contains
    sentences for the operator, and `warnings` repeats those that are reasons not to replay. To
    replay only the dead letters that this plan counts, pass `until_unix_ms` to the filter.

    `examined` is the number of dead letters that were read, out of `total` in the topic. If
    `complete` is False, the budget ran out before the last one, and all counts are lower bounds.
    """

    topic: str
    target: str
    dead_letters: int
    refused: dict[str, int]
    replayed_before: int
    causes: list[FailureCause]
    receivers: list[Receiver]
    notes: list[str]
    warnings: list[str]
    until_unix_ms: int
    examined: int
    total: int
    complete: bool


def plan(
    store: Store,
    topic: str,
    choice: MessageFilter,
    *,
    fleet: str,
    target: Target = DEFAULT_TARGET,
    max_replays: int = MAX_REPLAYS,
    limit: int | None = None,
    budget: int | None = None,
    stop: Stop = never_stop,
) -> ReplayPlan:
    """Return the effects of a replay without running it.

    Reading stops after `budget` dead letters, or when `stop` returns True. Raises
    TopicNotFoundError and RequestRefusedError.
    """
    route = Route(store, topic, target)
    receiving = target.topic or topic
    groups = topics.groups(store, receiving, range(route.count), only_messages=True)
    found = pages(store, topic, choice, page_size(budget))
    until = server_unix_ms(store.connection) + 1
    everything = total(store, topic)
    tally = _PlanTally(route, groups, max_replays, limit)
    complete = True
    for page in limit_pages(found, budget, stop):
        if page is None:
            complete = False
        elif tally.is_full:
            break
        else:
            tally.add(page.examined, page.dead_letters)
    causes = tally.failures.causes()
    receivers = _receivers(store, fleet, receiving, tally.newest, tally.counts)
    warnings, notes = _notes(tally.failures.count, target, causes, receivers)
    return ReplayPlan(
        topic=topic,
        target=str(target),
        dead_letters=tally.failures.count,
        refused=dict(tally.refused),
        replayed_before=sum(each.replayed for each in causes),
        causes=causes,
        receivers=receivers,
        notes=[*warnings, *notes],
        warnings=warnings,
        until_unix_ms=until,
        examined=tally.examined,
        total=everything,
        complete=complete or tally.is_full,
    )


class _PlanTally:
    """Counts dead letters by outcome, until `limit` dead letters would be replayed."""

    def __init__(
        self, route: Route, groups: Collection[str], max_replays: int, limit: int | None
    ) -> None:
        self._route, self._groups, self._max_replays = route, groups, max_replays
        self._limit = limit
        self.examined = 0
        self.failures = FailureTally()
        self.refused: Counter[str] = Counter()
        self.newest: dict[GroupPartition, int] = {}
        self.counts: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """True once the number of dead letters to replay has reached the limit."""
        return self._limit is not None and self.failures.count >= self._limit

    def add(self, examined: int, dead_letters: Sequence[Entry]) -> None:
        """Count a page's matching dead letters, for which `examined` dead letters were read."""
        self.examined += examined
        for entry in dead_letters:
            if self.is_full:
                return
            to = self._route.destination(entry)
            why = refusal(self._route, entry, self._max_replays)
            if to is not None and not why and to.group is not None and to.group not in self._groups:
                why = GROUP_GONE
            if why or to is None:
                self.refused[why] += 1
                continue
            self.failures.add(entry)
            for group in self._groups if to.group is None else (to.group,):
                self.counts[group] += 1
                place = (group, to.partition)
                self.newest[place] = max(self.newest.get(place, 0), entry.id.ms)


def _receivers(
    store: Store,
    fleet: str,
    topic: str,
    newest: dict[GroupPartition, int],
    counts: Counter[str],
) -> list[Receiver]:
    places = sorted(newest)
    assignments = [Assignment(topic, number, group) for group, number in places]
    rows = measure_assignments(ViewReader(store), assignments, 0)
    stored_directives = directives.read(store.execute("HGETALL", store.keys.directives(fleet)))
    paused = [
        stored_directives.find_pause(Assignment(topic, number, group)) is not None
        for group, number in places
    ]
    receivers = []
    for group, dead_letters in counts.most_common():
        positions = [at for at, place in enumerate(places) if place[0] == group]
        owned = [rows[at] for at in positions if rows[at].lease == "owned"]
        receivers.append(
            Receiver(
                group=group,
                dead_letters=dead_letters,
                partitions=len(positions),
                owned=len(owned),
                paused=sum(paused[at] for at in positions),
                same_worker=sum(
                    row.since_unix_ms is not None
                    and row.since_unix_ms <= newest[group, row.partition]
                    for row in owned
                ),
                owners=sorted({row.owner for row in owned}),
            )
        )
    return receivers


def _notes(
    dead_letters: int, target: Target, causes: list[FailureCause], receivers: list[Receiver]
) -> tuple[list[str], list[str]]:
    """Return the warnings (reasons not to replay) and the notes, with the most important first."""
    if not dead_letters:
        return [], []
    warnings, notes = list[str](), list[str]()
    for each in receivers:
        who, of = f"group {each.group}", f"of {plural(each.partitions, 'partition')}"
        if each.same_worker and target.topic is None:
            warnings.append(
                f"{who}: the worker that failed still runs on {each.same_worker} {of},"
                " so the same code would run again"
            )
        elif each.owned and target.topic is None:
            notes.append(
                f"the workers of group {each.group} were started, reloaded or moved after these"
                " failures; check that they run the fixed code"
            )
        if each.owned < each.partitions:
            warnings.append(
                f"{who}: no instance owns {each.partitions - each.owned} {of}, and dead"
                " letters wait there for an owner"
            )
        if each.paused:
            are = "is" if each.paused == 1 else "are"
            warnings.append(f"{who}: {each.paused} {of} {are} paused, and dead letters wait there")
    if not receivers:
        warnings.append("no group reads the target, so the messages stay unread")
    if any(each.reason == "crashes" for each in causes):
        warnings.append("some messages crashed their worker: first replay only one such message")
    if target.all_groups or target.topic is not None:
        warnings.append("every group receives them, including groups that handled them before")
    notes.append(
        "replayed messages run after newer messages with the same key, so the order of the key is"
        " not kept"
    )
    return warnings, notes
