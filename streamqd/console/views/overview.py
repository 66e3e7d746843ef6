"""The first page: first the troubles, then every group with its figures."""

from __future__ import annotations

from streamqd.console import overview
from streamqd.console.overview import ALARM, WARN, FleetNow
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.words import plural

TROUBLES_SHOWN = 12
GROUPS_SHOWN = 200


def show(visit: Visit) -> Context:
    """Return the troubles, and the groups whose name contains `q`."""
    desk, now, wanted = visit.desk, visit.now, visit.q.lower()
    groups = [each for each in now.groups if wanted in f"{each.topic}/{each.group}".lower()]
    every = "all" in visit.query
    troubles = now.troubles if every else now.troubles[:TROUBLES_SHOWN]
    return {
        "headline": _headline(now),
        "level": next((each for each in (ALARM, WARN) if now.count(each)), ""),
        "calm": overview.summarize_fleet(now),
        "troubles": troubles,
        "more_troubles": len(now.troubles) - len(troubles),
        "lag": sum(each.least_lag for each in now.groups),
        "page": visit.page_of(groups, GROUPS_SHOWN),
        "busiest": max((each.least_lag for each in groups), default=0),
        "sparks": desk.backend.history.sparks(desk.store, now.seen.fleet, now.now_unix_ms),
    }


def _headline(now: FleetNow) -> str:
    counts = ((now.count(ALARM), "problem"), (now.count(WARN), "warning"))
    return ", ".join(plural(number, noun) for number, noun in counts if number) or "No problems"


VIEWS = (ConsoleView("overview", "/", "Overview", show, label="Overview", key="o", live=True),)
