"""Publish the rows of a streaming query exactly once: tasks stage them, the driver publishes them.

1. In each attempt of a task, a `Stage` writes the rows to streams next to their partitions.
2. The driver gets a `Staged` from each task, and passes all of them to `Publisher.commit`.
3. The commit decides which attempts form the batch, and this decision is never changed. It then
   moves their rows until all of them are in the topic, and removes the rows of other attempts.

If a process dies along the way, Spark repeats the batch, and the commit continues where it stopped
(decision 0024).
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pyspark.sql.datasource import WriterCommitMessage

from streamqd.errors import RedisResponseError, SparkError, StreamqdError
from streamqd.model import TopicPartition
from streamqd.spark.options import WriteOptions
from streamqd.spark.outgoing import Chunk
from streamqd.spark.streams import keys_for, link_for, partition_counts, persist
from streamqd.store import spark as store
from streamqd.store.client import Connection
from streamqd.store.replies import check_replies
from streamqd.store.scripts import Call, Reply

CALLS = 8  # script calls per partition in one pipeline
KEYS_MAX = 256  # maximum keys of one command
_ATTEMPT = "attempt:"
_THERE = "equal or smaller"  # part of the server's error for an ID that already exists
_BATCH = re.compile(rb"[0-9]{1,18}")
_RUN_DIGITS = 8  # digits of the run ID with which the name of an attempt starts

_log = logging.getLogger("streamqd.spark")
_T = TypeVar("_T")


class NotPublishedError(SparkError):
    """A batch could not be published with exactly one copy of each row."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """A task's message to the driver about the rows that one of its attempts has staged.

    `rows` maps each partition to its number of staged rows. `counts` maps each topic to the number
    of partitions that it had when the task read it.
    """

    query: str
    attempt: str
    rows: Mapping[TopicPartition, int]
    counts: Mapping[str, int]


class _Attempt(NamedTuple):
    """An attempt that may have staged rows for a topic, as listed in the query's record."""

    field: bytes
    name: str
    topic: str
    batch: int


