"""4,096 coroutines at a time in one worker keep the promises of 128, in bounded memory.

Handlers take 1 s, like a call to another service. The tests print the rates, but do not check them.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from streamqd.model import LANES_MAX
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.waiting import wait_until

NewDaemon = Callable[..., Daemon]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CODE = """
import asyncio, os, time
from streamqd import Message

file = os.open("runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

async def obey(message: Message) -> None:
    await asyncio.sleep(1)
    os.write(file, f"{message.uid} {time.time()}\\n".encode())
"""
RSS_MAX = 250 << 20
BODY = "x" * 100


def configure_daemon(new_daemon: NewDaemon, **options: Any) -> Daemon:
    consumer = {"concurrency": LANES_MAX, "order": "key", **options}
    return new_daemon(code=CODE, consumer=consumer, daemon={"lease_ttl": "60s"})


def runs(daemon: Daemon) -> Counter[str]:
    """Return how many runs of each message have finished."""
    return Counter(line.split()[0] for line in lines(daemon))


def lines(daemon: Daemon) -> list[str]:
    """Return the message and the time of each finished run, one per line."""
    file = daemon.folder / "runs"
    return file.read_text().splitlines() if file.exists() else []


def worker(daemon: Daemon) -> psutil.Process:
    (pid,) = daemon.pids().values()
    return psutil.Process(pid)


def send_while_paused(daemon: Daemon, rounds: int) -> list[str]:
    """Send messages while the worker is paused, and then resume it. Return their uids."""
    daemon.pause()
    uids = daemon.send([BODY] * (rounds * LANES_MAX))
    daemon.signal(signal.SIGCONT)
    return uids


def test_4096_coroutines_run_at_a_time(new_daemon: NewDaemon) -> None:
    """All lanes run at a time in bounded memory, and finish their messages after SIGTERM."""
    with configure_daemon(new_daemon) as daemon:
        uids = send_while_paused(daemon, 5)
        wait_until(lambda: runs(daemon), timeout=30, what="the first end")
        peak = 0

        def settled() -> bool:
            nonlocal peak
            peak = max(peak, worker(daemon).memory_info().rss)
            return daemon.unsettled() == 0

        wait_until(settled, timeout=60, every=0.2, what="every message")
        assert runs(daemon) == Counter(uids)
        ends = sorted(float(line.split()[1]) for line in lines(daemon))
        rate = (len(ends) - LANES_MAX) / (ends[-1] - ends[LANES_MAX - 1])
        print(f"{rate:,.0f} messages/s behind the first round, {peak / 2**20:.0f} MiB resident")
        assert peak < RSS_MAX

        uids = daemon.send([BODY] * LANES_MAX)
        wait_until(lambda: daemon.pending() == LANES_MAX, timeout=30, what="all of them in flight")
        assert daemon.stop() == 0
        last = max(float(line.split()[1]) for line in lines(daemon))
        print(f"the daemon exited {time.time() - last:.2f} s after the last run")
        assert daemon.unsettled() == 0
        assert runs(daemon).keys() >= set(uids)


def test_4096_coroutines_recover_from_a_kill(new_daemon: NewDaemon) -> None:
    """After a kill, all suspects run again in rounds, and none of them is charged."""
    with configure_daemon(new_daemon) as daemon:
        uids = send_while_paused(daemon, 2)
        wait_until(lambda: daemon.pending() >= LANES_MAX, timeout=30, what="all lanes in use")
        killed = time.monotonic()
        worker(daemon).kill()
        wait_until(lambda: len(runs(daemon)) == len(uids), timeout=60, what="every message")
        print(f"all handled {time.monotonic() - killed:.1f} s after the kill")
        daemon.wait_settled()
        assert daemon.letters() == []
        assert daemon.events("worker.charged") == []
        assert max(runs(daemon).values()) <= 2


def test_payload_bytes_in_flight_are_bounded(new_daemon: NewDaemon) -> None:
    """`prefetch_bytes` limits the bytes of running messages as well."""
    with configure_daemon(new_daemon, prefetch_bytes="1MB") as daemon:
        daemon.pause()
        daemon.send(["x" * 10_000] * 1_000)
        daemon.signal(signal.SIGCONT)
        most = 0

        def settled() -> bool:
            nonlocal most
            most = max(most, daemon.pending())
            return daemon.unsettled() == 0

        wait_until(settled, timeout=60, what="every message")
        # One more read is allowed, because its entries had already arrived when the bound was
        # reached.
        assert 0 < most <= 1_000_000 // 10_000 + 256
        assert (daemon.assignments()[0].topic, daemon.assignments()[0].group) == (TOPIC, GROUP)
