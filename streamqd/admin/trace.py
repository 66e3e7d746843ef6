"""Trace one message: find its entry, its state in every group, and its copies.

The uid `topic/partition/id` identifies a message in all its copies. A trace searches the streams of
the partition for the message's entry, retries, dead letters and replays. It writes nothing. The
search is limited, and `complete` is False if a limit left something out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from streamqd.admin import delayed, outbox_messages, snapshot, topics
from streamqd.admin.assignments import AssignmentRow
from streamqd.admin.dead_letters.selection import DeadLetterFields, find_origin
from streamqd.admin.outbox_messages import OutboxUid
from streamqd.admin.published import Fleet
from streamqd.admin.reading import Entry, Id, ask, last_id, pairs, read_id, server_unix_ms
from streamqd.errors import InvalidRequestError, RedisResponseError, RequestRefusedError
from streamqd.message import LAST_ERROR, REPLAY_OF, RUN_REFERENCE
from streamqd.model import Assignment
from streamqd.store import retries, tracing
from streamqd.store.fetch import CONSUMER

CALLS_MAX = 40  # calls to search one stream, enough for 20,000 entries
PAGES_MAX = 160  # pages to read from a group's waiting retries, enough for 10,000
PAGE = 64
_UID = re.compile(r"([^/]+)/([0-9]{1,9})/([0-9A-Za-z_-]{1,64})")

# Headers that identify the origin of a message.
SCHEDULE, EDITED_FROM = "x-schedule", "x-edited-from"

# The states that a message can have in a group. The first one that applies is reported.
RUNNING, PENDING, READY, DELAYED = "running", "pending", "retry-unread", "waiting"
DEAD, UNREAD, DONE, UNREADABLE = "dead-lettered", "unread", "acknowledged", "unreadable"
MISSING, MISSED = "missing", "missed"  # used if nothing proves that the message was written
_KNOWN = (RUNNING, PENDING, READY, DELAYED, DEAD)  # states that prove that the message was written
_UNPROVEN = {DONE: MISSING, UNREAD: MISSED}  # the states to report without such proof


@dataclass(frozen=True, slots=True)
class EntryTrace:
    """The message's entry in the stream of its partition. `key` is null if the message has no key.

    The other fields describe the origin of the message, and each is '' if it does not apply:

    - `schedule` is the name of the schedule that sent the message, and `scheduled_for` is the tick
      (ISO 8601, UTC).
    - `send_id` is the ID of the delayed send or the outbox row that became this message.
    - `copy_of` is the uid of the original message, if this entry was written by a replay of dead
      letters to every group or to another topic.
    - `replay_of` is the entry that `pipeline replay` sent again.
    - `edited_from` is the message that was edited in the console.
    - `trace_id` is the trace ID of the send.

    Any producer can write the headers that contain these values, so they prove nothing.
    """

    id: str
    written_unix_ms: int
    key: bytes | None
    payload_bytes: int
    schedule: str = ""
    scheduled_for: str = ""
    send_id: str = ""
    copy_of: str = ""
    replay_of: str = ""
    edited_from: str = ""
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetterTrace:
    """A dead letter of the message. Pass `id` to `dlq show`.

    The other fields have the same meaning as in `dlq list`.
    """

    id: str
    group: str
    reason: str
    error_class: str
    error_message: str
    attempts: int | None
    crashes: int | None
    replays: int
    failed_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class GroupTrace:
    """The state of the message in one group.

    `state` is one of:

    - unread
    - pending: delivered and not acknowledged. If `due_unix_ms` is set, the message has failed,
      stays in flight, and runs again at that time.
    - running
    - waiting: failed, and waiting for its next attempt at `due_unix_ms`.
    - retry-unread: due for its next attempt, but not read yet.
    - dead-lettered
    - acknowledged: delivered, and no longer pending, waiting or dead-lettered.
    - missed, missing: used in place of unread and acknowledged if nothing proves that the message
      was ever written.
    - unreadable: the state cannot be read, for the reason in `problem`.

    `owner` is the instance that owns the partition, or '' if there is none. `condition` is the
    condition of the group on the partition, as in `status`. `place` is `m:ID` for an entry in the
    partition's stream, or `r:ID` for one in the retry stream. `attempt` is the number of the
    current or next run, starting at 1, or null if it is unknown. `crashes` is the number of worker
    processes that the message crashed. `failures` is the number of runs that failed while it stayed
    in flight.

    `error_class` and `error_message` describe the last failure, and are '' if it was not stored.
    For a waiting message, `error_message` starts with the class. `consumer` is the client that
    holds a pending message, or '' for streamqd itself. `deliveries` is the number of times that a
    pending entry was delivered, and `idle_ms` is the time since the last delivery.
    `running_seconds` is the duration of the current run. `replays` is the number of times that the
    message was replayed from the dead letters. `dead_letter_ids` contains the IDs of its dead
    letters that still exist.
    """

    group: str
    state: str
    owner: str
    condition: str
    place: str = ""
    attempt: int | None = None
    crashes: int = 0
    failures: int = 0
    replays: int = 0
    deliveries: int | None = None
    idle_ms: int | None = None
    consumer: str = ""
    due_unix_ms: int | None = None
    running_seconds: float | None = None
    error_class: str = ""
    error_message: str = ""
    dead_letter_ids: list[str] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything that Redis still contains about one message.

    `where` is one of:

    - present: in its partition.
    - delayed: a delayed send that is due at `due_unix_ms`.
    - trimmed: older than the first entry that trimming kept.
    - missing

    `written` is true if an entry or a copy proves that the message was written, false for a delayed
    send, and null if there is no proof. `send_id` is set if you traced a delayed send that has
    become this message, and `outbox_uid` if you traced an ID that `Outbox.send` returned.
    Otherwise, they are ''. `archived` is true if the archive pipeline has passed the message, and
    null if nothing is archived yet. `replays` contains the entries that replays to every group have
    written to the partition. `complete` is false if a limit stopped the search.
    """

    uid: str
    topic: str
    partition: int
    id: str
    now_unix_ms: int
    where: str
    written: bool | None
    send_id: str = ""
    outbox_uid: str = ""
    due_unix_ms: int | None = None
    entry: EntryTrace | None = None
    archived: bool | None = None
    groups: list[GroupTrace] = field(default_factory=list)
    dead_letters: list[DeadLetterTrace] = field(default_factory=list)
    replays: list[str] = field(default_factory=list)
    complete: bool = True


