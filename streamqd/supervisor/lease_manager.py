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
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from random import random
from typing import Any

from streamqd import logs, registration, startup
from streamqd.config import Settings
from streamqd.errors import BadValue, RedisRefused, RedisUnavailable
from streamqd.model import Unit
from streamqd.policy import heartbeats
from streamqd.policy.duplicate_instance import DuplicateInstance
from streamqd.policy.rebalance import MemberView, PartitionView
from streamqd.scoreboard import Scoreboard, now_ns
from streamqd.store import directives, leases, members, messages
from streamqd.store.cluster import connect
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.cluster_state import ClusterState
from streamqd.supervisor.metas import Metas
from streamqd.supervisor.node_backoff import NodeBackoff
from streamqd.supervisor.ownership_cache import OwnershipCache
from streamqd.supervisor.partition import OwnedPartition, Phase
from streamqd.supervisor.pubsub_listener import PubSubListener
from streamqd.supervisor.renewal_scheduler import RenewalScheduler
from streamqd.supervisor.resolver import Resolver
from streamqd.version import __version__

# One exchange blocks the supervisor at most this long, and this part of the ttl: names, sentinels,
# connecting and waiting included. Who waits longer for one node loses the leases at the others.
EXCHANGE_SECONDS = 1.0
EXCHANGE_SHARE = 0.25
DOUBT_SECONDS = 0.3  # after which a silent connection is doubted; what was asked is asked again
BACKOFF_SECONDS = (0.1, 2.0)

_ALL = "*"  # for the nodes of which none answered

Answer = Callable[[Reply | RedisRefused], None]
Calls = list[tuple[Call, Answer]]


