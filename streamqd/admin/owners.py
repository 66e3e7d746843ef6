"""Derive the last owners of an assignment from the recorded changes of owner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from streamqd.admin.reading import ViewReader
from streamqd.model import Assignment
from streamqd.store import leases
from streamqd.store.leases import OwnerChange

OWNERS_MAX = 20
# Stable words for the recorded reasons of a release.
_ENDS = {
    "shed": "handed-over",
    "drain": "instance-stopped",
    "broken": "crash-loop",
    "failed": "internal-error",
    "unstartable": "unstartable",
    "unkillable": "unkillable",
}
IN_WORDS = {
    "": "owns it now",
    "handed-over": "handed over",
    "instance-stopped": "its instance stopped",
    "crash-loop": "its worker crashed in a loop",
    "internal-error": "internal error",
    "unstartable": "no process could be started",
    "unkillable": "its process could not be killed",
    "released": "released",
    "lost": "lost: not released, taken over",
    "reset": "the group was reset",
    "unknown": "unknown",
}


@dataclass(frozen=True, slots=True)
class OwnerPeriod:
    """One period in which an instance owned an assignment.

    `epoch` is the epoch with which the instance acquired it. Times are on the Redis clock. `end` is
    the reason for the end of the period. It is '' for the current owner, and otherwise handed-over,
    instance-stopped, crash-loop, internal-error, unstartable, unkillable, released, lost, reset or
    unknown. It is unknown if an older version changed the owner without recording this.

    `since_unix_ms` is None if the acquisition was not recorded. `until_unix_ms` is None for the
    current owner, or if the end was not recorded. If the owner was lost, `until_unix_ms` is the
    time at which another instance took over, which is some time after the lease had expired.
    `held_seconds` is the duration of the period, which lasts until now for the current owner. It is
    None if the start or the end was not recorded.
    """

    owner: str
    epoch: int
    since_unix_ms: int | None
    until_unix_ms: int | None
    end: str
    held_seconds: float | None = None


def read(
    reader: ViewReader, assignment: Assignment, owner: str, now_unix_ms: int
) -> list[OwnerPeriod]:
    """Return at most OWNERS_MAX of the last owners, newest first.

    `owner` is the current owner, or '' if there is none. This sends one command. Invalid entries
    are left out, and `reader` records them.
    """
    key = reader.keys.epochs(*assignment)
    [entries] = reader.ask([leases.owner_changes_command(reader.keys, assignment)])
    found = [reader.read(OwnerChange.parse, entry, key) for entry in entries or ()]
    return periods([each for each in found if each is not None], owner, now_unix_ms)


def periods(changes: Iterable[OwnerChange], owner: str, now_unix_ms: int) -> list[OwnerPeriod]:
    """Turn changes of owner, oldest first, into periods of ownership, newest first. No I/O."""
    found: list[OwnerPeriod] = []
    for each in changes:
        starts = each.event in ("acquired", "inherited")
        left = each.other if starts else each.owner  # the owner before the change, '' if unknown
        end = "lost" if starts else _ENDS.get(each.other, each.event)
        if found and found[-1].end == "":
            known = found[-1].owner == left
            until = each.at_unix_ms if known else None
            found[-1] = replace(found[-1], until_unix_ms=until, end=end if known else "unknown")
        else:
            known = False
        if starts:
            found.append(OwnerPeriod(each.owner, each.epoch, each.at_unix_ms, None, ""))
        elif not known:
            found.append(OwnerPeriod(each.owner, each.epoch, None, each.at_unix_ms, end))
    if found and found[-1].end == "" and found[-1].owner != owner:
        found[-1] = replace(found[-1], end="unknown")
    return [_add_held_seconds(each, now_unix_ms) for each in reversed(found[-OWNERS_MAX:])]


def _add_held_seconds(period: OwnerPeriod, now_unix_ms: int) -> OwnerPeriod:
    until = now_unix_ms if period.end == "" else period.until_unix_ms
    if period.since_unix_ms is None or until is None:
        return period
    return replace(period, held_seconds=max(0, until - period.since_unix_ms) / 1000)
