"""Solo mode: what a lost owner left is handled one by one, each under a mark that outlives a host.

A mark is a suspicion. When a host is lost, each of its partitions may leave one, and at most one of
them is the cause. So whoever has been charged before runs alone from then on: of all workers of the
instance that have inherited entries only its own handles one, and the next loss blames nobody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from streamqd.message import Message
from streamqd.store import messages
from streamqd.store.scripts import Call
from streamqd.worker.blocking import NOBODY
from streamqd.worker.inherited import Held

if TYPE_CHECKING:
    from streamqd.worker.worker import Worker

POLL_SECONDS = 0.05


class Solo:
    """Marks and turns of one worker. Turns are a lock that all workers of the instance share."""

    def __init__(self, worker: Worker, run_script: Callable[[Call], object]) -> None:
        self._worker = worker
        self._run_script = run_script
        self._lock: int | None = None
        self._alone = False

    def begin(self, session: str, entry: Held, message: Message) -> None:
        """Settle what is done, wait for this entry's turn, and write down that it comes next."""
        self._worker.settler.flush()
        self._alone = self._is_suspect(entry, message)
        self._take_turn()
        self.mark(session, entry.place)

    def marker(self, session: str) -> Callable[[bytes], None]:
        """What a runner calls when the same entry waits to run again (NOBODY), and when it does."""

        def mark(place: bytes) -> None:
            if place == NOBODY:
                self.rest()
            else:
                self._take_turn()
            self.mark(session, place)

        return mark

    def mark(self, session: str, place: bytes) -> None:
        """Write durably which entry comes next, so that a host-killer is found."""
        worker = self._worker
        call = messages.solo_mark(worker.keys, worker.unit, worker.token, session, place, [])
        self._run_script(call)

    def end(self, session: str) -> None:
        """Nothing inherited is left."""
        self.mark(session, b"")
        self.rest()

    def rest(self) -> None:
        """End the turn: the others may go on."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_suspect(self, entry: Held, message: Message) -> bool:
        """Whether it was charged before, or the next charge would already bury it."""
        return entry.crashes + message.crash_count > 0 or self._worker.consumer.max_crashes == 1

    def _take_turn(self) -> None:
        """Wait until no suspect runs here; for a suspect, until no inherited entry does.

        The turn ends with `rest`, or with the process.
        """
        wanted = fcntl.LOCK_EX if self._alone else fcntl.LOCK_SH
        daemon = self._worker.settings.daemon
        # Without a place to write there are no turns; a mark still finds who kills hosts.
        with contextlib.suppress(OSError):
            if self._lock is None:
                path = daemon.state_dir / f"{daemon.instance}.solo"
                self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while self._lock is not None:
            try:
                fcntl.flock(self._lock, wanted | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                self._worker.gate.sleep(POLL_SECONDS)
