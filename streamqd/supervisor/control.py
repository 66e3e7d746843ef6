"""What operators want, as this instance reads it with its beats, and what it has obeyed of it.

Pauses, moves and drains are states: they hold as long as they are written down, also for an
instance that starts later. A reload and a rebalance are done once for each time of the order; those
that an instance finds when it starts are of the past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamqd import logs
from streamqd.model import Unit
from streamqd.policy.rebalance import Wishes, may_reload
from streamqd.store.directives import Directive, Directives

if TYPE_CHECKING:
    from streamqd.supervisor.supervisor import Supervisor


class Control:
    """Compares each new reading with the last one, and does what is new in it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._me = supervisor.settings.daemon.instance
        self._read = False
        self.control = Directives()
        self._strange = logs.Once(logs.event, "steer.ignored")
        self._reloaded = 0  # time of the last order to reload that is done with
        self._reloading = 0  # of the one under way, 0 = none

    @property
    def drained(self) -> bool:
        """Whether this instance shall own nothing."""
        return self._me in self.control.drains

    def is_paused(self, unit: Unit) -> bool:
        """Whether nothing of the unit shall be fetched."""
        return self.control.pause_of(unit) is not None

    def wishes(self) -> Wishes:
        """What the rebalancer has to know."""
        control = self.control
        moves = {unit: (order.to, order.at_unix_ms) for unit, order in control.moves.items()}
        stopped = {(str(scope.topic), str(scope.group)) for scope in control.stops}
        return Wishes(moves, control.drains.keys(), stopped)

    def tick(self) -> None:
        """Take a new reading, and go on with a reload that was ordered."""
        control = self._supervisor.exchange.view.control
        if control is not None and (control is not self.control or not self._read):
            before, self.control = self.control, control
            self._changed(before)
        if self._read:
            self._reload()

    def _changed(self, before: Directives) -> None:
        control = self.control
        self._strange.look(
            {name: {"order": name[:200], "problem": why} for name, why in control.strange.items()}
        )
        _tell("steer.pause", "steer.resume", before.pauses, control.pauses)
        _tell("steer.stop", "steer.start", before.stops, control.stops)
        _tell("steer.move", "steer.unmove", before.moves, control.moves)
        _tell("steer.drain", "steer.undrain", before.drains, control.drains)
        if not self._read:
            self._read = True
            self._reloaded = control.reload_of(self._me)
            self._obeyed("")
        elif control.rebalance is not None and control.rebalance != before.rebalance:
            order = control.rebalance
            logs.event("steer.rebalance", by=order.by, why=order.why or None)
            self._supervisor.moves.rebalancer.hurry()
        self._supervisor.apply_pauses()

    # --- reload ---

    def _reload(self) -> None:
        supervisor = self._supervisor
        if self._reloading:
            if supervisor.reload.idle:
                self._reloaded, self._reloading = self._reloading, 0
                self._obeyed(supervisor.reload.problem)
                # Whoever waits for its turn finds out at once.
                supervisor.exchange.beat_soon()
                supervisor.exchange.wake_fleet()
            return
        at = self.control.reload_of(self._me)
        if at <= self._reloaded or not supervisor.reload.idle:
            return
        mine = self.control.reloads.get(self._me)
        named = mine is not None and mine.at_unix_ms == at
        if named or may_reload(self._me, at, supervisor.moves.live):
            logs.event("steer.reload", at=at)
            self._reloading = at
            supervisor.reload.request()

    def _obeyed(self, problem: str) -> None:
        """Let the next beats tell how far this instance is."""
        self._supervisor.exchange.obeyed = {
            "reloaded": self._reloaded,
            "reload_problem": problem[:500],
        }


def _tell(begun: str, ended: str, before: dict[Any, Directive], now: dict[Any, Directive]) -> None:
    for name, order in now.items():
        if before.get(name) != order:
            logs.event(
                begun, order=str(name), to=order.to or None, by=order.by, why=order.why or None
            )
    for name in before.keys() - now.keys():
        logs.event(ended, order=str(name))
