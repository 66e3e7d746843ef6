"""Exactly once from a streaming query: tasks stage their rows, the driver publishes them.

1. A `Stage` takes the rows of one attempt of a task, each into a stream beside its partition.
2. The driver gets a `Staged` of each task, and gives them to `Publisher.commit`.
3. That decides once which attempts make up the batch, moves their rows, and removes what is left.

Whatever dies in between, the batch comes again and goes on from there: see decision 0024.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import WriterCommitMessage

from streamqd.errors import RedisRefused, StreamqdError
from streamqd.spark.offsets import Place
from streamqd.spark.options import WriteOptions
from streamqd.spark.outgoing import Chunk
from streamqd.spark.streams import keys_for, link_for, persist
from streamqd.store import spark as store
from streamqd.store import topics
from streamqd.store.client import accepted
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

CALLS = 8  # for one partition in one exchange
KEYS_MAX = 256  # of one command
_ATTEMPT = "attempt:"
_THERE = "equal or smaller"  # what the server says of an id that is there already

_log = logging.getLogger("streamqd.spark")


class NotPublishedError(StreamqdError):
    """A batch cannot be published so that each of its rows is there once."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What one attempt of a task has staged: how many rows for which partition."""

    query: str
    attempt: str
    rows: Mapping[Place, int]


class Stage:
    """Where one attempt of a task puts its rows."""

    def __init__(self, options: WriteOptions, query: str, batch: int) -> None:
        self._options = options
        self._keys = keys_for(options.connection)
        self._query = query
        self._batch = batch
        self._ttl_ms = round(options.commit_retention * 1000)
        self._attempt = secrets.token_hex(8)
        self._rows: Counter[Place] = Counter()
        self._announced: set[str] = set()
        self._bytes = 0

    def send(self, chunk: Chunk) -> None:
        """Stage some rows. Raises NotPublishedError for more than a task may stage."""
        self._bytes += sum(
            len(part) for rows in chunk.values() for row in rows for part in row.fields
        )
        if self._bytes > self._options.max_staged_bytes:
            raise NotPublishedError(
                f"batch {self._batch}: one task has more rows than Redis is to keep until the batch"
                " is published (maxStagedBytes): take less at a time (maxOffsetsPerTrigger,"
                " maxFilesPerTrigger), use more tasks, or raise it"
            )
        self._announce({topic for topic, _ in chunk})
        commands: list[tuple[object, ...]] = []
        for place, rows in chunk.items():
            key = self._keys.staged(*place, self._query, self._attempt)
            added = []
            for row in rows:
                self._rows[place] += 1
                added.append(("XADD", key, f"0-{self._rows[place]}", *row.fields))
            # Behind the first, so that nothing stays for ever when this process ends in between.
            commands += (*added[:1], ("PEXPIRE", key, self._ttl_ms), *added[1:])
        for reply in persist(self._options.connection, lambda link: link.pipeline(commands)):
            if isinstance(reply, RedisRefused) and _THERE not in str(reply):
                raise reply

    def _announce(self, names: set[str]) -> None:
        """Note what is to be removed should this attempt not count, before it is there."""
        record = self._keys.sink(self._query)
        new = sorted(names - self._announced)
        if not new:
            return
        fields = [part for name in new for part in (_field(self._attempt, name), self._batch)]
        commands = [("HSET", record, *fields), ("PEXPIRE", record, self._ttl_ms)]
        accepted(persist(self._options.connection, lambda link: link.pipeline(commands)))
        self._announced.update(new)

    def drop(self) -> None:
        """Remove what is staged, as far as Redis answers: the attempt has failed."""
        keys = [self._keys.staged(*place, self._query, self._attempt) for place in self._rows]
        fields = [_field(self._attempt, name).encode() for name in sorted(self._announced)]
        with contextlib.suppress(StreamqdError):
            link = link_for(self._options.connection)
            _remove(link, self._keys.sink(self._query), fields, keys)

    def message(self) -> Staged:
        """What is staged by now."""
        return Staged(self._query, self._attempt, dict(self._rows))


