"""Apply the directives of operators, which this instance receives with its heartbeats.

Pauses, moves and drains apply for as long as they are stored in Redis, even to an instance that
starts later. A reload, rebalance or stack directive is applied only once. To repeat it, an operator
stores it again with a new timestamp. An instance ignores such directives if they were stored before
it started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamqd import logs
from streamqd.model import Assignment
from streamqd.policy.rebalance import Constraints, MemberView, may_reload
from streamqd.store.directives import Directive, Directives

LOGGED_MAX = 50  # number of logged changes of one kind, after which one line counts the others


class Control:
    """The directives that apply to this instance, and its progress in following them.

    Whenever the directives in Redis have changed, the changes are logged.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._read = False
        self.directives = Directives()
        self._stacks: dict[
            Assignment, Directive
        ] = {}  # requests that `take_stacks` has not returned yet
        self._unreadable = logs.Once("directive.ignored")
        self._last_reload = 0  # timestamp of the last reload directive that is finished
        self._current_reload = (
            0  # timestamp of the reload directive in progress, 0 if there is none
        )
        self._reload_problem = ""

    @property
    def is_drained(self) -> bool:
        """True if a directive drains this instance, so that it should own no partitions."""
        return self._instance in self.directives.drains

    def is_paused(self, assignment: Assignment) -> bool:
        """Return True if a directive pauses the assignment."""
        return self.directives.find_pause(assignment) is not None

    def constraints(self) -> Constraints:
        """Return the constraints that the directives impose on the rebalancer."""
        directives = self.directives
        moves = {
            assignment: (move.to, move.at_unix_ms) for assignment, move in directives.moves.items()
        }
        stopped = {(str(scope.topic), str(scope.group)) for scope in directives.stops}
        return Constraints(moves, directives.drains.keys(), stopped)

    @property
    def reloading_unix_ms(self) -> int:
        """The timestamp of the reload directive in progress (unix ms, Redis time), or 0."""
        return self._current_reload

    @property
    def announcement(self) -> dict[str, object]:
        """The heartbeat fields that report the last finished reload directive and its problem."""
        if not self._read:
            return {}
        return {"reloaded": self._last_reload, "reload_problem": self._reload_problem[:500]}

    def read(self, directives: Directives | None) -> bool:
        """Apply the directives from the reply to the last heartbeat, and log what has changed.

        `directives` is None before the first reply. Return True if an operator has requested a
        rebalance. The caller should then move partitions without the usual delay.
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
            self._last_reload = directives.find_reload_unix_ms(self._instance)
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
        """Return the requests for stacks of workers that have arrived since the last call."""
        taken, self._stacks = self._stacks, {}
        return taken

    # --- reload ---

    def wants_reload(self, live: Sequence[MemberView]) -> bool:
        """Return True if a reload directive applies to this instance and it is its turn to reload.

        The directive then counts as in progress until `finish_reload`. Call this only while no
        reload is running.
        """
        at = self.directives.find_reload_unix_ms(self._instance)
        if not self._read or self._current_reload or at <= self._last_reload:
            return False
        own_directive = self.directives.reloads.get(self._instance)
        named = own_directive is not None and own_directive.at_unix_ms == at
        if not (named or may_reload(self._instance, at, live)):
            return False
        logs.event("reload.requested", at=at)
        self._current_reload = at
        return True

    def finish_reload(self, problem: str) -> bool:
        """Record that no reload is running. Return True if this completes a reload directive.

        `problem` is the reason why the reload failed, or ''.
        """
        if not self._current_reload:
            return False
        self._last_reload, self._current_reload = self._current_reload, 0
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
