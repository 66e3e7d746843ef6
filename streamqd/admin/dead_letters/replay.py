"""Bringing dead letters back: where they go, the replay itself, and the plan of one.

Within its slot a letter moves in one step. To another partition or topic it takes three, each of
which can be done again: it is marked as moving, it is written there under its own name, it is
deleted here. After an interruption the same replay goes on; nothing is lost, and nothing is written
twice as long as that is within `RESUME_SECONDS`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from streamqd.admin import partitions, topics
from streamqd.admin.dead_letters.listing import FailureCause, FailureTally
from streamqd.admin.dead_letters.passes import (
    DONE,
    LIMIT,
    Pass,
    Progress,
    Stop,
    never,
    silent,
)
from streamqd.admin.dead_letters.selection import (
    DEAD_ONLY,
    REPLAYS_HEADER,
    DeadLetterFilter,
    Fields,
    Page,
    origin_of,
    pages,
    replays_of,
)
from streamqd.admin.reading import BadValues, Entry, server_unix_ms
from streamqd.errors import RedisRefused, RedisUnavailable, Refused
from streamqd.model import Unit
from streamqd.policy.partitioning import crc32_partition
from streamqd.store import dead, directives
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

_FRESH = {b"retryCount": b"0", b"crashCount": b"0"}  # what a replayed letter starts with


@dataclass(frozen=True, slots=True)
class Target:
    """Where letters go: as it stands, back to the group that each died in, on its partition.

    `everyone` is every group of the topic; `partition` another partition of the topic; `topic`
    another topic, for all its groups. Letters for another topic go to `partition` there, else to
    that of their key, else to the one with their own number, counted round.
    """

    everyone: bool = False
    partition: int | None = None
    topic: str | None = None

    def __str__(self) -> str:
        if self.topic is not None:
            where = f"the topic {self.topic}"
        else:
            where = "every group" if self.everyone else "their own group"
        return where if self.partition is None else f"{where}, on partition {self.partition}"


HOME = Target()


class Destination(NamedTuple):
    """A stream: a partition, or with a group its retry stream there."""

    topic: str
    partition: int
    group: str | None

    def __str__(self) -> str:
        text = f"{self.topic}/{self.partition}"
        return text if self.group is None else f"{text}/{self.group}"


def read_destination(text: str) -> Destination | None:
    """Read the text of a destination; None when it is not one."""
    topic, _, rest = text.partition("/")
    number, slash, group = rest.partition("/")
    if not (topic and number.isascii() and number.isdigit()):
        return None
    return Destination(topic, int(number), group if slash else None)


class Route:
    """Knows the destination of each letter of a topic. Raises TopicMissing, Refused."""

    def __init__(self, store: Store, topic: str, target: Target) -> None:
        if target.topic == topic:
            raise Refused(
                f"{topic} is the topic of the letters: leave --to-topic out, or say --everyone"
            )
        self.topic = topic
        self.target = target
        self.count = topics.partition_count(store, target.topic or topic)
        if target.partition is not None:
            topics.check_partition(target.topic or topic, target.partition, self.count)

    def of(self, entry: Entry) -> Destination | None:
        """Where a letter goes; None when it does not say which group it is of."""
        target = self.target
        partition = entry.partition if target.partition is None else target.partition
        if target.topic is not None:
            if target.partition is None:
                key = entry.fields.get(b"key")
                many = self.count
                partition = partition % many if key is None else crc32_partition(key, many)
            return Destination(target.topic, partition, None)
        if target.everyone:
            return Destination(self.topic, partition, None)
        group = Fields(entry.fields).text(b"group")
        return Destination(self.topic, partition, group) if group else None

    def stays(self, entry: Entry, to: Destination) -> bool:
        """Whether the letter stays in its slot, so that it moves in one step."""
        return (to.topic, to.partition) == (self.topic, entry.partition)

    def matches(self, mark: Destination, to: Destination) -> bool:
        """Whether a letter marked for one destination may go on there, instead of to the other."""
        same = (mark.topic, mark.group) == (to.topic, to.group)
        return same and (self.target.partition is None or mark.partition == to.partition)


def changed(topic: str, entry: Entry, to: Destination) -> dict[bytes, bytes]:
    """The fields that a letter gets as it becomes a message again."""
    replays = replays_of(entry) + 1
    fields = {**_FRESH, b"replayCount": b"%d" % replays}
    origin_topic, origin_partition, original_id = origin_of(topic, entry)
    origin = (origin_topic, origin_partition)
    if original_id and origin != (to.topic, str(to.partition)):
        # The message keeps its uid wherever it goes.
        fields[b"originalTopic"], fields[b"originalPartition"] = (part.encode() for part in origin)
    if to.group is None and entry.headers is not None:
        headers = {**entry.headers, REPLAYS_HEADER: str(replays)}
        fields[b"headers"] = json.dumps(headers, separators=(",", ":")).encode()
    return fields


def moved(topic: str, entry: Entry, to: Destination) -> dict[bytes, bytes]:
    """All fields of a letter as it becomes a message in another slot."""
    kept = {name: value for name, value in entry.fields.items() if name not in DEAD_ONLY}
    return kept | changed(topic, entry, to)


Subject = TypeVar("Subject")

MAX_REPLAYS = 3
RESUME_SECONDS = 7 * 86_400.0  # how long the name of a moved letter is remembered

NO_GROUP_NAMED = "the letter names no group"
GROUP_GONE = "its group does not exist any more"
TOO_WIDE = "it has too many fields to leave its slot"
BODY_WITHHELD = "its body was not kept (dlq_body)"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did.

    `gone` letters had been replayed or purged by another client. `refused` maps the reason to the
    number of letters that stayed because of it. `unknown` letters were under way when the
    connection was lost: they were replayed or stay. `ended` is done, limit (so many were wanted),
    stopped or failed, then `error` says why. Only letters that had died by `began_unix_ms` were
    chosen. `first_id` and `last_id` are the first and the last replayed. `audited` is false when
    the audit trail could not be written.
    """

    topic: str
    target: str
    replayed: int
    gone: int
    refused: dict[str, int]
    unknown: int
    ended: str
    error: str
    began_unix_ms: int
    first_id: str
    last_id: str
    audited: bool