class Name(NamedTuple):
    """The parts of a uid. `id` is an entry ID, or the send ID for a delayed send."""

    topic: str
    partition: int
    id: str


def read_name(text: str) -> Name | OutboxUid:
    """Parse TOPIC/PARTITION/ID or TOPIC/outbox/UID. Raises InvalidRequestError."""
    return outbox_messages.read_uid(text) or read_uid(text)


def read_uid(text: str) -> Name:
    """Parse TOPIC/PARTITION/ID. Raises InvalidRequestError."""
    match = _UID.fullmatch(text)
    if match is None:
        raise InvalidRequestError(f"{text!r} is not a uid such as orders/3/1700000000000-0")
    return Name(match[1], int(match[2]), match[3])


def trace(fleet: Fleet, name: Name | OutboxUid) -> Trace:
    """Trace a message by its ID, or a delayed send together with the message that it produced.

    Raises TopicNotFoundError. Raises RequestRefusedError if Redis has no trace of the message,
    which may also mean that it was never written.
    """
    count = topics.partition_count(fleet.store, name.topic)
    if isinstance(name, OutboxUid):
        return _trace_outbox_row(fleet, name, count)
    topics.check_partition(name.topic, name.partition, count)
    try:
        entry_id = read_id(name.id)
    except ValueError:
        return _trace_delayed_send(fleet, name)
    return _Search(fleet, name, entry_id).run()


def _trace_outbox_row(fleet: Fleet, name: OutboxUid, partitions: int) -> Trace:
    """Find the message of an outbox row by searching every partition for the row's UID.

    Raises RequestRefusedError if the message is not found.
    """
    search = outbox_messages.find(fleet.store, name, partitions)
    if search.found is None:
        problem = f"message {name} is not in topic {name.topic}"
        if not search.complete:
            problem = f"message {name} was not found among the entries that were searched"
        elif search.trimmed:
            problem += ", which was trimmed since: the message was removed, or was not sent yet"
        raise RequestRefusedError(
            f"{problem}; a message is sent after its transaction commits, so run `streamqd outbox"
            " status` to see the rows that wait and the dead-lettered rows"
        )
    partition, entry_id = search.found
    if not entry_id:
        found = _trace_delayed_send(fleet, Name(name.topic, partition, name.uid))
    else:
        place = Name(name.topic, partition, entry_id)
        found = _Search(fleet, place, read_id(entry_id)).run()
    return replace(found, send_id="", outbox_uid=str(name))


