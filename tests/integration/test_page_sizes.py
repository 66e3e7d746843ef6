"""Replies of a listing do not grow with the size of bodies, and no listing asks for a long page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from streamqd.admin.messages import newest_first
from streamqd.admin.reading import LAST_ID, PAGE_MAX, read_forwards
from streamqd.store.client import Connection
from streamqd.store.items import BYTES_MAX
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

STREAM = Keys().dlq("orders", 0)
LARGE = BYTES_MAX // 4
COUNT = 300


@dataclass(frozen=True)
class Watched(Store):
    """A store that records how many rows and bytes each page of entries had."""

    pages: list[tuple[int, int]] = field(default_factory=list)

    def run(self, call: Call) -> Reply:
        reply = Store.run(self, call)
        assert call.script.name == "stream_page"
        self.pages.append((len(reply.values[0]), page_bytes(reply.values[0])))
        return reply


def page_bytes(page: Sequence[Any]) -> int:
    return sum(len(part) for _, fields in page for part in fields)


def fill_stream(link: Connection, sizes: Sequence[int]) -> Watched:
    link.execute("DEL", STREAM)
    for number, size in enumerate(sizes, 1):
        link.execute("XADD", STREAM, f"{number}-0", "payload", b"x" * size)
    return Watched(link, Keys())


def read_newest(store: Watched) -> list[str]:
    found = newest_first(store, "orders", [STREAM], lambda entry: str(entry.id)).iterate()
    return [each.position.place for each in found][::-1]


def read_forwards_ids(store: Watched) -> list[str]:
    pages = read_forwards(store, STREAM, size=PAGE_MAX)
    return [str(entry_id) for page in pages for entry_id, _ in page]


@pytest.mark.parametrize("listed", [read_newest, read_forwards_ids])
def test_page_of_large_entries_stops_at_the_byte_bound(link: Connection, listed: Any) -> None:
    """A page of large entries exceeds BYTES_MAX by at most one body, and no entry is skipped."""
    store = fill_stream(link, [LARGE] * 50)
    assert listed(store) == [f"{number}-0" for number in range(1, 51)]
    assert [count for count, _ in store.pages] == [4] * 12 + [2]


@pytest.mark.parametrize("listed", [read_newest, read_forwards_ids])
def test_page_of_small_entries_has_page_max_rows(link: Connection, listed: Any) -> None:
    """The size of a page with small entries is limited by its number of rows."""
    store = fill_stream(link, [10] * COUNT)
    assert listed(store) == [f"{number}-0" for number in range(1, COUNT + 1)]
    assert [count for count, _ in store.pages] == [PAGE_MAX] * 4 + [COUNT - 4 * PAGE_MAX]


@pytest.mark.parametrize("listed", [read_newest, read_forwards_ids])
def test_page_exceeds_the_byte_bound_by_at_most_one_body(link: Connection, listed: Any) -> None:
    """A page exceeds BYTES_MAX by at most one body, even after small entries that suggest 64."""
    sizes = ([10] * 20 + [8 * BYTES_MAX] * 3) * 3
    store = fill_stream(link, sizes)
    assert len(listed(store)) == len(sizes)
    assert max(size for _, size in store.pages) < 9 * BYTES_MAX
    assert all(size - 8 * BYTES_MAX < BYTES_MAX for _, size in store.pages)


@pytest.mark.parametrize("listed", [read_newest, read_forwards_ids])
def test_paging_stops_at_the_last_possible_id(link: Connection, listed: Any) -> None:
    """Paging stops at the last possible ID, because the server rejects a range after it."""
    store = fill_stream(link, [10])
    link.execute("XADD", STREAM, LAST_ID, "payload", "x")
    assert listed(store) == ["1-0", LAST_ID.decode()]
