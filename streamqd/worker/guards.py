"""The circuit breaker and the flood guard, which stop a worker while its messages would fail.

The circuit breaker stops the worker while a dependency of its handler fails. The flood guard pauses
the partition if too many messages become dead letters. `policy.circuit` and
`policy.dead_letter_rate` make the decisions. This module reports failures to both, and waits when
they require it. A consumer without guards has no extra cost. The state of the guards is stored in
the slot, so that the next worker continues with it, even after a crash.
"""

from __future__ import annotations

import contextlib
import logging

from streamqd import logs
from streamqd.errors import RedisResponseError
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
from streamqd.scoreboard import now_ns
from streamqd.store import directives
from streamqd.worker.context import WorkerContext

# Largest difference in seconds that is allowed between two workers' estimates of the server's
# clock. The estimates can differ by up to a round trip.
CLOCK_SECONDS = 0.1
SHORTEST_NS = 1_000_000  # the wait that `held_ns` reports while the flood guard has yet to pause
RESUME_SECONDS = 1.0  # interval at which a paused worker checks for a `resume`


class Guards:
    """The circuit breaker and the flood guard of one worker. Either may be disabled.

    The number of successful runs comes from the worker's `RunCounts`.
    """

    def __init__(self, context: WorkerContext) -> None:
        consumer, slot = context.consumer, context.slot
        self._policy = consumer.policy
        self._slot = slot
        self._channel = context.channel
        self._settler = context.settler
        self._clock = context.clock
        self._counts = context.counts
        self._assignment = context.assignment
        self._instance = context.delivery.instance
        self._fleet = context.settings.daemon.fleet
        self._waits = slot.waits
        breaker, guard = self._breaker, self._guard = consumer.breaker, consumer.flood_guard
        self._breaker_errors = frozenset(breaker.on)
        failures, since, opened, is_open = self._waits.previous_values(CIRCUIT)
        memory = circuit.CircuitMemory(failures, since / 1e9, opened / 1e9, bool(is_open))
        self._circuit = Circuit(breaker.failures, breaker.window, breaker.probe_every, memory)
        dead_letters, since, settled = self._waits.previous_values(FLOOD)
        flood = dead_letter_rate.DeadLetterRateMemory(dead_letters, since / 1e9, settled)
        self._flood = DeadLetterRate(guard.dead_letters, guard.window, guard.share, flood)
        (self._settled_before,) = self._waits.previous_values(SETTLED_SO_FAR)
        self._dead_letters = 0
        self._probe_from = 0  # number of successes when the probe started
        self.must_pause = False
        self._paused = False  # True while the pause is in Redis, where an operator removes it
        self._wait_unpublished = self.is_probing

    # --- reports of failures ---

    def exempts(self, outcome: Outcome, message: Message) -> bool:
        """Report a failure to the breaker. Return True if it does not count as an attempt.

        It does not count if the breaker holds a dependency responsible. A failure that the policy
        does not retry always counts, even if the breaker lists its error. The time at which a
        failure did not count is stored in the message, as `forgiven_at`.
        """
        if not self._breaker.failures or not isinstance(outcome, Failed):
            return False
        self.record_settled()
        of_message = not settlement.retries(outcome, self._policy)
        if of_message or (
            self._breaker_errors and self._breaker_errors.isdisjoint(outcome.lineage)
        ):
            # Either the message itself has caused this failure, or the breaker does not list its
            # error. So the failure does not show that a dependency is failing.
            return False
        now, unix = _now(), self._clock.time()
        forgiven = None
        if message.forgiven_at:
            forgiven = now - (unix - message.forgiven_at) - CLOCK_SECONDS
        was_closed = not self.is_probing
        counts = self._circuit.record_failure(message.uid, now, self._successes, forgiven)
        if not counts:
            message.forgiven_at = unix
        self._store_circuit()
        self._wait_unpublished = True
        if was_closed and self.is_probing:
            self._waits.count_opening()
            logs.event(
                "circuit.opened",
                logging.WARNING,
                assignment=self._assignment,
                error=outcome.error_class,
                failures=self._breaker.failures,
            )
        return not counts

    def count_dead_letter(self) -> None:
        """Record that a message became a dead letter."""
        self._dead_letters += 1
        if self._guard.dead_letters:
            self.must_pause |= self._flood.record_dead_letter(_now(), self._settled)
            if not self.must_pause:
                # If the limit is reached, do not store the count here, because `pause_partition`
                # does. If the process exits before that, the next worker starts just below the
                # limit instead of above it.
                self._store_flood()

    def record_settled(self) -> None:
        """Store the number of settled messages, and close the circuit after a successful probe."""
        self._waits.store(SETTLED_SO_FAR, self._settled)
        if self._wait_unpublished:
            self._wait_unpublished = False
            self._seconds_until_start()
        if self._probe_succeeded:
            self._circuit.close()
            self._store_circuit()
            self._waits.end()
            logs.event("circuit.closed", assignment=self._assignment)

    @property
    def _probe_succeeded(self) -> bool:
        half_open = self._circuit.state is CircuitState.HALF_OPEN
        return half_open and self._successes > self._probe_from

    @property
    def _successes(self) -> int:
        return self._counts.succeeded

    @property
    def _settled(self) -> int:
        return self._settled_before + self._successes + self._dead_letters

    def _store_circuit(self) -> None:
        failures, since, opened, is_open = self._circuit.memory
        self._waits.store(CIRCUIT, failures, int(since * 1e9), int(opened * 1e9), int(is_open))

    def _store_flood(self) -> None:
        dead_letters, since, settled = self._flood.memory
        self._waits.store(FLOOD, dead_letters, int(since * 1e9), settled)

    # --- checks before a run ---

    def held_ns(self, _now: int, _runs: int = 1) -> int:
        """Return the nanoseconds until a run may start, or 0 if one may start now."""
        return SHORTEST_NS if self.must_pause else int(self._seconds_until_start() * 1e9)

    def _seconds_until_start(self) -> float:
        if self._circuit.state is not CircuitState.OPEN:
            return 0.0
        left = self._circuit.seconds_until_start(_now())
        # Publish the wait even if no time is left. The worker may have no message to try, and then
        # operators must still see that the circuit is open.
        self._waits.begin(Wait.OPEN, now_ns() + int(left * 1e9))
        return left

    @property
    def is_probing(self) -> bool:
        """True while the circuit is open or half open.

        In that state, only one message at a time may run, as a probe.
        """
        return self._circuit.state is not CircuitState.CLOSED

    def admits(self, running: int) -> bool:
        """Return True if another run may start while this many are running."""
        if not running:
            self.record_settled()
        if not self.is_probing:
            return True
        return not (running or self._seconds_until_start())

    @property
    def one_by_one(self) -> bool:
        """True while only one message may run at a time, because the circuit is not closed."""
        self.record_settled()
        return self.is_probing

    def await_open(self, now: int, _runs: int = 1) -> int:
        """Wait until a run may start, and return that time. No handler runs during the wait.

        Raises Stop, Fenced, RedisUnavailableError, RedisResponseError.
        """
        if self.must_pause:
            self.pause_partition()
            now = now_ns()
        if not self.is_probing or self._probe_succeeded:
            return now  # the next check closes the circuit
        while left := self._seconds_until_start():
            self._settler.flush()
            self._channel.sleep(left, self._slot.unfinished)
        return now_ns()

    def note_start(self, _at: int, _runs: int = 1) -> None:
        """Record that a run starts, as a probe unless the circuit is closed or about to close."""
        if not self.is_probing or self._probe_succeeded:
            return
        self._circuit.start_probe(_now())
        self._store_circuit()
        self._probe_from = self._successes
        self._waits.begin(Wait.PROBING)

    def pause_partition(self) -> None:
        """Pause the partition as `streamqd pause` does, and wait until an operator resumes it.

        After a lost connection, call this again. A pause that Redis has already confirmed is not
        written a second time.
        """
        self._settler.flush()
        self._waits.begin(Wait.FLOODED)
        link, keys = self._settler.link, self._settler.keys
        name = f"pause:{directives.Scope(*self._assignment)}"
        if not self._paused:
            why = f"{self._guard.dead_letters} dead letters within {self._guard.window:g} s"
            problem = self._pause(name, why)
            self._waits.count_flood()
            self._store_flood()
            logs.event(
                "flood.stopped",
                logging.ERROR,
                assignment=self._assignment,
                why=why,
                error=problem or None,
            )
            if problem:
                # The pause is not in Redis, so an operator could not resume it. Wait only for the
                # length of the guard's window.
                self._channel.sleep(self._guard.window, self._slot.unfinished)
            else:
                with contextlib.suppress(RedisResponseError):
                    link.pipeline([("PUBLISH", keys.wake(self._fleet), "order")])
        # The supervisor reads the pause with its next heartbeat, and then commands the worker to
        # pause. Until then, or if it cannot read the directive, this loop makes the worker wait.
        key = keys.directives(self._fleet)
        while self._paused and link.execute("HEXISTS", key, name):
            self._channel.sleep(RESUME_SECONDS, self._slot.unfinished)
        self.must_pause = self._paused = False
        self._waits.end()

    def _pause(self, name: str, why: str) -> str:
        """Write the pause to Redis. Return the reason if Redis refuses it, or '' on success.

        If the connection is lost before the answer arrives, call this again.
        """
        link, keys = self._settler.link, self._settler.keys
        by = f"the flood guard of {self._instance}"
        try:
            reply = link.run(directives.change(keys, self._fleet, name, by=by, why=why))
        except RedisResponseError as error:
            return str(error)
        self._paused = reply.word == "OK"
        return "" if self._paused else "there are too many directives"


def make_guards(context: WorkerContext) -> Guards | None:
    """Return the guards that the consumer's settings enable, or None if there are none.

    The stored state of a guard that is disabled is cleared.
    """
    consumer, slot = context.consumer, context.slot
    waits = slot.waits
    if not consumer.breaker.failures:
        waits.forget(CIRCUIT)
    if not consumer.flood_guard.dead_letters:
        waits.forget(FLOOD)
    wanted = consumer.breaker.failures or consumer.flood_guard.dead_letters
    return Guards(context) if wanted else None


def _now() -> float:
    return now_ns() / 1e9