def _trace_delayed_send(fleet: Fleet, name: Name) -> Trace:
    """Find a delayed send by its send ID.

    If it was already sent, find the message that it produced. Raises RequestRefusedError if neither
    is found.
    """
    store = fleet.store
    due = store.execute("ZSCORE", store.keys.delayed_sends(name.topic, name.partition), name.id)
    if due is None:
        missed = delayed.find_sent(store, name.topic, [f"{name.partition}:{name.id}"])
        if not missed.sent:
            raise RequestRefusedError(
                f"delayed send {'/'.join(map(str, name))} not found: it was canceled, never"
                f" sent, or written before the last {delayed.SEARCH_MAX:,} entries of its partition"
            )
        found = read_uid(missed.sent[0].uid)
        return replace(_Search(fleet, found, read_id(found.id)).run(), send_id=name.id)
    return Trace(
        uid="/".join(map(str, name)),
        topic=name.topic,
        partition=name.partition,
        id=name.id,
        now_unix_ms=server_unix_ms(store.connection),
        where="delayed",
        written=False,
        due_unix_ms=_unix_ms(due),
    )


class _Search:
    """One search for a message. It remembers whether a limit stopped it."""

    def __init__(self, fleet: Fleet, name: Name, entry_id: Id) -> None:
        self._fleet, self._store, self._keys = fleet, fleet.store, fleet.store.keys
        self._name, self._id = name, entry_id
        self._complete = True
        self._replay_ids: list[str] = []  # entries written by replays to every group

    def run(self) -> Trace:
        name, keys = self._name, self._keys
        view = snapshot.read_published(self._fleet)
        assignments = {each.assignment: each for each in view.assignments}
        stream = keys.stream(name.topic, name.partition)
        here, info, first, archived, removed = ask(
            self._store,
            [
                ("XRANGE", stream, str(self._id), str(self._id)),
                ("XINFO", "STREAM", stream),
                ("HGET", keys.trim(name.topic, name.partition), "first"),
                ("HGET", keys.trim(name.topic, name.partition), "archived"),
                ("HGET", keys.trim(name.topic, name.partition), "removed"),
            ],
        )
        counts = pairs(info)
        last = read_id(last_id(info))
        dead_letters = [
            self._dead_letter(copy)
            for copy in self._find_copies(keys.dlq(name.topic, name.partition))
        ]
        where = "present" if here else "trimmed" if self._is_trimmed(first) else "missing"
        if self._id > last and not dead_letters:
            raise RequestRefusedError(
                f"message {self._uid} not found: the last one written to its partition is {last}"
            )
        self._replay_ids = [copy.id for copy in self._find_copies(stream)]
        groups = topics.groups(self._store, name.topic, (name.partition,))
        rows = [self._trace_group(group, dead_letters, assignments) for group in sorted(groups)]
        written = bool(
            here or dead_letters or self._replay_ids or any(row.state in _KNOWN for row in rows)
        )
        unreadable = any(row.state == UNREADABLE for row in rows)
        if not written and not unreadable:
            if removed is None and _is_whole(counts):
                raise RequestRefusedError(
                    f"message {self._uid} was never written; check the topic, partition and ID"
                )
            if _is_kept_part(self._id, counts):
                raise RequestRefusedError(
                    f"message {self._uid} was never written; check the topic, partition and ID"
                )
        if not written:
            rows = [replace(row, state=_UNPROVEN.get(row.state, row.state)) for row in rows]
        passed = _id(archived)
        return Trace(
            uid=self._uid,
            topic=name.topic,
            partition=name.partition,
            id=str(self._id),
            now_unix_ms=view.now_unix_ms,
            where=where,
            written=written or None,
            entry=_entry(name, here[0]) if here else None,
            archived=None if passed is None else self._id <= passed,
            groups=rows,
            dead_letters=dead_letters,
            replays=self._replay_ids,
            complete=self._complete,
        )

    @property
    def _uid(self) -> str:
        return f"{self._name.topic}/{self._name.partition}/{self._id}"

    def _is_trimmed(self, first: bytes | None) -> bool:
        """Return True if trimming has removed all entries up to and including the message."""
        kept = _id(first)
        return kept is not None and self._id < kept

    # --- copies ---

    def _find_copies(self, stream: str) -> list[tracing.Copy]:
        """Return the copies of the message in a stream.

        Copies are always written after the message, so the search starts at its ID.
        """
        copies: list[tracing.Copy] = []
        begin = str(self._id)
        for _ in range(CALLS_MAX):
            found, begin = tracing.parse_copies(
                self._store.run(tracing.find(stream, str(self._id), begin))
            )
            copies += [each for each in found if self._is_ours(each)]
            if not begin:
                return copies
        self._complete = False
        return copies

    def _is_ours(self, copy: tracing.Copy) -> bool:
        """Return False if this is the copy of a message in another topic or partition."""
        dead_letter = DeadLetterFields(copy.fields)
        topic, partition = (
            dead_letter.text(b"originalTopic"),
            dead_letter.text(b"originalPartition"),
        )
        return topic in ("", self._name.topic) and partition in ("", str(self._name.partition))

    def _dead_letter(self, copy: tracing.Copy) -> DeadLetterTrace:
        dead_letter = DeadLetterFields(copy.fields)
        return DeadLetterTrace(
            id=f"{self._name.partition}:{copy.id}",
            replays=max(0, dead_letter.number(b"replayCount") or 0),
            **dead_letter.fields_for(DeadLetterTrace),
        )

    # --- one group ---

    def _trace_group(
        self,
        group: str,
        dead_letters: list[DeadLetterTrace],
        assignments: dict[Assignment, AssignmentRow],
    ) -> GroupTrace:
        assignment = Assignment(self._name.topic, self._name.partition, group)
        seen = assignments.get(assignment)
        owner, condition = (seen.owner, seen.condition) if seen is not None else ("", "unknown")
        try:
            found = self._group_state(assignment, dead_letters, seen)
        except RedisResponseError as error:
            found = {"state": UNREADABLE, "problem": str(error)}
        return GroupTrace(group=group, owner=owner, condition=condition, **found)

    def _group_state(
        self,
        assignment: Assignment,
        dead_letters: list[DeadLetterTrace],
        seen: AssignmentRow | None,
    ) -> dict[str, Any]:
        if assignment.reads_dead_letters:
            return self._state_by_dead_letters(assignment, dead_letters, seen)
        retry = self._keys.retry_stream(*assignment)
        of_group = [each for each in dead_letters if each.group == assignment.group]
        more: dict[str, Any] = {"dead_letter_ids": [each.id for each in of_group]}
        replays = max((each.replays for each in of_group), default=0)
        # If the message was replayed to every group, several entries stand for it. The newest one
        # that is running or pending determines the state, so they are examined from the newest on.
        held = [
            self._entry_state(assignment, self._keys.source(*assignment), f"m:{entry_id}", seen)
            for entry_id in (*reversed(self._replay_ids), str(self._id))
        ]
        for each in held:
            if each["state"] in (RUNNING, PENDING):
                return more | each | {"attempt": each["failures"] + 1, "replays": replays}
        for copy in reversed(self._find_copies(retry)):
            counts = _counts(copy.fields)
            replays = max(replays, counts["replays"])
            again = self._entry_state(assignment, retry, f"r:{copy.id}", seen)
            if again["state"] != DONE:
                word = READY if again["state"] == UNREAD else again["state"]
                counts["attempt"] += again.get("failures", 0)
                counts["crashes"] += again.get("crashes", 0)
                return more | again | counts | {"state": word, "replays": replays}
        for row in self._find_delayed(assignment):
            found = _describe_delayed(row)
            return more | found | {"replays": max(replays, found["replays"])}
        more["replays"] = replays
        if of_group:
            last = of_group[-1]
            cause = {"error_class": last.error_class, "error_message": last.error_message}
            return more | cause | {"state": DEAD}
        return more | {"state": UNREAD if held[0]["state"] == UNREAD else DONE}

    def _state_by_dead_letters(
        self,
        assignment: Assignment,
        dead_letters: list[DeadLetterTrace],
        seen: AssignmentRow | None,
    ) -> dict[str, Any]:
        """Return the state of the message in a group that reads dead letters."""
        for dead_letter in reversed(dead_letters):
            place = f"m:{dead_letter.id.partition(':')[2]}"
            return self._entry_state(assignment, self._keys.source(*assignment), place, seen) | {
                "dead_letter_ids": [dead_letter.id]
            }
        return {"state": "none"}

    def _entry_state(
        self, assignment: Assignment, stream: str, place: str, seen: AssignmentRow | None
    ) -> dict[str, Any]:
        """Return the state of one stream entry in a group: unread, running, pending or done."""
        entry_id = place[2:]
        groups, pending, crashes, failures, due = ask(
            self._store,
            [
                ("XINFO", "GROUPS", stream),
                ("XPENDING", stream, assignment.group, entry_id, entry_id, 1),
                ("HGET", self._keys.attempts(*assignment), f"{place}:c"),
                ("HGET", self._keys.attempts(*assignment), f"{place}:f"),
                ("HGET", self._keys.attempts(*assignment), f"{place}:due"),
            ],
        )
        found = {"place": place, "crashes": _count(crashes), "failures": _count(failures)}
        if pending:
            _, consumer, idle, deliveries = pending[0]
            found |= {"state": PENDING, "idle_ms": int(idle), "deliveries": int(deliveries)}
            if due:
                found["due_unix_ms"] = _unix_ms(due)
            if consumer != CONSUMER.encode():
                found["consumer"] = consumer.decode("utf-8", "replace")
            if seen is not None and seen.running == place:
                found |= {"state": RUNNING, "running_seconds": seen.longest_run_seconds}
            return found
        rows = [pairs(each) for each in groups or ()]
        at = [each for each in rows if each[b"name"] == assignment.group.encode()]
        read = bool(at) and read_id(at[0][b"last-delivered-id"]) >= read_id(entry_id)
        return {"state": DONE if read else UNREAD}

    def _find_delayed(self, assignment: Assignment) -> Iterator[retries.Delayed]:
        """Yield the message's waiting retries, by searching all waiting retries of the group."""
        after = (0, "")
        for _ in range(PAGES_MAX):
            page, more = retries.rows(
                self._store.run(retries.page(self._keys, assignment, after, PAGE))
            )
            for row in page:
                original = row.fields.get(b"originalId", b"").decode("utf-8", "replace")
                if original == str(self._id) or row.place == f"m:{self._id}":
                    yield row
            if not page or not more:
                return
            after = (page[-1].due_unix_ms, page[-1].place)
        self._complete = False