class _QueryState:
    """The state of one query in Redis: its record, and the streams with staged rows."""

    def __init__(self, options: WriteOptions, query: str) -> None:
        self.connection = options.connection
        self.keys = keys_for(options.connection)
        self.query = query
        self.record = self.keys.sink(query)
        self.ttl = options.commit_retention
        self.ttl_ms = round(self.ttl * 1000)

    def ask(self, work: Callable[[Connection], _T]) -> _T:
        return persist(self.connection, work)

    def run(self, *commands: tuple[object, ...]) -> Sequence[Any]:
        return check_replies(self.ask(lambda link: link.pipeline(commands)))

    def stream(self, place: TopicPartition, attempt: str) -> str:
        return self.keys.staged_rows(*place, self.query, attempt)

    def lengths(self, streams: Sequence[str]) -> list[int | None]:
        """Return the number of rows in each stream, or None for a stream that does not exist.

        This also extends the expiry of the streams.
        """
        stay = [("PEXPIRE", stream, self.ttl_ms) for stream in streams]
        found = self.run(*stay, *(("XLEN", stream) for stream in streams))
        both = zip(found[: len(streams)], found[len(streams) :], strict=True)
        return [rows if exists else None for exists, rows in both]

    def partitions(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each topic, or 0 if the topic does not exist."""
        wanted = set(names)
        return self.ask(lambda link: partition_counts(link, self.keys, wanted))

    def read(self) -> tuple[int, list[_Attempt]]:
        """Return the last decided batch, or -1 if there is none, and all recorded attempts."""
        [flat] = self.run(("HGETALL", self.record))
        known = dict(zip(flat[::2], flat[1::2], strict=True))
        found = []
        for field, at in known.items():
            name, _, topic = field.decode("utf-8", "replace").removeprefix(_ATTEMPT).partition(":")
            if field.startswith(_ATTEMPT.encode()) and _BATCH.fullmatch(at):
                found.append(_Attempt(field, name, topic, int(at)))
        last = known.get(b"batch", b"")
        return int(last) if _BATCH.fullmatch(last) else -1, found

    def possible_streams(self, attempts: Sequence[_Attempt]) -> list[str]:
        """Return all streams to which these attempts may have written.

        An attempt that was killed did not report to which partitions it wrote, so the streams of
        all partitions are returned.
        """
        counts = self.partitions(each.topic for each in attempts)
        return [
            self.stream((each.topic, number), each.name)
            for each in attempts
            for number in range(counts[each.topic])
        ]

    def remove(self, link: Connection, fields: Iterable[bytes], streams: Iterable[str]) -> None:
        commands: list[tuple[object, ...]] = []
        for group in link.group_by_node(list(streams)):
            commands += [("UNLINK", *part) for part in _portions(group)]
        commands += [("HDEL", self.record, *part) for part in _portions(list(fields))]
        check_replies(link.pipeline(commands))


class Stage:
    """Stages the rows of one task attempt. `run` is the ID of the query's run, or '' if unknown."""

    def __init__(self, options: WriteOptions, query: str, batch: int, run: str = "") -> None:
        self._state = _QueryState(options, query)
        self._bytes_max = options.max_staged_bytes
        self._batch = batch
        self._run = run[:_RUN_DIGITS]
        self._attempt = self._run + secrets.token_hex(8)
        self._rows: Counter[TopicPartition] = Counter()
        self._announced: set[str] = set()
        self._bytes = 0

    def clear(self) -> None:
        """Remove the rows that earlier runs of the query staged for this batch.

        The rows of this run are kept, because another attempt of the task may still be using them.
        If the batch was already decided, all rows are kept, because the decided ones must be
        published.
        """
        decided, attempts = self._state.read()
        left = [
            each
            for each in attempts
            if each.batch == self._batch and not each.name.startswith(self._run)
        ]
        if left and decided < self._batch:
            streams = self._state.possible_streams(left)
            self._state.ask(lambda link: self._state.remove(link, (), streams))

    def send(self, chunk: Chunk) -> None:
        """Stage rows. Raises NotPublishedError if the task has staged more bytes than allowed."""
        self._bytes += sum(
            len(part) for rows in chunk.values() for row in rows for part in row.fields
        )
        if self._bytes > self._bytes_max:
            raise NotPublishedError(
                f"batch {self._batch}: the rows of one task exceed maxStagedBytes, the limit of"
                " Redis memory for rows that are not published yet; read less per batch"
                " (maxOffsetsPerTrigger, maxFilesPerTrigger), use more tasks, or raise"
                " maxStagedBytes"
            )
        self._announce({topic for topic, _ in chunk})
        commands: list[tuple[object, ...]] = []
        for place, rows in chunk.items():
            key = self._state.stream(place, self._attempt)
            added = []
            for row in rows:
                self._rows[place] += 1
                added.append(("XADD", key, f"0-{self._rows[place]}", *row.fields))
            # The expiry is set right after the first row, so that the stream does not remain
            # forever if this process is killed before it finishes.
            commands += (*added[:1], ("PEXPIRE", key, self._state.ttl_ms), *added[1:])
        for reply in self._state.ask(lambda link: link.pipeline(commands)):
            if isinstance(reply, RedisResponseError) and _THERE not in str(reply):
                raise reply

    def _announce(self, names: set[str]) -> None:
        """Record the topics before rows are staged.

        The rows of a rejected attempt can then be found.
        """
        record, new = self._state.record, sorted(names - self._announced)
        if new:
            fields = [part for name in new for part in (self._field(name), self._batch)]
            self._state.run(("HSET", record, *fields), ("PEXPIRE", record, self._state.ttl_ms))
            self._announced.update(new)

    def _field(self, topic: str) -> str:
        return f"{_ATTEMPT}{self._attempt}:{topic}"

    def drop(self) -> None:
        """Remove the staged rows of a failed attempt.

        If Redis fails, the rows remain until they expire.
        """
        streams = [self._state.stream(place, self._attempt) for place in self._rows]
        fields = [self._field(name).encode() for name in sorted(self._announced)]
        with contextlib.suppress(StreamqdError):
            self._state.remove(link_for(self._state.connection), fields, streams)

    def message(self, counts: Mapping[str, int]) -> Staged:
        """Return the message to the driver.

        `counts` maps each topic to its number of partitions.
        """
        return Staged(self._state.query, self._attempt, dict(self._rows), dict(counts))


class Publisher:
    """Publishes the staged rows of one query, batch by batch."""

    def __init__(self, options: WriteOptions, query: str) -> None:
        self._state = _QueryState(options, query)
        self._fails = options.fail_on_data_loss

    def commit(self, batch: int, parts: Sequence[Staged]) -> None:
        """Publish a batch. If it was partly published before, publish only the remaining rows.

        Raises NotPublishedError if exactly one copy of each row cannot be guaranteed.
        """
        self._check(batch, parts)
        plan = _plan(parts)
        if len(store.write_plan(plan)) > store.PLAN_BYTES_MAX:
            raise NotPublishedError(
                f"batch {batch}: {len(plan):,} tasks write to too many partitions each; use fewer"
                " tasks, for example with coalesce"
            )
        rows = sum(sum(part.rows.values()) for part in parts)
        published: store.Plan | None = None
        while (reply := self._begin(batch, plan, rows)).word != "DONE":
            match reply.word:
                case "PAST":
                    raise NotPublishedError(
                        f"batch {batch}: this query already published batch {int(reply.values[0])};"
                        " an old checkpoint cannot be restored, so start the query with a new one"
                    )
                case "STARTED":
                    begun, raw = reply.values
                    published = store.read_plan(raw, self._state.record)
                    self._publish(int(begun), published)
                case _:
                    if batch and not reply.values[0]:
                        self._warn(batch)
                    published = plan
                    self._publish(batch, plan)
        self._compare(batch, parts, rows, reply)
        self._sweep(batch, parts, published)

    # --- before the decision ---

    def _check(self, batch: int, parts: Sequence[Staged]) -> None:
        """Raise NotPublishedError if staged rows are missing, unless the batch was decided."""
        fault = self._topic_change(parts) or self._missing(parts)
        # If another driver has already decided the batch, it has removed the rows that are not part
        # of the batch, so missing rows are not an error.
        if fault and self._state.read()[0] < batch:
            raise NotPublishedError(
                f"batch {batch}: {fault}, so nothing of the batch was published; start the query"
                " again"
            )

    def _topic_change(self, parts: Sequence[Staged]) -> str:
        """Describe how a topic has changed since the rows were staged, or return '' if none has.

        If the number of partitions changed, publishing would lose rows or break their order.
        """
        routed = {each for part in parts for each in part.counts.items()}
        counts = self._state.partitions(name for name, _ in routed)
        for name, count in sorted(routed):
            if (now := counts[name]) != count:
                became = f"now has {now} partitions" if now else "no longer exists"
                return (
                    f"topic {name} {became}, but had {count} partitions when rows were"
                    " staged for it"
                )
        return ""

    def _missing(self, parts: Sequence[Staged]) -> str:
        """Describe how many staged rows are missing, or return '' if all rows exist."""
        wanted = {
            self._state.stream(place, part.attempt): rows
            for part in parts
            for place, rows in part.rows.items()
        }
        found = self._state.lengths(list(wanted))
        missing = sum(wanted.values()) - sum(rows or 0 for rows in found)
        return f"Redis lost {missing:,} of the staged rows" if missing else ""

    def _begin(self, batch: int, plan: store.Plan, rows: int) -> Reply:
        of = self._state
        call = store.begin(of.keys, of.query, batch, plan, of.ttl, rows)
        return of.ask(lambda link: link.run(call))

    def _warn(self, batch: int) -> None:
        _log.warning(
            "the batches of query %s before batch %d are unknown. If an older version ran that"
            " batch and was interrupted, or it was interrupted more than commitRetention ago,"
            " some of its rows are duplicated",
            self._state.query,
            batch,
        )

    # --- decided batches ---

    def _publish(self, batch: int, plan: store.Plan) -> None:
        """Move rows until all rows of a plan are in their partitions, and then record this.

        The replies of the moves do not show how many rows are left, because a replica that was
        promoted may lack the last moves. The remaining rows are therefore counted after each move.
        Raises NotPublishedError if rows were lost.
        """
        while True:
            left = self._rows_left(plan)
            waiting = [each for each, rows in left.items() if rows]
            if not waiting:
                break
            self._move(waiting)
        gone = [each for each, rows in left.items() if rows is None]
        if gone and not self._abandon_lost_rows(batch, gone):
            return
        of = self._state
        call = store.end(of.keys, of.query, batch, of.ttl)
        of.ask(lambda link: link.run(call))

    def _rows_left(self, plan: store.Plan) -> dict[tuple[TopicPartition, str], int | None]:
        """Return the number of rows left per partition and attempt, or None if they are lost.

        Rows also count as lost if their partition no longer exists, because no group would read
        them.
        """
        counts = self._state.partitions(name for names in plan.values() for name in names)
        lines = [
            ((name, number), attempt)
            for attempt, names in plan.items()
            for name, numbers in names.items()
            for number in numbers
        ]
        found = self._state.lengths([self._state.stream(*line) for line in lines])
        return {
            line: rows if line[0][1] < counts[line[0][0]] else None
            for line, rows in zip(lines, found, strict=True)
        }

    def _move(self, waiting: Sequence[tuple[TopicPartition, str]]) -> None:
        """Move staged rows to their partitions.

        Within a partition, the order of the attempts is kept.
        """
        lines: dict[TopicPartition, list[str]] = {}
        for place, attempt in waiting:
            lines.setdefault(place, []).append(attempt)
        of = self._state
        while lines:
            calls = [
                store.publish(of.keys, *place, of.query, attempts[0], of.ttl)
                for place, attempts in lines.items()
                for _ in range(CALLS)
            ]
            replies = self._run_many(calls)[CALLS - 1 :: CALLS]
            for place, reply in zip(list(lines), replies, strict=True):
                if reply.word == "GONE" or not reply.values[1]:
                    del lines[place][0]
                if not lines[place]:
                    del lines[place]

    def _run_many(self, calls: Sequence[Call]) -> Sequence[Any]:
        return check_replies(self._state.ask(lambda link: link.run_many(calls)))

    def _abandon_lost_rows(self, batch: int, gone: Sequence[tuple[TopicPartition, str]]) -> bool:
        """Give up the lost rows of a batch.

        Return False if another driver has already finished the batch.

        Raises NotPublishedError if the options do not allow losses.
        """
        [(at, plan)] = self._state.run(("HMGET", self._state.record, "batch", "plan"))
        if at != b"%d" % batch or plan is None:
            return False
        places = ", ".join(
            f"{name} partition {number}" for name, number in sorted({p for p, _ in gone})
        )
        text = (
            f"batch {batch}: rows for {places} were lost before they were published, because the"
            " topic was deleted, Redis lost them, or the query was stopped for longer than"
            " commitRetention. All other rows of the batch are published"
        )
        if self._fails:
            raise NotPublishedError(
                f"{text}. With failOnDataLoss=false the query continues without them. `HDEL"
                f" {self._state.record} batch plan` makes it publish the whole batch again,"
                " which duplicates the published rows"
            )
        _log.warning("%s. Continuing without them", text)
        streams = [self._state.stream(*line) for line in gone]
        self._state.ask(lambda link: self._state.remove(link, (), streams))
        return True

    # --- afterwards ---

    def _compare(self, batch: int, parts: Sequence[Staged], rows: int, done: Reply) -> None:
        """Compare the batch as it was published with the batch that this driver was to publish.

        Raises NotPublishedError if it was published to other topics, which happens if two queries
        share a checkpoint. If only the number of rows differs, a warning is logged.
        """
        count, names = (raw.decode("utf-8", "replace") for raw in done.values)
        our_names, their_names = (
            {name for part in parts for name, _ in part.rows},
            set(names.split()),
        )
        if our_names and their_names and not our_names & their_names:
            raise NotPublishedError(
                f"batch {batch} was published to {', '.join(sorted(their_names))}, but this one"
                " is for"
                f" {', '.join(sorted(our_names))}; two queries share this checkpoint, so give"
                " each its"
                " own"
            )
        if count and count != str(rows):
            _log.warning(
                "batch %d of query %s was already published with %s rows, so the %d rows that it"
                " has now are dropped. Its source has changed, or a checkpoint was copied or"
                " restored",
                *(batch, self._state.query, count, rows),
            )

    def _sweep(self, batch: int, parts: Sequence[Staged], published: store.Plan | None) -> None:
        """Remove the rows staged for earlier batches, and the rejected attempts of this batch.

        For published attempts, the empty streams are kept until the next batch. In a cluster,
        another node holds the query's record, and it may lose the information that they were
        published. A rejected attempt may still be running, so the next batch looks for its streams
        again.
        """
        own = {part.attempt for part in parts}
        obsolete, fields = [], []
        for each in self._state.read()[1]:
            counts = each.name not in own if published is None else each.name in published
            if each.batch < batch or (each.batch == batch and not counts):
                obsolete.append(each)
            if each.batch < batch:
                fields.append(each.field)
        streams = self._state.possible_streams(obsolete)
        self._state.ask(lambda link: self._state.remove(link, fields, streams))

    def abort(self, parts: Sequence[Staged]) -> None:
        """Remove the staged rows, except those of chosen attempts, which must be published."""
        [raw] = self._state.run(("HGET", self._state.record, "plan"))
        decided = store.read_plan(raw, self._state.record) if raw else {}
        places = [(p.attempt, place) for p in parts if p.attempt not in decided for place in p.rows]
        streams = [self._state.stream(place, attempt) for attempt, place in places]
        names = {f"{_ATTEMPT}{attempt}:{name}".encode() for attempt, (name, _) in places}
        self._state.ask(lambda link: self._state.remove(link, sorted(names), streams))


def _portions(every: Sequence[Any]) -> list[Sequence[Any]]:
    """Split a list of keys or fields into portions that are small enough for one command."""
    return [every[start : start + KEYS_MAX] for start in range(0, len(every), KEYS_MAX)]


def _plan(parts: Sequence[Staged]) -> store.Plan:
    plan: dict[str, dict[str, list[int]]] = {}
    for part in parts:
        names = plan.setdefault(part.attempt, {}) if part.rows else {}
        for name, number in sorted(part.rows):
            names.setdefault(name, []).append(number)
    return plan
