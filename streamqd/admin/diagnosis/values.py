"""The check of values: whatever in Redis is not what its key and field hold, and how to cure it."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin.diagnosis.declaration import Check, CheckResult, Need, Severity
from streamqd.admin.diagnosis.facts import DiagnosisFacts


def _unreadable(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for each in facts.values:
        where = f"{each.field} of {each.key}" if each.field else each.key
        yield CheckResult(
            f"{where} is {each.found} and not {each.wanted}: {each.harm}",
            each.cure,
            about=each.about,
            evidence={
                "key": each.key,
                "field": each.field,
                "found": each.found,
                "wanted": each.wanted,
            },
        )


CHECKS = (
    Check(
        "values.unreadable",
        Severity.PROBLEM,
        "A value of a key is not what streamqd writes there.",
        (Need.FLEET, Need.UNITS, Need.VALUES),
        _unreadable,
    ),
)
