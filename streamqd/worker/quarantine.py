"""Quarantine: run the entries of a lost owner in a way that finds a message that kills hosts.

A worker inherits the pending entries of an owner that did not release its lease. If the host of
that owner was lost, one of these entries may have caused it.

- A *round* is a set of inherited entries that run together.
- A *mark* lists the entries of a round. It is written to Redis before they run, so that it survives
  the loss of the host.
- A *turn* is the right to run inherited entries. Turns are granted by a file lock that all workers
  of an instance use.

For example, suppose that a host with three partitions is lost while each of them is running a
round. Any of the three marks may contain the message that killed the host. So all messages in the
marks are *accused*, and none is charged. An accused or charged message runs alone, which means that
no other worker of the instance runs an inherited entry at the same time. If another host is lost
while it runs, only this message is charged.

A worker holds a turn, and its mark lists entries, only while one of its messages is running. It
first waits for every condition that delays the run, and then for its turn. In the middle of a
round, a rate limit or a guard may delay the rest of the entries while none of them is running. In
that case, the worker gives up its turn, and its next mark lists only the remaining entries.
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

# Interval between attempts to get a turn. The worker polls, because it could not abort a blocking
# wait for the lock.
POLL_SECONDS = 0.05
SHARE_SECONDS = 1.0  # total length of turns after which a worker lets other workers have theirs

# The mark while no message is running. No entry has this ID, so it accuses no message.
NO_MESSAGE = b"m:0-0"


class Quarantine:
    """Writes the marks and takes the turns of one worker.

    The lock for turns is shared by all workers of the instance.
    """

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

        `width` is the largest number of entries in a round. `batches` is true if the handler
        receives all entries of a round in one call.
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
        """From now on, mark every run. If `session` is '', mark none.

        `session` identifies the connection whose marks Redis accepts.
        """
        self._session = session

    @property
    def is_open(self) -> bool:
        """True while every run is marked."""
        return self._session != ""

    def begin(self, *entries: FetchedEntry) -> None:
        """Start a round of these entries: settle finished runs, wait for a turn, write the mark.

        Raises Stop if the supervisor commands it, and the errors of `Settler.flush`.
        """
        self._context.settler.flush()
        self._suspects.update(entry.place for entry in entries if self._is_suspect(entry))
        self._begin(*[entry.place for entry in entries])

    def begin_rerun(self, place: bytes) -> None:
        """Wait for a turn, and mark an entry that was kept in its place and now runs again.

        Outside quarantine, do nothing. Raises the errors of `begin`.
        """
        if self._session:
            self._context.settler.flush()
            self._begin(place)

    def clear_mark_if_idle(self) -> None:
        """Clear the mark and give up the turn if no message is running.

        Call this when an entry is kept in its place for a later run.
        """
        if self._session and not self._runs:
            self.end_turn()
            self._mark(NO_MESSAGE)

    def end(self) -> None:
        """End the quarantine, because all entries of the lost owner are settled."""
        if self._session:
            self._mark(b"")
            self._suspects.clear()
            self.end_turn()
            self._session = ""

    def end_turn(self) -> None:
        """Give up the turn, so that other workers can run."""
        if self._lock is None:
            return
        # Unlock explicitly. Closing the file is not enough if the handler has started a process
        # that still has it open.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self.release_in_child()
        self._turn_seconds += time.monotonic() - self._since

    def _before_wait(self) -> None:
        """Give up the turn if the worker starts to wait while none of its messages is running."""
        if self._lock is not None and not self._runs:
            self.end_turn()

    @property
    def _runs(self) -> bool:
        return RUNNING in bytes(self._context.slot.states)

    def release_in_child(self) -> None:
        """Close the lock's file, but do not unlock it.

        This is also called in a forked process, where the turn belongs to the parent.
        """
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _is_suspect(self, entry: FetchedEntry) -> bool:
        """Return True if the entry was charged with a crash or accused, so it must run alone."""
        return entry.crash_count > 0 or entry.place in self.accused

    def _begin(self, *places: bytes) -> None:
        """Wait until nothing delays a round, then take a turn and mark the round.

        For each state of the loop, the table shows the mark in Redis and if the worker has a turn:

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
        """Return True if a command, a gate or a lease that is not trusted delays this many runs."""
        words = self._context.slot.words
        return bool(words[WORD_COMMAND]) or not self._gates.are_open(now_ns(), runs)

    def _await_conditions(self, runs: int) -> None:
        """Follow commands, and wait until this many runs may start. No handler is running then."""
        self._context.channel.check(self._context.slot.unfinished)
        self._gates.await_open(now_ns(), runs)

    def _mark(self, places: bytes) -> None:
        """Write the mark to Redis. `places` is a list of places, separated by spaces.

        If this host is lost, the entries at these places are accused.
        """
        settler = self._context.settler
        self._marked = b""  # the mark is unknown until Redis answers
        call = messages.quarantine_mark(settler.keys, settler.lease, self._session, places, [])
        self._calls.run(call)
        self._marked = places

    def _unmark(self) -> None:
        """Clear the mark before a wait, so that no entry is accused that is not running."""
        if self._marked != NO_MESSAGE:
            self._mark(NO_MESSAGE)

    def _take_turn(self, *, alone: bool) -> bool:
        """Try to take a turn. Return False if another worker's turn prevents it.

        During a turn, no other worker of the instance runs an accused or charged entry. If `alone`
        is true, no other worker runs any inherited entry. The turn lasts until `end_turn` or until
        the process exits.
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
            # Continue without the lock. Several workers may then run suspects at the same time, but
            # their marks still help to find the message that kills hosts.
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
