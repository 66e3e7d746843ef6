"""What keeps a worker from beginning messages that would only fail: a circuit, and a flood guard.

`policy.circuit` and `policy.dead_letter_rate` decide; here they hear of failures, and are waited
for. A worker without either has no guards, and pays nothing for them. What they know is kept in
words of the slot, so that a worker that follows on another, also after a crash, goes on where that
one was.
"""

from __future__ import annotations

import contextlib
import logging

from streamqd import logs
from streamqd.errors import RedisRefused
from streamqd.idle_reason import (
    CIRCUIT,
    FLOOD,
    SETTLED_SO_FAR,
    Wait,
)
from streamqd.message import Message
from streamqd.model import Failed, Outcome
from streamqd.policy import circuit, dead_letter_rate, settlement
from streamqd.policy.circuit import Circuit, CircuitState
from streamqd.policy.dead_letter_rate import DeadLetterRate
from streamqd.scoreboard import WorkerSlot, now_ns
from streamqd.store import directives
from streamqd.worker.context import WorkerContext

# Two workers read the server's clock differently, by a round trip at most.
CLOCK_SECONDS = 0.1
SHORTEST_NS = 1_000_000  # wait of a worker that must pause, before it is asked again
GLANCE_SECONDS = (0.01, 1.0)  # between two looks whether others have closed the circuit
RESUME_SECONDS = 1.0  # how often a worker that stands still looks for a `resume`
TURN_SECONDS = 0.05  # between two turns to probe, if there is time enough for all of them


class Outage:
    """The circuit of a group, as the worker of one slot sees it. Times are `now_ns` in seconds.

    Each partition has a worker of its own, but they all need the same database. So the circuit is
    the group's, in words of the slot of its first partition here: when it was last open, how often
    it has opened, and whose turn to try it was last, which is nobody's while it is closed. Every
    worker of the group may write them, without a lock: the loser of a race costs one message more
    that is tried. A worker that ends leaves nothing behind that another would have to wait for,
    because turns pass by time alone.
    """

    def __init__(self, slot: WorkerSlot) -> None:
        """Find the other workers of the group; those that come later are found when they come."""
        self._slot = slot
        self._known = 0
        self._family: list[WorkerSlot] = []
        self._find()
        self._first = self._family[0]  # for good: no slot is ever named again

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open. This is the one word that is read when all is well."""
        return self._first.outage_turn != 0

    @property
    def mine(self) -> bool:
        """Whether the last turn was this worker's."""
        return self._first.outage_turn == self._slot.index + 1

    @property
    def opened(self) -> float:
        """When the circuit was last known to be open, 0 for never."""
        return self._first.outage_ns / 1e9

    @property
    def openings(self) -> int:
        """How often the circuit has opened: a probe tells nothing of an outage after its own."""
        return self._first.outage_openings

    def failures(self, now: float, window: float) -> int:
        """How many failures of the other workers count: within the window, since it was open.

        Of each worker only the oldest failure is known: when that is too old, none of them counts.
        """
        since = max(now - window, self.opened)
        noted = (each.waits.kept(CIRCUIT) for each in self._others())
        return sum(failures for failures, oldest in noted if oldest / 1e9 > since)

    def successes(self) -> int:
        """How many messages the other workers have settled well, which only grows."""
        return sum(each.counter("acked") for each in self._others())

    def failed(self) -> bool:
        """Open the circuit, or keep it open from now. Returns whether it was closed."""
        self._slot.probe_seq = 0
        self._first.outage_ns = now_ns()
        if self.is_open:
            return False
        self._first.outage_openings += 1
        self._first.outage_turn = self._slot.index + 1
        return True

    def later(self, probe_every: float) -> float:
        """How much longer than `probe_every` this worker waits: the next in the line tries first.

        So a message that fails for reasons of its own does not keep the others from trying theirs.
        """
        self._find()
        indexes = [each.index for each in self._family]
        last, own = self._first.outage_turn - 1, indexes.index(self._slot.index)
        place = (own - indexes.index(last) - 1) % len(indexes) if last in indexes else own
        return place * min(TURN_SECONDS, probe_every / 2 / len(indexes))

    def probe(self, *, again: bool) -> None:
        """Take the turn: the next run of this worker is the probe.

        `again`: the one before told nothing. The turn lasts no longer for it.
        """
        self._slot.probe_seq = self._slot.run_seq + 1
        if not again:
            self._first.outage_ns = now_ns()
            self._first.outage_turn = self._slot.index + 1

    @property
    def proved(self) -> bool:
        """Whether a worker runs on behind its probe, which only a success lets it do.

        That worker looks at its successes between two reads, and the others need not wait for it.
        """
        last = self._first.outage_turn - 1
        if last < 0 or last == self._slot.index:
            return False
        slot = self._slot.board.slot(last)
        return 0 < slot.probe_seq < slot.run_seq

    def close(self) -> bool:
        """Close the circuit, for the whole group. Returns whether it was open."""
        self._slot.probe_seq = 0
        was_open, self._first.outage_turn = self.is_open, 0
        return was_open

    def _others(self) -> list[WorkerSlot]:
        self._find()
        return [each for each in self._family if each is not self._slot]

    def _find(self) -> None:
        """Look who is of the group, if a slot was named since."""
        board, unit = self._slot.board, self._slot.unit
        if board.used == self._known:
            return
        self._known = board.used
        named = ((each, each.unit) for each in board.slots())
        self._family = [
            each
            for each, other in named
            if unit and other and (other.topic, other.group) == (unit.topic, unit.group)
        ]


