"""The housekeeper's tasks for schedules: declare this instance's schedules, and fire due ones.

A declaration in Redis shows all instances that a schedule is still configured. This instance fires
schedules only after it has declared its own. Otherwise, a schedule that no instance has declared
recently would look like one that was removed, and would not fire.
"""

from __future__ import annotations

from collections.abc import Callable

from streamqd.config import Settings
from streamqd.isolate import Isolate
from streamqd.metrics.view import MetricsView
from streamqd.model import TopicPartition
from streamqd.schedules.firing import Firer, Outcome
from streamqd.schedules.reconciliation import MoveFinisher, Reconciler
from streamqd.store.store import Store

RECONCILE_SECONDS = 10.0
MOVES_SECONDS = 60.0


class Scheduler:
    """Runs the housekeeper's tasks for schedules."""

    def __init__(
        self,
        store: Store,
        view: MetricsView,
        settings: Settings,
        isolate: Callable[[str], Isolate[TopicPartition]],
    ) -> None:
        """Create the tasks. `isolate` takes a task's name, like `TaskIsolation.isolate_task`."""
        self._view = view
        self._reconciler = Reconciler(
            store,
            settings.daemon.fleet,
            settings.schedules,
            settings.read_unix_ms,
            settings.topics,
            isolate("declare_schedules"),
        )
        self._declared = not self._reconciler.wanted
        self._moves = MoveFinisher(store, isolate("move_schedules"))
        self._firer = Firer(
            store,
            self._owned_partitions,
            self._note,
            isolate("fire_schedules"),
            self._reconciler.declared,
        )

    def declare(self) -> None:
        """Declare the schedules of this instance."""
        if self._reconciler.wanted:
            self._reconciler.run()
        self._declared = True

    def finish_moves(self) -> None:
        """Finish moves of schedules that a process has started before it was killed."""
        self._moves.run()

    def fire(self) -> float | None:
        """Fire the schedules that are due. Return the seconds until the next turn.

        Return None if the usual interval is soon enough.
        """
        return self._firer.turn() if self._declared else None

    def _owned_partitions(self) -> set[TopicPartition]:
        return {
            (assignment.topic, assignment.partition) for _, assignment in self._view.owned_slots()
        }

    def _note(self, outcome: Outcome) -> None:
        topic = outcome.place[0]
        if outcome.reason:
            self._view.count("schedules_skipped", (topic, outcome.reason), outcome.ticks)
        else:
            self._view.count("schedules_fired", (topic,), outcome.ticks)
            self._view.count("schedules_late_ms", (topic,), outcome.late_ms)
            # Create these counters with the value 0. Otherwise, their first increase would be
            # invisible to the Prometheus function `increase`, which ignores a counter's first
            # value.
            for reason in ("misfire", "overlap"):
                self._view.count("schedules_skipped", (topic, reason), 0)
