"""The order in which `top` and the console list assignments, handlers and failures. No I/O."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from streamqd.admin.assignments import AssignmentRow, RecentFailure, by_group
from streamqd.admin.condition import ALARMING, STUCK_SECONDS

CALM = ("ready", "running", "recovering")
RECENT_SECONDS = 600.0  # age in seconds after which a failure is left out

Rank = Callable[[AssignmentRow], tuple[float | str, ...]]


def urgency(row: AssignmentRow) -> tuple[float | str, ...]:
    """Return the sort key for `urgency`: pauses and failures first, then the longest wait."""
    word = row.condition
    rank = 3 if word in ("paused", "stopped") else 2 if word in ALARMING else 0
    if not rank and (word not in CALM or (row.longest_run_seconds or 0) >= STUCK_SECONDS):
        rank = 1
    # Waits and lags are ranked by powers of two, so that similar rows do not keep changing
    # places.
    return rank, *(
        int(math.log2(1 + figure / 4)) for figure in (row.oldest_seconds or 0, row.lag or 0)
    )


def _rank_by(field: str) -> Rank:
    return lambda row: (getattr(row, field) or 0,)


# The sort keys for orders by one column.
_RANKS: Mapping[str, Rank] = {
    "owner": lambda row: (row.owner,),
    "epoch": _rank_by("epoch"),
    "since": _rank_by("since_unix_ms"),
    "rate": _rank_by("acked"),
    "fails": _rank_by("failed"),
    "lag": _rank_by("lag"),
    "trend": _rank_by("lag_per_second"),
    "oldest": _rank_by("oldest_seconds"),
    "pending": _rank_by("pending"),
    "retries": _rank_by("waiting_retries"),
    "p99": _rank_by("p99_seconds"),
    "run": _rank_by("longest_run_seconds"),
    "dlq": _rank_by("dead_letters"),
}
ORDERS = ("urgency", "name", *_RANKS)


def sort_rows(rows: Iterable[AssignmentRow], order: str) -> list[AssignmentRow]:
    """Return the assignments in one of `ORDERS`, highest first. Equal ones are sorted by name."""
    by_name = sorted(
        rows,
        key=lambda row: (row.topic, row.group, row.partition),
    )
    if order == "name":
        return by_name
    # Names are sorted in ascending order, and numbers in descending order.
    rank = urgency if order == "urgency" else _RANKS[order]
    return sorted(by_name, key=rank, reverse=order != "owner")


def select_rows(
    rows: Iterable[AssignmentRow], text: str, order: str, *, reverse: bool = False
) -> list[AssignmentRow]:
    """Return the assignments whose name, owner or state contains a text, in one of `ORDERS`."""
    wanted = text.lower()
    found = sort_rows(
        [
            row
            for row in rows
            if wanted in f"{row.name} {row.owner} {row.state} {row.condition}".lower()
        ],
        order,
    )
    return found[::-1] if reverse else found


@dataclass(frozen=True, slots=True)
class SlowHandler:
    """The slow runs of a group.

    `p99_seconds` is the 99th percentile of its runs in the last minute, and `run_seconds` is the
    age of its longest current run.
    """

    topic: str
    group: str
    p99_seconds: float
    run_seconds: float


def slowest(rows: Iterable[AssignmentRow]) -> list[SlowHandler]:
    """Return the groups whose handlers have run, the slowest first."""
    timed = [each for each in rows if each.p99_seconds is not None or each.longest_run_seconds]
    found = [
        SlowHandler(
            topic,
            group,
            max(row.p99_seconds or 0.0 for row in some),
            max(row.longest_run_seconds or 0.0 for row in some),
        )
        for (topic, group), some in by_group(timed).items()
    ]
    return sorted(found, key=lambda each: -max(each.p99_seconds, each.run_seconds))


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One kind of failure of a group.

    `count` is the number of failures on all partitions, and `seconds_ago` is the age of the last
    one.
    """

    error: str
    topic: str
    group: str
    count: int
    seconds_ago: float


def recent(failures: Iterable[RecentFailure]) -> list[FailureKind]:
    """Return the kinds of failure that occurred within RECENT_SECONDS, the most recent first."""
    by_kind: dict[tuple[str, str, str], list[RecentFailure]] = defaultdict(list)
    for each in failures:
        if each.seconds_ago <= RECENT_SECONDS:
            by_kind[each.error, each.topic, each.group].append(each)
    found = [
        FailureKind(*kind, sum(each.count for each in some), min(each.seconds_ago for each in some))
        for kind, some in by_kind.items()
    ]
    return sorted(found, key=lambda each: each.seconds_ago)
