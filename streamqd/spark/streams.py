"""Determine the partitions that a query reads, the state of their streams, and its positions.

Streams are read by ID, without a consumer group, so no entries become pending. Spark runs many
tasks in the same Python worker. To avoid reconnecting for each task, a process keeps a few
connections until they have been idle for a minute. They are never passed to other processes.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import methodcaller
from types import MappingProxyType
from typing import Any, TypeVar

from streamqd.config import topology
from streamqd.errors import (
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
    RequestRefusedError,
    SparkError,
    TopicNotFoundError,
)
from streamqd.model import TopicPartition
from streamqd.spark import offsets
from streamqd.spark.offsets import Bound, Id, Loss, Offsets, Position, Span, StreamFacts
from streamqd.spark.options import DLQ, ReadOptions, SparkConnection
from streamqd.store import spark as store
from streamqd.store import statistics, topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.replies import check_replies
from streamqd.store.slots import key_slot
from streamqd.store.store import Store

LINKS_MAX = 8  # maximum connections of one thread
_PROBED = 100  # entries that are counted in each time slice to estimate its density
_SLICES = 8  # time slices for each piece that a span is cut into
_ERROR_MAX = 0.25  # maximum relative error of an estimate that is still used
IDLE_MAX = 60.0  # seconds without use after which a connection is closed

_log = logging.getLogger("streamqd.spark")
_links: dict[tuple[int, SparkConnection, int], _Link] = {}  # least recently used first
_links_of = os.getpid()
_links_lock = threading.Lock()
# Warnings that were already logged. A stream checks all names in every batch, so the same warnings
# would otherwise be logged in every batch.
_logged: set[str] = set()
_T = TypeVar("_T")


class DataLossError(SparkError):
    """Entries were removed before the query read them."""


# --- connections ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Link:
    """An open connection, and the time when it was last used (seconds, monotonic)."""

    link: Connection
    used_at: float


def link_for(connection: SparkConnection, key: str = "") -> Connection:
    """Return a connection of this thread. In a cluster, it leads to the node that holds `key`.

    The connection is opened when it is first used. Call this before each round trip and do not keep
    the result, because a thread keeps open only the LINKS_MAX connections that it used last.
    Connections that have been idle for IDLE_MAX are closed, so that none stays open long after its
    password changed.
    """
    where = topology.parse(connection.redis.url)
    if where.kind != topology.CLUSTER:
        key = ""
    thread, now = threading.get_ident(), time.monotonic()
    known = (thread, connection, key_slot(key) if key else -1)
    with _links_lock:
        _drop_inherited()
        held = _links.pop(known, None)
        if held is None:
            made = connect(
                connection.redis, timeout=connection.timeout, name="streamqd:spark", key=key
            )
            held = _Link(made, now)
        held.used_at = now
        _close_unused(thread, now)
        _links[known] = held
    return held.link


def _drop_inherited() -> None:
    """Close connections inherited from a parent process, without notifying the server."""
    global _links_of
    if _links_of != os.getpid():
        for each in _links.values():
            each.link.disable()
        _links.clear()
        _links_of = os.getpid()


def _close_unused(thread: int, now: float) -> None:
    """Close the idle connections of all threads, and make room for another one of this thread.

    If the thread has too many, those that were not used for the longest time are closed.
    """
    idle = [
        each
        for each, held in _links.items()
        if now - held.used_at > max(IDLE_MAX, 2 * each[1].timeout)
    ]
    own = [each for each in _links if each[0] == thread and each not in idle]
    for each in (*idle, *own[: max(0, len(own) - LINKS_MAX + 1)]):
        _links.pop(each).link.close()


def keys_for(connection: SparkConnection) -> Keys:
    """Return the key names for the prefixes in these options."""
    return Keys(connection.control, connection.streams)


def persist(connection: SparkConnection, work: Callable[[Connection], _T], *, key: str = "") -> _T:
    """Run a function, and run it again if Redis does not answer.

    The function must be safe to repeat.

    If all retries fail, the last error is raised. Any other error is raised immediately.
    """
    for _ in range(connection.retries):
        try:
            return work(link_for(connection, key))
        except RedisUnavailableError:
            pass
        except RedisResponseError as error:
            if not error.transient:
                raise
        time.sleep(connection.retry_interval)
    return work(link_for(connection, key))


def stream_key(keys: Keys, place: TopicPartition) -> str:
    """Return the key of the stream with the messages or the dead letters of a partition."""
    name, partition = place
    if name.endswith(DLQ):
        return keys.dlq(name.removesuffix(DLQ), partition)
    return keys.stream(name, partition)


# --- facts --------------------------------------------------------------------------------------


def topic_names(store: Store) -> list[str]:
    """Return the names of all topics in order.

    Any client can add any name to the registry of topics, and names become parts of paths. Invalid
    names are therefore skipped, and each of them is logged once.
    """
    found, bad = topics.read_registry(store)
    for error in bad:
        warn_once(f"{error}, so it is skipped")
    return found


def partition_counts(link: Connection, keys: Keys, names: Iterable[str]) -> dict[str, int]:
    """Return the number of partitions of each topic or DLQ.

    The number is 0 if the topic does not exist or is being deleted. Raises InvalidValueError if a
    topic has invalid metadata.
    """
    wanted = {name: name.removesuffix(DLQ) for name in names}
    found = check_replies(
        link.pipeline([topics.partition_count_command(keys, topic) for topic in wanted.values()])
    )
    return {
        name: topics.parse_partition_count_reply(keys, topic, reply) or 0
        for (name, topic), reply in zip(wanted.items(), found, strict=True)
    }


def warn_once(text: str) -> None:
    """Log a warning, unless this process has already logged the same text."""
    if text not in _logged:
        _logged.add(text)
        _log.warning("%s", text)


class Catalog:
    """Applies the options of a read to the topics and streams that exist on the server."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._keys = keys_for(options.connection)

    def places(
        self, begun: Iterable[TopicPartition] = (), *, strict: bool = True
    ) -> list[TopicPartition]:
        """Return all partitions that can be read now, in order.

        Raises TopicNotFoundError or RequestRefusedError if a topic or a partition is missing. This
        does not apply to topics of `begun`, the partitions that a stream already reads, because
        they may have been deleted since then. If `strict` is False, any topic or partition may be
        missing.
        """
        known = {name for name, _ in begun}
        found = persist(
            self._options.connection, lambda link: self._find_places(link, known, strict)
        )
        if strict and not known:
            self._refuse_unknown(found)
        return sorted(found)

    def _refuse_unknown(self, found: Sequence[TopicPartition]) -> None:
        """Raise RequestRefusedError if a start or end is set for a partition that is not read."""
        options = self._options
        for edge, named in (("starting", options.starting), ("ending", options.ending)):
            unread = sorted(set(named or ()) - set(found))
            if unread:
                name, partition = unread[0]
                raise RequestRefusedError(
                    f"{edge}Offsets contains partition {partition} of {name}, which does not exist"
                    " or is not subscribed; remove it"
                )

    def find_vanished(
        self, begun: Iterable[TopicPartition], places: Sequence[TopicPartition]
    ) -> list[TopicPartition]:
        """Return the subscribed partitions that a stream has read but that no longer exist."""
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

    def _find_places(self, link: Connection, known: set[str], strict: bool) -> list[TopicPartition]:
        options = self._options
        if options.pattern:
            wanted = re.compile(options.pattern.removesuffix(DLQ))
            suffix = DLQ if options.pattern.endswith(DLQ) else ""
            found = topic_names(Store(link, self._keys))
            names = [name + suffix for name in found if wanted.fullmatch(name)]
        else:
            names = sorted(options.subscribe or {name for name, _ in options.assign})
        counts = partition_counts(link, self._keys, names)
        for name in names:
            if counts[name] or options.pattern or name in known:
                continue
            topic = name.removesuffix(DLQ)
            text = f"topic {topic} does not exist"
            if strict:
                alike = get_close_matches(topic, topic_names(Store(link, self._keys)), 1)
                hint = f"did you mean {alike[0]}, or " if alike else ""
                raise TopicNotFoundError(
                    f"{text}; {hint}create it with `streamqd topic create {topic}`"
                )
            warn_once(f"{text}, so it is skipped")
        if not options.assign:
            return [(name, number) for name in names for number in range(counts[name])]
        for name, partition in options.assign:
            if partition >= counts[name] and strict and name not in known:
                raise RequestRefusedError(topics.no_partition_text(name, partition, counts[name]))
        return [place for place in options.assign if place[1] < counts[place[0]]]

    def facts(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, StreamFacts]:
        """Return the current state of the streams of these partitions."""
        return persist(self._options.connection, lambda link: self._ask_facts(link, places))

    def _ask_facts(
        self, link: Connection, places: Sequence[TopicPartition]
    ) -> dict[TopicPartition, StreamFacts]:
        dead = [place for place in places if place[0].endswith(DLQ)]
        live = [place for place in places if not place[0].endswith(DLQ)]
        asked = [("XINFO", "STREAM", stream_key(self._keys, place)) for place in dead]
        found = {
            place: _dead_letter_facts(raw)
            for place, raw in zip(dead, link.pipeline(asked), strict=True)
        }
        calls = [statistics.measure_partition(self._keys, *place) for place in live]
        for place, answer in zip(live, link.run_many(calls), strict=True):
            if isinstance(answer, RedisResponseError):
                found[place] = self._stream_facts(link, place, answer)
                continue
            figures = statistics.partition_figures(answer)
            found[place] = StreamFacts(
                length=figures.length,
                added=figures.added,
                first=_id_or_none(figures.first_id),
                last=_id_or_none(figures.last_id) or offsets.ZERO,
                counted=figures.counted,
            )
        return found

    def _stream_facts(
        self, link: Connection, place: TopicPartition, refused: RedisResponseError
    ) -> StreamFacts:
        """Return the facts that the stream provides, for a partition with another invalid key.

        For example, another client may have overwritten the key of the partition's dead letters.
        Raises `refused` if the stream's own key is invalid, or if the server does not count
        entries.
        """
        if refused.kind is not RefusalKind.BAD_KEY_OR_COMMAND:
            raise refused
        [raw] = link.pipeline([("XINFO", "STREAM", stream_key(self._keys, place))])
        if isinstance(raw, RedisResponseError) and "no such key" in str(raw):
            return StreamFacts()
        info = (
            {}
            if isinstance(raw, RedisResponseError)
            else dict(zip(raw[::2], raw[1::2], strict=True))
        )
        if b"entries-added" not in info:
            raise refused
        first = info[b"first-entry"]
        return StreamFacts(
            length=int(info[b"length"]),
            added=int(info[b"entries-added"]),
            first=offsets.read_id(first[0]) if first else None,
            last=offsets.read_id(info[b"last-generated-id"]),
        )

    def show(self, positions: Offsets) -> None:
        """Publish the position of a query as the position of its group.

        If Redis rejects a position, a warning is logged, because the query works without publishing
        it.
        """
        calls = [
            store.query_position(
                *(self._keys, *place, self._options.group, offsets.write_id(each.id), each.passed),
                hold=self._options.hold,
            )
            for place, each in positions.items()
        ]
        for answer in persist(self._options.connection, lambda link: link.run_many(calls)):
            if isinstance(answer, RedisResponseError):
                warn_once(f"the position of spark:{self._options.group} is not shown: {answer}")

    # --- positions ---

    def starts(
        self,
        facts: Mapping[TopicPartition, StreamFacts],
        default: Bound,
        archived: Container[TopicPartition] = (),
    ) -> Offsets:
        """Return the start positions.

        In the partitions in `archived`, a start may be before the oldest entry in Redis. Raises
        RequestRefusedError if the options leave out a partition or name a group that does not
        exist.
        """
        return self._resolve_edge("starting", facts, default, archived)

    def ends(self, facts: Mapping[TopicPartition, StreamFacts]) -> Offsets:
        """Return the end positions of a batch read. Raises the same errors as `starts`."""
        return self._resolve_edge("ending", facts, offsets.LATEST)

    def _resolve_edge(
        self,
        edge: str,
        facts: Mapping[TopicPartition, StreamFacts],
        default: Bound,
        archived: Container[TopicPartition] = (),
    ) -> Offsets:
        single: Mapping[TopicPartition, Bound] | None = getattr(self._options, edge)
        chosen: Bound = getattr(self._options, f"{edge}_default") or default
        missing = [place for place in facts if single is not None and place not in single]
        if missing:
            name, partition = missing[0]
            raise RequestRefusedError(
                f"{edge}Offsets lacks {len(missing)} partitions, such as {name} {partition}; add"
                " every partition that is read"
            )
        bounds = {place: chosen if single is None else single[place] for place in facts}
        grouped = {place: bound.value for place, bound in bounds.items() if bound.kind == "group"}
        settled = self._group_positions(grouped) if grouped else {}
        return {
            place: offsets.resolve(
                bound, facts[place], settled.get(place), archived=place in archived
            )
            for place, bound in bounds.items()
        }

    def _group_positions(self, groups: Mapping[TopicPartition, str]) -> dict[TopicPartition, Id]:
        """Return the position of each group, up to which it has handled all entries.

        This is the position before the group's first pending entry, or its last delivered entry if
        none is pending. Delivery positions are read before the pending entries. An entry that is
        delivered between these two reads is therefore after the returned position, so it is not
        skipped.

        Raises RequestRefusedError if a group does not exist.
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
            given = (
                None if isinstance(listed, RedisResponseError) else _last_delivered(listed, group)
            )
            if given is None or isinstance(pending, RedisResponseError):
                raise RequestRefusedError(
                    f"group {group} does not exist on {place[0]}/{place[1]}; `streamqd group"
                    f" list` shows the groups"
                )
            first = offsets.read_id(pending[1]) if pending[0] else None
            settled[place] = given if first is None else min(given, offsets.predecessor(first))
        return settled

    def add_counts(
        self, positions: Offsets, facts: Mapping[TopicPartition, StreamFacts]
    ) -> Offsets:
        """Add counts to positions that lack one, if the entries after them can be counted."""
        unknown = {
            place: position
            for place, position in positions.items()
            if position.passed is None and facts[place].exact and position.id < facts[place].last
            if offsets.find_loss(position, facts[place]) is None
        }
        behind = self.walk({p: (unknown[p].id, facts[p].last, facts[p].length) for p in unknown})
        gone = self.find_overtaken(unknown, facts)
        return dict(positions) | {
            p: at._replace(passed=facts[p].added - behind[p].passed)
            for p, at in unknown.items()
            if p not in gone
        }

    def find_overtaken(
        self, starts: Offsets, facts: Mapping[TopicPartition, StreamFacts]
    ) -> set[TopicPartition]:
        """Return the partitions whose start was passed by trimming after `facts` were read.

        For these partitions, counts that are based on `facts` are wrong.
        """
        now = self.facts(list(starts))
        return {
            place
            for place, start in starts.items()
            if now[place].removed != facts[place].removed
            and ((first := now[place].first) is None or first > start.id)
        }

    def walk(
        self, wanted: Mapping[TopicPartition, tuple[Id, Id, int]]
    ) -> dict[TopicPartition, _WalkResult]:
        """Advance by a number of entries in each stream, and return the end of each walk.

        `wanted` contains (after, upto, count) for each stream. In each round trip, all streams
        advance together, and the server counts at most a thousand entries of each, or fewer if
        messages are large, so that it is never busy for more than a few milliseconds.
        """
        walked = {place: _WalkResult(after, 0) for place, (after, _, _) in wanted.items()}
        left = {place: count for place, (_, _, count) in wanted.items() if count > 0}
        while left:
            calls = [
                store.step(
                    stream_key(self._keys, place),
                    offsets.write_id(walked[place].id),
                    offsets.write_id(wanted[place][1]),
                    min(store.STEP_MAX, count),
                )
                for place, count in left.items()
            ]
            answers = persist(self._options.connection, methodcaller("run_many", calls))
            for place, answer in zip(list(left), check_replies(answers), strict=True):
                gone, last, more = answer.values
                walked[place] = _WalkResult(offsets.read_id(last), walked[place].passed + gone)
                left[place] -= gone
                if not more or left[place] <= 0:
                    del left[place]
        return walked

    # --- ranges ---

    def spans(
        self,
        starts: Offsets,
        ends: Offsets,
        facts: Mapping[TopicPartition, StreamFacts],
        seen: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> dict[TopicPartition, Span]:
        """Return the spans between two offsets.

        A partition without a start is new, and is read from its first entry. `seen` contains the
        number of entries that each stream had issued at the last check. If entries were lost, this
        raises DataLossError, or logs the loss and skips them if the options allow that.
        """
        found = {}
        for place, end in ends.items():
            start, now = starts.get(place, Position(offsets.ZERO, 0)), facts[place]
            if start == end:
                continue
            gone = offsets.is_replaced(end, now)
            loss = offsets.find_loss(end if gone else start, now, seen.get(place))
            if loss is not None and (start.id < end.id or loss.kind == "replaced"):
                self.report_gap(place, start, loss)
                start = offsets.resume_position(start, now)
            whole = None if gone else offsets.span(place, start, end, now)
            if whole is not None:
                found[place] = whole
        return found

    def cut(
        self, spans: Mapping[TopicPartition, Span], facts: Mapping[TopicPartition, StreamFacts]
    ) -> list[Span]:
        """Cut the spans into the number of pieces that the options request."""
        options = self._options
        counts = dict.fromkeys(spans, 1)
        weights = {
            place: offsets.backlog(Position(each.start), facts[place])
            for place, each in spans.items()
        }
        weights |= {place: each.rows for place, each in spans.items() if each.rows is not None}
        if options.min_partitions > len(spans):
            counts = offsets.pieces(weights, options.min_partitions)
        found: list[Span] = []
        for place, each in spans.items():
            if most := options.max_per_partition:
                if counts[place] > 1:
                    rows = self._number(each, facts[place].length)
                    most = min(most, max(1, -(-rows // counts[place])))
                found += self._counted_pieces(each, most)
            elif counts[place] > 1:
                found += self._even_pieces(each, counts[place], weights[place], facts[place].first)
            else:
                found.append(each)
        return found

    def _number(self, whole: Span, length: int) -> int:
        """Return the number of entries in a span.

        If the span does not contain it, the entries are counted.

        `length` is the number of entries in the whole stream, at which counting stops.
        """
        if whole.rows is not None:
            return whole.rows
        return self.walk({whole.place: (whole.start, whole.end, length)})[whole.place].passed

    def _counted_pieces(self, whole: Span, most: int) -> list[Span]:
        ends: list[Id] = []
        after = whole.start
        while True:
            gone = self.walk({whole.place: (after, whole.end, most)})[whole.place]
            if gone.passed < most or gone.id >= whole.end:
                return offsets.cut_at(whole, ends, most)
            ends.append(gone.id)
            after = gone.id

    def _even_pieces(self, whole: Span, count: int, rows: int, first: Id | None) -> list[Span]:
        """Cut a span into pieces with about the same number of entries.

        The span is divided into many time slices, and the first entries of each slice show how
        dense the slice is. The sum of these estimates is compared with the number of entries in the
        span (`rows`). If it differs too much, the server counts the entries, which takes about a
        second per million. If the span does not contain its number of entries, the sum is used
        instead of `rows`.
        """
        slices = offsets.split(whole, count * _SLICES, first)
        least = (
            len(slices) * _PROBED
        )  # number of entries that are counted to estimate all densities
        if whole.rows is None or rows > least:
            weights = self._densities(slices)
            seen = sum(weights)
            rows = round(seen) if whole.rows is None else rows
            if rows > least and abs(seen - rows) <= rows * _ERROR_MAX:
                return offsets.cut_at(whole, offsets.even_cuts(slices, weights, count), None)
        return offsets.cut_at_marks(whole, self._marks(whole, rows, count * _SLICES), count)

    def _densities(self, slices: Sequence[Span]) -> list[float]:
        """Estimate the number of entries in each slice from its first few entries."""
        calls = [
            store.step(
                stream_key(self._keys, each.place),
                offsets.write_id(each.start),
                offsets.write_id(each.end),
                _PROBED,
            )
            for each in slices
        ]
        answers = check_replies(persist(self._options.connection, methodcaller("run_many", calls)))
        found = []
        for each, answer in zip(slices, answers, strict=True):
            passed, reached, more = answer.values
            found.append(offsets.density(each, offsets.read_id(reached), passed, more=bool(more)))
        return found

    def _marks(self, whole: Span, rows: int, wanted: int) -> list[Position]:
        """Return positions at equal distances (in entries). The last one is at the last entry.

        About `wanted` positions are returned, or more if the distance would exceed the number of
        entries that the server counts at a time. If there are many more entries than expected
        (`rows`), the distance is doubled, so the span does not take one round trip per entry.
        """
        marks: list[Position] = []
        stride = max(1, min(store.STEP_MAX, rows // wanted))
        at = Position(whole.start, 0)
        while at.id < whole.end:
            gone = self.walk({whole.place: (at.id, whole.end, stride)})[whole.place]
            if not gone.passed:
                break
            at = Position(gone.id, (at.passed or 0) + gone.passed)
            marks.append(at)
            if len(marks) >= 2 * wanted and stride < store.STEP_MAX:
                marks, stride = marks[1::2], min(store.STEP_MAX, 2 * stride)
        return marks

    def report_gap(self, place: TopicPartition, after: Position, loss: Loss) -> None:
        """Report a loss: raise DataLossError, or log it if the options allow losses."""
        report_loss(place, after.id, loss, fail=self._options.fail_on_data_loss)


class _WalkResult(Position):
    """The end of a walk: the ID that was reached, and the number of entries passed on the way."""

    passed: int


def _id_or_none(text: str) -> Id | None:
    return offsets.read_id(text) if text else None


def _dead_letter_facts(raw: Any) -> StreamFacts:
    """Return the facts about a stream of dead letters.

    Counts are not exact, because replays and purges also remove entries from the middle of the
    stream.
    """
    if isinstance(raw, RedisResponseError):
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


def report_loss(place: TopicPartition, after: Id, loss: Loss, *, fail: bool) -> None:
    """Raise DataLossError if `fail` is True. Otherwise, log the loss as a warning."""
    left = "the remaining entries"
    where = f"{place[0]} partition {place[1]} after {offsets.write_id(after)}"
    known = loss.entries is not None
    seen = f"at least {loss.entries:,} entries" if known else "entries that were not read"
    if loss.kind == "trimmed":
        many = f"{loss.entries:,}" if known else "an unknown number of"
        text = f"{many} entries of {where} were trimmed before they were read"
    elif loss.kind == "vanished":
        text = f"the stream of {where} no longer exists, and {seen} are lost"
    else:
        text = (
            f"the stream of {where} is not the stream that was read before, and {seen} are lost,"
            " because the topic was deleted and created again, a failover lost its newest"
            " entries, or on Redis 6.2 another client trimmed it"
        )
        left = (
            "all entries of the stream, which after a failover include entries that it has"
            " already read"
        )
    if fail:
        raise DataLossError(f"{text}. With failOnDataLoss=false, the query continues with {left}")
    _log.warning("%s. Continuing with %s", text, left)
