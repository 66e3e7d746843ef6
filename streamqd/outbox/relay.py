"""The relay, which moves committed rows of an outbox to their topics, each exactly once.

A relay holds its outbox through a lease with an epoch. Before it sends to a topic for the first
time, it fences all partitions of the topic, so that relays with earlier epochs can no longer write
to them. Fencing a partition returns a record of the rows in its last batch. The relay then reads
the table again. Rows in a record are already in the topic, so the relay only deletes them.

No transaction is open while Redis is called, and no clock decides whether a row is sent. See
decision 0035.
"""

from __future__ import annotations

import logging
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamqd import config, logs, process
from streamqd.config import OutboxSettings
from streamqd.errors import (
    ContractError,
    DatabaseResponseError,
    DatabaseUnavailableError,
    InvalidValueError,
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
)
from streamqd.outbox import schema
from streamqd.outbox.database import Database
from streamqd.outbox.rows import OutboxRow
from streamqd.policy.partitioning import crc32_partition
from streamqd.process_token import is_gone, new_token
from streamqd.store import outbox, topics, untrusted
from streamqd.store.outbox import OutgoingRow, Published
from streamqd.store.replies import require_all
from streamqd.store.scripts import Answer, Call, Reply
from streamqd.store.store import Store

CALL_BYTES = 1 << 20  # bytes after which a call for one partition is full
FENCES_MAX = 512  # maximum calls in one write
PAGES_MAX = 16  # maximum batches that one pass reads if the rows of all earlier ones must wait
COUNTED_MAX = 10_000  # number up to which rows are counted for the figures
PAUSE_FIRST, PAUSE_LONGEST = 0.1, 5.0  # seconds of the first and the longest pause after a failure
WAIT_LONGEST = 5.0  # maximum seconds of a single wait, so that the supervisor gets heartbeats
CONFIRM_MS = 1000  # milliseconds that replicas have to confirm a batch
# If another relay holds the outbox and has been blocked for longer than this (in seconds), a burst
# stops waiting for it.
FAILING_SECONDS = 10.0
_LOADED_REPLICA = re.compile(rb"^slave[0-9]+:.*,state=online,offset=[1-9]", re.MULTILINE)
LEFT = 1  # exit code of a burst that left rows in the table
# Errors that come from the state of the whole server, and not from one key or one write.
_SERVER_REFUSALS = (RefusalKind.NOT_READY, RefusalKind.BUSY, RefusalKind.LOGIN)


@dataclass(slots=True)
class _Topic:
    """A topic in this epoch. `fenced` is True once all its partitions are fenced."""

    count: int
    fenced: bool = False


class _Obstacle(NamedTuple):
    """The reason why rows wait. `cause` is one of `store.outbox.CAUSES`."""

    cause: str
    error: str
    topic: str = ""  # empty if the rows of all topics wait


@dataclass(slots=True)
class _Figures:
    """The figures that the relay publishes."""

    sent: int = 0
    dead: int = 0
    rows: int = 0
    oldest: float = 0.0
    table: str = ""  # identity of the table, or '' while it is unknown
    obstacle: _Obstacle | None = None
    _failing_since: float = 0.0  # monotonic

    def note_obstacle(self, obstacle: _Obstacle) -> None:
        if self.obstacle is None:
            self._failing_since = time.monotonic()
        self.obstacle = obstacle

    def clear_obstacle(self) -> None:
        self.obstacle = None

    def fields(self) -> dict[str, object]:
        found, failing = self.obstacle, 0.0
        if found is not None:
            failing = time.monotonic() - self._failing_since
        return {
            "rows": min(self.rows, COUNTED_MAX),
            "more": int(self.rows > COUNTED_MAX),
            "oldest_ms": round(self.oldest * 1000),
            "sent": self.sent,
            "dead": self.dead,
            "table": self.table,
            "error": "" if found is None else found.error,
            "cause": "" if found is None else found.cause,
            "topic": "" if found is None else found.topic,
            "failing_ms": round(failing * 1000),
        }


@dataclass(slots=True)
class _Pass:
    """The result of one pass over the oldest rows in the table."""

    progress: bool = False  # True if rows were sent or dead-lettered, so more may follow
    read_again: bool = False  # True if the rows must be read again before any are sent
    held: int = 0  # number of rows that wait because of an obstacle
    obstacle: _Obstacle | None = None  # the first obstacle, or None

    def hold(self, rows: int, obstacle: _Obstacle) -> None:
        self.held += rows
        self.obstacle = self.obstacle or obstacle


