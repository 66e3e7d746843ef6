"""The supervisor's talk with Redis: one bounded exchange per tick, whatever there is to say.

Renewals, the beat and what each holding wants travel in one write; looking at the fleet, telling
it and listening to it come in later ticks, which follow at once. While Redis does not answer,
nothing is lost: every call is wanted until it is answered, and the pause between two tries grows.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import random

from streamqd import logs, startup
from streamqd.config import Settings
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.model import Unit
from streamqd.policy.rebalance import Seen, View
from streamqd.scoreboard import Scoreboard, now_ns
from streamqd.store import control, leases, members, messages
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.holding import Holding, Phase
from streamqd.version import __version__

EXCHANGE_SECONDS = 1.0  # one exchange blocks the supervisor at most this long
BACKOFF_SECONDS = (0.1, 2.0)
LISTEN_RETRY_SECONDS = (1.0, 60.0)  # wake-ups are a convenience: beats alone do as well

Answer = Callable[[Reply | RedisRefused], None]


@dataclass
class FleetView:
    """What the last beat and the views after it have shown."""

    seen: list[Seen] = field(default_factory=list)
    server_unix_ms: int = 0
    twin: bool = False
    views: dict[Unit, View] = field(default_factory=dict)
    tokens: dict[Unit, str] = field(default_factory=dict)
    fresh: bool = False  # the views belong to the last beat and have not been acted on
    control: control.Control | None = None  # what operators want; a new one when it has changed


class Exchange:
    """Owns the supervisor's two connections: one to ask, one on which wake-ups arrive."""

    def __init__(self, settings: Settings, board: Scoreboard, lock_id: str) -> None:
        self.settings = settings
        self.board = board
        self.keys = Keys(settings.keys.control, settings.keys.streams)
        self.ttl = settings.daemon.lease_ttl
        self.interval = self.ttl / 5
        self.me = settings.daemon.instance
        self.nonce = secrets.token_hex(8)
        self.lock_id = lock_id
        self.link = Link(settings.redis, timeout=EXCHANGE_SECONDS, name="streamqd:supervisor")
        self.wake_link = Link(settings.redis, timeout=EXCHANGE_SECONDS, name="streamqd:wake")
        self.view = FleetView()
        self.leaving = False
        self.suspects_empty = False  # a fence was gone: the topics may be gone too
        self.beat_at = 0.0
        self.views_due = False
        self.episode = logs.Episode("redis.lost", "redis.back")
        self._retry_at = 0.0
        self._backoff = BACKOFF_SECONDS[0]
        self._notices: list[tuple[str, ...]] = []
        self._dead_nonce = ""  # of a predecessor that is to be taken out of the fleet
        self._listen_at = 0.0
        self._listen_backoff = LISTEN_RETRY_SECONDS[0]
        self._started = time.time()
        self._orders: list[bytes] | None = None
        self.obeyed: dict[str, object] = {}  # what the beat tells of orders, see `steering`

    @property
    def ok(self) -> bool:
        """Whether the last exchange was answered."""
        return not self.episode.open

    def next_at(self) -> float:
        """When there is something to say next (monotonic)."""
        more = self.views_due or self._notices or self._dead_nonce
        return max(0.0 if more else min(self.beat_at, self._next_listen()), self._retry_at)

    def _next_listen(self) -> float:
        return float("inf") if self.wake_link.connected else self._listen_at

    # --- one tick ---

    def tick(self, now: float, holdings: Mapping[Unit, Holding], offers: Sequence[Unit]) -> None:
        """Say what is due and hand out the answers."""
        if now < self._retry_at:
            return
        calls: list[tuple[Call, Answer]] = []
        sent_ns = now_ns()
        for holding in holdings.values():
            self._wishes(holding, now, sent_ns, calls)
        if now >= self.beat_at:
            broken = [unit for unit in offers if holdings[unit].broken_until > now]
            calls.append((self._beat_call(offers, broken), self._on_beat))
        try:
            if calls:
                self._ask(calls)
                self._backoff = BACKOFF_SECONDS[0]
                self.episode.recovered()
            elif self.views_due:
                self._look(holdings, offers)
            elif self._dead_nonce:
                self._bury()
            elif self._notices:
                notices, self._notices = self._notices, []
                self.link.pipeline(notices)
            elif now >= self._next_listen():
                self._listen(now)
        except RedisUnavailable as error:
            self._failed(now, error)

    def _ask(self, calls: list[tuple[Call, Answer]]) -> None:
        """Run the calls in one exchange and hand out the answers."""
        self.board.add("exchanges")
        replies = self.link.run_many([call for call, _ in calls])
        for (_, answer), reply in zip(calls, replies, strict=True):
            if isinstance(reply, RedisRefused) and reply.code in _NOT_NOW:
                raise RedisUnavailable(str(reply), sent=True)
            answer(reply)

    def _wishes(
        self, holding: Holding, now: float, sent_ns: int, calls: list[tuple[Call, Answer]]
    ) -> None:
        call = holding.intent(self.keys, self.ttl, self.me)
        if call is not None:
            calls.append((call, partial(self._on_intent, holding, sent_ns)))
            return
        if holding.phase is not Phase.HELD:
            return
        if not holding.groups_ready:
            call = messages.ensure_group(self.keys, holding.unit, "0")
            calls.append((call, partial(self._on_group, holding)))
        if now >= holding.renew_at:
            call = leases.renew(self.keys, holding.unit, holding.token, self.ttl)
            calls.append((call, partial(self._on_renew, holding, sent_ns)))

    def _failed(self, now: float, error: RedisUnavailable) -> None:
        self.board.add("exchange_errors")
        self.episode.failed(error=str(error))
        self._retry_at = now + self._backoff * (0.5 + random())
        # Who comes back later than the others by a beat would be taken for dead.
        self._backoff = min(self._backoff * 2, BACKOFF_SECONDS[1], self.interval / 4)
        self.wake_link.close()
        # The first thing to know after an outage is who is alive.
        self.beat_at = min(self.beat_at, now)

    # --- answers ---

    def _on_intent(self, holding: Holding, sent_ns: int, reply: Reply | RedisRefused) -> None:
        now = time.monotonic()
        before = holding.phase
        word = holding.answered(reply, now)
        if holding.owned:
            self._trust(holding, sent_ns, now)
        if word == "acquired":
            self.board.add("rebalance_acquired")
            assert not isinstance(reply, RedisRefused)
            taken = leases.Acquired.parse(reply)
            logs.event(
                "lease.acquired", unit=holding.unit, epoch=taken.epoch, inherited=taken.unclean
            )
        elif word == "released":
            logs.event("lease.released", unit=holding.unit, epoch=holding.epoch)
            self.wake_fleet()
        elif word == "charged":
            logs.event("worker.charged", logging.WARNING, unit=holding.unit, epoch=holding.epoch)
        elif word == "lost":
            self._lost(holding)
        elif before is Phase.ACQUIRING and holding.phase is Phase.FREE:
            self.beat_soon()  # somebody was quicker; look again at the next beat
        if isinstance(reply, RedisRefused):
            self._refused(holding, before.value, reply)
        else:
            holding.refusal = ""

    def _refused(self, holding: Holding, what: str, error: RedisRefused) -> None:
        if holding.refusal != error.code:
            holding.refusal = error.code
            logs.event(
                "redis.refused", logging.ERROR, unit=holding.unit, what=what, error=str(error)
            )

    def _on_group(self, holding: Holding, reply: Reply | RedisRefused) -> None:
        if isinstance(reply, RedisRefused):
            self._refused(holding, "group", reply)
            return
        holding.groups_ready = True

    def _on_renew(self, holding: Holding, sent_ns: int, reply: Reply | RedisRefused) -> None:
        if isinstance(reply, RedisRefused) or holding.phase is not Phase.HELD:
            return
        if reply.word in ("OK", "LATE"):
            self._trust(holding, sent_ns, time.monotonic())
            if reply.word == "LATE":
                self.board.add("renew_late")
                logs.event("lease.late", logging.WARNING, unit=holding.unit, epoch=holding.epoch)
            return
        self._lost(holding)
        holding.lose()

    def _lost(self, holding: Holding) -> None:
        self.board.add("lease_lost")
        logs.event("lease.lost", logging.WARNING, unit=holding.unit, epoch=holding.epoch)
        self.unit_lost()

    def unit_lost(self) -> None:
        """A fence was not ours any more: look who has it, and whether the server was emptied."""
        self.suspects_empty = True
        self.beat_soon()

    def _trust(self, holding: Holding, sent_ns: int, now: float) -> None:
        # The lease runs from the moment the server got the call, which is after we sent it.
        holding.slot.trusted_until_ns = sent_ns + int(self.ttl * 0.9 * 1e9)
        holding.renew_at = now + self.interval * (0.8 + 0.2 * random())

    # --- the fleet ---

    def beat_soon(self) -> None:
        """Beat and look at the fleet at the next tick."""
        self.beat_at = 0.0

    def wake_fleet(self) -> None:
        """Tell the other instances that something changed."""
        self._notices.append(("PUBLISH", self.keys.wake(self.settings.daemon.fleet), self.me))

    def _beat_call(self, offers: Sequence[Unit], broken: Sequence[Unit]) -> Call:
        daemon = self.settings.daemon
        info = {
            "boot": startup.boot_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "lock": self.lock_id,
            "weight": daemon.weight,
            "cap": daemon.max_partitions,
            "offers": sorted({(unit.topic, unit.group) for unit in offers}),
            "broken": sorted(broken),
            "leaving": self.leaving,
            "version": __version__,
            "started": round(self._started, 3),
            **self.obeyed,
        }
        return members.beat(self.keys, daemon.fleet, self.me, self.nonce, info, self.ttl)

    def _on_beat(self, reply: Reply | RedisRefused) -> None:
        now = time.monotonic()
        self.beat_at = now + self.interval * (0.8 + 0.2 * random())
        if isinstance(reply, RedisRefused):
            logs.event("redis.refused", logging.ERROR, what="beat", error=str(reply))
            return
        self.view.twin = reply.word == "TWIN"
        if self.view.twin:
            twin = members.twin(reply).info
            # Whoever beat with the lock that we hold now is dead, and so are all its processes.
            if twin.get("lock") == self.lock_id:
                self._dead_nonce = str(twin.get("nonce", ""))
                self.view.twin = not self._dead_nonce
            return
        present = members.Present.parse(reply)
        self.view.server_unix_ms = present.now_unix_ms
        self.view.seen = [members.seen_of(member) for member in present.members]
        if present.orders != self._orders:
            self._orders = present.orders
            self.view.control = control.read(present.orders)
        self.views_due = True

    def _bury(self) -> None:
        """Take a killed predecessor out of the fleet instead of waiting until its beat is old."""
        fleet, nonce = self.settings.daemon.fleet, self._dead_nonce
        self.link.run_many([members.leave(self.keys, fleet, self.me, nonce)])
        self._dead_nonce = ""
        self.beat_soon()

    def _look(self, holdings: Mapping[Unit, Holding], offers: Sequence[Unit]) -> None:
        """Look at every unit that is not ours: who has it, with which epoch."""
        units = [unit for unit in offers if holdings[unit].phase is Phase.FREE]
        commands = [command for unit in units for command in leases.view(self.keys, unit)]
        replies = self.link.pipeline(commands)
        views: dict[Unit, View] = {}
        tokens: dict[Unit, str] = {}
        for number, unit in enumerate(units):
            hashed, pttl = replies[2 * number : 2 * number + 2]
            if isinstance(hashed, RedisRefused) or isinstance(pttl, RedisRefused):
                continue
            found = leases.LeaseView.parse(hashed, pttl)
            # We hold the lock that every process of a predecessor on this host would hold too.
            ghost = bool(found.token) and found.owner == self.me
            if ghost:
                tokens[unit] = found.token
            views[unit] = View(
                found.epoch,
                found.owner if found.token and not ghost else "",
                found.ttl is not None and not ghost,
            )
        self.view.views, self.view.tokens = views, tokens
        self.view.fresh = True
        self.views_due = False

    # --- wake-ups ---

    def _listen(self, now: float) -> None:
        """Subscribe to wake-ups. Trouble here is no trouble with Redis as such."""
        self._listen_at = now + self._listen_backoff
        self._listen_backoff = min(self._listen_backoff * 2, LISTEN_RETRY_SECONDS[1])
        try:
            self.wake_link.execute("SUBSCRIBE", self.keys.wake(self.settings.daemon.fleet))
            self.wake_link.socket().setblocking(False)
        except (RedisRefused, RedisUnavailable):
            self.wake_link.close()  # perhaps without the right to subscribe

    def drain_wakes(self) -> None:
        """Take what arrived on the wake-up connection; each message asks for a beat."""
        if not self.wake_link.connected:
            return
        try:
            if self.wake_link.socket().recv(65536):
                self._listen_backoff = LISTEN_RETRY_SECONDS[0]
            else:
                self.wake_link.close()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return
        except (OSError, RedisUnavailable):
            self.wake_link.close()
        self.beat_soon()

    def leave(self) -> None:
        """Take this instance out of the fleet. Best effort."""
        fleet = self.settings.daemon.fleet
        try:
            self.link.run(members.leave(self.keys, fleet, self.me, self.nonce))
            self.link.execute("PUBLISH", self.keys.wake(fleet), self.me)
        except (RedisUnavailable, RedisRefused):
            pass

    def close(self) -> None:
        """Close both connections."""
        self.link.close()
        self.wake_link.close()


# Replies of a server that will answer later: nothing was done, and it is not our mistake.
_NOT_NOW = frozenset(
    {"LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS"}
)