def over_replayed(most: int) -> str:
    """The reason why a letter stays that was replayed too often."""
    times = "before" if most == 1 else f"{most} times or more already"
    return f"it was replayed {times}, and died again"


def replay(
    store: Store,
    topic: str,
    choice: DeadLetterFilter,
    *,
    target: Target = HOME,
    rate: float | None = None,
    limit: int | None = None,
    max_replays: int = MAX_REPLAYS,
    stop: Stop = never,
    progress: Progress = silent,
) -> ReplayResult:
    """Put letters back, the oldest of each partition first.

    `rate` spaces them evenly, so many a second. At most `limit` are replayed. A letter that was
    replayed `max_replays` times already stays. `stop` is asked between two batches; `progress` gets
    the number of letters of each batch. Losing Redis ends the replay; it does not raise.

    Raises TopicMissing; Refused when a letter that is named does not exist or is another group's,
    or the target does not exist; RedisUnavailable when nothing was begun.
    """
    route = Route(store, topic, target)
    done = Pass(store, topic, choice, stop, progress)
    began = server_unix_ms(store.connection)
    work = _Replay(store, route, done, max_replays)
    for piece in done.pieces(rate):
        work.run(piece if limit is None else piece[: limit - done.counts["replayed"]])
        if limit is not None and done.counts["replayed"] >= limit and done.ended == DONE:
            done.ended = LIMIT
    counts = done.counts
    note = "; ".join(f"{number}: {why}" for why, number in done.refused.items())
    return ReplayResult(
        topic=topic,
        target=str(target),
        replayed=counts["replayed"],
        gone=counts["gone"],
        refused=dict(done.refused),
        unknown=done.unknown,
        ended=done.ended,
        error=done.error,
        began_unix_ms=began,
        first_id=done.first,
        last_id=done.last,
        audited=done.record("dlq replay", note, to=str(target)),
    )


def refusal(route: Route, entry: Entry, max_replays: int) -> str:
    """Why a letter stays, by the letter itself; '' when it may go."""
    to = route.of(entry)
    if to is None:
        return NO_GROUP_NAMED
    if b"payloadBytes" in entry.fields:
        return BODY_WITHHELD
    if replays_of(entry) >= max_replays:
        return over_replayed(max_replays)
    if not route.stays(entry, to) and 2 * len(moved(route.topic, entry, to)) > dead.DELIVER_MAX:
        return TOO_WIDE
    return ""


class _Going(NamedTuple):
    """A letter and where it goes."""

    entry: Entry
    to: Destination


