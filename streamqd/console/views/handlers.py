"""Handlers: the durations of their runs, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streamqd.admin import ranking
from streamqd.admin.assignments import AssignmentRow
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.scoreboard import quantile


@dataclass(slots=True)
class HandlerRow:
    """One handler in one group.

    Quantiles are in seconds over the last hour, or None without runs.
    """

    handler: str
    topic: str
    group: str
    acked: float = 0.0
    failed: float = 0.0
    longest_seconds: float | None = None
    runs: dict[int, int] = field(default_factory=dict)

    def quantile(self, share: float) -> float | None:
        """Return the upper bound (seconds) of the histogram bucket with this quantile."""
        return quantile(self.runs, share)


def show(visit: Visit) -> Context:
    """Return the most recent failures, and a row for each handler and group, the slowest first."""
    resources, now = visit.resources, visit.now
    rows = _rows(now.snapshot.assignments)
    found_runs = resources.backend.history.runs(
        resources.store, now.snapshot.fleet, now.now_unix_ms
    )
    for pair, row in rows.items():
        row.runs = found_runs.get(pair, {})
    wanted = visit.q.lower()
    found = [
        row for row in rows.values() if wanted in f"{row.handler} {row.topic}/{row.group}".lower()
    ]
    found.sort(key=lambda row: (-(row.quantile(0.95) or 0.0), row.handler, row.topic))
    return {
        "page": visit.paginate(found, visit.limit),
        "failures": visit.paginate(
            ranking.recent(now.snapshot.failures), visit.limit, "failures_from"
        ),
        "failures_seconds": ranking.RECENT_SECONDS,
    }


def _rows(rows: Iterable[AssignmentRow]) -> Mapping[tuple[str, str], HandlerRow]:
    found: dict[tuple[str, str], HandlerRow] = {}
    for row in rows:
        if not row.handler:
            continue
        handler = found.setdefault(
            (row.topic, row.group),
            HandlerRow(row.handler, row.topic, row.group),
        )
        handler.acked += row.acked or 0.0
        handler.failed += row.failed or 0.0
        ages = [each for each in (handler.longest_seconds, row.longest_run_seconds) if each]
        handler.longest_seconds = max(ages, default=None)
    return found


VIEWS = (ConsoleView("handlers", "/handlers", "Handlers", show, label="Handlers", key="h"),)