# --- reading ------------------------------------------------------------------------------------


def parse_trace_id(headers: Mapping[str, str]) -> str:
    """Return the trace ID in the header `traceparent`, or '' if there is no valid one."""
    found = RUN_REFERENCE.fullmatch(headers.get("traceparent", ""))
    return found[1] if found and found[1].strip("0") and found[2].strip("0") else ""


def _entry(name: Name, raw: list[Any]) -> EntryTrace:
    entry = Entry(name.partition, read_id(raw[0]), pairs(raw[1]))
    headers = entry.headers or {}
    origin = find_origin(name.topic, entry)
    return EntryTrace(
        id=str(entry.id),
        written_unix_ms=entry.id.ms,
        key=entry.fields.get(b"key"),
        payload_bytes=len(entry.fields.get(b"payload", b"")),
        schedule=headers.get(SCHEDULE, ""),
        scheduled_for=headers.get("x-scheduled-for", ""),
        send_id=entry.fields.get(b"sendId", b"").decode("utf-8", "replace"),
        copy_of="/".join(origin) if origin[2] else "",
        replay_of=headers.get(REPLAY_OF, ""),
        edited_from=headers.get(EDITED_FROM, ""),
        trace_id=parse_trace_id(headers),
    )


def _describe_delayed(row: retries.Delayed) -> dict[str, Any]:
    return _counts(row.fields) | {
        "state": DELAYED,
        "place": row.place,
        "due_unix_ms": row.due_unix_ms,
        "error_message": DeadLetterFields(row.fields).text(LAST_ERROR),
    }


