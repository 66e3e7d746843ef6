"""Checks of ownership: leases and fences that disagree, owners that are gone, solo mode."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin.diagnosis.declaration import Check, CheckResult, Need, Severity, spans
from streamqd.admin.diagnosis.facts import DiagnosisFacts, UnitFacts
from streamqd.admin.diagnosis.partitions import by_group, numbers
from streamqd.store.keys import Keys

SOLO_SECONDS = 300.0


def _unfenced(each: UnitFacts) -> bool:
    return bool(each.looks) and all(
        look.lease_matches is not None and (not look.fence.token or not look.lease_matches)
        for look in each.looks
    )


def _lease_without_fence(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    keys = Keys(facts.settings.keys.control, facts.settings.keys.streams)
    for (topic, group), units in by_group(facts.units, _unfenced).items():
        names = " ".join(keys.lease(*each.unit) for each in units[:4])
        yield CheckResult(
            f"there is a lease of {group} on {spans(numbers(units))} of {topic} that the fence does"
            " not know: nobody can take the partition until it ends",
            "somebody has written keys of ours by hand, or the server lost some: delete the leases,"
            f" the next owner takes them anew: `redis-cli DEL {names}`",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(units),
                "ttl_seconds": [each.view.ttl for each in units if each.view is not None][:16],
            },
        )


def _expired(each: UnitFacts) -> bool:
    """Whether an owner is named, and both looks found no lease of it."""
    return bool(each.looks) and all(
        bool(look.fence.token) and look.fence.ttl is None for look in each.looks
    )


def _owner(each: UnitFacts) -> str:
    return each.view.owner if each.view is not None else ""


def _owner_silent(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    def lost(each: UnitFacts) -> bool:
        return _expired(each) and not facts.alive(_owner(each))

    for (topic, group), units in by_group(facts.units, lost).items():
        owners = sorted({_owner(each) for each in units})
        yield CheckResult(
            f"{spans(numbers(units))} of {topic}/{group} still belong to {', '.join(owners[:4])},"
            " which is gone, and nobody has taken over",
            f"start an instance that runs {topic}/{group} (`systemctl start streamqd`): it takes"
            " them at once, with what is pending",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(units),
                "owners": owners[:16],
                "pending": sum(each.pending for each in units),
            },
        )


def _not_renewed(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    def stalled(each: UnitFacts) -> bool:
        return _expired(each) and facts.alive(_owner(each))

    for (topic, group), units in by_group(facts.units, stalled).items():
        owners = sorted({_owner(each) for each in units})
        yield CheckResult(
            f"{', '.join(owners[:4])} beats, but has let the lease of {spans(numbers(units))} of"
            f" {topic}/{group} expire",
            "look again in a few seconds: a late renewal mends it; if it stays, see `lease.` in the"
            f" log of {owners[0]} and `streamqd why {topic}/{units[0].unit.partition}/{group}`",
            about=f"{topic}/{group}",
            evidence={"partitions": numbers(units), "owners": owners[:16]},
        )


def _solo_stuck(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    def stuck(each: UnitFacts) -> bool:
        view = each.view
        return (
            view is not None
            and view.solo
            and view.ttl is not None
            and each.figures is not None
            and not each.pending
            and facts.now_unix_ms - view.since_unix_ms > SOLO_SECONDS * 1000
        )

    for (topic, group), units in by_group(facts.units, stuck).items():
        yield CheckResult(
            f"{spans(numbers(units))} of {topic}/{group} handle one message at a time as after the"
            " loss of a host, although nothing inherited is left",
            f"`streamqd reload {_owner(units[0])}` gives them fresh workers, which look again;"
            f" `streamqd partitions {topic}` shows their state",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(units),
                "since_unix_ms": [each.view.since_unix_ms for each in units if each.view][:16],
            },
        )


_NEEDS = (Need.FLEET, Need.UNITS)
CHECKS = (
    Check(
        "fleet.lease-without-fence",
        Severity.PROBLEM,
        "There is a lease, and the fence has no token or another one (seen twice).",
        _NEEDS,
        _lease_without_fence,
    ),
    Check(
        "fleet.owner-silent",
        Severity.PROBLEM,
        "A lease has expired, its owner is gone, and nobody has taken over.",
        _NEEDS,
        _owner_silent,
    ),
    Check(
        "fleet.not-renewed",
        Severity.WARNING,
        "A lease has expired although its owner beats.",
        _NEEDS,
        _not_renewed,
    ),
    Check(
        "fleet.solo-stuck",
        Severity.WARNING,
        "A partition is in solo mode for 5 minutes with nothing pending.",
        _NEEDS,
        _solo_stuck,
    ),
)