class _Superseded(Exception):  # noqa: N818 - the end of an epoch is not an error
    """Raised if a relay with a later epoch has fenced a partition."""


class _Hold(NamedTuple):
    """The rows for one partition or topic pause until a monotonic time because of an obstacle."""

    until: float
    obstacle: _Obstacle


class Relay:
    """One relay of one outbox. It is a standby while another relay holds the outbox.

    It runs in one thread, with its own connection to Redis and its own database connection.
    `stop_fd` becomes readable when the relay should stop, and `stopping` reads from it.
    """

    def __init__(
        self,
        options: OutboxSettings,
        settings: config.Settings,
        database: Database,
        store: Store,
        *,
        stop_fd: int,
        stopping: Callable[[], bool],
    ) -> None:
        self._options = options
        self._settings = settings
        self._database = database
        self._store = store
        self._stop_fd = stop_fd
        self._stopping = stopping
        self._token = new_token()
        self._owner = f"{settings.daemon.instance} ({socket.gethostname()}, process {os.getpid()})"
        self._epoch = 0  # 0 while this relay does not hold the outbox
        self._above = 0  # the greatest epoch seen in a record
        self._keep_at = 0.0  # time of the next renewal, monotonic
        self._topics: dict[str, _Topic] = {}
        # Rows that are already in their topics, but perhaps still in the table.
        self._settled: list[OutboxRow] = []
        self._blocked: dict[tuple[str, int], _Hold] = {}  # by topic and partition (-1: the topic)
        self._spread = len(store.connection.group_by_node(("{a}", "{b}"))) > 1
        self._pages = 1  # batches to read, increased while all of their rows wait
        self._figures = _Figures()
        self._registered = False
        self._standby = False
        self._burst = False
        self._identified = False  # True if the identity of the table is known
        self._stuck = False  # True if the last pass could not send any row
        self._failures = 0  # number of turns that failed in succession
        self.left = ""  # sentence that explains why a burst left rows
        self._redis_episode = logs.Episode("outbox.redis_lost", "outbox.redis_recovered")
        self._database_episode = logs.Episode("outbox.database_lost", "outbox.database_recovered")
        self._obstacle = logs.Episode("outbox.blocked", "outbox.unblocked")

    # --- running ---

    def run(self, *, burst: bool = False) -> int:
        """Relay rows until a stop is requested. A burst stops when no more rows can be sent.

        Return 0, or LEFT if a burst left rows in the table. `left` then contains the reason. During
        an outage, the relay waits. If waiting cannot help, a burst raises DatabaseResponseError,
        RedisResponseError or InvalidValueError.
        """
        self._burst = burst
        logs.event("outbox.started", outbox=self._options.name, owner=self._owner)
        try:
            while not self._stopping():
                pause = self._turn()
                if burst and (self._is_empty() or self._is_stuck()):
                    break
                self._wait(pause)
                logs.flush()
        finally:
            self._release()
        logs.event("outbox.stopped", outbox=self._options.name, sent=self._figures.sent)
        return LEFT if self.left else 0

    def _turn(self) -> float:
        """Run one step, and return the seconds to wait until the next step."""
        try:
            pause = self._step()
        except (RedisUnavailableError, RedisResponseError, InvalidValueError) as error:
            if self._burst and not _is_transient(error):
                raise
            # The outcome of a write may be unknown, and Redis may still execute its call. The relay
            # therefore acquires a new epoch, with which such a late call is refused.
            self._epoch = 0
            self._registered = False  # Redis may have lost its data
            self._figures.note_obstacle(_Obstacle("redis", str(error)))
            self._redis_episode.log_failure(outbox=self._options.name, error=str(error))
        except DatabaseUnavailableError as error:
            refused = isinstance(error, DatabaseResponseError)
            if self._burst and refused:
                raise
            # If a delete got no reply, the rows in `_settled` are simply deleted again later.
            self._database.close()
            self._identified = False  # the next connection may lead to another server
            self._figures.note_obstacle(_Obstacle("refused" if refused else "database", str(error)))
            self._database_episode.log_failure(
                outbox=self._options.name, error=str(error), refused=refused or None
            )
            self._renew_without_database()
        else:
            self._failures = 0
            return pause
        self._failures += 1
        return float(min(PAUSE_LONGEST, PAUSE_FIRST * 2 ** min(self._failures - 1, 10)))

    def _step(self) -> float:
        pause = self._acquire_or_renew()
        if not self._epoch:
            return pause
        found = self._run_pass()
        self._database_episode.log_recovery(outbox=self._options.name)
        self._stuck = found.held > 0 and not (found.progress or found.read_again)
        if found.obstacle is not None:
            self._note_obstacle(found.held, found.obstacle)
        elif not found.read_again:
            self._figures.clear_obstacle()
            self._obstacle.log_recovery(outbox=self._options.name)
        return 0.0 if found.progress or found.read_again else self._options.poll

    def _note_obstacle(self, rows: int, obstacle: _Obstacle) -> None:
        self._figures.note_obstacle(obstacle)
        self._obstacle.log_failure(outbox=self._options.name, rows=rows, error=obstacle.error)

    def _wait(self, seconds: float) -> None:
        """Wait for the next turn, for new rows, or for a stop."""
        if self._epoch:
            seconds = min(seconds, max(0.0, self._keep_at - time.monotonic()))
        seconds = min(seconds, WAIT_LONGEST)
        if seconds <= 0:
            return
        if not self._epoch or self._database_episode.open or self._redis_episode.open:
            process.wait_readable([self._stop_fd], seconds)
            return
        try:
            self._database.wait(seconds, self._stop_fd)
        except DatabaseUnavailableError as error:
            self._database.close()
            self._identified = False
            self._database_episode.log_failure(outbox=self._options.name, error=str(error))

    def _is_empty(self) -> bool:
        if self._redis_episode.open or self._database_episode.open:
            return False
        try:
            return not self._database.measure_backlog(1)[0]
        except DatabaseUnavailableError:
            return False

    def _is_stuck(self) -> bool:
        """Return True if a burst cannot send the remaining rows, and set the reason in `left`."""
        if self._redis_episode.open or self._database_episode.open:
            return False  # the burst waits for the end of the outage
        obstacle = self._figures.obstacle
        if self._stuck and obstacle is not None:
            self.left = f"rows of outbox {self._options.name} wait: {obstacle.error}"
        elif self._standby:
            # Another relay holds the outbox. If that one is stuck, waiting for an empty table would
            # never end.
            try:
                view = outbox.read_view(self._store, self._options.name)
            except (RedisUnavailableError, RedisResponseError, InvalidValueError):
                return False  # the next turn reports this error
            if view.error and view.failing_seconds >= FAILING_SECONDS:
                self.left = (
                    f"another relay ({view.owner}) owns outbox {self._options.name}, and its"
                    f" rows wait: {view.error}"
                )
        return bool(self.left)

    def _release(self) -> None:
        """Release the outbox, so that another relay can acquire it immediately."""
        try:
            if self._epoch:
                self._measure()
                self._store.run(self._renew_call())
                self._store.run(outbox.release(self._store.keys, self._options.name, self._token))
        except (RedisUnavailableError, RedisResponseError, DatabaseUnavailableError) as error:
            logs.event(
                "outbox.release_failed",
                logging.WARNING,
                outbox=self._options.name,
                error=str(error),
            )
        self._database.close()
        self._store.connection.close()

    # --- the lease ---

    def _acquire_or_renew(self) -> float:
        """Acquire the lease, or renew it.

        Return 0, or, if another relay holds the lease, the seconds until the next attempt.
        """
        if not self._epoch:
            pause = self._acquire()
            if not self._epoch:
                return pause
        if time.monotonic() >= self._keep_at:
            self._measure()
            reply = self._store.run(self._renew_call())
            if reply.word == "FENCED":
                self._stop_publishing()
            self._keep_at = time.monotonic() + self._options.lease_ttl / 3
            if self._spread:
                self._topics.clear()  # in a cluster, no script compares the partition counts
            if self._epoch and self._is_shared():
                # The relay of the other outbox may be releasing it, too. The random pause avoids
                # that both try again at the same time.
                self._store.run(self._renew_call())
                self._store.run(outbox.release(self._store.keys, self._options.name, self._token))
                self._epoch = 0
                return self._options.poll * random.uniform(1, 2)
        return 0.0

    def _is_shared(self) -> bool:
        """Return True if the relay of another outbox is using the same table.

        The records of sent rows belong to one outbox. If two outboxes shared a table, both relays
        would therefore send each row. Each relay publishes the identity of its table before this
        check, so that at least the later one of the two finds the other.
        """
        other = outbox.find_conflict(self._store, self._options.name, self._figures.table)
        self._stuck = other is not None
        if other is None:
            return False
        text = (
            f"outbox {other.name} has the same table, and its relay ({other.owner}) sends the"
            " rows; remove one of the two outboxes from the configurations"
        )
        self._note_obstacle(self._figures.rows, _Obstacle("shared", text))
        return True

    def _acquire(self) -> float:
        if not self._registered:
            outbox.register(self._store, self._options.name)
            self._registered = True
        if self._is_shared():  # an earlier attempt has read the identity
            return self._options.poll
        reply = self._store.run(self._acquire_call(""))
        if reply.word == "HELD" and is_gone(holder := untrusted.label(reply.values[0])):
            reply = self._store.run(self._acquire_call(holder))
        self._redis_episode.log_recovery(outbox=self._options.name)
        if reply.word == "HELD":
            if not self._standby:
                self._standby = True
                logs.event(
                    "outbox.standby",
                    outbox=self._options.name,
                    owner=untrusted.label(reply.values[2]),
                )
            return min(self._options.poll, max(0.05, int(reply.values[1]) / 1000))
        self._epoch = int(reply.values[0])
        self._keep_at = 0.0  # publishes the first figures immediately
        self._topics.clear()
        self._settled.clear()  # fencing returns records that contain these rows
        if self._standby or not self._figures.sent:
            logs.event("outbox.acquired", outbox=self._options.name, epoch=self._epoch)
        self._standby = False
        return 0.0

    def _acquire_call(self, dead: str) -> Call:
        options = self._options
        return outbox.acquire(
            *(self._store.keys, options.name, self._token, options.lease_ttl),
            owner=self._owner,
            above=self._above,
            dead=dead,
        )

    def _renew_call(self) -> Call:
        options, figures = self._options, self._figures.fields()
        return outbox.renew(self._store.keys, options.name, self._token, options.lease_ttl, figures)

    def _measure(self) -> None:
        self._figures.rows, self._figures.oldest = self._database.measure_backlog(COUNTED_MAX + 1)
        if not self._identified:
            self._figures.table = schema.identity(self._database)
            self._identified = True

    def _renew_without_database(self) -> None:
        """Keep the lease while the database is unavailable, and publish the reason."""
        if not self._epoch or time.monotonic() < self._keep_at:
            return
        self._keep_at = time.monotonic() + self._options.lease_ttl / 3
        try:
            if self._store.run(self._renew_call()).word == "FENCED":
                self._stop_publishing()
        except (RedisUnavailableError, RedisResponseError) as error:
            self._epoch = 0
            self._redis_episode.log_failure(outbox=self._options.name, error=str(error))

    def _stop_publishing(self) -> None:
        """Stop sending rows, because another relay now holds the outbox."""
        if self._epoch:
            logs.event("outbox.lost", outbox=self._options.name, epoch=self._epoch)
        self._epoch = 0

    # --- one pass ---

    def _run_pass(self) -> _Pass:
        """Send the oldest rows, and delete them once they are in their topics.

        The steps are: delete rows sent earlier, read the table, fence new topics, publish rows, and
        delete those that were published.
        """
        found = _Pass()
        # Each batch replaces the record of the previous one. The rows in that record must be
        # deleted first, because later nothing would show that they are already in their topics.
        self._delete_settled()
        wanted = self._options.batch * self._pages
        rows = self._database.read_oldest(wanted)
        try:
            sendable = list(self._route_rows(rows, found))
            if not found.read_again:
                self._publish(sendable, found)
        except _Superseded:
            self._epoch = 0  # `_acquire` then finds out who holds the outbox
            found.read_again = True
            return found
        found.progress = found.progress or bool(self._settled)
        self._delete_settled()
        stuck = found.held > 0 and not found.progress and len(rows) >= wanted
        if stuck and self._pages < PAGES_MAX:
            self._pages *= 2
            found.read_again = True
        elif not found.held:
            self._pages = 1
        return found

    def _delete_settled(self) -> None:
        """Delete the rows that are already in their topics."""
        if self._settled:
            self._confirm()
            self._database.delete(self._settled)
            self._settled = []

    def _route_rows(
        self, rows: Sequence[OutboxRow], found: _Pass
    ) -> Iterator[tuple[OutboxRow, int]]:
        """Yield each row that can be sent now, with its partition.

        Rows with a fault are dead-lettered, and topics that are new in this epoch are fenced.
        """
        uids: set[str] = set()
        for row in rows:
            fault, topic = row.fault, None
            # The second of two rows with the same uid would count as already sent. Its message
            # would be lost, so the row is dead-lettered instead.
            if not fault and row.uid in uids:
                fault = f"another row has the uid {row.uid}; give each row a unique uid"
            uids.add(row.uid)
            if not fault:
                topic, fault = self._topic(row.topic, found)
            if fault:
                self._move_to_dead_table(row, fault)
                found.progress = True
            elif topic is None:
                continue  # the row must wait
            elif row.partition is not None and row.partition >= topic.count:
                self._move_to_dead_table(
                    row, topics.no_partition_text(row.topic, row.partition, topic.count)
                )
                found.progress = True
            else:
                routing = row.uid.encode() if row.key is None else row.key
                chosen = row.partition
                yield row, crc32_partition(routing, topic.count) if chosen is None else chosen

    def _topic(self, name: str, found: _Pass) -> tuple[_Topic | None, str]:
        """Return a fenced topic, or None and the reason why its rows cannot be sent.

        If that reason is '', the rows wait, because the topic cannot be used yet.
        """
        topic = self._topics.get(name)
        try:
            if topic is None:
                count = self._count(name)
                if count is None:
                    return None, f"topic {name} does not exist; create it, and send the row again"
                topic = self._topics[name] = _Topic(count)
            if not topic.fenced and not self._is_held_back((name, -1), found):
                self._fence(name, topic)
                # Some of the rows that were read before the fence may already be in the topic, so
                # they are read again.
                found.read_again = True
        except (RedisResponseError, InvalidValueError, ContractError) as error:
            if isinstance(error, RedisResponseError) and error.kind in _SERVER_REFUSALS:
                raise
            self._topics.pop(name, None)
            self._hold_back(
                (name, -1), 1, _Obstacle("topic", f"topic {name}: {error}", name), found
            )
            return None, ""
        return (topic if topic.fenced else None), ""

    def _count(self, name: str) -> int | None:
        """Return the partition count of a topic. A missing topic is created if it is configured."""
        count = topics.partition_count(self._store, name)
        configured = self._settings.topics.get(name)
        if count is None and configured is not None:
            count = topics.create(self._store, name, configured)
        return count

    def _fence(self, name: str, topic: _Topic) -> None:
        """Fence all partitions of a topic against earlier epochs, and read their records."""
        keys, meta = self._store.keys, self._meta(name)
        for first in range(0, topic.count, FENCES_MAX):
            numbers = range(first, min(topic.count, first + FENCES_MAX))
            calls = [
                outbox.fence(keys, self._options.name, name, number, self._epoch, topic.count, meta)
                for number in numbers
            ]
            for number, reply in zip(numbers, self._store.run_each(calls), strict=True):
                answered = self._check_reply(reply)
                if answered.word == "FENCED":
                    self._raise_superseded(answered)
                if answered.word == "MOVED":
                    self._topics.pop(name, None)
                    return
                record = keys.outbox_record(name, number, self._options.name)
                recorded = outbox.parse_rows(answered.values[0], record)
                self._settled += [OutboxRow(each.id, each.uid) for each in recorded]
        topic.fenced = True

    def _publish(self, rows: Sequence[tuple[OutboxRow, int]], found: _Pass) -> None:
        """Write rows to their partitions, with one call for each partition."""
        parts = {
            place: part
            for place, part in _first_rows(rows, self._options.batch).items()
            if not self._is_held_back(place, found, len(part))
        }
        calls = []
        for (name, number), part in parts.items():
            some = [_outgoing(row) for row in part]
            calls.append(
                outbox.publish(
                    *(self._store.keys, self._options.name, name, number, some, self._epoch),
                    partitions=self._topics[name].count,
                    meta=self._meta(name),
                    max_backlog=self._options.max_backlog,
                )
            )
        # An error for a missing reply is raised before any other error, because that write may
        # still be executed.
        replies: list[Reply | RedisResponseError | ContractError] = require_all(
            self._store.run_each(calls)
        )
        superseded: Reply | None = None
        for ((name, number), part), reply in zip(parts.items(), replies, strict=True):
            if isinstance(reply, Reply) and reply.word == "FENCED":
                superseded = reply
            else:
                self._record_reply(name, number, part, reply, found)
        if superseded is not None:
            self._raise_superseded(superseded)

    def _record_reply(
        self,
        name: str,
        number: int,
        part: Sequence[OutboxRow],
        reply: Reply | RedisResponseError | ContractError,
        found: _Pass,
    ) -> None:
        """Record the result of the call for one partition."""
        where = f"{name}/{number}"
        if isinstance(reply, RedisResponseError | ContractError):
            if isinstance(reply, RedisResponseError) and reply.kind in _SERVER_REFUSALS:
                raise reply
            obstacle = _Obstacle("partition", f"{where}: {reply}", name)
            self._hold_back((name, number), len(part), obstacle, found)
            return
        if reply.word in ("MOVED", "UNFENCED"):
            self._topics.pop(name, None)
            found.read_again = True
            return
        published = Published.parse(reply)
        self._figures.sent += published.written
        self._settled += part[: published.settled]
        left = len(part) - published.settled
        if published.full:
            text = f"{where}: max_backlog is reached ({self._options.max_backlog} messages wait)"
            self._hold_back((name, number), left, _Obstacle("backlog", text, name), found)
        elif published.refusal is not None:
            obstacle = _Obstacle("partition", f"{where}: {published.refusal}", name)
            self._hold_back((name, number), left, obstacle, found)

    def _hold_back(
        self, place: tuple[str, int], rows: int, obstacle: _Obstacle, found: _Pass
    ) -> None:
        """Postpone these rows for `poll` seconds. Rows for other places are still sent."""
        self._blocked[place] = _Hold(time.monotonic() + self._options.poll, obstacle)
        found.hold(rows, obstacle)

    def _is_held_back(self, place: tuple[str, int], found: _Pass, rows: int = 1) -> bool:
        """Return True if the rows for this place must still wait for their next attempt."""
        hold = self._blocked.get(place)
        if hold is None:
            return False
        if hold.until <= time.monotonic():
            del self._blocked[place]
            return False
        found.hold(rows, hold.obstacle)
        return True

    def _confirm(self) -> None:
        """Wait until `wait_replicas` replicas have all rows that were written.

        Raises RedisUnavailableError if fewer replicas have them within CONFIRM_MS.
        """
        wanted = self._options.wait_replicas
        if not wanted:
            return
        for node in self._store.connection.masters():
            have = int(node.execute("WAIT", wanted, CONFIRM_MS))
            # If no replica was connected when the rows were written, WAIT also counts a replica
            # that is still loading its first copy of the data. Only replicas that have finished
            # loading are therefore counted.
            if have >= wanted:
                have = len(_LOADED_REPLICA.findall(bytes(node.execute("INFO", "replication"))))
            if have < wanted:
                raise RedisUnavailableError(
                    f"{have} of {wanted} replicas have the last rows (wait_replicas)", sent=True
                )

    def _move_to_dead_table(self, row: OutboxRow, fault: str) -> None:
        if not self._database.move_to_dead_table(row, fault):
            return
        self._figures.dead += 1
        logs.event(
            "outbox.row_dead_lettered",
            logging.WARNING,
            outbox=self._options.name,
            row=row.id,
            topic=row.topic or None,
            uid=row.uid or None,
            error=fault,
        )

    # --- replies ---

    def _meta(self, name: str) -> str | None:
        return None if self._spread else self._store.keys.meta(name)

    def _raise_superseded(self, reply: Reply) -> None:
        self._above = max(
            self._above, untrusted.integer(reply.values[0], "the record of an outbox", "epoch")
        )
        raise _Superseded

    def _check_reply(self, reply: Answer) -> Reply:
        if isinstance(reply, RedisResponseError | RedisUnavailableError | ContractError):
            raise reply
        return reply


