"""Workers that run in the test's own process, one after the other.

A worker's life takes milliseconds, and the test decides at which instruction something happens.
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
from streamqd.worker import Grant, WorkerLoop, assemble
from tests.contract.harness import ASSIGNMENT
from tests.support import users

Work = Callable[[Message], object]

PATIENCE = 60.0  # longest life of a worker in seconds; a few milliseconds on an idle host
NEVER = (1 << 63) - 1
_work: list[Work] = []


def handle(message: Message) -> object:
    """Call the function that the test has supplied. This is the handler of every worker here."""
    return _work[-1](message)


def handle_batch(batch: list[Message]) -> object:
    """Call the test's function for each message of a batch."""
    failed: dict[Message, BaseException] = {}
    for message in batch:
        try:
            _work[-1](message)
        except Exception as error:  # noqa: BLE001 - whatever the test raises
            failed[message] = error
    return Failures(failed)


class Life:
    """Runs workers in this process."""

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
    ) -> WorkerLoop:
        """Return a worker that is not started yet. Pass settings of its consumer in `changed`."""
        consumer = replace(self.settings.consumers[0], **changed)
        orders = Grant(Lease(ASSIGNMENT, token, 7), cautious, suspects or {})
        return assemble(orders, self.settings, consumer, self.slot, self._own)

    def run(self, worker: WorkerLoop, work: Work) -> int:
        """Run a worker until it exits, for at most PATIENCE. Return its exit code."""
        self.slot.command = WorkerCommand.NONE
        timer = threading.Timer(PATIENCE, self.stop)
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
        """Ask the worker to finish its message and exit, in the same way as the supervisor."""
        self.send_command(WorkerCommand.STOP)

    def send_command(self, command: WorkerCommand) -> None:
        """Set the supervisor's command, and wake the worker."""
        self.slot.command = command
        self._peer.send(b"look")


@contextmanager
def open_lives(slot: WorkerSlot) -> Iterator[Callable[[str], Life]]:
    """Make lives that use the server at a URL. Undo the changes of their workers at the end."""
    peer, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    factory, limit = logging.getLogRecordFactory(), signal.getsignal(signal.SIGUSR1)
    slot.trusted_until_ns = NEVER

    def make(url: str) -> Life:
        consumer = Consumer(
            topic=ASSIGNMENT.topic,
            group=ASSIGNMENT.group,
            handler=f"{__name__}:handle",
            backoff=Backoff("fixed", 3600.0, 3600.0, "none"),
        )
        # Each life has its own folder, because workers of one folder wait for each other in
        # quarantine.
        daemon = Daemon(instance="west-1", state_dir=Path(folder))
        settings = Settings(daemon=daemon, consumers=(consumer,))
        redis = users.settings_as(replace(settings.redis, url=url), "daemon")
        return Life(replace(settings, redis=redis), slot, peer, own)

    with tempfile.TemporaryDirectory(prefix="sql-") as folder:
        yield make
    logging.setLogRecordFactory(factory)
    signal.signal(signal.SIGUSR1, limit)
    peer.close()
    own.close()
