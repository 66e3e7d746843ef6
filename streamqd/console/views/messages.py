"""Messages: a limited search, a live tail, and one message's origin, states and copies."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from streamqd import extras
from streamqd.admin import delayed, tail
from streamqd.admin import trace as tracing
from streamqd.admin.messages import MessageFilter, MessageList
from streamqd.admin.reading import Entry, Unreadable, pairs, parse_headers, read_id
from streamqd.admin.tail import TailedEntry
from streamqd.admin.topics import partition_count
from streamqd.admin.trace import EntryTrace, Trace
from streamqd.console.access import Role
from streamqd.console.view import PARTITION_MAX, ConsoleView, Context, Download, Visit
from streamqd.console.views.dead import read_choice
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.message import REPLAY_OF
from streamqd.policy.partitioning import crc32_partition

BUDGET = 10_000  # messages that one request examines at most
SECONDS = 2.0  # seconds that a search may take
PIECE = 500  # number of messages between two checks of the time
TAIL_ROWS = 50
TAIL_BYTES = 1 << 20  # payload bytes after which a read of the newest messages stops
TAIL_PARTITIONS = 64  # partitions that can be followed together
_WHERE = re.compile(
    r"(header:[^\s=~]+|/(?:[^\s=~]|~[01])*|payload)\s*(=|~|exists)\s*(.*)", re.DOTALL
)
_FILTERS = ("key", "partition", "since", "until", "where")
# Held by the request that is reading the archive, because only one request at a time may do so.
_archive_lock = threading.Lock()

Test = Callable[[TailedEntry], bool]


def show(visit: Visit) -> Context:
    """Return a page of messages, newest first, and how many were examined."""
    topic, store = visit.path["topic"], visit.resources.store
    choice = read_choice(visit, visit.now.now_unix_ms)
    count = partition_count(store, topic)
    if choice.key is not None and choice.partition is None:
        # Only the partition that the key's hash selects is searched. The message is in another one
        # only if its producer chose that partition explicitly.
        choice = replace(choice, partition=crc32_partition(choice.key, count))
    test = _read_test(visit)
    rows, cursor, examined, total = _search(visit, choice, test)
    return {
        "filters": {name: visit.text(name) for name in _FILTERS if visit.text(name)},
        "rows": rows,
        "cursor": cursor,
        "first": bool(visit.text("cursor")),
        "looked": examined,
        "total": total,
        "partition": choice.partition if choice.key is not None else None,
    }


def _search(
    visit: Visit, choice: MessageFilter, test: Test | None
) -> tuple[list[TailedEntry], str, int, int]:
    """Return the rows, the next cursor, the number of examined messages, and the topic's total."""
    rows: list[TailedEntry] = []
    examined, total, cursor = 0, 0, visit.text("cursor")
    until = time.monotonic() + SECONDS
    while True:
        found = tail.messages(visit.resources.store, visit.path["topic"])
        piece = min(PIECE, BUDGET - examined) if test or choice.has_filters else visit.limit
        size = piece if test else visit.limit - len(rows)
        page = found.page(choice, limit=size, cursor=cursor, budget=piece)
        total, before, cursor = page.total, cursor, page.cursor
        examined += len(page.rows) if page.complete else piece
        for each in page.rows:
            if test is None or test(each):
                rows.append(each)
                if len(rows) == visit.limit:
                    more = each is not page.rows[-1] or cursor
                    return rows, f"{each.partition}:{each.id}" if more else "", examined, total
        if not cursor or cursor == before or examined >= BUDGET or time.monotonic() >= until:
            return rows, cursor, examined, total


