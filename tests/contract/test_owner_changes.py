"""Each acquisition, release and reset records one change of owner, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.store import groups, leases
from streamqd.store.leases import CHANGES_MAX, OwnerChange
from tests.contract.harness import TTL, Harness


def acquire(harness: Harness, token: str, seen: int, owner: str, dead: str = "") -> int:
    call = leases.acquire(harness.keys, harness.leased(token, seen), TTL, owner, dead)
    return int(harness.expect("lease_acquire", "OK", call)[0])


def changes(harness: Harness) -> list[tuple[str, int, str, str]]:
    """Return the recorded changes without their times, with the oldest first."""
    entries = harness.do(*leases.owner_changes_command(harness.keys, harness.assignment))
    found = [OwnerChange.parse(each, "k") for each in entries]
    return [tuple(each[1:]) for each in found]  # type: ignore[misc]


def test_every_owner_change_is_recorded(harness: Harness) -> None:
    with harness.instant() as now:
        first = acquire(harness, "t1", 0, "a")
    [entry] = harness.do(*leases.owner_changes_command(harness.keys, harness.assignment))
    assert OwnerChange.parse(entry, "k").at_unix_ms == now
    release = leases.release(harness.keys, harness.leased("t1"), "shed")
    harness.expect("lease_release", "OK", release)
    second = acquire(harness, "t2", first, "b")
    harness.do("DEL", harness.lease)
    third = acquire(harness, "t3", second, "c")
    fourth = acquire(harness, "t4", third, "d", "t3")
    assert changes(harness) == [
        ("acquired", first, "a", ""),
        ("released", first, "a", "shed"),
        ("acquired", second, "b", ""),
        ("inherited", third, "c", "b"),
        ("inherited", fourth, "d", "c"),
    ]


def test_repeats_renewals_and_refences_are_not_recorded(harness: Harness) -> None:
    epoch = acquire(harness, "t1", 0, "a")
    before = changes(harness)
    again = leases.acquire(harness.keys, harness.leased("t1"), TTL, "a")
    harness.expect("lease_acquire", "MINE", again)
    harness.expect(
        "lease_renew", "OK", leases.renew(harness.keys, harness.leased("t1", epoch), TTL)
    )
    call = leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", [])
    harness.expect("lease_refence", "OK", call)
    late = leases.release(harness.keys, harness.leased("t1"), "shed")
    harness.expect("lease_release", "FENCED", late)
    assert changes(harness) == before


def test_release_after_a_refence_records_the_current_epoch(harness: Harness) -> None:
    acquire(harness, "t1", 0, "a")
    call = leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", [])
    epoch = int(harness.expect("lease_refence", "OK", call)[0])
    harness.expect("lease_release", "OK", leases.release(harness.keys, harness.leased("t2")))
    assert changes(harness)[-1] == ("released", epoch, "a", "")


def test_only_the_last_owner_changes_are_kept(harness: Harness) -> None:
    epoch = 0
    for number in range(CHANGES_MAX):
        epoch = acquire(harness, f"t{number}", epoch, "a")
        release = leases.release(harness.keys, harness.leased(f"t{number}"), "drain")
        harness.expect("lease_release", "OK", release)
    assert harness.do("LLEN", harness.epochs) == CHANGES_MAX
    assert changes(harness)[-1] == ("released", epoch, "a", "drain")
    assert harness.do("MEMORY", "USAGE", harness.epochs) < 2600


def reset(harness: Harness, token: str, at_once: int) -> Any:
    return groups.reset(
        harness.keys, harness.assignment, "0-0", drop_retries=False, force=True, keeper="",
        token=token,
        at_once=at_once, part=1,
    )  # fmt: skip


@pytest.mark.parametrize("at_once", [10, 1], ids=["in one call", "in several calls"])
def test_group_reset_with_an_owner_is_recorded_once(harness: Harness, at_once: int) -> None:
    harness.pending("1-0", "2-0")
    epoch = acquire(harness, "t1", 0, "a")
    word = "MORE"
    while word == "MORE":
        word = harness.link.run(reset(harness, "r1", at_once)).word
    assert word == "OK"
    assert changes(harness) == [("acquired", epoch, "a", ""), ("reset", epoch, "a", "")]
    assert harness.link.run(reset(harness, "r2", at_once)).word == "OK"  # it has no owner
    assert len(changes(harness)) == 2


def test_group_delete_removes_the_owner_changes(harness: Harness) -> None:
    harness.groups()
    acquire(harness, "t1", 0, "a")
    call = groups.delete(harness.keys, harness.assignment, force=True, token="d1")
    harness.expect("group_delete", "OK", call)
    assert harness.do("EXISTS", harness.epochs) == 0


def test_owner_change_ignores_a_history_of_a_wrong_type(harness: Harness) -> None:
    harness.do("SET", harness.epochs, "x")
    epoch = acquire(harness, "t1", 0, "a")
    harness.expect("lease_release", "OK", leases.release(harness.keys, harness.leased("t1")))
    acquire(harness, "t2", epoch, "b")
    assert harness.do("GET", harness.epochs) == b"x"
