"""Prevent a process that a handler forks from acting as a worker.

A handler may fork, for example through `multiprocessing`. Such a child usually runs a function of
its own and exits. However, a child that returns from the handler would continue the worker's loop
with the worker's token and connections. To prevent this, a hook runs in each child before any other
Python code. It closes the connections to Redis and the supervisor's socket, and replaces the slot
with private memory that contains a stop command. The child exits when it next checks that command.

This does not slow down the worker itself, and does not affect programs that are started through
`subprocess`.
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
from streamqd.model import Assignment
from streamqd.scoreboard import WORD_COMMAND, WorkerCommand, WorkerSlot
from streamqd.store.client import Connection

EXIT_CODE = 70  # exit code of a child that returns, for the process that waits for it
ADVICE = "a handler forked and its child returned; exit from such a child with os._exit"


class Loop(Protocol):
    """An event loop that must stop in a forked child."""

    def halt(self) -> None: ...


class ForkingWorker:
    """The parts of a worker process that its forked children must not use."""

    def __init__(self, assignment: Assignment, slot: WorkerSlot, control: socket.socket) -> None:
        self.assignment = assignment
        self.slot = slot
        self.control = control
        self.links: Callable[[], Iterable[Connection]] = tuple  # returns its open connections


class ForkRole:
    """The role of this process, which may be a worker or a worker's forked child.

    Each process has one instance.
    """

    def __init__(self) -> None:
        self.child = False  # True if a worker forked this process
        self.loops: weakref.WeakSet[Loop] = weakref.WeakSet()
        self._assignment: Assignment | None = None
        self._worker: Callable[[], ForkingWorker | None] = lambda: None

    def enter_worker(self, worker: ForkingWorker) -> None:
        """Mark this process as a worker for as long as the object is referenced."""
        self._worker = weakref.ref(worker)

    def enter_child(self) -> None:
        """Release the worker's resources in a child, before it runs any other Python code."""
        worker = self._worker()
        if worker is None:
            return
        self.child, self._assignment = True, worker.assignment
        self._worker = lambda: None
        for link in worker.links():
            link.disable()
        try:
            worker.slot.detach()
        except OSError:
            os._exit(EXIT_CODE)  # otherwise, its next write would change its parent's slot
        worker.slot.words[WORD_COMMAND] = WorkerCommand.STOP
        with contextlib.suppress(OSError):
            worker.control.close()
        for loop in tuple(self.loops):
            loop.halt()

    def end_child(self) -> None:
        """Exit if this process is a child that returned from a handler."""
        if not self.child:
            return
        logs.event(
            "worker.forked",
            logging.ERROR,
            assignment=self._assignment,
            parent=os.getppid(),
            error=ADVICE,
        )
        logs.flush(1.0)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(EXIT_CODE)


fork_role = ForkRole()
os.register_at_fork(after_in_child=fork_role.enter_child)
