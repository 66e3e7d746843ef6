"""Prevent a process that a handler forks from acting as a worker.

A handler may fork, for example through `multiprocessing`. Such a child usually runs a function of
its own and exits. But if it returned from the handler instead, it would continue the worker's loop,
with the worker's token and connections. To prevent this, a hook runs in each child before any other
Python code. It disables the connections to Redis, closes the socket to the supervisor, and replaces
the slot with private memory that contains a stop command. The child exits when it next checks for a
command.

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

EXIT_CODE = 70  # exit code of a forked child that has returned from the handler
ADVICE = "a handler forked and its child returned; exit from such a child with os._exit"


class Loop(Protocol):
    """An event loop that must stop in a forked child."""

    def halt(self) -> None: ...


class ForkingWorker:
    """The resources of a worker process that its forked children must not use."""

    def __init__(self, assignment: Assignment, slot: WorkerSlot, control: socket.socket) -> None:
        self.assignment = assignment
        self.slot = slot
        self.control = control
        self.links: Callable[[], Iterable[Connection]] = tuple  # returns its open connections


class ForkRole:
    """Stores if this process is a worker, a process that a worker has forked, or neither.

    Each process has exactly one instance, `fork_role`.
    """

    def __init__(self) -> None:
        self.child = False  # True if a worker forked this process
        self.loops: weakref.WeakSet[Loop] = weakref.WeakSet()
        self._assignment: Assignment | None = None
        self._worker: Callable[[], ForkingWorker | None] = lambda: None

    def enter_worker(self, worker: ForkingWorker) -> None:
        """Mark this process as a worker, for as long as the caller keeps `worker` alive."""
        self._worker = weakref.ref(worker)

    def enter_child(self) -> None:
        """Take the worker's resources away from a child. Python calls this after each fork."""
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
            os._exit(EXIT_CODE)  # otherwise, the child could write to the slot of its parent
        worker.slot.words[WORD_COMMAND] = WorkerCommand.STOP
        with contextlib.suppress(OSError):
            worker.control.close()
        for loop in tuple(self.loops):
            loop.halt()

    def end_child(self) -> None:
        """Exit if a worker has forked this process.

        The worker calls this where a child arrives only if it has returned from the handler.
        """
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
