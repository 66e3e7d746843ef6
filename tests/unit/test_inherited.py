"""Two lists of pending entries are merged into one, with the oldest entries first."""

from __future__ import annotations

import pytest

from streamqd.store.messages import PendingEntry, Recovered


def page(main: str, retry: str, more: str) -> Recovered:
    lists = [
        [PendingEntry(retried, n.encode(), []) for n in ids.split()]
        for retried, ids in ((False, main), (True, retry))
    ]
    return Recovered(False, b"", b"", *lists, more_main="m" in more, more_retry="r" in more)


@pytest.mark.parametrize(
    ("main", "retry", "more", "wanted", "over"),
    [
        ("", "", "", "", True),
        ("1-0 5-0", "3-0", "", "m:1-0 r:3-0 m:5-0", True),
        ("9-0 10-0", "9-1", "", "m:9-0 r:9-1 m:10-0", True),
        ("1-0 5-0", "3-0 9-0", "mr", "m:1-0 r:3-0 m:5-0", False),
        ("1-0 5-0", "3-0 9-0", "r", "m:1-0 r:3-0 m:5-0 r:9-0", False),
        ("1-0 2-0", "9-0", "m", "m:1-0 m:2-0", False),
        ("8-0 9-0", "1-0 2-0", "r", "r:1-0 r:2-0", False),
        ("5-0", "5-0", "mr", "m:5-0 r:5-0", False),
        ("5-0", "7-0", "mr", "m:5-0", False),
    ],
)
def test_only_entries_older_than_the_next_page_are_returned(
    main: str, retry: str, more: str, wanted: str, over: bool
):
    held, last = page(main, retry, more).entries_in_order()
    assert " ".join(entry.place.decode() for entry in held) == wanted
    assert last is over