class Publisher:
    """Publishes what the tasks of one query have staged, batch by batch."""

    def __init__(self, options: WriteOptions, query: str) -> None:
        self._connection = options.connection
        self._keys = keys_for(options.connection)
        self._query = query
        self._record = self._keys.sink(query)
        self._ttl = options.commit_retention

    def commit(self, batch: int, parts: Sequence[Staged]) -> None:
        """Publish a batch, or what is left of it after an earlier try. Raises NotPublishedError."""
        self._check(batch, parts)
        plan = _plan(parts)
        if len(store.write_plan(plan)) > store.PLAN_BYTES_MAX:
            raise NotPublishedError(
                f"batch {batch}: {len(plan):,} tasks write to too many partitions each: use fewer"
                " tasks, as by coalesce"
            )
        rows = sum(sum(part.rows.values()) for part in parts)
        while (reply := self._begin(batch, plan, rows)).word != "DONE":
            match reply.word:
                case "PAST":
                    raise NotPublishedError(
                        f"batch {batch}: this query has published batch {int(reply.rest[0])};"
                        " an old checkpoint cannot be brought back, start it with a new one"
                    )
                case "BEGUN":
                    begun, raw = reply.rest
                    self._publish(int(begun), store.read_plan(raw, self._record))
                case _:
                    if batch and not reply.rest[0]:
                        self._warn(batch)
                    self._publish(batch, plan)
        self._compare(batch, parts, rows, reply)
        self._sweep(batch, parts)

    def _compare(self, batch: int, parts: Sequence[Staged], rows: int, done: Reply) -> None:
        """See whether what was published may be this batch. Raises NotPublishedError."""
        count, names = (raw.decode("utf-8", "replace") for raw in done.rest)
        mine, theirs = {name for part in parts for name, _ in part.rows}, set(names.split())
        if mine and theirs and not mine & theirs:
            raise NotPublishedError(
                f"batch {batch} was published to {', '.join(sorted(theirs))}, this one is for"
                f" {', '.join(sorted(mine))}: two queries share this checkpoint, give each its own"
            )
        if count and count != str(rows):
            _log.warning(
                "batch %d of query %s was published before, with %s rows; the %d that it has now"
                " are dropped: its source has changed, or a checkpoint was copied or brought back",
                *(batch, self._query, count, rows),
            )

    def abort(self, parts: Sequence[Staged]) -> None:
        """Remove what was staged, but for attempts that are decided and still to be published."""
        asked = ("HGET", self._record, "plan")
        raw = persist(self._connection, lambda link: link.execute(*asked))
        decided = store.read_plan(raw, self._record) if raw else {}
        dropped = [part for part in parts if part.attempt not in decided]
        places = [(part.attempt, place) for part in dropped for place in part.rows]
        keys = [self._keys.staged(*place, self._query, attempt) for attempt, place in places]
        names = {(attempt, name) for attempt, (name, _) in places}
        fields = [_field(*each).encode() for each in sorted(names)]
        persist(self._connection, lambda link: _remove(link, self._record, fields, keys))

    def _check(self, batch: int, parts: Sequence[Staged]) -> None:
        """See that all is there that was staged, and that it stays, unless that is decided."""
        wanted = {
            self._keys.staged(*place, self._query, part.attempt): rows
            for part in parts
            for place, rows in part.rows.items()
        }
        ttl_ms = round(self._ttl * 1000)
        commands: list[tuple[object, ...]] = [("PEXPIRE", key, ttl_ms) for key in wanted]
        commands += [("XLEN", key) for key in wanted]
        found = accepted(persist(self._connection, lambda link: link.pipeline(commands)))
        missing = sum(wanted.values()) - sum(found[len(wanted) :])
        # Another driver that decides the batch removes what it does not publish.
        if missing and not self._is_decided(batch):
            raise NotPublishedError(
                f"batch {batch}: Redis has lost {missing:,} of the rows that were staged; nothing"
                " of the batch is published, start the query again"
            )

    def _begin(self, batch: int, plan: store.Plan, rows: int) -> Reply:
        call = store.begin(self._keys, self._query, batch, plan, self._ttl, rows)
        return persist(self._connection, lambda link: link.run(call))

    def _publish(self, batch: int, plan: store.Plan) -> None:
        """Move all rows of a plan: those of a partition in the order of the tasks."""
        lines: dict[Place, list[str]] = {}
        for attempt, names in plan.items():
            for name, partitions in names.items():
                for number in partitions:
                    lines.setdefault((name, number), []).append(attempt)
        while lines:
            places = [place for place in lines for _ in range(CALLS)]
            calls = [
                store.publish(self._keys, *place, self._query, lines[place][0], self._ttl)
                for place in places
            ]
            replies = accepted(self._run_many(calls))
            for place, reply in zip(places[::CALLS], replies[CALLS - 1 :: CALLS], strict=True):
                if reply.word == "GONE":
                    if self._is_open(batch):
                        raise self._gone(batch, place, lines[place][0])
                    return
                if not reply.rest[1]:
                    del lines[place][0]
                if not lines[place]:
                    del lines[place]
        call = store.end(self._keys, self._query, batch, self._ttl)
        persist(self._connection, lambda link: link.run(call))

    def _run_many(self, calls: Sequence[Call]) -> list[Any]:
        return persist(self._connection, lambda link: list(link.run_many(calls)))

    def _is_decided(self, batch: int) -> bool:
        """Whether this batch or a later one was decided."""
        at = persist(self._connection, lambda link: link.execute("HGET", self._record, "batch"))
        return at is not None and at.isdigit() and int(at) >= batch

    def _is_open(self, batch: int) -> bool:
        """Whether a batch is still to be published; another driver may have done it meanwhile."""
        asked = ("HMGET", self._record, "batch", "plan")
        at, plan = persist(self._connection, lambda link: link.execute(*asked))
        return at == b"%d" % batch and plan is not None

    def _gone(self, batch: int, place: Place, attempt: str) -> NotPublishedError:
        key = self._keys.staged(*place, self._query, attempt)
        return NotPublishedError(
            f"batch {batch} was published in part, and the rest of it is gone: {key} has expired or"
            f" was lost. `HDEL {self._record} batch plan` lets the query publish the whole batch:"
            " what is there of it will be there twice"
        )

    def _warn(self, batch: int) -> None:
        _log.warning(
            "nothing is known of what query %s has published before batch %d: if that batch was cut"
            " off before, by an older version or longer ago than commitRetention, rows of it are"
            " there twice",
            self._query,
            batch,
        )

    def _sweep(self, batch: int, parts: Sequence[Staged]) -> None:
        """Remove all that was staged up to a batch, which is published.

        Of an attempt that did not count nobody knows the partitions, nor whether it is still at
        work: it is looked for again at the end of the next batch.
        """
        known = persist(self._connection, lambda link: link.execute("HGETALL", self._record))
        doomed = [
            self._keys.staged(*place, self._query, part.attempt)
            for part in parts
            for place in part.rows
        ]
        finished = {part.attempt for part in parts}
        fields = []
        for field, at in zip(known[::2], known[1::2], strict=True):
            prefix, _, rest = field.decode("utf-8", "replace").partition(":")
            attempt, _, name = rest.partition(":")
            if prefix + ":" != _ATTEMPT or not at.isdigit() or int(at) > batch:
                continue
            if attempt not in finished:
                doomed += self._everywhere(name, attempt)
            if attempt in finished or int(at) < batch:
                fields.append(field)
        persist(self._connection, lambda link: _remove(link, self._record, fields, doomed))

    def _everywhere(self, name: str, attempt: str) -> Iterator[str]:
        count = persist(
            self._connection, lambda link: topics.partition_count(Store(link, self._keys), name)
        )
        for number in range(count or 0):
            yield self._keys.staged(name, number, self._query, attempt)


def _remove(link: Any, record: str, fields: Sequence[bytes], keys: Sequence[str]) -> None:
    commands = [
        ("UNLINK", *together[start : start + KEYS_MAX])
        for together in (link.together(keys) if keys else ())
        for start in range(0, len(together), KEYS_MAX)
    ]
    commands += [
        ("HDEL", record, *fields[start : start + KEYS_MAX])
        for start in range(0, len(fields), KEYS_MAX)
    ]
    accepted(link.pipeline(commands))


def _field(attempt: str, topic: str) -> str:
    return f"{_ATTEMPT}{attempt}:{topic}"


def _plan(parts: Sequence[Staged]) -> store.Plan:
    plan: dict[str, dict[str, list[int]]] = {}
    for part in parts:
        names = plan.setdefault(part.attempt, {}) if part.rows else {}
        for name, number in sorted(part.rows):
            names.setdefault(name, []).append(number)
    return plan
