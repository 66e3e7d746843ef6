"""Solo mode: what a lost owner left is handled one by one, each under a mark that outlives a host.

A mark is a suspicion. When a host is lost, each of its partitions may leave one, and at most one of
them is the cause. So whoever has been charged before runs alone from then on: of all workers of the
instance that have inherited entries only its own handles one, and the next loss blames nobody else.

Nobody is marked, and nobody has a turn, while nothing runs: whatever holds a run back is waited for
before its turn, and the next wait, whatever it is for, ends the turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from streamqd import logs
from streamqd.errors import Refused
from streamqd.message import Message
from streamqd.paths import below
from streamqd.scoreboard import WORD_COMMAND, WORD_TRUSTED_UNTIL, now_ns
from streamqd.store import messages
from streamqd.store.scripts import Call
from streamqd.worker.blocking import NOBODY
from streamqd.worker.pending_entry import PendingEntry

if TYPE_CHECKING:
    from streamqd.worker.worker import WorkerProcess

POLL_SECONDS = 0.05  # how often a turn is asked for: the lock's own queue could not be left
SHARE_SECONDS = 1.0  # of turns, after which a worker lets those go first that ask for one


class Quarantine:
    """Marks and turns of one worker. Turns are a lock that all workers of the instance share."""

    def __init__(self, worker: WorkerProcess, run_script: Callable[[Call], object]) -> None:
        self._worker = worker
        self._run_script = run_script
        self._lock: int | None = None
        self._since = 0.0  # when the present turn began
        self._had_seconds = 0.0  # of turns since the others could go first
        self._suspects: set[bytes] = set()  # places; also of what is kept in hand
        self._marked = NOBODY
        self._told = False  # that there are no turns
        worker.gate.before_wait = self.rest
        _everyone.add(self)

    def begin(self, session: str, entry: PendingEntry, message: Message) -> None:
        """Settle what is done, wait for this entry's turn, and write down that it comes next.

        Raises Stop, Fenced, RedisUnavailable.
        """
        self._worker.settler.flush()
        if self._is_suspect(entry, message):
            self._suspects.add(entry.place)
        self._begin(session, entry.place)

    def marker(self, session: str) -> Callable[[bytes], None]:
        """What a runner calls when the same entry waits to run again (NOBODY), and when it does."""

        def mark(place: bytes) -> None:
            if place == NOBODY:
                self.rest()
                self._mark(session, NOBODY)
            else:
                self._begin(session, place)

        return mark

    def end(self, session: str) -> None:
        """Nothing inherited is left."""
        self._mark(session, b"")
        self._suspects.clear()
        self.rest()

    def rest(self) -> None:
        """End the turn: the others may go on."""
        if self._lock is None:
            return
        # A process that the handler has left behind may have the file too: closing is not enough.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self.disown()
        self._had_seconds += time.monotonic() - self._since

    def disown(self) -> None:
        """Let go of the lock in a forked process. The turn is its parent's."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _is_suspect(self, entry: PendingEntry, message: Message) -> bool:
        """Whether it was charged before, or the next charge would already bury it."""
        return entry.crashes + message.crash_count > 0 or self._worker.consumer.max_crashes == 1

    def _begin(self, session: str, place: bytes) -> None:
        """Wait until nothing holds the entry back, then take its turn and mark it."""
        gate = self._worker.gate
        if self._had_seconds > SHARE_SECONDS:
            self._had_seconds = 0.0
            self._unmark(session)
            gate.sleep(2 * POLL_SECONDS)
        while True:
            if self._is_held_back():
                self._unmark(session)
                self._wait_out()
            elif not self._take_turn(alone=place in self._suspects):
                self._unmark(session)
                gate.sleep(POLL_SECONDS)
            else:
                self._mark(session, place)
                if not self._is_held_back():
                    return
                self.rest()

    def _is_held_back(self) -> bool:
        """Whether a run would wait: for an order's end, for trust, the rate or the guards."""
        runner, words = self._worker.runner, self._worker.slot.words
        now, guards, throttle = now_ns(), runner.guards, runner.throttle
        return bool(
            words[WORD_COMMAND]
            or now > words[WORD_TRUSTED_UNTIL]
            or (guards is not None and (guards.flooded or guards.room(0) == 0))
            or (throttle is not None and throttle.left_ns(now))
        )

    def _wait_out(self) -> None:
        """Wait for all that could hold a run back. Nothing runs, so none of it comes again soon."""
        worker, runner = self._worker, self._worker.runner
        worker.gate.check(worker.slot.unfinished)
        if runner.guards is not None:
            runner.guards.heed()
        if runner.throttle is not None:
            runner.throttle.wait(now_ns())
        worker.gate.await_trust()

    def _mark(self, session: str, place: bytes) -> None:
        """Write durably which entry comes next, so that a host-killer is found."""
        worker = self._worker
        self._marked = b""  # unknown, if there is no answer
        call = messages.solo_mark(worker.keys, worker.unit, worker.token, session, place, [])
        self._run_script(call)
        self._marked = place

    def _unmark(self, session: str) -> None:
        """Suspect nobody: the last one that ran may still be pending, because it was kept."""
        if self._marked != NOBODY:
            self._mark(session, NOBODY)

    def _take_turn(self, *, alone: bool) -> bool:
        """Try to begin a turn: when no suspect runs here; `alone`, when no inherited entry does.

        The turn ends with `rest`, or with the process.
        """
        self.rest()
        daemon = self._worker.settings.daemon
        wanted = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            path = below(daemon.state_dir, f"{daemon.instance}.solo")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path, flags, 0o600)
            self._since = time.monotonic()
            fcntl.flock(self._lock, wanted | fcntl.LOCK_NB)
        except BlockingIOError:
            self.disown()
            return False
        except (OSError, Refused) as error:
            # Without a lock there are no turns; a mark still finds who kills hosts.
            self.disown()
            if not self._told:
                self._told = True
                unit = self._worker.unit
                logs.event("solo.unlocked", logging.WARNING, unit=unit, error=str(error))
        return True


_everyone: weakref.WeakSet[Quarantine] = weakref.WeakSet()


def _disown_turns() -> None:
    for solo in tuple(_everyone):
        solo.disown()


os.register_at_fork(after_in_child=_disown_turns)
