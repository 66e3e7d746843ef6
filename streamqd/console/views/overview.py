"""The first page: first the issues, then every group with its figures."""

from __future__ import annotations

from streamqd.console import overview
from streamqd.console.overview import ALARM, WARN, FleetNow
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.words import plural

ISSUES_SHOWN = 12
GROUPS_SHOWN = 200


def show(visit: Visit) -> Context:
    """Return the issues, and the groups whose name contains `q`."""
    resources, now, wanted = visit.resources, visit.now, visit.q.lower()
    groups = [each for each in now.groups if wanted in f"{each.topic}/{each.group}".lower()]
    every = "all" in visit.query
    issues = now.issues if every else now.issues[:ISSUES_SHOWN]
    return {
        "headline": _headline(now),
        "level": next((each for each in (ALARM, WARN) if now.count(each)), ""),
        "calm": overview.summarize_fleet(now),
        "issues": issues,
        "more_issues": len(now.issues) - len(issues),
        "lag": sum(each.least_lag for each in now.groups),
        "page": visit.paginate(groups, GROUPS_SHOWN),
        "busiest": max((each.least_lag for each in groups), default=0),
        "sparks": resources.backend.history.sparks(
            resources.store, now.snapshot.fleet, now.now_unix_ms
        ),
    }


def _headline(now: FleetNow) -> str:
    counts = ((now.count(ALARM), "problem"), (now.count(WARN), "warning"))
    return ", ".join(plural(number, noun) for number, noun in counts if number) or "No problems"


VIEWS = (ConsoleView("overview", "/", "Overview", show, label="Overview", key="o", live=True),)