class _Replay:
    """Replays batches of letters of one topic."""

    def __init__(self, store: Store, route: Route, done: Pass, max_replays: int) -> None:
        self._store = store
        self._route = route
        self._done = done
        self._max_replays = max_replays

    def run(self, piece: Page) -> None:
        """Replay the letters of one partition."""
        near: list[_Going] = []
        far: list[_Going] = []
        for entry in piece:
            why = refusal(self._route, entry, self._max_replays)
            to = self._route.of(entry)
            if why or to is None:
                self._done.refused[why] += 1
            else:
                (near if self._route.stays(entry, to) else far).append(_Going(entry, to))
        self._step_back(near)
        if self._done.ended == DONE:
            self._move(far)

    # --- within the slot ---

    def _step_back(self, letters: list[_Going]) -> None:
        topic = self._route.topic
        calls = [
            dead.replay(
                *(self._store.keys, topic, entry.partition, str(entry.id), to.group),
                changed(topic, entry, to),
            )
            for entry, to in letters
        ]
        for (entry, _), reply in self._ask(letters, calls, len(letters)):
            match reply.word:
                case "OK":
                    self._replayed(entry)
                case "GONE":
                    self._done.counts["gone"] += 1
                case "MOVING":
                    self._on_its_way(reply.rest[0].decode("utf-8", "replace"))
                case _:
                    self._done.refused[GROUP_GONE] += 1

    # --- out of the slot ---

    def _move(self, letters: list[_Going]) -> None:
        keys, topic = self._store.keys, self._route.topic
        marks = [
            dead.mark(keys, topic, entry.partition, str(entry.id), str(to)) for entry, to in letters
        ]
        going = []
        # A mark whose answer is lost moves nothing: such letters are not under way.
        for (entry, to), reply in self._ask(letters, marks, 0):
            there = self._judge(to, reply)
            if there is not None:
                going.append(_Going(entry, there))
        if self._done.ended == DONE:
            self._deliver(going)

    def _judge(self, to: Destination, reply: Reply) -> Destination | None:
        """Where a marked letter goes on to; None when it does not."""
        if reply.word == "GONE":
            self._done.counts["gone"] += 1
            return None
        marked = dead.Marked.parse(reply)
        there = read_destination(marked.target)
        if there is None or not self._route.matches(there, to):
            self._on_its_way(marked.target)
        elif marked.age > RESUME_SECONDS / 2:
            days = round(marked.age / 86_400)
            self._done.refused[
                f"its move to {there} was interrupted {days} days ago: look whether it arrived"
                " there, then purge it"
            ] += 1
        else:
            return there
        return None

    def _deliver(self, letters: list[_Going]) -> None:
        keys, topic = self._store.keys, self._route.topic
        calls = [
            dead.deliver(
                *(keys, *to, moved(topic, entry, to)),
                name=f"dlq:{topic}:{entry.place}",
                window=RESUME_SECONDS,
            )
            for entry, to in letters
        ]
        arrived: list[Entry] = []
        refused: list[Entry] = []
        for (entry, _), reply in self._ask(letters, calls, len(letters)):
            (refused if reply.word == "NOGROUP" else arrived).append(entry)
        self._done.refused.update({GROUP_GONE: len(refused)} if refused else {})
        unmark = [dead.mark(keys, topic, each.partition, str(each.id), "") for each in refused]
        self._ask(refused, unmark, 0)
        self._delete(arrived)

    def _delete(self, letters: list[Entry]) -> None:
        keys, topic = self._store.keys, self._route.topic
        calls = [dead.purge(keys, topic, each.partition, [str(each.id)]) for each in letters]
        for entry, reply in self._ask(letters, calls, len(letters)):
            if reply.rest[0]:
                self._replayed(entry)
            else:
                self._done.counts["gone"] += 1

    # --- both ---

    def _ask(
        self, about: list[Subject], calls: list[Call], under_way: int
    ) -> list[tuple[Subject, Reply]]:
        """Run a call about each; the answers with what they are about. An error ends the pass."""
        try:
            replies = self._store.run_many(calls)
        except RedisUnavailable as error:
            self._done.fail(error, under_way)
            return []
        found = []
        for each, reply in zip(about, replies, strict=True):
            if isinstance(reply, RedisRefused):
                self._done.fail(reply)
            else:
                found.append((each, reply))
        return found

    def _replayed(self, entry: Entry) -> None:
        self._done.counts["replayed"] += 1
        self._done.touched(entry)

    def _on_its_way(self, where: str) -> None:
        self._done.refused[f"it is on its way to {where}: finish that replay first"] += 1


Place = tuple[str, int]  # group, partition


