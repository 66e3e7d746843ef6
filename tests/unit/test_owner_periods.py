"""The last owners of an assignment are derived from the recorded changes. No server."""

from __future__ import annotations

from streamqd.admin.owners import IN_WORDS, OWNERS_MAX, OwnerPeriod, periods
from streamqd.store.leases import OwnerChange

NOW = 100_000


def acquired(at: int, owner: str) -> OwnerChange:
    return OwnerChange(at, "acquired", at, owner, "")


def inherited(at: int, owner: str, lost: str) -> OwnerChange:
    return OwnerChange(at, "inherited", at, owner, lost)


def released(at: int, owner: str, reason: str = "") -> OwnerChange:
    return OwnerChange(at, "released", at, owner, reason)


def period_ends(found: list[OwnerPeriod]) -> list[tuple[str, str, float | None]]:
    return [(each.owner, each.end, each.held_seconds) for each in found]


def test_owner_period_has_a_start_and_an_end() -> None:
    found = periods(
        [
            acquired(1_000, "a"),
            released(3_000, "a", "shed"),
            acquired(4_000, "b"),
            inherited(60_000, "c", "b"),
        ],
        "c",
        NOW,
    )
    assert period_ends(found) == [("c", "", 40.0), ("b", "lost", 56.0), ("a", "handed-over", 2.0)]
    assert [each.until_unix_ms for each in found] == [None, 60_000, 3_000]


def test_every_release_reason_has_a_description() -> None:
    for reason in ("shed", "drain", "broken", "failed", "unstartable", "unkillable", "", "new"):
        [found] = periods([acquired(1, "a"), released(2, "a", reason)], "", NOW)
        assert found.end in IN_WORDS
        assert found.end not in ("", "lost", "unknown")


def test_reset_ends_an_ownership() -> None:
    changes = [acquired(1_000, "a"), OwnerChange(2_000, "reset", 1_000, "a", "")]
    assert period_ends(periods(changes, "", NOW)) == [("a", "reset", 1.0)]


def test_change_by_an_older_version_has_an_unknown_end() -> None:
    # An older version released the assignment for `a` and acquired it for `b`. This version
    # released it for `b`.
    found = periods([acquired(1_000, "a"), released(9_000, "b", "shed")], "", NOW)
    assert period_ends(found) == [("b", "handed-over", None), ("a", "unknown", None)]
    # An older version released the assignment for `a`.
    found = periods([acquired(1_000, "a"), acquired(5_000, "c")], "c", NOW)
    assert period_ends(found) == [("c", "", 95.0), ("a", "unknown", None)]
    # An older version lost the assignment for `b`, which this version has not recorded.
    found = periods([acquired(1_000, "a"), inherited(5_000, "c", "b")], "c", NOW)
    assert period_ends(found) == [("c", "", 95.0), ("a", "unknown", None)]
    # The current owner is not the recorded one.
    assert period_ends(periods([acquired(1_000, "a")], "b", NOW)) == [("a", "unknown", None)]
    assert period_ends(periods([acquired(1_000, "a")], "", NOW)) == [("a", "unknown", None)]


def test_only_the_last_owners_are_returned() -> None:
    changes = [acquired(number, f"i{number}") for number in range(50)]
    found = periods(changes, "i49", NOW)
    assert [each.owner for each in found] == [f"i{49 - at}" for at in range(OWNERS_MAX)]
    assert periods([], "", NOW) == []
