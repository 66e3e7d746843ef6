"""Move due messages: retries into the retry streams, delayed sends into the partitions.

The moves need no fence, because each is atomic and safe even if repeated or concurrent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, ParamSpec, TypeVar

from streamqd import logs
from streamqd.errors import RedisResponseError
from streamqd.housekeeper import batch
from streamqd.housekeeper.batch import Refusals, run_batched
from streamqd.isolate import Isolate, run_directly
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import now_ns
from streamqd.store import messages
from streamqd.store.messages import Promoted
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

PAGE = 32  # entries moved by one script, which takes less than 0.5 ms
ROUNDS_MAX = 64  # scripts for one target in one turn
POLL_SECONDS = 1.0  # longest time between two calls for a target with waiting messages
LIVELY_SECONDS = 60.0  # time for which a target counts as active after its last waiting message
HINT_INTERVAL_SECONDS = 0.2  # seconds between two reads of the workers' hints

Target = TypeVar("Target", bound=Hashable)
P = ParamSpec("P")
T = TypeVar("T")


class Promoter(Generic[Target]):
    """Moves delayed sends and waiting retries when they are due.

    A target is a group's retry set, or the delayed sends of a partition. The reply to a move
    contains the next due time. A worker that delays a message writes its due time to its slot as a
    hint. Other sources give no hint: delayed sends, retries that an operator runs now, and workers
    whose reply was lost. Their messages are found within a second if the target has waiting
    messages, or had any within the last minute. For any other target, no call is made until the
    figures, which are measured every three seconds, show waiting messages.

    Only a check examines all targets. Between two checks, only targets with messages due before the
    next check are examined, so a busy target causes no work for the others.
    """

    def __init__(
        self,
        store: Store,
        view: MetricsView,
        call: Callable[[Target], Call],
        measured: Callable[[Target], int | None],
        moved: Callable[[Target, int], None],
        check_interval: float = HINT_INTERVAL_SECONDS,
        isolate: Isolate[Target] = run_directly,
    ) -> None:
        """`measured` returns a target's due time in the view. `check_interval`: seconds."""
        self._store = store
        self._view = view
        self._call = call
        self._measured = measured
        self._moved = moved
        self._check_interval = check_interval
        self._isolate = isolate
        self._check_at = 0.0  # time of the next check (monotonic)
        self._checked_ns = 0  # time of the figures at the last check
        self._wanted: set[Target] = set()  # targets to call immediately
        self._due_soon: dict[Target, int] = {}  # due times before the next check
        self._asked: dict[Target, float] = {}  # time of the last script call
        self._lively: dict[Target, float] = {}  # last time with waiting messages
        self._due: dict[Target, int | None] = {}
        self._measured_ns: dict[Target, int] = {}  # time at which `_due` was measured
        self._hinted: dict[Target, int] = {}  # the last hint that was followed
        self._refusals = Refusals()

    def turn(self, targets: Callable[[], Mapping[Target, int]]) -> float:
        """Check `targets()` if due, and promote. Return the seconds until the next turn."""
        if time.monotonic() >= self._check_at or self._view.measured_ns > self._checked_ns:
            self.select_targets(targets())
        return self.promote()

    def run(self, targets: Mapping[Target, int]) -> float:
        """Check `targets`, and promote. Return the seconds until the next turn."""
        self.select_targets(targets)
        return self.promote()

    def select_targets(self, targets: Mapping[Target, int]) -> None:
        """Select the targets to call, from `targets` (target -> hint, unix ms or 0)."""
        clock, now = time.monotonic(), self._view.now_unix_ms()
        self._check_at, self._checked_ns = clock + self._check_interval, self._view.measured_ns
        for known in self._asked.keys() - targets.keys():
            self._forget(known)
        isolate, wants = self._isolate, self._is_due
        self._wanted = {
            target
            for target, hint in targets.items()
            if isolate(target, wants, target, hint, clock, now)
        }
        horizon = self._horizon_unix_ms()
        self._due_soon = {
            target: due
            for target, due in self._due.items()
            if due is not None and due <= horizon and target not in self._wanted
        }

    def promote(self) -> float:
        """Promote due messages for one turn. Return the seconds until the next turn."""
        now = self._view.now_unix_ms()
        self._wanted |= {target for target, due in self._due_soon.items() if due <= now}
        until = time.monotonic() + batch.TURN_SECONDS
        # Start with the target that has waited longest, so that no target starves.
        waiting = sorted(self._wanted, key=lambda target: self._asked.get(target, 0.0))
        steps = run_batched(
            self._store, waiting, self._call, self._record_reply, ROUNDS_MAX, self._run_isolated
        )
        for _ in steps:
            if time.monotonic() >= until:
                break
        if self._wanted:
            return 0.0
        self._refusals.raise_first()
        return self._next_turn()

    def _run_isolated(
        self, target: Target, do: Callable[P, T], /, *args: P.args, **named: P.kwargs
    ) -> T | None:
        found = self._isolate(target, do, *args, **named)
        if found is None:
            # The data about this target may be incomplete, so drop it. The target is called again
            # after its pause.
            self._wanted.discard(target)
            self._due_soon.pop(target, None)
            self._forget(target)
        return found

    def _is_due(self, target: Target, hint: int, clock: float, now: int) -> bool:
        """Return True if a message is or may be due `now`."""
        asked = self._asked.get(target)
        if asked is None:
            return True
        if self._view.measured_ns > self._measured_ns[target]:
            self._record_due(target, self._measured(target), self._view.measured_ns)
        if hint and hint != self._hinted.get(target):
            self._lively[target] = clock
            if hint <= now:
                self._hinted[target] = hint
                return True
        due = self._due[target]
        lively = clock - self._lively.get(target, -LIVELY_SECONDS) < LIVELY_SECONDS
        return (due is not None and due <= now) or (lively and clock - asked >= POLL_SECONDS)

    def _record_due(self, target: Target, due: int | None, at_ns: int) -> None:
        self._due[target], self._measured_ns[target] = due, at_ns
        if due is not None:
            self._lively[target] = time.monotonic()

    def _record_reply(self, target: Target, reply: Reply | RedisResponseError) -> bool:
        """Record a reply. Return True if there is more to move now."""
        self._asked[target] = time.monotonic()
        self._wanted.discard(target)
        self._due_soon.pop(target, None)
        if isinstance(reply, RedisResponseError):
            # The refused message is still due. Try again at the next poll and not immediately.
            self._record_due(target, None, now_ns())
            self._lively[target] = time.monotonic()
            return self._refusals.accept(reply)
        done = Promoted.parse(reply)
        due = done.next_due_unix_ms
        self._record_due(target, due, now_ns())
        if done.more:
            self._wanted.add(target)
        elif due is not None and due <= self._horizon_unix_ms():
            self._due_soon[target] = due
        if done.moved:
            self._lively[target] = time.monotonic()
            self._moved(target, done.moved)
        if done.orphans:
            logs.event("due_time.removed", logging.ERROR, where=str(target), members=done.orphans)
        if done.unreadable:
            logs.event(
                "waiting_message.unreadable",
                logging.ERROR,
                where=str(target),
                members=done.unreadable,
            )
        return done.more

    def _horizon_unix_ms(self) -> float:
        """Return the server's clock at the next check."""
        return self._view.now_unix_ms() + (self._check_at - time.monotonic()) * 1000

    def _next_turn(self) -> float:
        now = self._view.now_unix_ms()
        dues = [(due - now) / 1000 for due in self._due_soon.values()]
        return max(0.01, min([self._check_at - time.monotonic(), *dues]))

    def _forget(self, target: Target) -> None:
        for known in (self._asked, self._lively, self._due, self._measured_ns, self._hinted):
            known.pop(target, None)


