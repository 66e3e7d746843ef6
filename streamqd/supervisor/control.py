"""Apply the directives of operators, which this instance reads with its heartbeats.

Pauses, moves and drains apply as long as they are stored, even to an instance that starts later. A
reload, rebalance or stack directive is applied once for each new timestamp. An instance ignores
timestamps from before its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamqd import logs
from streamqd.model import Assignment
from streamqd.policy.rebalance import Constraints, MemberView, may_reload
from streamqd.store.directives import Directive, Directives

LOGGED_MAX = 50  # logged changes of one kind. One more line counts the rest.


class Control:
    """Compares each new reading of the directives with the last one, and logs the changes."""

    def __init__(self, instance: str) -> None:
        self._me = instance
        self._read = False
        self.directives = Directives()
        self._stacks: dict[
            Assignment, Directive
        ] = {}  # requests that `take_stacks` has not returned yet
        self._unreadable = logs.Once("directive.ignored")
        self._reloaded = 0  # time of the last finished reload directive
        self._reloading = 0  # timestamp of the reload in progress, 0 = none
        self._reload_problem = ""

    @property
    def is_drained(self) -> bool:
        """True if this instance should own no partition."""
        return self._me in self.directives.drains

    def is_paused(self, assignment: Assignment) -> bool:
        """Return True if no message of the assignment should be fetched."""
        return self.directives.pause_of(assignment) is not None

    def constraints(self) -> Constraints:
        """Return the constraints that the directives set for the rebalancer."""
        directives = self.directives
        moves = {
            assignment: (move.to, move.at_unix_ms) for assignment, move in directives.moves.items()
        }
        stopped = {(str(scope.topic), str(scope.group)) for scope in directives.stops}
        return Constraints(moves, directives.drains.keys(), stopped)

    @property
    def reloading_unix_ms(self) -> int:
        """The time of the reload directive in progress (unix ms, Redis time), 0 for none."""
        return self._reloading

    @property
    def announcement(self) -> dict[str, object]:
        """Heartbeat fields: the time of the last finished reload directive, and its problem."""
        if not self._read:
            return {}
        return {"reloaded": self._reloaded, "reload_problem": self._reload_problem[:500]}

    def read(self, directives: Directives | None) -> bool:
        """Apply the directives that the last heartbeat returned, None before the first heartbeat.

        Return True if misplaced partitions should move without delay.
        """
        if directives is None or (directives is self.directives and self._read):
            return False
        before, self.directives = self.directives, directives
        self._unreadable.report(
            {
                name: {"directive": name[:200], "problem": why}
                for name, why in directives.unreadable.items()
            }
        )
        _log_changes("pause.requested", "pause.removed", before.pauses, directives.pauses)
        _log_changes("group.stopped", "group.started", before.stops, directives.stops)
        _log_changes("move.requested", "move.removed", before.moves, directives.moves)
        _log_changes("drain.requested", "drain.removed", before.drains, directives.drains)
        if not self._read:
            self._read = True
            self._reloaded = directives.reload_of(self._me)
            return False
        directive = directives.rebalance
        hurry = directive is not None and directive != before.rebalance
        stacks = directives.stacks.items()
        self._stacks |= {
            assignment: each for assignment, each in stacks if before.stacks.get(assignment) != each
        }
        if directive is not None and hurry:
            logs.event("rebalance.requested", by=directive.by, why=directive.why or None)
        return hurry

    def take_stacks(self) -> dict[Assignment, Directive]:
        """Return the stacks that were requested since the last call."""
        taken, self._stacks = self._stacks, {}
        return taken

    # --- reload ---

    def wants_reload(self, live: Sequence[MemberView]) -> bool:
        """Return True if it is this instance's turn to reload. Call only while no reload runs."""
        at = self.directives.reload_of(self._me)
        if not self._read or self._reloading or at <= self._reloaded:
            return False
        own_directive = self.directives.reloads.get(self._me)
        named = own_directive is not None and own_directive.at_unix_ms == at
        if not (named or may_reload(self._me, at, live)):
            return False
        logs.event("reload.requested", at=at)
        self._reloading = at
        return True

    def finish_reload(self, problem: str) -> bool:
        """Record that no reload runs. Return True if the reload of a directive just finished."""
        if not self._reloading:
            return False
        self._reloaded, self._reloading = self._reloading, 0
        self._reload_problem = problem
        return True


def _log_changes(
    begun: str, ended: str, before: dict[Any, Directive], now: dict[Any, Directive]
) -> None:
    changed = [(name, found) for name, found in now.items() if before.get(name) != found]
    for name, found in changed[:LOGGED_MAX]:
        logs.event(
            begun, directive=str(name), to=found.to or None, by=found.by, why=found.why or None
        )
    gone = [name for name in before if name not in now]
    for name in gone[:LOGGED_MAX]:
        logs.event(ended, directive=str(name))
    for event, count in ((begun, len(changed)), (ended, len(gone))):
        if count > LOGGED_MAX:
            logs.event(event, directive=f"{count - LOGGED_MAX:,} more")