class LeaseManager:
    """Owns the supervisor's two connections: one to ask, one on which wake-ups arrive."""

    def __init__(
        self, settings: Settings, board: Scoreboard, lock_id: str, names: Resolver | None = None
    ) -> None:
        self.settings = settings
        self.board = board
        self.keys = Keys(settings.keys.control, settings.keys.streams)
        self.ttl = settings.daemon.lease_ttl
        self.interval = self.ttl / 5
        self.me = settings.daemon.instance
        self.nonce = secrets.token_hex(8)
        self.lock_id = lock_id
        self.patience = min(EXCHANGE_SECONDS, self.ttl * EXCHANGE_SHARE)
        redis = partial(connect, settings.redis, timeout=EXCHANGE_SECONDS)
        redis = partial(redis, lookup=(names or Resolver()).lookup)
        self.link = redis(name="streamqd:supervisor", doubt=min(DOUBT_SECONDS, self.patience / 2))
        channel = self.keys.wake(settings.daemon.fleet)
        self.wakes = PubSubListener(redis(name="streamqd:wake", key=channel), channel)
        self.view = ClusterState()
        self.twin = DuplicateInstance(self.ttl, self.interval)
        self._looks = OwnershipCache(self.keys)
        self._metas = Metas(self.keys)
        self._bad_fences, self._bad_members = logs.bad_values(), logs.bad_values()
        self._strange: list[BadValue] = []  # of the members of this beat
        self._rounds = RenewalScheduler(self.interval)
        self._asked = False  # calls have had the last turn
        self.leaving = False
        self.suspects_empty = False  # a fence was gone: the topics may be gone too
        self.beat_at = 0.0
        self._beaten_at = 0.0
        self.views_due = False
        self.episode = logs.Episode("redis.lost", "redis.back")
        # Who comes back later than the others by a beat would be taken for dead.
        longest = min(BACKOFF_SECONDS[1], self.interval / 4)
        self._silent = NodeBackoff(BACKOFF_SECONDS[0], longest, random)
        self._retry_at = 0.0
        self._jitter = 0.0  # drawn for each exchange, so that what is said together stays together
        self._notices: list[tuple[str, ...]] = []
        self._dead_nonce = ""  # of a predecessor that is to be taken out of the fleet
        self._started = time.time()
        self._orders: list[bytes] | None = None
        self.obeyed: dict[str, object] = {}  # what the beat tells of orders, see `steering`
        self.capacity: dict[str, object] = {}  # and of what the system refuses, see `serving`

    @property
    def ok(self) -> bool:
        """Whether the last exchange was answered."""
        return not self.episode.open

    def next_at(self) -> float:
        """When there is something to say next (monotonic)."""
        more = self.views_due or self._notices or self._dead_nonce or self._rounds.goes_on
        return max(0.0 if more else min(self.beat_at, self.wakes.next_at()), self._retry_at)

    # --- one tick ---

    def tick(
        self, now: float, holdings: Mapping[Unit, OwnedPartition], offers: Sequence[Unit]
    ) -> None:
        """Say what is due and hand out the answers."""
        if now < self._retry_at:
            return
        with self.link.within(self.patience):
            self._say(now, holdings, offers)

    def _say(
        self, now: float, holdings: Mapping[Unit, OwnedPartition], offers: Sequence[Unit]
    ) -> None:
        others = self.views_due or self._notices or self._dead_nonce or now >= self.wakes.next_at()
        # What is refused is wanted at every tick: the others have theirs in between.
        calls = [] if self._asked and others else self._calls(now, holdings, offers)
        self._asked = bool(calls)
        try:
            if calls:
                self._ask(calls)
            elif self.views_due:
                self._look(holdings, offers, now)
            elif self._dead_nonce:
                self._bury()
            elif self._notices:
                notices, self._notices = self._notices, []
                self.link.pipeline(notices)
            elif now >= self.wakes.next_at():
                self.wakes.listen(now, self.patience)
        except RedisUnavailable as error:
            self._failed(error)

    def _calls(
        self, now: float, holdings: Mapping[Unit, OwnedPartition], offers: Sequence[Unit]
    ) -> Calls:
        self._jitter = random()
        wishes = partial(self._wishes, now_ns())
        calls = self._rounds.next(now, self.beat_at, holdings, wishes)
        calls = [each for each in calls if not self._rests(each[0].key, now)]
        if now >= self.beat_at:
            beat = self._beat_call(now, holdings, offers)
            if self._rests(beat.key, now):
                self.beat_at = self._silent.end_of(self.link.node_of(beat.key))
            else:
                calls.append((beat, self._on_beat))
        return calls

    def _ask(self, calls: Calls) -> None:
        """Run the calls in one exchange and hand out the answers.

        Where only a part of the nodes answers, the others rest, each for itself, and what they are
        wanted for is wanted again.
        """
        self.board.add("exchanges")
        answered, silent = {_ALL}, dict[str, RedisUnavailable]()
        replies = self.link.run_each([call for call, _ in calls])
        for (call, answer), reply in zip(calls, replies, strict=True):
            node = self.link.node_of(call.key)
            if isinstance(reply, RedisRefused) and reply.transient:
                silent[node] = RedisUnavailable(str(reply), sent=True)
            elif isinstance(reply, RedisUnavailable):
                silent[node] = reply
            else:
                answered.add(node)
                try:
                    answer(reply)
                except BadValue as bad:
                    logs.bad_value(bad)
        if answered == {_ALL}:
            raise next(iter(silent.values()))
        for node in answered:
            self._silent.end(node)
        self._silent.forget(time.monotonic())
        for node, error in silent.items():
            self._leave_alone(node, error)
        if not self._silent:
            self.episode.recovered()

    def _leave_alone(self, node: str, error: RedisUnavailable) -> None:
        """Let a node rest from now on that did not answer while others did."""
        self.board.add("exchange_errors")
        self.episode.failed(error=str(error))
        self._silent.begin(node, time.monotonic())

    def _rests(self, key: str, now: float) -> bool:
        """Whether the node that serves a key did not answer a moment ago."""
        return bool(self._silent) and self._silent.rests(self.link.node_of(key), now)

    def _wishes(self, sent_ns: int, holding: OwnedPartition, due: float) -> Calls:
        call = holding.intent(self.keys, self.ttl, self.me)
        if call is not None:
            return [(call, partial(self._on_intent, holding, sent_ns))]
        calls: Calls = []
        if holding.phase is Phase.HELD and not holding.groups_ready:
            call = messages.ensure_group(self.keys, holding.unit, "0")
            calls.append((call, partial(self._on_group, holding)))
        if holding.phase is Phase.HELD and due >= holding.renew_at:
            call = leases.renew(self.keys, holding.unit, holding.token, self.ttl)
            calls.append((call, partial(self._on_renew, holding, sent_ns)))
        return calls

    def _failed(self, error: RedisUnavailable) -> None:
        now = time.monotonic()  # not of the start: waiting in vain is no pause
        self.board.add("exchange_errors")
        self.episode.failed(error=str(error))
        self._retry_at = self._silent.begin(_ALL, now)
        self.wakes.link.close()
        # The first thing to know after an outage is who is alive.
        self.beat_at = min(self.beat_at, now)

    # --- answers ---

    def _on_intent(
        self, holding: OwnedPartition, sent_ns: int, reply: Reply | RedisRefused
    ) -> None:
        now = time.monotonic()
        before, left = holding.phase, holding.left
        word = holding.answered(reply, now)
        if holding.owned and not isinstance(reply, RedisRefused):
            self._trust(holding, sent_ns, now)
        if word == "acquired":
            self.board.add("rebalance_acquired")
            assert not isinstance(reply, RedisRefused)
            taken = leases.Acquired.parse(reply)
            logs.event("lease.acquired", unit=holding.unit, **taken.told())
        elif word == "resumed" and left is not None:
            running = [place.decode() for place in left.running]
            logs.event(
                "lease.resumed",
                unit=holding.unit,
                epoch=holding.epoch,
                done=len(left.done),
                running=running or None,
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

    def _refused(self, holding: OwnedPartition, what: str, error: RedisRefused) -> None:
        if holding.refusal != error.code:
            holding.refusal = error.code
            bad = error.code == "BADVALUE"
            name, level = ("redis.bad_value", logging.WARNING) if bad else _REFUSED
            logs.event(name, level, unit=holding.unit, what=what, error=str(error))

    def _on_group(self, holding: OwnedPartition, reply: Reply | RedisRefused) -> None:
        if isinstance(reply, RedisRefused):
            self._refused(holding, "group", reply)
            return
        self.board.add("groups_restored", registration.tell_restored(holding.unit, reply))
        holding.groups_ready = True

    def _on_renew(self, holding: OwnedPartition, sent_ns: int, reply: Reply | RedisRefused) -> None:
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

    def _lost(self, holding: OwnedPartition) -> None:
        self.board.add("lease_lost")
        logs.event("lease.lost", logging.WARNING, unit=holding.unit, epoch=holding.epoch)
        self.unit_lost()

    def unit_lost(self) -> None:
        """A fence was not ours any more: look who has it, and whether the server was emptied."""
        self.suspects_empty = True
        self.beat_soon()

    def _trust(self, holding: OwnedPartition, sent_ns: int, now: float) -> None:
        # The lease runs from the moment the server got the call, which is after we sent it.
        holding.slot.trusted_until_ns = sent_ns + int(self.ttl * 0.9 * 1e9)
        holding.renew_at = heartbeats.next_beat(now, self.interval, self._jitter)

    # --- the fleet ---

    def beat_soon(self) -> None:
        """Beat and look at the fleet at the next tick; later when the fleet is large."""
        at = heartbeats.woken_beat(self._beaten_at, self.interval, len(self.view.seen), random())
        self.beat_at = min(self.beat_at, at)

    def wake_fleet(self) -> None:
        """Tell the other instances that something changed."""
        self._notices.append(("PUBLISH", self.keys.wake(self.settings.daemon.fleet), self.me))

    def _beat_call(
        self, now: float, holdings: Mapping[Unit, OwnedPartition], offers: Sequence[Unit]
    ) -> Call:
        daemon = self.settings.daemon
        info = {
            "boot": startup.boot_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "lock": self.lock_id,
            "weight": daemon.weight,
            "cap": daemon.max_partitions,
            "offers": sorted({(unit.topic, unit.group) for unit in offers}),
            "broken": sorted(unit for unit in offers if holdings[unit].broken_until > now),
            "owned": sum(each.phase is not Phase.FREE for each in holdings.values()),
            "leaving": self.leaving,
            "ttl": self.ttl,
            "version": __version__,
            "started": round(self._started, 3),
            **self.obeyed,
            **self.capacity,
        }
        silent = self.view.silent
        return members.beat(self.keys, daemon.fleet, self.me, self.nonce, info, self.ttl, silent)

    def _on_beat(self, reply: Reply | RedisRefused) -> None:
        now = self._beaten_at = time.monotonic()
        self.beat_at = heartbeats.next_beat(now, self.interval, self._jitter)
        if isinstance(reply, RedisRefused):
            logs.event("redis.refused", logging.ERROR, what="beat", error=str(reply))
            return
        if reply.word == "TWIN":
            _, beaten, other, _ = members.twin(reply)
            # Whoever beat with the lock that we hold now is dead, and so are all its processes.
            if self.twin.heard(beaten, now) or other.get("lock") == self.lock_id:
                self._dead_nonce = str(other.get("nonce", ""))
            return
        self.twin.gone()
        present = members.Present.parse(reply)
        self.view.server_unix_ms = present.now_unix_ms
        self.view.seen = [self._seen(member) for member in present.members]
        self._bad_members.values(self._strange)
        self._strange = []
        if present.orders != self._orders:
            self._orders = present.orders
            self.view.control = directives.read(present.orders)
        self.views_due = True

    def _seen(self, member: members.Heartbeat) -> MemberView:
        try:
            return members.described(member, self.keys.info(self.settings.daemon.fleet))
        except BadValue as error:
            self._strange.append(error)
            return members.seen_of(member)

    def _bury(self) -> None:
        """Take a killed predecessor out of the fleet instead of waiting until its beat is old."""
        fleet, nonce = self.settings.daemon.fleet, self._dead_nonce
        self.link.run_many([members.leave(self.keys, fleet, self.me, nonce)])
        self._dead_nonce = ""
        self.beat_soon()

    def _look(
        self, holdings: Mapping[Unit, OwnedPartition], offers: Sequence[Unit], now: float
    ) -> None:
        """Look at every unit that is not ours: who has it, with which epoch."""
        free = [unit for unit in offers if holdings[unit].phase is Phase.FREE]
        units = [unit for unit in free if not self._rests(self.keys.fence(*unit), now)]
        views: dict[Unit, PartitionView] = {}
        tokens: dict[Unit, str] = {}
        for unit, found in self._looks.take(units, self.view.live, self._ask_of).items():
            # We hold the lock that every process of a predecessor on this host would hold too.
            ghost = bool(found.token) and found.owner == self.me
            tokens[unit] = found.token if found.owner else ""
            views[unit] = PartitionView(
                found.epoch,
                found.owner if found.token and not ghost else "",
                found.ttl is not None and not ghost,
                found.ttl or 0.0,
            )
        self._bad_fences.values(self._looks.bad)
        self.view.views, self.view.tokens = views, tokens
        self.view.fresh = True
        self.views_due = False
        self._look_at_topics({unit.topic for unit in holdings})

    def _look_at_topics(self, served: Collection[str]) -> None:
        """See whether all topics are registered, and whether one is that was not before."""
        names = sorted({consumer.topic for consumer in self.settings.consumers})
        if self._metas.look(names, served, self.link.pipeline_each):
            self.suspects_empty = True

    def _ask_of(self, units: Sequence[Unit], commands: list[tuple[Any, ...]]) -> list[Any]:
        """Run equally many commands for each unit; nodes that do not answer rest from now on."""
        try:
            return self.link.pipeline_each(commands)
        except RedisUnavailable as error:
            nodes = {self.link.node_of(self.keys.fence(*unit)) for unit in units}
            if "" in nodes:
                raise
            for node in nodes:
                self._leave_alone(node, error)
            return [error] * len(commands)

    # --- wake-ups ---

    def drain_wakes(self) -> None:
        """Take what arrived on the wake-up connection; each message asks for a beat."""
        if self.wakes.drain():
            self.beat_soon()

    def leave(self) -> None:
        """Take this instance out of the fleet. Best effort."""
        fleet = self.settings.daemon.fleet
        try:
            with self.link.within(self.patience):
                self.link.run(members.leave(self.keys, fleet, self.me, self.nonce))
                self.link.execute("PUBLISH", self.keys.wake(fleet), self.me)
        except (RedisUnavailable, RedisRefused):
            pass

    def close(self) -> None:
        """Close both connections."""
        self.link.close()
        self.wakes.link.close()


_REFUSED = "redis.refused", logging.ERROR
