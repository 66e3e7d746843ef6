"""Moving what is due: retries into the retry streams, scheduled sends into the partitions.

Not fenced: each move is atomic and right whoever asks for it, twice or at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from streamqd import logs
from streamqd.errors import RedisRefused
from streamqd.housekeeper.batch import Refusals, run_calls
from streamqd.metrics.view import View
from streamqd.model import Unit
from streamqd.scoreboard import now_ns
from streamqd.store import messages
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.messages import Promoted
from streamqd.store.scripts import Call, Reply

PAGE = 128  # entries moved by one script
ROUNDS_MAX = 16  # scripts for one target in one run
POLL_SECONDS = 1.0  # how old the next due time may be where something is delayed, or was lately
LIVELY_SECONDS = 60.0  # how long ago is lately
LOOK_SECONDS = 0.2  # how often the hints of the workers are read

Target = TypeVar("Target", bound=Hashable)


class Promoter(Generic[Target]):
    """Moves what is due, at its time.

    The answer to a move says when the next one is due, so what was set aside for longer than a
    second is moved punctually. A worker that sets something aside says in its slot when that is
    due. What others bring in (a send with a delay, a retry that a person hastens, a worker whose
    answer was lost) is found within a second where anything is delayed, or was a minute ago. At
    a target that is quiet nobody asks: the figures, measured every three seconds, tell of it.
    """

    def __init__(
        self,
        link: Link,
        view: View,
        call: Callable[[Target], Call],
        measured: Callable[[Target], int | None],
        moved: Callable[[Target, int], None],
        look: float = LOOK_SECONDS,
    ) -> None:
        """`measured`: the next due time by the view's figures. `look`: seconds between two runs."""
        self._link = link
        self._view = view
        self._call = call
        self._measured = measured
        self._moved = moved
        self._look = look
        self._asked: dict[Target, float] = {}  # when a script has asked last
        self._lively: dict[Target, float] = {}  # when something was delayed last
        self._due: dict[Target, int | None] = {}
        self._learnt_ns: dict[Target, int] = {}  # how old `_due` is
        self._hinted: dict[Target, int] = {}  # the hint that was followed last

    def run(self, targets: Mapping[Target, int]) -> float:
        """Promote for `targets` (target -> hint, unix ms or 0); return when to look again."""
        for known in self._asked.keys() - targets.keys():
            self._forget(known)
        waiting = [target for target, hint in targets.items() if self._wanted(target, hint)]
        refusals = Refusals()
        for _ in range(ROUNDS_MAX):
            if not waiting:
                break
            replies = run_calls(self._link, [self._call(target) for target in waiting])
            waiting = [
                target
                for target, reply in zip(waiting, replies, strict=True)
                if self._book(target, reply, refusals)
            ]
        refusals.tell()
        return 0.0 if waiting else self._next_look()

    def _wanted(self, target: Target, hint: int) -> bool:
        """Whether something is due, or may be."""
        asked = self._asked.get(target)
        if asked is None:
            return True
        if self._view.measured_ns > self._learnt_ns[target]:
            self._learn(target, self._measured(target), self._view.measured_ns)
        clock, now = time.monotonic(), self._view.now_unix_ms()
        if hint and hint != self._hinted.get(target):
            self._lively[target] = clock
            if hint <= now:
                self._hinted[target] = hint
                return True
        due = self._due[target]
        lively = clock - self._lively.get(target, -LIVELY_SECONDS) < LIVELY_SECONDS
        return (due is not None and due <= now) or (lively and clock - asked >= POLL_SECONDS)

    def _learn(self, target: Target, due: int | None, at_ns: int) -> None:
        self._due[target], self._learnt_ns[target] = due, at_ns
        if due is not None:
            self._lively[target] = time.monotonic()

    def _book(self, target: Target, reply: Reply | RedisRefused, refusals: Refusals) -> bool:
        """Note one answer; return whether there is more to move at once."""
        self._asked[target] = time.monotonic()
        if isinstance(reply, RedisRefused):
            # What could not be moved is still due; try it with the next poll, not before.
            self._learn(target, None, now_ns())
            self._lively[target] = time.monotonic()
            refusals.took(reply)
            return False
        done = Promoted.parse(reply)
        self._learn(target, done.next_due_unix_ms, now_ns())
        if done.moved:
            self._lively[target] = time.monotonic()
            self._moved(target, done.moved)
        if done.orphans:
            logs.event("promote.orphan", logging.ERROR, where=str(target), members=done.orphans)
        if done.unreadable:
            logs.event(
                "promote.unreadable", logging.ERROR, where=str(target), members=done.unreadable
            )
        return done.more

    def _next_look(self) -> float:
        now = self._view.now_unix_ms()
        dues = [(due - now) / 1000 for due in self._due.values() if due is not None]
        return max(0.01, min([self._look, *dues]))

    def _forget(self, target: Target) -> None:
        for known in (self._asked, self._lively, self._due, self._learnt_ns, self._hinted):
            known.pop(target, None)


def retry_promoter(link: Link, view: View, keys: Keys) -> Promoter[Unit]:
    """Promote due retries into the retry streams."""

    def measured(unit: Unit) -> int | None:
        figures = view.units.get(unit)
        return None if figures is None else figures.next_due_unix_ms

    def moved(unit: Unit, count: int) -> None:
        view.count("promoted", (unit.topic, str(unit.partition), unit.group), count)

    return Promoter(
        link, view, lambda unit: messages.promote_retries(keys, unit, PAGE), measured, moved
    )


def send_promoter(link: Link, view: View, keys: Keys) -> Promoter[tuple[str, int]]:
    """Promote due `delay=` sends into the partitions."""

    def measured(place: tuple[str, int]) -> int | None:
        figures = view.partitions.get(place)
        return None if figures is None else figures.next_due_unix_ms

    def moved(place: tuple[str, int], count: int) -> None:
        view.count("sent", (place[0], str(place[1])), count)

    def call(place: tuple[str, int]) -> Call:
        return messages.promote_scheduled(keys, *place, PAGE)

    # There are no hints, so new figures and what is due are all that there is to look at.
    return Promoter(link, view, call, measured, moved, look=POLL_SECONDS)
