"""What a handler forks is never a worker.

A handler may fork: `multiprocessing` does, and what it starts runs a function of its own and exits.
But a child that returns from the handler comes back into the worker's loop, with the worker's token
and connections. So at the fork, before any other Python runs in the child, it loses all that makes
a worker: the connections to Redis, the supervisor's socket, and the slot, in whose place it gets
memory of its own with an order to stop. It ends at the first look.

Only the child pays for this. Programs that are started, as by `subprocess`, see nothing of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from streamqd import logs
from streamqd.model import Unit
from streamqd.scoreboard import WORD_COMMAND, WorkerCommand, WorkerSlot
from streamqd.store.client import Connection

EXIT_CODE = 70  # of such a child, for whoever has forked it and waits for it
ADVICE = "a handler forked and its child returned; end such a child with os._exit"


class Loop(Protocol):
    """An event loop, which must not go on turning in a child."""

    def halt(self) -> None: ...


class ForkingWorker:
    """What a worker process holds that no child of it may have."""

    def __init__(self, unit: Unit, slot: WorkerSlot, control: socket.socket) -> None:
        self.unit = unit
        self.slot = slot
        self.control = control
        self.links: Callable[[], Iterable[Connection]] = tuple  # those that there are by now


class Family:
    """Whether this process is a worker, or the child of one. There is one for each process."""

    def __init__(self) -> None:
        self.child = False  # it was forked in a worker
        self.loops: weakref.WeakSet[Loop] = weakref.WeakSet()
        self._unit: Unit | None = None
        self._worker: Callable[[], ForkingWorker | None] = lambda: None

    def enter(self, worker: ForkingWorker) -> None:
        """This process is a worker, for as long as `worker` is kept."""
        self._worker = weakref.ref(worker)

    def forked(self) -> None:
        """In a child, first of all: give up what is the worker's."""
        worker = self._worker()
        if worker is None:
            return
        self.child, self._unit = True, worker.unit
        self._worker = lambda: None
        for link in worker.links():
            link.forsake()
        try:
            worker.slot.leave()
        except OSError:
            os._exit(EXIT_CODE)  # its next write would be into the slot of its parent
        worker.slot.words[WORD_COMMAND] = WorkerCommand.STOP
        with contextlib.suppress(OSError):
            worker.control.close()
        for loop in tuple(self.loops):
            loop.halt()

    def end_child(self) -> None:
        """End this process if it is a child that has come back from a handler."""
        if not self.child:
            return
        logs.event(
            "worker.forked", logging.ERROR, unit=self._unit, parent=os.getppid(), error=ADVICE
        )
        logs.flush(1.0)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(EXIT_CODE)


family = Family()
os.register_at_fork(after_in_child=family.forked)
