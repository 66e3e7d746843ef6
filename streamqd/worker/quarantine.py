"""Quarantine: run the entries of a lost owner so that a message that kills hosts is found.

- A *round* is a set of inherited entries that run together.
- A *mark* lists the entries of a round. It is written to Redis before they run, so that it survives
  the loss of the host.
- A *turn* is the right to run inherited entries. It is a lock that the workers of an instance
  share.

For example, suppose that a host with three partitions is lost while each of them is running a
round. At most one of the three marks contains the message that killed the host. All messages in the
marks are therefore *accused*, and none is charged. An accused or charged message runs alone, which
means that no other worker of the instance runs an inherited entry at the same time. If the next
host is lost too, only this message is charged.

A worker holds a turn, and its mark lists entries, only while one of its messages is running. It
first waits for every condition that delays the run, and then for its turn. A rate limit or a guard
may delay the rest of a round while no message of the round is running. The worker then gives up its
turn, and its next mark lists only the remaining entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import weakref

from streamqd import logs
from streamqd.errors import RequestRefusedError
from streamqd.paths import join_parts
from streamqd.scoreboard import RUNNING, WORD_COMMAND, now_ns
from streamqd.store import messages
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.fenced import FencedCalls
from streamqd.worker.gates import Gates

# Interval between attempts to get a turn. They are repeated because a blocking wait could not be
# aborted.
POLL_SECONDS = 0.05
SHARE_SECONDS = 1.0  # total length of turns after which the worker pauses for other workers

# The mark while no message is running. No entry has this ID, so no message becomes a suspect.
NO_MESSAGE = b"m:0-0"


class Quarantine:
    """The marks and turns of one worker. All workers of the instance share the lock for turns."""

    def __init__(
        self,
        context: WorkerContext,
        calls: FencedCalls,
        gates: Gates,
        *,
        width: int,
        batches: bool,
    ) -> None:
        """Create the quarantine, which marks no runs until `open` is called.

        `width` is the size of the largest round. `batches` is true if the handler receives a whole
        round in one call.
        """
        self.width, self._batches = width, batches
        self._context = context
        self._calls = calls
        self._gates = gates
        self.accused: frozenset[bytes] = frozenset()  # entries marked when a host was lost
        self._session = ""  # set while entries of a lost owner are being handled
        self._lock: int | None = None
        self._since = 0.0  # start of the current turn (`time.monotonic`)
        self._turn_seconds = 0.0  # total length of the turns since the last pause for other workers
        self._suspects: set[bytes] = set()  # places, including entries that wait in this process
        self._marked = NO_MESSAGE
        self._logged_unlocked = False  # True once the missing lock was logged
        context.channel.before_wait = self._before_wait
        _instances.add(self)

    def open(self, session: str) -> None:
        """Start to mark every run of a session. If `session` is '', no run is marked."""
        self._session = session

    @property
    def is_open(self) -> bool:
        """True while every run is marked."""
        return self._session != ""

    def begin(self, *entries: FetchedEntry) -> None:
        """Settle finished runs, wait for a turn for the round, and write its mark.

        Raises Stop, Fenced, RedisUnavailableError, RedisResponseError.
        """
        self._context.settler.flush()
        self._suspects.update(entry.place for entry in entries if self._is_suspect(entry))
        self._begin(*[entry.place for entry in entries])

    def begin_rerun(self, place: bytes) -> None:
        """Wait for a turn, and mark an entry that runs again after it was kept.

        This does nothing while runs are not marked. Raises the errors of `begin`.
        """
        if self._session:
            self._context.settler.flush()
            self._begin(place)

    def clear_mark_if_idle(self) -> None:
        """Clear the mark if no message is running. Call this when an entry is kept for later."""
        if self._session and not self._runs:
            self.end_turn()
            self._mark(NO_MESSAGE)

    def end(self) -> None:
        """Stop marking runs, because all entries of the lost owner are settled."""
        if self._session:
            self._mark(b"")
            self._suspects.clear()
            self.end_turn()
            self._session = ""

    def end_turn(self) -> None:
        """Give up the turn, so that other workers can run."""
        if self._lock is None:
            return
        # Unlock explicitly, because a process that the handler left running may still have the file
        # open.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self.release_in_child()
        self._turn_seconds += time.monotonic() - self._since

    def _before_wait(self) -> None:
        """End the turn when the worker starts to wait, unless messages are still running."""
        if self._lock is not None and not self._runs:
            self.end_turn()

    @property
    def _runs(self) -> bool:
        return RUNNING in bytes(self._context.slot.states)

    def release_in_child(self) -> None:
        """Close the lock's file in a forked process, because the turn belongs to its parent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _is_suspect(self, entry: FetchedEntry) -> bool:
        """Return True if the entry was charged with a crash or is accused."""
        return entry.crash_count > 0 or entry.place in self.accused

    def _begin(self, *places: bytes) -> None:
        """Wait until no condition delays a round, then take a turn and mark the round.

        | State                                 | Mark       | Turn | Next step            |
        | a condition delays the round          | no message | no   | wait, then try again |
        | another worker prevents the turn      | no message | no   | wait, then try again |
        | the turn is taken                     | the round  | yes  | start the round      |
        | delayed again while the mark was sent | the round  | no   | try again            |
        """
        channel = self._context.channel
        if self._turn_seconds > SHARE_SECONDS:
            self._turn_seconds = 0.0
            self._unmark()
            channel.sleep(2 * POLL_SECONDS)
        runs = len(places) if self._batches else 1  # number of runs that start at the same time
        while True:
            if self._is_held_back(runs):
                self._unmark()
                self._await_conditions(runs)
            elif not self._take_turn(alone=not self._suspects.isdisjoint(places)):
                self._unmark()
                channel.sleep(POLL_SECONDS)
            else:
                self._mark(b" ".join(places))
                if not self._is_held_back(runs):
                    return
                self.end_turn()

    def _is_held_back(self, runs: int) -> bool:
        """Return True if a command, an untrusted lease or a gate delays this many runs."""
        words = self._context.slot.words
        return bool(words[WORD_COMMAND]) or not self._gates.are_open(now_ns(), runs)

    def _await_conditions(self, runs: int) -> None:
        """Wait until no condition delays this many runs. No handler runs during the wait."""
        self._context.channel.check(self._context.slot.unfinished)
        self._gates.await_open(now_ns(), runs)

    def _mark(self, places: bytes) -> None:
        """Write the places of the next entries to Redis, separated by spaces.

        If this host is lost, these entries are accused.
        """
        settler = self._context.settler
        self._marked = b""  # the mark is unknown until Redis answers
        call = messages.quarantine_mark(settler.keys, settler.lease, self._session, places, [])
        self._calls.run(call)
        self._marked = places

    def _unmark(self) -> None:
        """Clear the mark, because a marked entry that is kept stays pending but is not running."""
        if self._marked != NO_MESSAGE:
            self._mark(NO_MESSAGE)

    def _take_turn(self, *, alone: bool) -> bool:
        """Try to start a turn. Return False while another worker prevents it.

        During a turn, no other worker of the instance runs a suspect. If `alone` is true, no other
        worker runs any inherited entry. The turn lasts until `end_turn` or until the process exits.
        """
        self.end_turn()
        daemon = self._context.settings.daemon
        wanted = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            path = join_parts(daemon.state_dir, f"{daemon.instance}.quarantine")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path, flags, 0o600)
            self._since = time.monotonic()
            fcntl.flock(self._lock, wanted | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release_in_child()
            return False
        except (OSError, RequestRefusedError) as error:
            # Without the lock, all workers may run at the same time, but the marks still identify
            # the message that kills hosts.
            self.release_in_child()
            if not self._logged_unlocked:
                self._logged_unlocked = True
                assignment = self._context.assignment
                logs.event(
                    "quarantine.lock_failed",
                    logging.WARNING,
                    assignment=assignment,
                    error=str(error),
                )
        return True


_instances: weakref.WeakSet[Quarantine] = weakref.WeakSet()


def _release_in_child() -> None:
    for quarantine in tuple(_instances):
        quarantine.release_in_child()


os.register_at_fork(after_in_child=_release_in_child)
