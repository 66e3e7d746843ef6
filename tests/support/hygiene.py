"""Replace workers continually during a storm of signals, and observe them from outside.

Each worker handles one message and is then replaced. Its handler has threads, a TLS client and,
where it is installed, a gRPC client, and never closes any of them (tests/support/hygiene_work.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.support import tls
from tests.support.daemon import GROUP, ROOT, Daemon
from tests.support.echo_peer import grpc
from tests.support.ledger import Audit
from tests.support.waiting import wait_until

WORK = Path(__file__).with_name("hygiene_work.py")
PARTITIONS = 4
# Each worker handles one message, with little read-ahead.
SETTINGS = {"handler": "work:handle", "max_messages": 1, "prefetch_max": 4}
AHEAD = 100  # messages that wait for a worker
STEP_SECONDS = 0.02
STANDSTILL_SECONDS = 60.0  # if no message is handled for this many seconds, some process is locked
STAY_SECONDS = 10.0  # a supervisor without CPU time may take this long to reap its children
TO_SUPERVISOR = (signal.SIGCHLD, signal.SIGWINCH, signal.SIGCONT)


class Sample(NamedTuple):
    """The kernel's figures for the daemon at one time."""

    recycles: int
    supervisor_fds: int
    supervisor_rss: int  # bytes
    housekeeper_fds: int
    housekeeper_rss: int


FDS_OF_A_CHILD = 3  # in the supervisor: a socket, a pidfd and the file of the stacks
# The allowed growth of a median from the first to the last samples. In any sample, each partition
# may have a second worker as a standby. At the end, `judge` counts exactly.
WAVERS = {
    "supervisor_fds": FDS_OF_A_CHILD * PARTITIONS,
    "housekeeper_fds": 2,
    "supervisor_rss": 4 << 20,
    "housekeeper_rss": 4 << 20,
}


@contextmanager
def echo_peer(folder: Path) -> Iterator[str]:
    """Start the peer of the handlers. Yield the value of PEER for the handlers' environment."""
    folder.mkdir()
    tls.certificates(folder)
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.echo_peer", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert peer.stdout is not None
        ports = peer.stdout.readline().split()
        yield " ".join([*ports, str(folder)])
    finally:
        peer.kill()
        peer.wait(10)
        assert peer.stdout is not None
        peer.stdout.close()


