"""The screen of `streamqd top`: every assignment and its figures, slow handlers, and failures."""

from __future__ import annotations

from collections import Counter

from streamqd.admin import ranking
from streamqd.admin.condition import describe_condition
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.errors import InvalidRequestError

PANEL_ROWS = 8  # rows in the panels of slow handlers and of failures
ISSUES_SHOWN = 3
# The sort orders, each with the heading of its column.
HEADS = {
    "urgency": "Urgency",
    "name": "Name",
    "owner": "Owner",
    "epoch": "Epoch",
    "since": "Since",
    "rate": "Out",
    "fails": "Failed",
    "lag": "Lag",
    "trend": "Lag/s",
    "oldest": "Oldest",
    "pending": "Pending",
    "retries": "Retries",
    "p99": "p99",
    "run": "Run",
    "dlq": "Dead",
}


def show(visit: Visit) -> Context:
    """Return a page of the assignments that match `q`, in the order `sort` or its reverse."""
    now, order, reverse = visit.now, visit.text("sort", ranking.ORDERS[0]), "reverse" in visit.query
    if order not in ranking.ORDERS:
        raise InvalidRequestError(f"sort must be one of {', '.join(ranking.ORDERS)}")
    seen = now.snapshot
    rows = ranking.select_rows(seen.assignments, visit.q, order, reverse=reverse)
    return {
        "totals": seen.totals,
        "states": sorted(Counter(each.state for each in seen.instances).items()),
        "issues": now.issues[:ISSUES_SHOWN],
        "more_issues": len(now.issues[ISSUES_SHOWN:]),
        "order": order,
        "reverse": reverse,
        "heads": HEADS,
        "describe_condition": describe_condition,
        "page": visit.paginate(rows, visit.limit),
        "slow": ranking.slowest(seen.assignments)[:PANEL_ROWS],
        "failures": ranking.recent(seen.failures)[:PANEL_ROWS],
        "failures_seconds": ranking.RECENT_SECONDS,
    }


VIEWS = (ConsoleView("top", "/top", "Live", show, label="Live", key="v", live=True),)
