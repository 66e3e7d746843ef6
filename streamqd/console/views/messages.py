"""Messages: search in a budget, and one message's journey."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping

from streamqd.admin import tail
from streamqd.admin import trace as tracing
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import headers_of, pairs
from streamqd.admin.tail import TailedEntry
from streamqd.admin.topics import partition_count
from streamqd.console.access import Role
from streamqd.console.view import ConsoleView, Context, Download, Visit
from streamqd.console.views.dead import choice_of
from streamqd.errors import Malformed, Refused
from streamqd.policy.partitioning import crc32_partition

BUDGET = 10_000  # messages that one request looks at
SECONDS = 2.0  # after which it stops anyway
PIECE = 500  # messages between two looks at the clock
_WHERE = re.compile(
    r"(header:[^\s=~]+|/(?:[^\s=~]|~[01])*|payload)\s*(=|~|exists)\s*(.*)", re.DOTALL
)
_FILTERS = ("key", "partition", "since", "until", "where")

Test = Callable[[TailedEntry], bool]


def show(visit: Visit) -> Context:
    """Return a page of messages, the newest first, and how far was looked."""
    topic, store = visit.path["topic"], visit.desk.store
    uid = visit.text("uid")
    choice = choice_of(visit, visit.now.now_unix_ms)
    count = partition_count(store, topic)
    if choice.key is not None and choice.partition is None:
        # The hash of the key names the partition, unless a producer chose another one.
        visit_partition = crc32_partition(choice.key, count)
        choice = MessageFilter(
            key=choice.key,
            partition=visit_partition,
            since_unix_ms=choice.since_unix_ms,
            until_unix_ms=choice.until_unix_ms,
        )
    test = _test_of(visit)
    rows, cursor, looked, total = _search(visit, choice, test)
    reader = visit.reader
    return {
        "now": visit.now,
        "topic": topic,
        "filters": {name: visit.text(name) for name in _FILTERS if visit.text(name)},
        "uid": uid,
        "rows": rows,
        "cursor": cursor,
        "first": bool(visit.text("cursor")),
        "looked": looked,
        "total": total,
        "limit": visit.limit,
        "reader": reader,
        "partition": choice.partition if choice.key is not None else None,
    }


def _search(
    visit: Visit, choice: MessageFilter, test: Test | None
) -> tuple[list[TailedEntry], str, int, int]:
    """Return rows, the next cursor, the examined messages, and the messages of the topic."""
    rows: list[TailedEntry] = []
    looked, total, cursor = 0, 0, visit.text("cursor")
    until = time.monotonic() + SECONDS
    while True:
        found = tail.messages(visit.desk.store, visit.path["topic"])
        piece = min(PIECE, BUDGET - looked) if test or choice.narrows else visit.limit
        size = piece if test else visit.limit - len(rows)
        page = found.page(choice, limit=size, cursor=cursor, budget=piece)
        total, before, cursor = page.total, cursor, page.cursor
        looked += len(page.rows) if page.complete else piece
        for each in page.rows:
            if test is None or test(each):
                rows.append(each)
                if len(rows) == visit.limit:
                    more = each is not page.rows[-1] or cursor
                    return rows, f"{each.partition}:{each.id}" if more else "", looked, total
        if not cursor or cursor == before or looked >= BUDGET or time.monotonic() >= until:
            return rows, cursor, looked, total


def _test_of(visit: Visit) -> Test | None:
    """Return the test that `where` states: NAME = TEXT, NAME ~ TEXT or NAME exists."""
    text = visit.text("where")
    if not text:
        return None
    if visit.person.bodies != "show":
        raise Refused("you may not search in bodies that you may not see")
    match = _WHERE.fullmatch(text)
    if match is None:
        raise Malformed(
            "where: write a JSON pointer, header:NAME or payload, then = TEXT, ~ TEXT or exists,"
            " such as /customer/id = 42"
        )
    name, operator, wanted = match[1], match[2], match[3].strip()

    def test(row: TailedEntry) -> bool:
        value = _value(row, name)
        if value is None or operator == "exists":
            return value is not None
        return value == wanted if operator == "=" else wanted.lower() in value.lower()

    return test


def _value(row: TailedEntry, name: str) -> str | None:
    """Return a part of a message as text, None if it has none."""
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


def show_message(visit: Visit) -> Context:
    """Return one message and its way through each group."""
    uid = visit.text("uid")
    name = tracing.read_uid(uid)
    if name.topic != visit.path["topic"]:
        raise Malformed(f"{uid} is not a message of {visit.path['topic']}")
    found = tracing.trace(visit.desk.fleet, name)
    fields = _fields(visit, name.partition, found.id) if found.entry is not None else {}
    reader = visit.reader
    return {
        "now": visit.now,
        "topic": name.topic,
        "trace": found,
        "fields": fields,
        "body": reader.body(fields.get(b"payload", b"")) if fields else None,
        "key": reader.key(fields.get(b"key")),
        "headers": reader.headers(headers_of(fields)),
        "reader": reader,
    }


def _fields(visit: Visit, partition: int, entry_id: str) -> Mapping[bytes, bytes]:
    store, topic = visit.desk.store, visit.path["topic"]
    page = store.execute("XRANGE", store.keys.stream(topic, partition), entry_id, entry_id)
    return pairs(page[0][1]) if page else {}


def payload(visit: Visit) -> tuple[str, str, bytes]:
    """Return the payload of one message."""
    if visit.person.bodies != "show":
        raise Refused("you may not see the bodies of messages")
    name = tracing.read_uid(visit.text("uid"))
    if name.topic != visit.path["topic"]:
        raise Malformed("the uid is of another topic")
    fields = _fields(visit, name.partition, name.id)
    if not fields:
        raise Refused("the message is not in its partition")
    return (
        f"{name.partition}-{name.id}.bin",
        "application/octet-stream",
        fields.get(b"payload", b""),
    )


VIEWS = (
    ConsoleView(
        "messages", "/topics/{topic}/messages", "Messages", show, example="/topics/orders/messages"
    ),
    ConsoleView(
        "message",
        "/topics/{topic}/message",
        "Message",
        show_message,
        example="/topics/orders/message?uid=UID",
    ),
)
DOWNLOADS = (Download("message_payload", "/topics/{topic}/payload", Role.VIEWER, payload),)
