"""Acting on a fresh view of the fleet: acquire what is ours, hand over what is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamqd import logs
from streamqd.config.schema import Daemon
from streamqd.policy.expired_leases import ExpiredLeases
from streamqd.policy.rebalance import MORE_SECONDS, Liveness, MemberView, Rebalancer
from streamqd.supervisor.partition import OwnedPartition, Phase

if TYPE_CHECKING:
    from streamqd.supervisor.supervisor import Supervisor


class Rebalance:
    """Decides once for each beat that was answered."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        daemon, interval = supervisor.settings.daemon, supervisor.exchange.interval
        self._liveness = Liveness(daemon.instance, daemon.lease_ttl, interval)
        self._stranded = ExpiredLeases(interval)
        self.rebalancer = Rebalancer(
            daemon.instance,
            daemon.rebalance_delay,
            daemon.rebalance_hold,
            daemon.rebalance_moves,
            patience=2 * interval,
        )
        self.live: list[MemberView] = []
        self.looked = False  # at who owns what, and acted on it
        self._ticked = 0.0

    def damp(self, daemon: Daemon) -> None:
        """Use the damping of a reloaded configuration."""
        self.rebalancer.delay = daemon.rebalance_delay
        self.rebalancer.hold = daemon.rebalance_hold
        self.rebalancer.moves_max = daemon.rebalance_moves

    def tick(self, now: float) -> None:
        """Act on the view of the last beat, if nobody has yet."""
        supervisor = self._supervisor
        view, holdings = supervisor.exchange.view, supervisor.holdings
        if any(self._ticked < holding.broken_until <= now for holding in holdings.values()):
            supervisor.exchange.beat_soon()  # its rest is over: see whether it is still free
        self._ticked = now
        if not view.fresh or supervisor.drain.begun:
            return
        view.fresh = False
        self.looked = True
        self.live = self._liveness.observe(now, view.server_unix_ms, view.seen)
        view.silent = self._liveness.forgettable
        view.live = frozenset(one.member.id for one in self.live)
        mine = {u: h.since for u, h in holdings.items() if h.phase is not Phase.FREE}
        moving = sum(1 for unit in mine if holdings[unit].stop_reason == "shed")
        expired = self._stranded.observe(now, view.views, view.seen, self.live)
        views = {
            unit: seen._replace(leased=False) if unit in expired else seen
            for unit, seen in view.views.items()
            if holdings[unit].phase is Phase.FREE
            and holdings[unit].child is None
            and unit not in supervisor.crew.lingering
            and now >= holdings[unit].broken_until
        }
        cap = supervisor.settings.daemon.max_partitions or len(holdings)
        # `room` is negative when a reload has lowered the cap: then some are handed over.
        decision = self.rebalancer.decide(
            now,
            self.live,
            supervisor.wanted_units(),
            mine,
            moving,
            views,
            room=supervisor.serving.room(len(mine), cap),
            wishes=supervisor.steering.wishes(),
        )
        if decision.more:
            supervisor.exchange.beat_at = min(supervisor.exchange.beat_at, now + MORE_SECONDS)
        for unit in decision.acquire:
            # Whose owner is not seen is ours, or was: its processes are proven dead.
            dead = unit in expired or not views[unit].owner
            holdings[unit].take(views[unit].epoch, view.tokens.get(unit, "") if dead else "")
        for unit in [*decision.shed, *(supervisor.unwanted & mine.keys())]:
            self._shed(holdings[unit])

    def _shed(self, holding: OwnedPartition) -> None:
        supervisor = self._supervisor
        if holding.stop_reason in ("shed", "drain") or holding.phase is Phase.RELEASING:
            return
        supervisor.board.add("rebalance_shed")
        logs.event("rebalance.shed", unit=holding.unit, epoch=holding.epoch)
        if holding.child is None:
            holding.give_up()
        else:
            supervisor.crew.stop(holding, "shed")
