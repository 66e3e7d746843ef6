"""The list of arguments for settling contains a value only once if all entries share it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from streamqd.store.items import flatten_items

NAMES = some.sampled_from([b"originalId", b"retryCount", b"reason", b"traceback", b"payload"])
FIELDS = some.dictionaries(NAMES, some.sampled_from([b"", b"1", b"2"]))


def read(flat: list[Any], heads: int) -> list[tuple[tuple[Any, ...], dict[bytes, bytes]]]:
    """Read a list in the same way as the scripts."""

    def pairs(at: int) -> tuple[dict[bytes, bytes], int]:
        end = at + 1 + flat[at]
        return dict(zip(flat[at + 1 : end : 2], flat[at + 2 : end : 2], strict=True)), end

    shared, at = pairs(0)
    entries = []
    while at < len(flat):
        head = tuple(flat[at : at + heads])
        own, at = pairs(at + heads)
        entries.append((head, {**shared, **own}))
    return entries


@given(some.lists(FIELDS, max_size=6))
def test_item_list_round_trips_every_entry(changes: list[dict[bytes, bytes]]) -> None:
    entries = [((b"m:%d-0" % number, 5), fields) for number, fields in enumerate(changes)]
    assert read(flatten_items(entries), heads=2) == entries


def test_shared_values_occur_once() -> None:
    entries = [((b"m:%d-0" % n,), {b"id": b"%d" % n, b"traceback": b"long"}) for n in (1, 2, 3)]
    assert flatten_items(entries) == [
        *(4, b"id", b"1", b"traceback", b"long"),
        *(b"m:1-0", 0),
        *(b"m:2-0", 2, b"id", b"2"),
        *(b"m:3-0", 2, b"id", b"3"),
    ]
    assert flatten_items([]) == [0]