class Storm:
    """Sends messages and signals to a daemon, and takes samples of it."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.daemon = daemon
        self.samples: list[Sample] = []
        self.signals = 0
        self.stayed: list[str] = []  # zombies and adopted processes that stayed too long
        self._chance = random.Random(f"storm {seed}")
        self._supervisor = psutil.Process(daemon.pid)
        self._own_fds = self._fds_without_children()
        self._children: list[psutil.Process] = []
        self._odd: dict[str, float] = {}  # an unexpected process -> the time since which it exists
        self._sent = 0
        self._read = 0  # number of ledger records read so far
        self._sample_at = 0.0
        self._moved = (0, time.monotonic())  # finished messages, and the time since when

    def run(self, count: int, every: float) -> None:
        """Run until `count` messages have been handled, taking a sample every `every` seconds."""

        def step() -> bool:
            ended = self._count_ended()
            still = time.monotonic() - self._moved[1]
            assert still < STANDSTILL_SECONDS, f"nothing moves\n{self.daemon.tail()}"
            if self._sent < count and self._sent - ended < AHEAD:
                more = min(AHEAD, count - self._sent)
                self.daemon.send(self._payload() for _ in range(more))
                self._sent += more
            if time.monotonic() >= self._sample_at:
                self._sample_at = time.monotonic() + every
                self._sample(ended)
            self._send_signals()
            return ended >= count

        wait_until(step, timeout=24 * 3600, every=STEP_SECONDS, what="all are handled")

    def _count_ended(self) -> int:
        news = self.daemon.ledger.since(self._read)
        self._read += len(news)
        ended = self._moved[0] + sum(record.kind == "end" for record in news)
        if ended > self._moved[0]:
            self._moved = (ended, time.monotonic())
        return ended

    def _payload(self) -> str:
        return "spawn" if self._chance.random() < 0.05 else "ok"

    def _send_signals(self) -> None:
        dice, supervisor = self._chance.random(), self._supervisor
        if dice < 0.01:
            supervisor.send_signal(signal.SIGUSR1)  # a dump takes long
        elif dice < 0.05:
            supervisor.send_signal(signal.SIGTSTP)
            supervisor.send_signal(signal.SIGCONT)
        else:
            supervisor.send_signal(self._chance.choice(TO_SUPERVISOR))
        self.signals += 1
        if self._children:
            # Objects are used instead of pids, because psutil never signals another process that
            # reuses a pid.
            with contextlib.suppress(psutil.NoSuchProcess):
                self._chance.choice(self._children).send_signal(signal.SIGUSR1)
                self.signals += 1

    def _sample(self, ended: int) -> None:
        self._children = self._supervisor.children()
        self._note_unexpected()
        housekeeper = next((p for p in self._children if title(p).endswith("housekeeper")), None)
        if housekeeper is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            one, other = self._supervisor, housekeeper
            self.samples.append(
                Sample(
                    *(ended, one.num_fds(), one.memory_info().rss),
                    *(other.num_fds(), other.memory_info().rss),
                )
            )

    def _note_unexpected(self) -> None:
        """Record zombies and adopted processes that stay. Both may exist for a short time."""
        now = time.monotonic()
        self._odd = {name: self._odd.get(name, now) for name in self.unexpected_processes()}
        self.stayed += [name for name, since in self._odd.items() if now - since > STAY_SECONDS]

    def unexpected_processes(self) -> set[str]:
        """Return the zombies and adopted processes of the daemon."""
        return find_odd_processes(self.daemon.pid)

    def wait_recycles(self, count: int) -> int:
        """Wait until `count` workers, except the last ones, have been replaced at their limit.

        Return the number of replaced workers. A worker that has a successor may take a while to
        exit.
        """

        def recycles() -> int:
            return len(self.daemon.events("worker.exited", how="exit code 5"))

        self.daemon.wait_for(
            lambda: recycles() >= count - PARTITIONS, what="the workers have exited"
        )
        return recycles()

    def sixth_medians(self, name: str) -> tuple[float, float]:
        """Return the medians of a figure over the first and the last sixth of the samples."""
        return sixth_medians(self.samples, name)

    def judge(self) -> None:
        """Assert that every message was handled once, and that nothing is left or has grown."""
        daemon = self.daemon
        daemon.wait_settled()
        daemon.wait_for(
            lambda: not self.unexpected_processes(), timeout=5.0, what="no zombie, no orphan"
        )
        assert self.stayed == []
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.events("worker.crashed") == daemon.events("worker.killed") == []
        assert daemon.events("housekeeper.exited") == daemon.events("lease.lost") == []
        assert daemon.traces() == []
        assert not (more := grown_figures(self.samples)), more
        daemon.wait_for(
            lambda: self._fds_without_children() <= self._own_fds,
            what=f"the supervisor has {self._own_fds} descriptors, as at first",
        )

    def _fds_without_children(self) -> int:
        """Return the number of the supervisor's descriptors, without those for its children."""
        children = len(self._supervisor.children())
        return self._supervisor.num_fds() - FDS_OF_A_CHILD * children


def find_odd_processes(leader: int) -> set[str]:
    """Return the zombies, adopted processes and lost processes in the session of a leader."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(pid) != leader or pid == leader:
                continue
            one = psutil.Process(pid)
            if one.status() == psutil.STATUS_ZOMBIE:
                found.add(f"zombie {pid}")
            elif one.ppid() == leader and not title(one).startswith("streamqd: "):
                found.add(f"orphan {pid} {title(one)}")
            elif one.ppid() in (0, 1):
                found.add(f"lost {pid} {title(one)}")
    return found


def sixth_medians(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Return the medians of a figure over the first and the last sixth of the samples."""
    figures = [getattr(sample, name) for sample in samples]
    sixth = max(1, len(figures) // 6)
    return statistics.median(figures[:sixth]), statistics.median(figures[-sixth:])


def grown_figures(samples: Sequence[Sample]) -> list[str]:
    """Return the figures that grew by more than WAVERS allows from first to last."""
    found = []
    for name, more in WAVERS.items():
        early, late = sixth_medians(samples, name)
        if late - early > more:
            found.append(f"{name}: {early:g} at first, {late:g} at last")
    return found


def title(process: psutil.Process) -> str:
    """Return the title that ps shows for a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).strip() or process.name()
    return ""


def clients() -> list[str]:
    """Return the clients that the handlers use. gRPC is included only where it is installed."""
    return ["threads", "TLS", *(["gRPC"] if grpc is not None else [])]


def daemon_options() -> dict[str, Any]:
    """Return the daemon's configuration, which preloads gRPC.

    The subject of the tests is forking after the import of gRPC.
    """
    return {
        "partitions": PARTITIONS,
        "consumer": SETTINGS,
        "daemon": {"preload": ["ssl", *(["grpc"] if grpc is not None else [])]},
        "code": WORK.read_text(),
    }
