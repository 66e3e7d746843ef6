"""The Redis side of the source: what streams hold, where positions are, what is to be read.

Reads by id only: no consumer group is made, no pending entry. Connections are kept per process,
because Spark's Python workers live over many tasks, and never travel between processes.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from streamqd.config import topology
from streamqd.errors import (
    BadValue,
    RedisRefused,
    RedisUnavailable,
    Refused,
    StreamqdError,
    TopicMissing,
)
from streamqd.spark import offsets
from streamqd.spark.offsets import Bound, Id, Loss, Offsets, Place, Position, Span, StreamFacts
from streamqd.spark.options import DLQ, ReadOptions, SparkConnection
from streamqd.store import spark as store
from streamqd.store import statistics, topics, untrusted
from streamqd.store.client import Connection
from streamqd.store.cluster import connect
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from streamqd.store.slots import slot_of
from streamqd.store.store import Store

_log = logging.getLogger("streamqd.spark")
_links: dict[tuple[int, SparkConnection, int], Connection] = {}
_told: set[str] = set()  # a stream asks for the names in every batch; each is told once
_T = TypeVar("_T")


class DataLossError(StreamqdError):
    """Entries were removed before the query read them."""


# --- connections ----------------------------------------------------------------------------------


def link_for(connection: SparkConnection, key: str = "") -> Connection:
    """This process's connection; made at its first use. With `key` to the node that serves it."""
    where = topology.parse(connection.redis.url)
    if where is None or where.kind != topology.CLUSTER:
        key = ""
    known = (os.getpid(), connection, slot_of(key) if key else -1)
    if known not in _links:
        _links[known] = connect(
            connection.redis, timeout=connection.timeout, name="streamqd:spark", key=key
        )
    return _links[known]


def keys_for(connection: SparkConnection) -> Keys:
    """The names of keys."""
    return Keys(connection.control, connection.streams)


def persist(connection: SparkConnection, work: Callable[[Connection], _T], *, key: str = "") -> _T:
    """Do what may be repeated, again when Redis does not answer; raise what the last try raised."""
    link = link_for(connection, key)
    for _ in range(connection.retries):
        try:
            return work(link)
        except RedisUnavailable:
            pass
        except RedisRefused as error:
            if not error.transient:
                raise
        time.sleep(connection.retry_interval)
    return work(link)


def stream_key(keys: Keys, place: Place) -> str:
    """The stream of a place."""
    name, partition = place
    if name.endswith(DLQ):
        return keys.dlq(name.removesuffix(DLQ), partition)
    return keys.stream(name, partition)


# --- what there is --------------------------------------------------------------------------------


def registered(store: Store) -> list[str]:
    """The names of all topics, sorted, without what cannot be the name of a topic.

    Whoever may write to Redis can put any text there, and a name becomes a part of paths. A bad one
    is logged once and passed over.
    """
    found = []
    for raw in store.execute("SMEMBERS", store.keys.registry()):
        try:
            found.append(untrusted.name(raw, store.keys.registry()))
        except BadValue as error:
            _warn_once(f"{error}; it is passed over")
    return sorted(found)


def _warn_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _log.warning("%s", text)