@dataclass(frozen=True, slots=True)
class Receiver:
    """A group that would get letters, and how it stands on the partitions that they go to.

    `owned` and `paused` count those partitions; `owners` are the instances. `same_worker` counts
    partitions whose worker is the one that ran when the newest of the letters there died: neither
    a restart, nor a reload, nor another owner has come in between, so what failed would run again.
    """

    group: str
    letters: int
    partitions: int
    owned: int
    paused: int
    same_worker: int
    owners: list[str]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a replay would do now.

    `letters` would be replayed, those in `refused` would stay, by reason. `replayed_before` of them
    were replayed before. `causes` are as in `dlq stats`, of what would be replayed. `receivers` are
    the groups that would get them. `notes` are sentences about what to think of first.
    `until_unix_ms` bounds the same replay to the letters counted here.
    """

    topic: str
    target: str
    letters: int
    refused: dict[str, int]
    replayed_before: int
    causes: list[FailureCause]
    receivers: list[Receiver]
    notes: list[str]
    until_unix_ms: int


def plan(
    store: Store,
    topic: str,
    choice: DeadLetterFilter,
    *,
    fleet: str,
    target: Target = HOME,
    max_replays: int = MAX_REPLAYS,
    limit: int | None = None,
) -> ReplayPlan:
    """Count what `dead_replay.replay` would do. Raises TopicMissing, Refused."""
    route = Route(store, topic, target)
    receiving = target.topic or topic
    groups = topics.groups(store, receiving, range(route.count), letters=False, queries=False)
    refused: Counter[str] = Counter()
    tally = FailureTally()
    newest: dict[Place, int] = {}
    counts: Counter[str] = Counter()
    found = pages(store, topic, choice)
    until = server_unix_ms(store.connection) + 1
    for page in found:
        for entry in page:
            if limit is not None and tally.count >= limit:
                break
            why = refusal(route, entry, max_replays)
            to = route.of(entry)
            if to is not None and not why and to.group is not None and to.group not in groups:
                why = GROUP_GONE
            if why or to is None:
                refused[why] += 1
                continue
            tally.add(entry)
            for group in groups if to.group is None else (to.group,):
                counts[group] += 1
                place = (group, to.partition)
                newest[place] = max(newest.get(place, 0), entry.id.ms)
    causes = tally.causes()
    receivers = _receivers(store, fleet, receiving, newest, counts)
    return ReplayPlan(
        topic=topic,
        target=str(target),
        letters=tally.count,
        refused=dict(refused),
        replayed_before=sum(each.replayed for each in causes),
        causes=causes,
        receivers=receivers,
        notes=_notes(tally.count, target, causes, receivers),
        until_unix_ms=until,
    )


def _receivers(
    store: Store,
    fleet: str,
    topic: str,
    newest: dict[Place, int],
    counts: Counter[str],
) -> list[Receiver]:
    places = sorted(newest)
    units = [Unit(topic, number, group) for group, number in places]
    rows = partitions.rows(store, units, BadValues())
    orders = directives.read(store.execute("HGETALL", store.keys.orders(fleet)))
    paused = [orders.pause_of(Unit(topic, number, group)) is not None for group, number in places]
    receivers = []
    for group, letters in counts.most_common():
        mine = [at for at, place in enumerate(places) if place[0] == group]
        owned = [rows[at] for at in mine if rows[at].state == "owned"]
        receivers.append(
            Receiver(
                group=group,
                letters=letters,
                partitions=len(mine),
                owned=len(owned),
                paused=sum(paused[at] for at in mine),
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
    letters: int, target: Target, causes: list[FailureCause], receivers: list[Receiver]
) -> list[str]:
    """What to think of before a replay, the most important first."""
    if not letters:
        return []
    notes = []
    for each in receivers:
        who, of = f"the group {each.group}", f"of {each.partitions}"
        if each.same_worker and target.topic is None:
            notes.append(
                f"{who}: the worker that failed still runs on {each.same_worker} {of} partitions;"
                " the same code would run again"
            )
        elif each.owned and target.topic is None:
            notes.append(
                f"{who}: its workers were started, reloaded or moved since these died; see that"
                " they run the fixed code"
            )
        if each.owned < each.partitions:
            notes.append(
                f"{who}: no instance owns {each.partitions - each.owned} {of} partitions; dead"
                " letters wait there until one does"
            )
        if each.paused:
            notes.append(
                f"{who}: {each.paused} {of} partitions are paused; dead letters wait there"
            )
    if not receivers:
        notes.append("no group reads where they go: they stay there unread")
    if any(each.reason == "crashes" for each in causes):
        notes.append("some took their process down: replay one of them alone first")
    if target.everyone or target.topic is not None:
        notes.append("every group gets them, also one that has handled them before")
    notes.append("they come after newer messages of the same key: no order is kept")
    return notes
