"""Gates delay the start of runs. Before each start, the worker checks them in order.

A gate applies to all runs of a worker. The circuit breaker (`guards`) and the rate limit
(`throttle`) are gates. Conditions of a single entry are checked elsewhere: `verdicts` handles
entries that have expired, are too large or have crashed too often, and `blocking` and `held_keys`
keep the order of messages.
"""

from __future__ import annotations

from typing import Protocol

from streamqd.scoreboard import WORD_TRUSTED_UNTIL, now_ns
from streamqd.worker.context import WorkerContext


class Gate(Protocol):
    """Something that can delay the start of a worker's runs.

    All times are on the `now_ns` clock. Only the main thread may use a gate.
    """

    def held_ns(self, now: int, runs: int = 1) -> int:
        """Return the nanoseconds until this many runs may start, or 0 if they may start now.

        This must not do any I/O.
        """

    def admits(self, running: int) -> bool:
        """Return True if another run may start while this many are running."""

    @property
    def one_by_one(self) -> bool:
        """True while only one message may run at a time."""

    def await_open(self, now: int, runs: int = 1) -> int:
        """Wait until this many runs may start, and return the time after the wait.

        No handler is running during the wait. Raises Stop if the supervisor commands it, and the
        errors of `Settler.flush`, because verdicts may be settled before the wait.
        """

    def note_start(self, now: int, runs: int = 1) -> None:
        """Record that this many runs start now."""


class Gates:
    """All gates of one worker, and the check that its lease can still be trusted.

    Every run needs this check, even if there are no gates. The lease is trusted until shortly
    before it would expire, unless the supervisor renews it.
    """

    def __init__(self, context: WorkerContext, *gates: Gate | None) -> None:
        """Set the gates, in the order in which they are checked.

        The rate limit must be the last one, because a run must start immediately after it has
        passed the rate limit.
        """
        self._words = context.slot.words
        self._channel = context.channel
        self._gates = [gate for gate in gates if gate is not None]
        self.has_gates = bool(self._gates)

    def held_ns(self, now: int, runs: int = 1) -> int:
        """Return the nanoseconds that the first closed gate still needs, or 0 if all are open."""
        for gate in self._gates:
            if left := gate.held_ns(now, runs):
                return left
        return 0

    def admits(self, running: int) -> bool:
        """Return True if another run may start while this many are running."""
        if self.held_ns(now_ns()):
            return False
        return all(gate.admits(running) for gate in self._gates)

    @property
    def one_by_one(self) -> bool:
        """True while only one message may run at a time."""
        return any(gate.one_by_one for gate in self._gates)

    def are_open(self, now: int, runs: int = 1) -> bool:
        """Return True if this many runs could start now if no other run were active."""
        return self._is_trusted(now) and not self.held_ns(now, runs) and self.admits(0)

    def _is_trusted(self, now: int) -> bool:
        # `SingleRunner._run_each` repeats this comparison inline, because it runs for each message.
        return now <= self._words[WORD_TRUSTED_UNTIL]

    def await_trust(self, now: int) -> int:
        """Wait until the lease can be trusted, and return the time after the wait.

        If no wait is necessary, return `now`.
        """
        return now if self._is_trusted(now) else self._channel.await_trust()

    def await_open(self, now: int, runs: int = 1) -> int:
        """Wait until the lease can be trusted and all gates are open. Return the time after that.

        Raises Stop, or the errors of `Settler.flush`.
        """
        while True:
            now = self.await_trust(now)
            for gate in self._gates:
                now = gate.await_open(now, runs)
            if self._is_trusted(now):  # the lease may have expired while a gate waited
                return now

    def await_start(self, now: int, runs: int = 1) -> int:
        """Wait as `await_open` does, and record that this many runs start now. Return the time."""
        now = self.await_open(now, runs)
        for gate in self._gates:
            gate.note_start(now, runs)
        return now

    def note_start(self, now: int) -> None:
        """Record that a run starts, after `admits` has allowed it."""
        for gate in self._gates:
            gate.note_start(now)