class Catalog:
    """What a read's options mean on the server as it is now."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._keys = keys_for(options.connection)

    def places(self, begun: Iterable[Place] = (), *, strict: bool = True) -> list[Place]:
        """All partitions to be read now, in order. Raises TopicMissing, Refused.

        Those that a stream has begun to read may be gone, and any when it is not `strict`.
        """
        known = {name for name, _ in begun}
        found = persist(
            self._options.connection, lambda link: self._find_places(link, known, strict)
        )
        return sorted(found)

    def vanished(self, begun: Iterable[Place], places: Sequence[Place]) -> list[Place]:
        """Partitions that a stream has begun to read, is still to read, and that are gone."""
        options = self._options
        pattern = re.compile(options.pattern.removesuffix(DLQ))
        return [
            place
            for place in begun
            if place not in places
            and (
                place in options.assign
                or place[0] in options.subscribe
                or (options.pattern and pattern.fullmatch(place[0].removesuffix(DLQ)))
            )
        ]

    def _find_places(self, link: Connection, known: set[str], strict: bool) -> list[Place]:
        options = self._options
        if options.pattern:
            wanted = re.compile(options.pattern.removesuffix(DLQ))
            suffix = DLQ if options.pattern.endswith(DLQ) else ""
            found = registered(Store(link, self._keys))
            names = [name + suffix for name in found if wanted.fullmatch(name)]
        else:
            names = sorted(options.subscribe or {name for name, _ in options.assign})
        counts = {}
        for name in names:
            counts[name] = self._partition_count(link, name)
            if counts[name] or options.pattern or name in known:
                continue
            topic = name.removesuffix(DLQ)
            text = f"the topic {topic} does not exist"
            if strict:
                raise TopicMissing(f"{text}; create it with `streamqd topic create {topic}`")
            _warn_once(f"{text}; it is left out")
        if not options.assign:
            return [(name, number) for name in names for number in range(counts[name])]
        for name, partition in options.assign:
            if partition >= counts[name] and strict and name not in known:
                raise Refused(f"{name} has {counts[name]} partitions: there is no {partition}")
        return [place for place in options.assign if place[1] < counts[place[0]]]

    def _partition_count(self, link: Connection, name: str) -> int:
        """0 for a topic that is not there."""
        return topics.partition_count(Store(link, self._keys), name.removesuffix(DLQ)) or 0

    def facts(self, places: Sequence[Place]) -> dict[Place, StreamFacts]:
        """What each stream says of itself."""
        return persist(self._options.connection, lambda link: self._ask_facts(link, places))

    def _ask_facts(self, link: Connection, places: Sequence[Place]) -> dict[Place, StreamFacts]:
        dead = [place for place in places if place[0].endswith(DLQ)]
        live = [place for place in places if not place[0].endswith(DLQ)]
        asked = [("XINFO", "STREAM", stream_key(self._keys, place)) for place in dead]
        found = {
            place: _letter_facts(raw) for place, raw in zip(dead, link.pipeline(asked), strict=True)
        }
        calls = [statistics.measure_partition(self._keys, *place) for place in live]
        for place, answer in zip(live, link.run_many(calls), strict=True):
            if isinstance(answer, RedisRefused):
                raise answer
            figures = statistics.partition_figures(answer)
            found[place] = StreamFacts(
                length=figures.length,
                added=figures.added,
                first=_id_or_none(figures.first_id),
                last=_id_or_none(figures.last_id) or offsets.ZERO,
            )
        return found

    # --- positions ---

    def starts(self, facts: Mapping[Place, StreamFacts], default: Bound) -> Offsets:
        """Where reading begins. Raises Refused when options do not say it for a partition."""
        options = self._options
        chosen = options.starting_default or default
        return self._resolved(options.starting, chosen, facts, "startingOffsets")

    def ends(self, facts: Mapping[Place, StreamFacts]) -> Offsets:
        """Where a batch read ends."""
        options = self._options
        chosen = options.ending_default or offsets.LATEST
        return self._resolved(options.ending, chosen, facts, "endingOffsets")

    def _resolved(
        self,
        single: Mapping[Place, Bound] | None,
        chosen: Bound,
        facts: Mapping[Place, StreamFacts],
        option: str,
    ) -> Offsets:
        missing = [place for place in facts if single is not None and place not in single]
        if missing:
            name, partition = missing[0]
            raise Refused(
                f"{option} leaves {len(missing)} partitions out, as {name} {partition}: all that"
                " are read must be named"
            )
        bounds = {place: chosen if single is None else single[place] for place in facts}
        grouped = {place: bound.value for place, bound in bounds.items() if bound.kind == "group"}
        settled = self._settled(grouped) if grouped else {}
        return {
            place: offsets.resolve(bound, facts[place], settled.get(place))
            for place, bound in bounds.items()
        }

    def _settled(self, groups: Mapping[Place, str]) -> dict[Place, Id]:
        """Up to where each group is done: before its first pending entry, else what it was given.

        The groups are asked first: what is delivered in between is then pending, or done.
        """
        commands: list[tuple[str, ...]] = []
        for place, group in groups.items():
            key = stream_key(self._keys, place)
            commands += (("XINFO", "GROUPS", key), ("XPENDING", key, group))
        connection = self._options.connection
        replies = persist(connection, lambda link: link.pipeline(commands))
        settled = {}
        for at, (place, group) in enumerate(groups.items()):
            listed, pending = replies[2 * at : 2 * at + 2]
            given = None if isinstance(listed, RedisRefused) else _last_delivered(listed, group)
            if given is None or isinstance(pending, RedisRefused):
                raise Refused(f"there is no group {group} on {place[0]} {place[1]}")
            first = offsets.read_id(pending[1]) if pending[0] else None
            settled[place] = given if first is None else min(given, offsets.predecessor(first))
        return settled

    def counted(self, positions: Offsets, facts: Mapping[Place, StreamFacts]) -> Offsets:
        """The positions, with their counts where those can be had by walking over what follows."""
        unknown = {
            place: (position.id, facts[place].last, facts[place].length)
            for place, position in positions.items()
            if position.passed is None and facts[place].exact and position.id < facts[place].last
        }
        behind = self.walk(unknown)
        return {
            place: position._replace(passed=facts[place].added - behind[place].passed)
            if place in behind
            else position
            for place, position in positions.items()
        }

    def walk(self, wanted: Mapping[Place, tuple[Id, Id, int]]) -> dict[Place, _Walked]:
        """Go (after, up to, entries) in each stream; return how far that was.

        The server counts a thousand at a time, fewer where bodies are large, so that it is never
        busy for more than some milliseconds; all streams take their steps together.
        """
        walked = {place: _Walked(after, 0) for place, (after, _, _) in wanted.items()}
        moving = [place for place, (_, _, count) in wanted.items() if count > 0]
        while moving:
            sizes = {
                place: min(store.STEP_MAX, wanted[place][2] - walked[place].passed)
                for place in moving
            }
            calls = [
                self._step(place, walked[place].id, wanted[place][1], sizes[place])
                for place in moving
            ]
            answers = persist(self._options.connection, lambda link, c=calls: link.run_many(c))  # type: ignore[misc]
            still = []
            for place, answer in zip(moving, answers, strict=True):
                if isinstance(answer, RedisRefused):
                    raise answer
                gone, last, more = answer.rest
                walked[place] = _Walked(offsets.read_id(last), walked[place].passed + gone)
                if more and walked[place].passed < wanted[place][2]:
                    still.append(place)
            moving = still
        return walked

    def _step(self, place: Place, after: Id, upto: Id, count: int) -> Call:
        key = stream_key(self._keys, place)
        return store.step(key, offsets.write_id(after), offsets.write_id(upto), count)

    # --- ranges ---

    def spans(
        self,
        starts: Offsets,
        ends: Offsets,
        facts: Mapping[Place, StreamFacts],
        seen: Mapping[Place, int] = MappingProxyType({}),
    ) -> dict[Place, Span]:
        """What lies between two offsets. Raises DataLossError for what is gone, or leaves it out.

        A partition that has no start is new: it is read from its first entry on. `seen` is how many
        entries a stream had issued when it was last looked at.
        """
        found = {}
        for place, end in ends.items():
            start, now = starts.get(place, Position(offsets.ZERO, 0)), facts[place]
            if start == end:
                continue
            gone = offsets.replaced(end, now)
            loss = offsets.lost(end if gone else start, now, seen.get(place))
            if loss is not None and (start.id < end.id or loss.kind == "replaced"):
                self.told(place, start, loss)
                start = offsets.onward(start, now)
            whole = None if gone else offsets.span(place, start, end, now)
            if whole is not None:
                found[place] = whole
        return found

    def cut(self, spans: Mapping[Place, Span], facts: Mapping[Place, StreamFacts]) -> list[Span]:
        """The spans in as many pieces as the options ask for."""
        options = self._options
        if options.max_per_partition:
            return [part for each in spans.values() for part in self._counted_pieces(each)]
        if options.min_partitions <= len(spans):
            return list(spans.values())
        weights = {
            place: offsets.backlog(Position(each.start), facts[place])
            for place, each in spans.items()
        }
        weights |= {place: each.rows for place, each in spans.items() if each.rows is not None}
        counts = offsets.pieces(weights, options.min_partitions)
        return [
            part
            for place, each in spans.items()
            for part in offsets.split(each, counts[place], facts[place].first)
        ]

    def _counted_pieces(self, whole: Span) -> list[Span]:
        ends: list[Id] = []
        most = self._options.max_per_partition
        after = whole.start
        while True:
            gone = self.walk({whole.place: (after, whole.end, most)})[whole.place]
            if gone.passed < most or gone.id >= whole.end:
                return offsets.cut_at(whole, ends, most)
            ends.append(gone.id)
            after = gone.id

    def told(self, place: Place, after: Position, loss: Loss) -> None:
        """Raise DataLossError, or say it and go on, as the options want it."""
        tell_loss(place, after.id, loss, fail=self._options.fail_on_data_loss)


class _Walked(Position):
    """How far a walk came: the id reached, and (as `passed`) over how many entries."""

    passed: int


def _id_or_none(text: str) -> Id | None:
    return offsets.read_id(text) if text else None


def _letter_facts(raw: Any) -> StreamFacts:
    """Dead letters go from the middle, by replay and purge, and never by trimming."""
    if isinstance(raw, RedisRefused):
        if "no such key" in str(raw):
            return StreamFacts(exact=False)
        raise raw
    info = dict(zip(raw[::2], raw[1::2], strict=True))
    first = info[b"first-entry"]
    length = int(info[b"length"])
    return StreamFacts(
        length=length,
        added=length,
        first=offsets.read_id(first[0]) if first else None,
        last=offsets.read_id(info[b"last-generated-id"]),
        exact=False,
    )


def _last_delivered(listed: list[Any], group: str) -> Id | None:
    for flat in listed:
        info = dict(zip(flat[::2], flat[1::2], strict=True))
        if info[b"name"].decode() == group:
            return offsets.read_id(info[b"last-delivered-id"])
    return None


def tell_loss(place: Place, after: Id, loss: Loss, *, fail: bool) -> None:
    """Raise DataLossError when `fail`, else log it."""
    many = "an unknown number of" if loss.entries is None else f"{loss.entries:,}"
    where = f"{place[0]} partition {place[1]} behind {offsets.write_id(after)}"
    text = f"{many} entries of {where} were trimmed before they were read"
    if loss.kind != "trimmed":
        many = "entries that were not read" if loss.entries is None else f"at least {many} entries"
        fate = "gone" if loss.kind == "vanished" else "not the one that was read before"
        text = f"the stream of {where} is {fate}, and {many} with it"
    if fail:
        raise DataLossError(
            f"{text}; with failOnDataLoss=false the query goes on with what is left"
        )
    _log.warning("%s; going on with what is left", text)
