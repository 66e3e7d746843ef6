"""S2: no reply of a listing grows with the bodies, and no listing asks for a long page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from streamqd.admin.reading import PAGE_FIRST, PAGE_MAX, Entry, forwards, newest_first
from streamqd.store.client import Connection
from streamqd.store.items import BYTES_MAX
from streamqd.store.keys import Keys
from streamqd.store.store import Store

STREAM = Keys().dlq("orders", 0)
LARGE = BYTES_MAX // 4
COUNT = 300


@dataclass(frozen=True)
class Watched(Store):
    """A store that keeps the rows and bytes of each page of entries."""

    pages: list[tuple[int, int]] = field(default_factory=list)

    def execute(self, *words: Any) -> Any:
        found = Store.execute(self, *words)
        if words[0] in ("XRANGE", "XREVRANGE"):
            self.pages.append((len(found), taken(found)))
        return found


def taken(page: Sequence[Any]) -> int:
    return sum(len(part) for _, fields in page for part in fields)


def filled(link: Connection, sizes: Sequence[int]) -> Watched:
    link.execute("DEL", STREAM)
    for number, size in enumerate(sizes, 1):
        link.execute("XADD", STREAM, f"{number}-0", "payload", b"x" * size)
    return Watched(link, Keys())


def backwards(store: Watched) -> list[str]:
    keep = lambda _: True  # noqa: E731 - as with `dlq stats`: all are read
    found: list[Entry] = list(newest_first(store, {0: STREAM}, keep=keep, limit=10**6))
    return [str(each.id) for each in reversed(found)]


def onwards(store: Watched) -> list[str]:
    pages = forwards(store, STREAM, size=PAGE_MAX)
    return [str(entry_id) for page in pages for entry_id, _ in page]


@pytest.mark.parametrize("listed", [backwards, onwards])
def test_a_walk_asks_for_few_large_entries_at_a_time(link: Connection, listed: Any) -> None:
    """S2: behind the first page, a page has BYTES_MAX of bodies at most; none is passed over."""
    store = filled(link, [LARGE] * 50)
    assert listed(store) == [f"{number}-0" for number in range(1, 51)]
    rows = [count for count, _ in store.pages]
    assert rows[0] == PAGE_FIRST
    assert max(size for _, size in store.pages[1:]) <= BYTES_MAX


@pytest.mark.parametrize("listed", [backwards, onwards])
def test_a_walk_asks_for_short_pages_of_small_entries(link: Connection, listed: Any) -> None:
    """S2: a page doubles up to PAGE_MAX rows."""
    store = filled(link, [10] * COUNT)
    assert listed(store) == [f"{number}-0" for number in range(1, COUNT + 1)]
    assert [count for count, _ in store.pages][:4] == [PAGE_FIRST, 32, PAGE_MAX, PAGE_MAX]
    assert max(count for count, _ in store.pages) == PAGE_MAX


@pytest.mark.parametrize("listed", [backwards, onwards])
def test_a_walk_recovers_from_an_entry_beyond_the_bound(link: Connection, listed: Any) -> None:
    """S2: behind an entry larger than BYTES_MAX the walk goes on with few, and grows again."""
    sizes = [10] * 100 + [8 * BYTES_MAX] + [10] * 100
    store = filled(link, sizes)
    assert len(listed(store)) == len(sizes)
    (at,) = [at for at, (_, size) in enumerate(store.pages) if size > BYTES_MAX]
    assert store.pages[at + 1][0] < store.pages[at][0]
    assert store.pages[-1][0] > store.pages[at + 1][0]
