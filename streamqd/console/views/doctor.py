"""Doctor: the checks of `streamqd doctor`, apart from those of a daemon's host."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from streamqd.admin import diagnosis
from streamqd.console.overview import LEVELS
from streamqd.console.view import ConsoleView, Context, Visit


def show(visit: Visit) -> Context:
    """Run the checks, or those of `area`, and return their findings by area.

    The console may run on another host than the daemons, so the checks of a host are left out, and
    in a console that is read-only those of a daemon's permissions. No database of an outbox is
    asked: the console may not reach it, and a page must not wait for it.
    """
    settings = visit.desk.settings
    left_out = {"host"} | ({"permissions"} if settings.console.read_only else set())
    every = [each for each in diagnosis.CHECKS if each.area not in left_out]
    area = visit.text("area")
    checks = [each for each in every if area in ("", each.area)]
    report = diagnosis.examine(visit.desk.store.connection, settings, checks)
    findings = sorted(report.findings, key=lambda each: each.area)
    return {
        "report": report,
        "area": area,
        "areas": sorted({each.area for each in every}),
        "found": [(name, list(some)) for name, some in groupby(findings, lambda each: each.area)],
        "levels": {str(severity): level for severity, level in LEVELS.items() if severity},
        "of_groups": Counter(
            each.level for each in visit.now.troubles if each.kind in ("assignment", "group")
        ),
        "left_out": "permissions" in left_out,
    }


VIEWS = (ConsoleView("doctor", "/doctor", "Doctor", show, label="Doctor", key="d"),)
