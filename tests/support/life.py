"""Workers that live in the test's own process, one after the other.

A life takes milliseconds, and the test decides at which instruction something happens.
"""

from __future__ import annotations

import logging
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamqd.config import Consumer, Daemon, Settings
from streamqd.handlers import Failures
from streamqd.message import Message
from streamqd.model import Backoff, Lease
from streamqd.policy.rounds import Suspects
from streamqd.scoreboard import WorkerCommand, WorkerSlot
from streamqd.worker import Assignment, WorkerProcess, assemble
from tests.contract.desk import UNIT
from tests.support import users

Work = Callable[[Message], object]

PATIENCE = 5.0  # seconds that a worker's life may take; a healthy one takes milliseconds
NEVER = (1 << 63) - 1
_work: list[Work] = []


def handle(message: Message) -> object:
    """The handler of every worker here: what the test has given it."""
    return _work[-1](message)


def handle_batch(batch: list[Message]) -> object:
    """The handler of a worker that takes batches: what the test has given, for each message."""
    failed: dict[Message, BaseException] = {}
    for message in batch:
        try:
            _work[-1](message)
        except Exception as error:  # noqa: BLE001 - whatever the test raises
            failed[message] = error
    return Failures(failed)


class Life:
    """Lets workers live in this process."""

    def __init__(
        self, settings: Settings, slot: WorkerSlot, peer: socket.socket, own: socket.socket
    ):
        self.settings = settings
        self.slot = slot
        self._peer = peer
        self._own = own

    def worker(
        self,
        token: str,
        *,
        cautious: bool = False,
        suspects: Suspects | None = None,
        **changed: Any,
    ) -> WorkerProcess:
        """A worker that has not begun; `changed` are settings of its consumer."""
        consumer = replace(self.settings.consumers[0], **changed)
        orders = Assignment(Lease(UNIT, token, 7), cautious, suspects or {})
        return assemble(orders, self.settings, consumer, self.slot, self._own)

    def run(self, worker: WorkerProcess, work: Work, patience: float = PATIENCE) -> int:
        """Let it live until it ends, or for `patience` seconds; return its exit code."""
        self.slot.command = WorkerCommand.NONE
        timer = threading.Timer(patience, self.stop)
        timer.start()
        _work.append(work)
        try:
            return worker.run()
        finally:
            _work.pop()
            timer.cancel()
            timer.join()
            worker.link.close()

    def stop(self) -> None:
        """Tell it to finish its message and end, as the supervisor does."""
        self.tell(WorkerCommand.STOP)

    def tell(self, command: WorkerCommand) -> None:
        """Say what the supervisor wants, and wake it."""
        self.slot.command = command
        self._peer.send(b"look")


@contextmanager
def lives(slot: WorkerSlot) -> Iterator[Callable[[str], Life]]:
    """Make a life on the server at a URL. What a worker does to its process is undone."""
    peer, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    factory, limit = logging.getLogRecordFactory(), signal.getsignal(signal.SIGUSR1)
    slot.trusted_until_ns = NEVER

    def make(url: str) -> Life:
        consumer = Consumer(
            topic=UNIT.topic,
            group=UNIT.group,
            handler=f"{__name__}:handle",
            backoff=Backoff("fixed", 3600.0, 3600.0, "none"),
        )
        # A folder of its own: workers of one folder wait for each other's turn in solo mode.
        daemon = Daemon(instance="west-1", state_dir=Path(folder))
        settings = Settings(daemon=daemon, consumers=(consumer,))
        redis = users.acting(replace(settings.redis, url=url), "daemon")
        return Life(replace(settings, redis=redis), slot, peer, own)

    with tempfile.TemporaryDirectory(prefix="sql-") as folder:
        yield make
    logging.setLogRecordFactory(factory)
    signal.signal(signal.SIGUSR1, limit)
    peer.close()
    own.close()
