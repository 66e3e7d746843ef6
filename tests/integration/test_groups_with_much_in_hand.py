"""Groups can be reset and deleted even if they have more pending entries than one call removes."""

from __future__ import annotations

import pytest

from streamqd.admin import groups
from streamqd.errors import RequestRefusedError
from streamqd.store import groups as store
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support.commands import HarnessAt, Run, document

MANY = store.AT_ONCE_MAX + 2 * store.PART_MAX


def add_many_pending(harness: Harness) -> None:
    harness.groups()
    for first in range(1, MANY + 1, 1000):
        ids = range(first, min(first + 1000, MANY + 1))
        harness.link.pipeline([("XADD", harness.stream, f"{n}-0", "payload", "x") for n in ids])
    assert len(harness.fetch(MANY)) == MANY


def test_group_reset_repeats_until_all_entries_are_dropped(run: Run, harness_at: HarnessAt) -> None:
    add_many_pending(harness_at(0))
    for number in (1, 2):
        harness_at(number).groups()
    arguments = ("group", "reset", "access", "hits", "--to", "3-0", "--json")
    foretold = document(run(*arguments, "--dry-run"))

    done = document(run(*arguments, "--yes"))

    assert done["partitions"] == foretold["partitions"]
    row = done["partitions"][0]
    assert (row["before"], row["pending"]) == (f"{MANY}-0", MANY)
    assert row["unread"] == MANY - 2
    assert "lease" not in harness_at(0).state()
    assert harness_at(0).fetch(2) == [b"3-0", b"4-0"]


def test_group_reset_keeps_the_first_calls_latest_position(
    harness_at: HarnessAt, store: Store
) -> None:
    add_many_pending(harness_at(0))
    for number in (1, 2):
        harness_at(number).groups()
    row = groups.reset(store, "access", "hits", "latest").partitions[0]
    assert (row.after, row.pending, row.unread) == (f"{MANY}-0", MANY, 0)


def test_group_delete_repeats_until_all_entries_are_dropped(
    harness_at: HarnessAt, store: Store
) -> None:
    add_many_pending(harness_at(0))
    for number in (1, 2):
        harness_at(number).groups()
    with pytest.raises(RequestRefusedError, match=f"has {MANY} messages"):
        groups.delete(store, "access", "hits", force=False)

    groups.delete(store, "access", "hits", force=True)

    assert {"retry", "fence", "lease"}.isdisjoint(harness_at(0).state())
    assert harness_at(0).state()["stream"].groups == {}


def test_concurrent_group_reset_is_refused_with_a_reason(
    harness_at: HarnessAt, store: Store
) -> None:
    for number in range(3):
        harness_at(number).groups()
    harness_at(1).own("t1", owner="group-reset")
    with pytest.raises(RequestRefusedError, match="a group reset is changing access/1/hits, or"):
        groups.reset(store, "access", "hits", "latest")