def _counts(fields: dict[bytes, bytes]) -> dict[str, Any]:
    return {
        "attempt": _count(fields.get(b"retryCount")) + 1,
        "crashes": _count(fields.get(b"crashCount")),
        "replays": _count(fields.get(b"replayCount")),
    }


def _count(raw: bytes | None) -> int:
    """Parse a counter from the fields of an entry. Return 0 if it is missing or not a number."""
    return int(raw) if raw and raw.isdigit() and len(raw) <= COUNT_DIGITS else 0


COUNT_DIGITS = 9


def _is_whole(stream: dict[bytes, Any]) -> bool:
    """Return True if a stream still has every entry that was ever added to it.

    Return False if this is unknown, because the server does not count added entries (Redis before
    7.0).
    """
    return b"entries-added" in stream and stream[b"entries-added"] == stream[b"length"]


def _is_kept_part(entry_id: Id, stream: dict[bytes, Any]) -> bool:
    """Return True if no entry with this ID or a later one was ever deleted from the stream.

    There are two ways to delete an entry. Trimming removes only the oldest entries, so the ID must
    be greater than that of the first entry. XDEL can remove any entry, so the ID must also be
    greater than the greatest ID that XDEL has removed. Return False if the server does not record
    that ID (Redis before 7.0), or if the stream is empty.
    """
    first, deleted = stream.get(b"first-entry"), stream.get(b"max-deleted-entry-id")
    if not first or deleted is None:
        return False
    return entry_id > max(read_id(first[0]), read_id(deleted))


def _id(raw: bytes | None) -> Id | None:
    try:
        return read_id(raw) if raw else None
    except (ValueError, UnicodeDecodeError):
        return None


def _unix_ms(score: bytes) -> int | None:
    try:
        return int(float(score))
    except (ValueError, OverflowError):
        return None
