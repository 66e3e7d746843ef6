"""Move messages that are due: retries to the retry streams, and delayed messages to the partitions.

The moves are not checked against the fence. This is safe, because each of them is atomic and does
no harm if it is repeated or if several processes try it at the same time.
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

PAGE = 32  # largest number of entries that one script moves, in less than 0.5 ms
ROUNDS_MAX = 64  # largest number of scripts for one target in one turn
POLL_SECONDS = 1.0  # longest time between two calls for an active target
ACTIVE_SECONDS = 60.0  # a target counts as active for this long after its last waiting message
HINT_INTERVAL_SECONDS = 0.2  # seconds between two reads of the workers' hints

Target = TypeVar("Target", bound=Hashable)
P = ParamSpec("P")
T = TypeVar("T")


class Promoter(Generic[Target]):
    """Moves either waiting retries or delayed messages when they are due.

    A target is a place from which messages are moved: the waiting retries of a group on a
    partition, or the delayed messages of a partition.

    The promoter must find out when a target's next message is due. The reply to each move contains
    the next due time. A worker that delays a message writes the due time to its slot as a hint.
    There is no hint for delayed messages, for retries that an operator runs now, or if the worker
    did not get Redis's reply. To find such messages within a second, the promoter polls each active
    target, which is one that has waiting messages or had any within the last minute. It does not
    call any other target until the figures, which are measured every three seconds, show waiting
    messages.

    A check examines all targets. It takes place every `check_interval` seconds, and after each
    measurement. Between two checks, only targets with a message that is due before the next check
    are examined, so that a busy target causes no work for the others.
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
        """Create the promoter.

        `call` builds the call that moves a target's due messages. `moved` is called with a target
        and the number of messages that were moved. `measured` returns the target's next due time
        from the view (unix ms), or None. `check_interval` is the number of seconds between checks.
        """
        self._store = store
        self._view = view
        self._call = call
        self._measured = measured
        self._moved = moved
        self._check_interval = check_interval
        self._isolate = isolate
        self._check_at = 0.0  # monotonic time of the next check
        self._checked_ns = 0  # time at which the figures of the last check were measured
        self._wanted: set[Target] = set()  # targets that must be called immediately
        self._due_soon: dict[Target, int] = {}  # due times before the next check
        self._asked: dict[Target, float] = {}  # monotonic time of each target's last call
        self._last_active: dict[Target, float] = {}  # last monotonic time with waiting messages
        self._due: dict[Target, int | None] = {}  # next due times (unix ms), None if there is none
        self._measured_ns: dict[Target, int] = {}  # time at which `_due` was measured
        self._last_hints: dict[Target, int] = {}  # the last hint that was followed
        self._refusals = Refusals()

    def turn(self, targets: Callable[[], Mapping[Target, int]]) -> float:
        """Make a check if it is due, and move due messages. Return the seconds to the next turn.

        `targets` maps all targets to their hints, as for `select_targets`. It is a function, which
        is only called if a check is due.
        """
        if time.monotonic() >= self._check_at or self._view.measured_ns > self._checked_ns:
            self.select_targets(targets())
        return self.promote()

    def run(self, targets: Mapping[Target, int]) -> float:
        """Make a check, and move due messages. Return the seconds until the next turn."""
        self.select_targets(targets)
        return self.promote()

    def select_targets(self, targets: Mapping[Target, int]) -> None:
        """Make a check, which selects the targets whose messages must be moved now or soon.

        `targets` maps all targets to the due time that a worker has left as a hint (unix ms), or to
        0 if there is none.
        """
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
        """Move due messages for one turn. Return the seconds until the next turn."""
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
            # An error has occurred, so the data about this target may be incomplete. Forget it. The
            # target is called again when its pause is over.
            self._wanted.discard(target)
            self._due_soon.pop(target, None)
            self._forget(target)
        return found

    def _is_due(self, target: Target, hint: int, clock: float, now: int) -> bool:
        """Return True if the target must be called, because a message is due or may be due.

        `clock` is the monotonic time, and `now` the server's time in unix ms.
        """
        asked = self._asked.get(target)
        if asked is None:
            return True
        if self._view.measured_ns > self._measured_ns[target]:
            self._record_due(target, self._measured(target), self._view.measured_ns)
        if hint and hint != self._last_hints.get(target):
            self._last_active[target] = clock
            if hint <= now:
                self._last_hints[target] = hint
                return True
        due = self._due[target]
        is_active = clock - self._last_active.get(target, -ACTIVE_SECONDS) < ACTIVE_SECONDS
        return (due is not None and due <= now) or (is_active and clock - asked >= POLL_SECONDS)

    def _record_due(self, target: Target, due: int | None, at_ns: int) -> None:
        self._due[target], self._measured_ns[target] = due, at_ns
        if due is not None:
            self._last_active[target] = time.monotonic()

    def _record_reply(self, target: Target, reply: Reply | RedisResponseError) -> bool:
        """Record a reply. Return True if more messages are due now."""
        self._asked[target] = time.monotonic()
        self._wanted.discard(target)
        self._due_soon.pop(target, None)
        if isinstance(reply, RedisResponseError):
            # The messages are still due, but try again at the next poll instead of immediately.
            self._record_due(target, None, now_ns())
            self._last_active[target] = time.monotonic()
            return self._refusals.accept(reply)
        done = Promoted.parse(reply)
        due = done.next_due_unix_ms
        self._record_due(target, due, now_ns())
        if done.more:
            self._wanted.add(target)
        elif due is not None and due <= self._horizon_unix_ms():
            self._due_soon[target] = due
        if done.moved:
            self._last_active[target] = time.monotonic()
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
        """Return the time of the next check on the server's clock (unix ms)."""
        return self._view.now_unix_ms() + (self._check_at - time.monotonic()) * 1000

    def _next_turn(self) -> float:
        now = self._view.now_unix_ms()
        dues = [(due - now) / 1000 for due in self._due_soon.values()]
        return max(0.01, min([self._check_at - time.monotonic(), *dues]))

    def _forget(self, target: Target) -> None:
        for known in (
            self._asked,
            self._last_active,
            self._due,
            self._measured_ns,
            self._last_hints,
        ):
            known.pop(target, None)


def retry_promoter(
    store: Store, view: MetricsView, isolate: Isolate[Assignment] = run_directly
) -> Promoter[Assignment]:
    """Return the promoter that moves due retries to the retry streams."""

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
    """Return the promoter that moves due messages, sent with `delay=`, to the partitions."""

    def next_due(place: tuple[str, int]) -> int | None:
        figures = view.partitions.get(place)
        return None if figures is None else figures.next_due_unix_ms

    def count_sent(place: tuple[str, int], count: int) -> None:
        view.count("sent", (place[0], str(place[1])), count)

    def call(place: tuple[str, int]) -> Call:
        return messages.promote_delayed(store.keys, *place, PAGE)

    # Workers leave no hints about delayed messages, so checks need not be frequent.
    return Promoter(
        store, view, call, next_due, count_sent, check_interval=POLL_SECONDS, isolate=isolate
    )
