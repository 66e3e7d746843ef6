"""The checks of `streamqd doctor`, except the checks of a daemon's host."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from streamqd.admin import diagnosis
from streamqd.console.overview import LEVELS
from streamqd.console.view import ConsoleView, Context, Visit


def show(visit: Visit) -> Context:
    """Run the checks, or only those in `area`, and return their findings by area.

    The checks of a host are left out, because the console may run on a different host than the
    daemons. In a read-only console, the check of a daemon's permissions is left out, too. The
    databases of outboxes are not read, because the console may not be able to reach them, and a
    page must not wait for them.
    """
    settings = visit.resources.settings
    left_out = {"host"} | ({"permissions"} if settings.console.read_only else set())
    every = [each for each in diagnosis.CHECKS if each.area not in left_out]
    area = visit.text("area")
    checks = [each for each in every if area in ("", each.area)]
    report = diagnosis.examine(visit.resources.store.connection, settings, checks)
    findings = sorted(report.findings, key=lambda each: each.area)
    return {
        "report": report,
        "area": area,
        "areas": sorted({each.area for each in every}),
        "found": [(name, list(some)) for name, some in groupby(findings, lambda each: each.area)],
        "levels": {str(severity): level for severity, level in LEVELS.items() if severity},
        "of_groups": Counter(
            each.level for each in visit.now.issues if each.kind in ("assignment", "group")
        ),
        "left_out": "permissions" in left_out,
    }


VIEWS = (ConsoleView("doctor", "/doctor", "Doctor", show, label="Doctor", key="d"),)
