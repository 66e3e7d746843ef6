"""The worker that holds keys: what is held runs between two reads, when it is due."""

from __future__ import annotations

from typing import Any

from streamqd.idle_reason import IdleReason
from streamqd.scoreboard import SETTLED, now_ns
from streamqd.store.fetch import FetchResult
from streamqd.worker.holding import HoldingRunner, tell_full, tell_held
from streamqd.worker.worker import WorkerProcess

DUE_MAX = 128  # held messages that come into hand at once, and of one key


class HoldingWorker(WorkerProcess):
    """Handles one unit, one message at a time, and what is held when it is due."""

    runner: HoldingRunner

    def _attach(self) -> None:
        self.runner.mark = None
        self.runner.holds.restart(now_ns())
        super()._attach()

    def _await_room(self) -> int:
        room = super()._await_room()
        holds, waits = self.runner.holds, IdleReason(self.slot.words)
        while holds.entries >= self.consumer.held_max or holds.size >= self.consumer.prefetch_bytes:
            # What would come now could be of held keys: nothing is read, not even awaited.
            self.settler.flush()
            due = holds.next_due() or now_ns()
            tell_full(waits, due)
            self.gate.sleep(max(0.0, (due - now_ns()) / 1e9))
            tell_full(waits, None)
            self._run_due()
        return max(1, min(room, (self.consumer.held_max - holds.entries) // 2))

    def _round(self, *, doorbell: bool) -> FetchResult:
        self._run_due()
        return super()._round(doorbell=doorbell and not self.settler.acks_owed)

    def _bell_seconds(self) -> float:
        due = self.runner.holds.next_due()
        wait = super()._bell_seconds()
        return wait if due is None else min(wait, max(0.001, (due - now_ns()) / 1e9))

    def _run_due(self) -> None:
        """Run the held messages that are due, and what is behind each until one fails again.

        What is due again meanwhile waits until something was read: it must not starve other keys.
        """
        holds, runner = self.runner.holds, self.runner
        keys = self._due_keys()
        if not keys:
            return
        lines = [(key, holds.line(key, DUE_MAX)) for key in keys]
        self.settler.flush()
        self._post([kept.place for _, line in lines for kept in line])
        first = 0
        for key, line in lines:
            indexes = range(first, first + len(line))
            first += len(line)
            for index, kept in zip(indexes, line, strict=True):
                self.gate.check(self.slot.unfinished)
                if not runner.handle_kept(index, kept):
                    self._give_back(indexes[index - indexes.start + 1 :])
                    break
            holds.go_on(key, now_ns())
        tell_held(runner)
        self.settler.flush()
        runner.publish()

    def _give_back(self, indexes: range) -> None:
        """Let what is in the batch behind a message that failed again be in hand no more."""
        for index in indexes:
            self.slot.states[index] = SETTLED

    def _due_keys(self) -> list[Any]:
        """The keys that are due, of which not too many messages come into hand at once."""
        holds, keys, count = self.runner.holds, [], 0
        while count < DUE_MAX and (key := holds.take(now_ns())) is not None:
            keys.append(key)
            count += len(holds.line(key, DUE_MAX))
        return keys