def _read_test(visit: Visit) -> Test | None:
    """Parse the test in `where`: NAME = TEXT, NAME ~ TEXT or NAME exists.

    Return None if it is empty.

    Raises InvalidRequestError and RequestRefusedError.
    """
    text = visit.text("where")
    if not text:
        return None
    if visit.person.bodies != "show":
        raise RequestRefusedError(
            "payloads are hidden from your role, so you cannot search in them"
        )
    match = _WHERE.fullmatch(text)
    if match is None:
        raise InvalidRequestError(
            "the search must be a JSON pointer, header:NAME or payload, followed by = TEXT, ~ TEXT"
            " or exists, such as /customer/id = 42"
        )
    name, operator, wanted = match[1], match[2], match[3].strip()

    def test(row: TailedEntry) -> bool:
        value = _message_value(row, name)
        if value is None or operator == "exists":
            return value is not None
        return value == wanted if operator == "=" else wanted.lower() in value.lower()

    return test


def _message_value(row: TailedEntry, name: str) -> str | None:
    """Return one part of a message as text, or None if the message does not have it."""
    if name.startswith("header:"):
        return (row.headers or {}).get(name.removeprefix("header:"))
    text = row.payload.decode("utf-8", "replace")
    if name == "payload":
        return text
    try:
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
        for part in name[1:].split("/") if name != "/" else []:
            key = part.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def show_tail(visit: Visit) -> Context:
    """Return the newest messages of a topic or partition.

    The live page adds newer ones automatically.
    """
    topic, partition = visit.path["topic"], visit.optional_number("partition", most=PARTITION_MAX)

    def read() -> tuple[int, bool, list[TailedEntry], list[Unreadable]]:
        found = tail.messages(visit.resources.store, topic)
        followed = partition is not None or found.partitions <= TAIL_PARTITIONS
        rows = _read_newest(found, MessageFilter(partition=partition)) if followed else []
        return found.partitions, followed, rows, found.reader.rows

    partitions, followed, rows, unreadable = visit.now.read_once(("tail", topic, partition), read)
    return {
        "partition": visit.text("partition"),
        "partitions": partitions,
        "followed": followed,
        "rows": rows,
        "unreadable": unreadable,
        "most": TAIL_ROWS,
        "most_bytes": TAIL_BYTES,
        "most_partitions": TAIL_PARTITIONS,
    }


def _read_newest(
    found: MessageList[Entry, TailedEntry], choice: MessageFilter
) -> list[TailedEntry]:
    kept, size = [], 0
    for each in found.examine(choice, TAIL_ROWS):
        kept.append(each)
        size += len(each.fields.get(b"payload", b""))
        if len(kept) == TAIL_ROWS or size >= TAIL_BYTES:
            break
    return found.rows(kept)


@dataclass(frozen=True, slots=True)
class Origin:
    """One origin of a message, according to its entry: a label, a name, and its page, if any."""

    label: str
    text: str
    note: str = ""
    view: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


def show_message(visit: Visit) -> Context:
    """Return one message: its origins, its state in each group, and its copies."""
    topic, name = visit.path["topic"], tracing.read_name(visit.text("uid"))
    if name.topic != topic:
        raise InvalidRequestError(f"{visit.text('uid')} is not a message of {topic}")
    found = tracing.trace(visit.resources.fleet, name)
    kept = found.entry is not None or found.where == "delayed"
    fields = _read_fields(visit, found.partition, found.id) if kept else {}
    reader, raw_headers = visit.reader, parse_headers(fields) or {}
    headers = reader.headers(raw_headers)
    origins = [] if found.entry is None else _origins(found.entry, raw_headers, headers)
    trace_id = tracing.parse_trace_id(headers)
    return {
        "trace": found,
        "origins": origins,
        "trace_id": trace_id,
        "trace_url": visit.trace_url(trace_id),
        "body": reader.body(fields.get(b"payload", b"")) if fields else None,
        "key": reader.key(fields.get(b"key")),
        "headers": headers,
        "archive": visit.resources.settings.console.archive or "",
        "archived_in": _find_in_archive(visit, found),
    }