def _is_transient(error: Exception) -> bool:
    """Return True if the cause of an error may disappear without an operator's action."""
    if isinstance(error, RedisResponseError):
        return error.transient or error.kind in (*_SERVER_REFUSALS[:2], RefusalKind.FULL)
    return isinstance(error, RedisUnavailableError)


def _outgoing(row: OutboxRow) -> OutgoingRow:
    # The uid is stored in the field for delayed sends, so that `streamqd trace` finds the entry.
    fields = [*row.fields, b"sendId", row.uid.encode()]
    return OutgoingRow(row.id, row.uid, row.due_unix_ms, fields)


def _first_rows(
    rows: Sequence[tuple[OutboxRow, int]], most: int
) -> dict[tuple[str, int], list[OutboxRow]]:
    """Return the first rows for each partition, up to `most` rows and CALL_BYTES.

    The last row of a partition may exceed CALL_BYTES.
    """
    parts: dict[tuple[str, int], list[OutboxRow]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for row, number in rows:
        place = (row.topic, number)
        part, size = parts.setdefault(place, []), sizes.get(place, 0)
        if (
            size < CALL_BYTES and len(part) < most
        ):  # once this is false for a partition, it stays false, so that the order is kept
            part.append(row)
            sizes[place] = size + row.size
    return parts
