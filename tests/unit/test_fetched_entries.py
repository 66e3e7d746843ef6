"""Fetched entries skip the constructor, and must equal entries that the constructor makes."""

from __future__ import annotations

import pytest

from streamqd.message import Delivery, messages_of_read
from streamqd.model import Assignment
from streamqd.worker.entry import NOWHERE, FetchedEntry, entries_of_read

_FIELDS: tuple[list[bytes], ...] = (
    [],
    [b"payload", b"x"],
    [b"payload", b"x", b"key", b"k"],
    [b"payload", b"x", b"key", b""],
    [b"payload", b"key", b"key", b"key"],
    [b"key", b"a", b"key", b"b"],
    [b"other", b"x", b"key", b"k"],
    [b"payload", b"x", b"headers", b"{}"],
    [b"payload", b"x", b"key", b"k", b"key", b"z"],
    [b"payload", b"x", b"key", b"k", b"expiresAt", b"1"],
)


@pytest.mark.parametrize("retried", [False, True])
def test_fetched_entries_equal_constructed_entries(retried: bool) -> None:
    delivery = Delivery(Assignment("topic", 0, "group"), "instance", 1)
    raw = [[b"%d-0" % number, fields] for number, fields in enumerate(_FIELDS)]
    found, may_expire = entries_of_read(delivery, raw, retried)
    assert may_expire
    messages, _ = messages_of_read(delivery, raw, retried)
    for entry, message, (entry_id, fields) in zip(found, messages, raw, strict=True):
        place = (b"r:" if retried else b"m:") + entry_id
        assert entry.message.id_bytes == entry_id
        assert entry.message.fields == message.fields
        entry.message = message
        built = FetchedEntry(NOWHERE, place, message, retried, 0, sum(map(len, fields)))
        assert _values(entry) == _values(built)


def _values(entry: FetchedEntry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in FetchedEntry.__slots__ if hasattr(entry, name)}
