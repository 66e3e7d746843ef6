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
from streamqd.store import messages
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.messages import Promoted
from streamqd.store.scripts import Call, Reply

PAGE = 256  # entries moved by one script
ROUNDS_MAX = 8  # scripts for one target in one run
POLL_SECONDS = 1.0  # how old the knowledge of the next due time may be
LOOK_SECONDS = 0.2  # how often the hints of the workers are read

Target = TypeVar("Target", bound=Hashable)


class Promoter(Generic[Target]):
    """Moves what is due, at its time.

    Every target is looked at once per second. The answer says when the next one is due, so what
    was set aside for longer than a second is moved punctually; for shorter waits there is a hint.
    """

    def __init__(
        self,
        link: Link,
        view: View,
        call: Callable[[Target], Call],
        moved: Callable[[Target, int], None],
    ) -> None:
        self._link = link
        self._view = view
        self._call = call
        self._moved = moved
        self._polled: dict[Target, float] = {}
        self._due: dict[Target, int | None] = {}
        self._hinted: dict[Target, int] = {}

    def run(self, targets: Mapping[Target, int]) -> float:
        """Promote for `targets` (target -> hint, unix ms or 0); return when to look again."""
        for known in self._polled.keys() - targets.keys():
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
        now = self._view.now_unix_ms()
        due = self._due.get(target)
        if time.monotonic() - self._polled.get(target, -POLL_SECONDS) >= POLL_SECONDS:
            return True
        if due is not None and due <= now:
            return True
        if hint and hint != self._hinted.get(target) and hint <= now:
            self._hinted[target] = hint
            return True
        return False

    def _book(self, target: Target, reply: Reply | RedisRefused, refusals: Refusals) -> bool:
        """Note one answer; return whether there is more to move at once."""
        self._polled[target] = time.monotonic()
        if isinstance(reply, RedisRefused):
            # What could not be moved is still due; try it with the next poll, not before.
            self._due[target] = None
            refusals.took(reply)
            return False
        done = Promoted.parse(reply)
        self._due[target] = done.next_due_unix_ms
        if done.moved:
            self._moved(target, done.moved)
        if done.orphans:
            logs.event("promote.orphan", logging.ERROR, where=str(target), members=done.orphans)
        if done.unreadable:
            logs.event(
                "promote.unreadable", logging.ERROR, where=str(target), members=done.unreadable
            )
        return done.moved + done.orphans >= PAGE

    def _next_look(self) -> float:
        now = self._view.now_unix_ms()
        dues = [(due - now) / 1000 for due in self._due.values() if due is not None]
        return max(0.01, min([LOOK_SECONDS, *dues]))

    def _forget(self, target: Target) -> None:
        for known in (self._polled, self._due, self._hinted):
            known.pop(target, None)


def retry_promoter(link: Link, view: View, keys: Keys) -> Promoter[Unit]:
    """Promote due retries into the retry streams."""

    def moved(unit: Unit, count: int) -> None:
        view.count("promoted", (unit.topic, str(unit.partition), unit.group), count)

    return Promoter(link, view, lambda unit: messages.promote_retries(keys, unit, PAGE), moved)


def send_promoter(link: Link, view: View, keys: Keys) -> Promoter[tuple[str, int]]:
    """Promote due `delay=` sends into the partitions."""

    def moved(place: tuple[str, int], count: int) -> None:
        view.count("sent", (place[0], str(place[1])), count)

    return Promoter(link, view, lambda place: messages.promote_scheduled(keys, *place, PAGE), moved)
