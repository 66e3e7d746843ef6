"""`MessageList` has pages, budgets, cursors and unreadable partitions, for each kind of message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streamqd.admin import dead_letters, delayed, pending, retries, tail
from streamqd.admin.messages import MATCH_ALL, MessageFilter, MessageList
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.commands import HarnessAt, Run, document

COUNT = 12  # messages on three partitions

Listed = Callable[[Store], MessageList[Any, Any]]
KINDS: dict[str, Listed] = {
    "messages": lambda store: tail.messages(store, "access"),
    "dead letters": lambda store: dead_letters.messages(store, "access"),
    "pending": lambda store: pending.messages(store, "access", "hits"),
    "retries": lambda store: retries.messages(store, "access", "hits"),
    "delayed": lambda store: delayed.messages(store, "access"),
}


@pytest.fixture
def store(link: Connection, keys: Keys, harness_at: HarnessAt) -> Store:
    """A topic with 12 messages of each kind, whose IDs and due times are 1 to 12."""
    for number in range(1, COUNT + 1):
        harness = harness_at(number % 3)
        assignment, name = harness.assignment, f"{number}-0"
        place = assignment.topic, assignment.partition
        harness.pending(name)
        harness.do("XADD", keys.dlq(*place), name, "payload", "x", "key", f"k{number % 2}")
        harness.do("ZADD", keys.retry(*assignment), number, f"m:{name}")
        harness.do("ZADD", keys.delayed_sends(*place), number, f"send{number}")
    return Store(link, keys)


def names(store: Store, listed: Listed, choice: MessageFilter = MATCH_ALL, **how: Any) -> list[str]:
    """Return the cursor position of every message in the pages of a list."""
    found: list[str] = []
    cursor = ""
    while True:
        page = listed(store).page(choice, cursor=cursor, **how)
        assert page.total == COUNT
        found += [getattr(row, "id", "") or f"{row.partition}:{row.place}" for row in page.rows]
        cursor = page.cursor
        if not cursor:
            return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 5, COUNT])
def test_message_pages_list_each_message_once(store: Store, kind: str, limit: int) -> None:
    whole = names(store, KINDS[kind], limit=100)
    assert len(set(whole)) == len(whole) == COUNT
    assert names(store, KINDS[kind], limit=limit) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_message_page_stops_at_its_budget_and_continues(store: Store, kind: str) -> None:
    """If a filter rejects everything, a page still examines no more messages than its budget."""
    cursor, pages = "", 0
    while cursor or not pages:
        page = KINDS[kind](store).page(MessageFilter(key=b"none"), budget=3, cursor=cursor)
        assert (page.rows, page.complete) == ([], not page.cursor)
        cursor, pages = page.cursor, pages + 1
    assert pages == COUNT / 3


@pytest.mark.parametrize("kind", KINDS)
def test_time_filter_selects_one_message(store: Store, kind: str) -> None:
    whole = names(store, KINDS[kind], limit=100)
    only = MessageFilter(since_unix_ms=6, until_unix_ms=7)
    assert names(store, KINDS[kind], only) == [each for each in whole if "6" in each]


@pytest.mark.parametrize("kind", KINDS)
def test_partition_filter_selects_or_refuses_a_partition(store: Store, kind: str) -> None:
    found = names(store, KINDS[kind], MessageFilter(partition=1), limit=3)
    assert len(found) == COUNT // 3
    with pytest.raises(RequestRefusedError, match="partition 3 of topic"):
        KINDS[kind](store).page(MessageFilter(partition=3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cursor", ["x", "1:", ":1-0", "9:m:1-0", "1/2/3:1-0"])
def test_bad_cursor_is_refused(store: Store, kind: str, cursor: str) -> None:
    with pytest.raises(RequestRefusedError):
        KINDS[kind](store).page(cursor=cursor)


@pytest.mark.parametrize("kind", ["messages", "dead letters", "pending"])
def test_cursor_of_another_list_is_malformed(store: Store, kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a cursor"):
        KINDS[kind](store).page(cursor="5/1:send5")


def test_unreadable_partition_does_not_hide_others(store: Store, run: Run, keys: Keys) -> None:
    """The other partitions are listed, and the key that cannot be read is named once."""
    broken = keys.dlq("access", 1)
    store.execute("DEL", broken)
    store.execute("SET", broken, "x")
    page = dead_letters.messages(store, "access").page()
    assert len(page.rows) == page.total == COUNT * 2 // 3
    assert [each.key for each in page.unreadable] == [broken]
    for command in (("dlq", "list"), ("dlq", "stats")):
        shown = run(*command, "access")
        assert "0:12-0" in shown.stdout
        assert shown.stderr.count(broken) == 1
        assert [each["key"] for each in document(run(*command, "access", "--json"))["unreadable"]]


def test_filter_compares_each_field() -> None:
    fields = {b"group": b"hits", b"errorClass": b"shop.BankError", b"retryCount": b"2"}
    for choice in (
        MessageFilter(group="hits"),
        MessageFilter(error_class="BankError"),
        MessageFilter(error_class="shop.BankError", attempt_min=3),
        MessageFilter(since_unix_ms=5, until_unix_ms=6),
    ):
        assert choice.takes(5, fields)
    for choice in (
        MessageFilter(group="agents"),
        MessageFilter(error_class="shop"),
        MessageFilter(attempt_min=4),
        MessageFilter(key=b""),
        MessageFilter(until_unix_ms=5),
    ):
        assert not choice.takes(5, fields)
    assert replace(MessageFilter(key=b"k"), key=None).has_filters is False