def _origins(
    entry: EntryTrace, headers: Mapping[str, str], shown: Mapping[str, str]
) -> list[Origin]:
    """Return the origins of a message, without the headers that the person may not see."""
    seen = {name for name, value in headers.items() if shown.get(name) == value}
    found = []
    if entry.schedule and tracing.SCHEDULE in seen:
        view, parameters = "schedule", {"schedule": entry.schedule}
        note = f"tick {entry.scheduled_for}"
        found.append(Origin("Sent by schedule", entry.schedule, note, view, parameters))
    if entry.send_id:
        found.append(Origin("Send ID", entry.send_id, "from a delayed send or an outbox"))
    if entry.copy_of:
        found.append(_origin_of_uid("Replayed from", entry.copy_of))
    if entry.replay_of and REPLAY_OF in seen:
        found.append(_origin_of_uid("Replayed by a pipeline from", entry.replay_of))
    if entry.edited_from and tracing.EDITED_FROM in seen:
        found.append(_origin_of_uid("Edited copy of", entry.edited_from))
    return found


def _origin_of_uid(label: str, text: str) -> Origin:
    """Return an origin. If its text is a uid, it has a link.

    The uid of a dead letter has `:dlq` after the topic.
    """
    try:
        name = tracing.read_uid(text)
    except InvalidRequestError:
        return Origin(label, text)
    topic, _, dead = name.topic.partition(":")
    if dead:
        dead_letter = f"{name.partition}:{name.id}"
        return Origin(label, text, "", "dead_letter", {"topic": topic, "dead_letter": dead_letter})
    return Origin(label, text, "", "message", {"topic": topic, "uid": text})


def _find_in_archive(visit: Visit, found: Trace) -> str:
    """Search the archive for a message.

    Return the result in words, or '' if it was not requested.
    """
    settings = visit.resources.settings
    asked = visit.text("archive") and found.where != "delayed"
    if not asked or settings.console.archive is None:
        return ""
    if not _archive_lock.acquire(blocking=False):
        return "Another request is reading the archive; reload this page."
    try:
        place = (found.topic, found.partition, found.id)
        find_in_archive = visit.resources.backend.find_in_archive
        copy = find_in_archive(settings.console.archive, *place, settings.archive.pairs)
    except ModuleNotFoundError as error:
        return f"Reading the archive needs the package {error.name}; run {extras.hint('spark')}."
    except RequestRefusedError as error:
        return f"{error}."
    finally:
        _archive_lock.release()
    if copy.found:
        return f"A copy is in {copy.file}."
    return f"{copy.file or settings.console.archive} contains no copy."


def _read_fields(visit: Visit, partition: int, place: str) -> Mapping[bytes, bytes]:
    """Return the fields of an entry or a delayed send by its ID, or {} if the entry is gone.

    Raises RequestRefusedError if a delayed send is no longer waiting.
    """
    store, topic = visit.resources.store, visit.path["topic"]
    try:
        entry_id = str(read_id(place))
    except ValueError:
        send = delayed.show(store, topic, f"{partition}:{place}")
        fields = {b"payload": send.payload, b"headers": json.dumps(send.headers or {}).encode()}
        return fields if send.key is None else fields | {b"key": send.key}
    page = store.execute("XRANGE", store.keys.stream(topic, partition), entry_id, entry_id)
    return pairs(page[0][1]) if page else {}


def payload(visit: Visit) -> tuple[str, str, bytes]:
    """Return the payload of one message as a file.

    Raises RequestRefusedError if the person may not see it, or if the message no longer exists.
    """
    if visit.person.bodies != "show":
        raise RequestRefusedError("payloads are hidden from your role")
    name = tracing.read_uid(visit.text("uid"))
    if name.topic != visit.path["topic"]:
        raise InvalidRequestError("the uid belongs to another topic")
    fields = _read_fields(visit, name.partition, name.id)
    if not fields:
        raise RequestRefusedError("the message is no longer in its partition")
    return (
        f"{name.partition}-{name.id}.bin",
        "application/octet-stream",
        fields.get(b"payload", b""),
    )


VIEWS = (
    ConsoleView("messages", "/topics/{topic}/messages", "Messages", show),
    ConsoleView("tail", "/topics/{topic}/tail", "Live tail", show_tail, live=True),
    ConsoleView("message", "/topics/{topic}/message", "Message", show_message, query="uid=UID"),
)
DOWNLOADS = (Download("message_payload", "/topics/{topic}/payload", Role.VIEWER, payload),)