class Guards:
    """The guards of one worker. They know its runs from its counts."""

    def __init__(self, context: WorkerContext) -> None:
        consumer, slot = context.consumer, context.slot
        self._policy = consumer.policy
        self._slot = slot
        self._channel = context.channel
        self._settler = context.settler
        self._clock = context.clock
        self._counts = context.counts
        self._unit = context.unit
        self._instance = context.delivery.instance
        self._fleet = context.settings.daemon.fleet
        self._waits = slot.waits
        breaker, guard = self._breaker, self._guard = consumer.breaker, consumer.flood_guard
        self._on = frozenset(breaker.on)
        failures, since = self._waits.kept(CIRCUIT)
        memory = circuit.CircuitMemory(failures, since / 1e9)
        self._circuit = Circuit(breaker.failures, breaker.window, breaker.probe_every, memory)
        shortest, longest = GLANCE_SECONDS
        self._glance: float = min(max(shortest, breaker.probe_every / 20), longest)
        self._outage = Outage(slot)
        deaths, since, settled = self._waits.kept(FLOOD)
        letters = dead_letter_rate.DeadLetterRateMemory(deaths, since / 1e9, settled)
        self._flood = DeadLetterRate(guard.letters, guard.window, guard.share, letters)
        (self._settled_before,) = self._waits.kept(SETTLED_SO_FAR)
        self._deaths = 0
        self._probe_from = 0  # successes when the probe began
        self._probe_of = 0  # openings of the circuit by then
        self.must_pause = False
        self._paused = False  # the pause is written; it ends when an operator takes it out
        self._hear()
        self._unsaid = self.probing

    # --- being told ---

    def exempts(self, outcome: Outcome, message: Message) -> bool:
        """Judge a failure: whether it is a dependency's, and costs the message no attempt.

        What the policy does not retry is the message's own, whatever the breaker names. A message
        that is forgiven is told when, and takes it along.
        """
        if not self._breaker.failures or not isinstance(outcome, Failed):
            return False
        self.hear()
        of_message = not settlement.retries(outcome, self._policy)
        if of_message or (self._on and self._on.isdisjoint(outcome.lineage)):
            # This failure tells us nothing about the dependency.
            return False
        now, unix, outage = _now(), self._clock.time(), self._outage
        forgiven = None
        if message.forgiven_at:
            forgiven = now - (unix - message.forgiven_at) - CLOCK_SECONDS
        successes = self._successes + outage.successes()
        others = outage.failures(now, self._breaker.window)
        counts = self._circuit.failed(message.uid, now, successes, forgiven, others)
        if not counts:
            message.forgiven_at = unix
        self._keep_circuit()
        self._unsaid = True
        if self._circuit.state is CircuitState.OPEN and outage.failed():
            self._waits.count_opening()
            logs.event(
                "circuit.opened",
                logging.WARNING,
                unit=self._unit,
                error=outcome.error_class,
                failures=self._breaker.failures,
            )
        return not counts

    def died(self) -> None:
        """Note that a message has become a dead letter."""
        self._deaths += 1
        if self._guard.letters:
            self.must_pause |= self._flood.died(_now(), self._settled)
            if not self.must_pause:
                # Else what is kept stays one short of a flood until this one has been stopped.
                self._keep_flood()

    def look(self) -> None:
        """Note what has been settled, and whether a circuit that was open is closed."""
        self._waits.keep(SETTLED_SO_FAR, self._settled)
        if self._unsaid:
            self._unsaid = False
            self._seconds()
        if self.probing:
            self._hear()

    def hear(self) -> None:
        """The same, but look also whether another worker of the group has opened it."""
        self.look()
        if not self.probing and self._group_is_open:
            self._hear()

    @property
    def _group_is_open(self) -> bool:
        """Whether the circuit of the group is open. It reads one word, so it is cheap."""
        return self._breaker.failures > 0 and self._outage.is_open

    def _hear(self) -> None:
        """Bring this circuit in line with the group's; close that if our probe succeeded."""
        if not self._breaker.failures:
            return
        circuit, outage = self._circuit, self._outage
        before = circuit.state
        succeeded = before is CircuitState.HALF_OPEN and self._successes > self._probe_from
        # Else others have closed it for this probe, and it has opened again meanwhile.
        succeeded = succeeded and outage.openings == self._probe_of
        if (succeeded or outage.proved) and outage.close():
            logs.event("circuit.closed", unit=self._unit)
        circuit.heard(is_open=outage.is_open, opened=outage.opened)
        if before is not CircuitState.CLOSED and circuit.state is CircuitState.CLOSED:
            self._keep_circuit()
            self._waits.end()

    @property
    def _successes(self) -> int:
        return self._counts.succeeded

    @property
    def _settled(self) -> int:
        return self._settled_before + self._successes + self._deaths

    def _keep_circuit(self) -> None:
        failures, since = self._circuit.memory
        self._waits.keep(CIRCUIT, failures, int(since * 1e9))

    def _keep_flood(self) -> None:
        deaths, since, settled = self._flood.memory
        self._waits.keep(FLOOD, deaths, int(since * 1e9), settled)

    # --- being asked ---

    def held_ns(self, _now: int, _runs: int = 1) -> int:
        """Return for how long nothing may start, 0 for now. Then ask again: others may be first."""
        return SHORTEST_NS if self.must_pause else int(self._seconds() * 1e9)

    def _seconds(self) -> float:
        if self._circuit.state is not CircuitState.OPEN:
            return 0.0
        later = self._outage.later(self._breaker.probe_every)
        left = self._circuit.wait(_now(), later)
        # Also when none is left: a worker that has nothing to try says that the circuit is open.
        self._waits.begin(Wait.OPEN, now_ns() + int(left * 1e9))
        return min(left, self._glance)

    @property
    def probing(self) -> bool:
        """Whether no more than one message may be tried at once."""
        return self._circuit.state is not CircuitState.CLOSED

    def admits(self, running: int) -> bool:
        """Return True if a run may start beside `running` others. It takes the probe turn."""
        if self.probing and not running:
            self.hear()
        if not self.probing:
            return True
        if running or self._left():
            return False
        self._probe()
        return True

    @property
    def one_by_one(self) -> bool:
        """True while the circuit is not closed."""
        if self.probing:
            self.hear()
        return self.probing

    def await_open(self, now: int, _runs: int = 1) -> int:
        """Wait, in a worker that runs nothing, until a run may start, as a probe if need be.

        Returns that instant. Raises Stop, Fenced, RedisUnavailable, RedisRefused.
        """
        if self.must_pause:
            self.stand_still()
            now = now_ns()
        if not (self.probing or self._group_is_open):
            return now
        if self._successes > self._probe_from and self._circuit.state is CircuitState.HALF_OPEN:
            return now  # the probe succeeded: the next look closes the circuit
        self.hear()
        while left := self._left():
            self._settler.flush()
            self._channel.sleep(left, self._slot.unfinished)
            self.hear()
        if self.probing:
            self._probe()
        return now_ns()

    def started(self, _now: int, _runs: int = 1) -> None:
        """Do nothing: a start that is a probe is noted when it is admitted."""

    def _left(self) -> float:
        """Like `_seconds`; also ends our probe if another worker has taken the turn."""
        if self._circuit.state is CircuitState.HALF_OPEN and not self._outage.mine:
            self._circuit.rest()
        return self._seconds()

    def _probe(self) -> None:
        """Let the next run be a probe."""
        self._outage.probe(again=self._circuit.state is CircuitState.HALF_OPEN)
        self._circuit.probe()
        self._probe_from, self._probe_of = self._successes, self._outage.openings
        self._waits.begin(Wait.PROBING)

    def stand_still(self) -> None:
        """Pause the partition as an operator would, and wait until an operator resumes it.

        Called again after a lost connection; a pause that was written is not written again.
        """
        self._settler.flush()
        self._waits.begin(Wait.FLOODED)
        link, keys = self._settler.link, self._settler.keys
        name = f"pause:{directives.Scope(*self._unit)}"
        if not self._paused:
            why = f"{self._guard.letters} dead letters within {self._guard.window:g} s"
            problem = self._pause(name, why)
            self._waits.count_flood()
            self._keep_flood()
            logs.event(
                "flood.stopped", logging.ERROR, unit=self._unit, why=why, error=problem or None
            )
            if problem:
                # A pause that is not written cannot be resumed.
                self._channel.sleep(self._guard.window, self._slot.unfinished)
            else:
                with contextlib.suppress(RedisRefused):
                    link.pipeline([("PUBLISH", keys.wake(self._fleet), "order")])
        orders = keys.orders(self._fleet)
        while self._paused and link.execute("HEXISTS", orders, name):
            self._channel.sleep(RESUME_SECONDS, self._slot.unfinished)
        self.must_pause = self._paused = False
        self._waits.end()

    def _pause(self, name: str, why: str) -> str:
        """Write the pause; return why it could not be written, or ''.

        If the connection is lost before the answer, the pause is written a second time.
        """
        link, keys = self._settler.link, self._settler.keys
        by = f"the flood guard of {self._instance}"
        try:
            reply = link.run(directives.change(keys, self._fleet, name, by=by, why=why))
        except RedisRefused as error:
            return str(error)
        self._paused = reply.word == "OK"
        return "" if self._paused else "there are too many orders"


def guards_of(context: WorkerContext) -> Guards | None:
    """Return the guards that a consumer asks for, None when it asks for none."""
    consumer, slot = context.consumer, context.slot
    waits = slot.waits
    slot.probe_seq = 0
    if not consumer.breaker.failures:
        waits.forget(CIRCUIT)
    if not consumer.flood_guard.letters:
        waits.forget(FLOOD)
    wanted = consumer.breaker.failures or consumer.flood_guard.letters
    return Guards(context) if wanted else None


def _now() -> float:
    return now_ns() / 1e9
