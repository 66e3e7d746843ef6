"""group reset and delete with more pending entries than one call removes."""

from __future__ import annotations

import pytest

from streamqd.admin import groups
from streamqd.errors import Refused
from streamqd.store import groups as store
from streamqd.store.store import Store
from tests.contract.desk import Desk
from tests.support.verbs import At, Run, document

MANY = store.AT_ONCE_MAX + 2 * store.PART_MAX


def much_in_hand(desk: Desk) -> None:
    desk.groups()
    for first in range(1, MANY + 1, 1000):
        ids = range(first, min(first + 1000, MANY + 1))
        desk.link.pipeline([("XADD", desk.stream, f"{n}-0", "payload", "x") for n in ids])
    assert len(desk.fetch(MANY)) == MANY


def test_a_reset_takes_as_many_calls_as_it_needs(run: Run, at: At) -> None:
    much_in_hand(at(0))
    for number in (1, 2):
        at(number).groups()
    arguments = ("group", "reset", "access", "hits", "--to", "3-0", "--json")
    foretold = document(run(*arguments, "--dry-run"))

    done = document(run(*arguments, "--yes"))

    assert done["partitions"] == foretold["partitions"]
    row = done["partitions"][0]
    assert (row["before"], row["pending"]) == (f"{MANY}-0", MANY)
    assert row["unread"] == MANY - 2
    assert "lease" not in at(0).state()
    assert at(0).fetch(2) == [b"3-0", b"4-0"]


def test_latest_is_what_it_was_at_the_first_call(at: At, store: Store) -> None:
    much_in_hand(at(0))
    for number in (1, 2):
        at(number).groups()
    row = groups.reset(store, "access", "hits", "latest").partitions[0]
    assert (row.after, row.pending, row.unread) == (f"{MANY}-0", MANY, 0)


def test_a_deletion_takes_as_many_calls_as_it_needs(at: At, store: Store) -> None:
    much_in_hand(at(0))
    for number in (1, 2):
        at(number).groups()
    with pytest.raises(Refused, match=f"has {MANY} messages"):
        groups.delete(store, "access", "hits", force=False)

    groups.delete(store, "access", "hits", force=True)

    assert {"retry", "fence", "lease"}.isdisjoint(at(0).state())
    assert at(0).state()["stream"].groups == {}


def test_who_comes_in_between_is_told_what_goes_on(at: At, store: Store) -> None:
    for number in range(3):
        at(number).groups()
    at(1).own("t1", owner="group-reset")
    with pytest.raises(Refused, match="a group reset is changing access/1/hits, or"):
        groups.reset(store, "access", "hits", "latest")