def retry_promoter(
    store: Store, view: MetricsView, isolate: Isolate[Assignment] = run_directly
) -> Promoter[Assignment]:
    """Promote due retries into the retry streams."""

    def next_due(assignment: Assignment) -> int | None:
        figures = view.assignments.get(assignment)
        return None if figures is None else figures.next_due_unix_ms

    def count_promoted(assignment: Assignment, count: int) -> None:
        view.count(
            "promoted", (assignment.topic, str(assignment.partition), assignment.group), count
        )

    def call(assignment: Assignment) -> Call:
        return messages.promote_retries(store.keys, assignment, PAGE)

    return Promoter(store, view, call, next_due, count_promoted, isolate=isolate)


def send_promoter(
    store: Store, view: MetricsView, isolate: Isolate[tuple[str, int]] = run_directly
) -> Promoter[tuple[str, int]]:
    """Promote due `delay=` sends into the partitions."""

    def next_due(place: tuple[str, int]) -> int | None:
        figures = view.partitions.get(place)
        return None if figures is None else figures.next_due_unix_ms

    def count_sent(place: tuple[str, int], count: int) -> None:
        view.count("sent", (place[0], str(place[1])), count)

    def call(place: tuple[str, int]) -> Call:
        return messages.promote_delayed(store.keys, *place, PAGE)

    # There are no hints, so check only new figures and due times.
    return Promoter(
        store, view, call, next_due, count_sent, check_interval=POLL_SECONDS, isolate=isolate
    )
