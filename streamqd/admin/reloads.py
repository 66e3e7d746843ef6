"""Find reloads that instances have not completed yet, and the reasons. No I/O.

A supervisor publishes its current reload with each heartbeat, in the field `reloading`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamqd.admin import published
from streamqd.admin.published import FleetState
from streamqd.model import Assignment
from streamqd.policy.rebalance import may_reload
from streamqd.words import plural, precise_duration


@dataclass(frozen=True, slots=True)
class PendingReload:
    """An unfinished reload of one instance.

    `asked_unix_ms` is the time at which the reload was requested: the time of the directive
    (server's clock) or of the signal (clock of the instance's host). `by` and `reason` come from
    the directive, and are '' for a signal. `assignment` is the assignment whose worker is being
    replaced. `waits_for` is a clause that describes what the reload is waiting for. `its_turn` is
    False while other instances reload first.
    """

    asked_unix_ms: int
    by: str
    reason: str
    assignment: Assignment | None
    waits_for: str
    its_turn: bool = True


def find_pending(
    state: FleetState, instance: str, summary: Mapping[str, Any]
) -> PendingReload | None:
    """Return the unfinished reload of a live instance, or None if it has none.

    `summary` is the summary that the instance published.
    """
    seen = state.live.get(instance)
    if seen is None or seen.leaving:
        return None
    directive = state.control.find_reload(instance)
    if directive is not None and (seen.reloaded is None or seen.reloaded >= directive.at_unix_ms):
        directive = None
    raw = state.infos[instance].get("reloading")
    if isinstance(raw, dict):
        since = published.read_integer(raw.get("since_unix_ms")) or 0
        at = published.read_integer(raw.get("directive_unix_ms")) or 0  # 0 for a signal
        assignment = _parse_assignment(raw.get("assignment"))
        # If the directive is later, it requests another reload, which waits until this one has
        # finished.
        announced = directive if directive is not None and directive.at_unix_ms == at else None
        return PendingReload(
            at or since,
            announced.by if announced else "",
            announced.why if announced else "",
            assignment,
            _describe_obstacle(raw, assignment, _run_seconds(summary, assignment)),
        )
    if directive is None:
        return None
    before = [
        name
        for name, one in sorted(state.live.items())
        if not may_reload(instance, directive.at_unix_ms, [one])
    ]
    its_turn = directive is state.control.reloads.get(instance) or not before
    waits = "its start" if its_turn else f"its turn, after {before[0]}"
    return PendingReload(directive.at_unix_ms, directive.by, directive.why, None, waits, its_turn)


def _parse_assignment(raw: Any) -> Assignment | None:
    """Return an assignment that was published as a list, or None for anything else."""
    if not isinstance(raw, list) or [type(part) for part in raw] != [str, int, str]:
        return None
    return Assignment(*raw)


def _run_seconds(summary: Mapping[str, Any], assignment: Assignment | None) -> float:
    """Return the age of an assignment's oldest run in seconds, or 0 if nothing is running."""
    for raw in published.to_tables(summary.get("assignments")):
        if assignment is not None and [*assignment] == [
            raw.get(each) for each in Assignment._fields
        ]:
            return published.read_number(raw.get("longest_run_seconds")) or 0.0
    return 0.0


def _describe_obstacle(
    raw: Mapping[str, Any], assignment: Assignment | None, run_seconds: float
) -> str:
    step, left = raw.get("step"), published.read_integer(raw.get("workers")) or 0
    text = "the check of the new configuration and code"
    if assignment is not None:
        text = f"the replacement of the worker of {assignment}"
        if step == "start":
            text = f"the start of the new worker of {assignment}"
        elif step == "finish":
            text = f"the old worker of {assignment} to stop"
            if run_seconds:
                text = (
                    f"the message of {assignment} that has been running for"
                    f" {precise_duration(run_seconds)}"
                )
    return f"{text}; then {plural(left, 'more worker')} to replace" if left else text
