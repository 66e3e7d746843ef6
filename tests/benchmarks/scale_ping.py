"""Another client of the server, which only measures how long it waits for replies.

It is a separate process, so that the benchmark does not delay it.
"""

from __future__ import annotations

import multiprocessing
import time
from array import array
from multiprocessing.connection import Connection
from typing import NamedTuple

import redis

EVERY = 0.005  # seconds between two pings; no longer block can go unnoticed
STOP_SECONDS = 10.0


class Delays(NamedTuple):
    """The number of pings, their 99th percentile and the longest one, in ms."""

    pings: int
    p99: float
    worst: float


class Pinger:
    """Sends PING to a server all the time."""

    def __init__(self, path: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_ping, args=(path, theirs), daemon=True)
        self._process.start()

    def delays(self, *, whole: bool = False) -> Delays:
        """Return the delays since the last call, or since the start if `whole` is True."""
        self._ours.send(whole)
        found: Delays = self._ours.recv()
        return found

    def close(self) -> None:
        """Stop the process."""
        self._ours.close()
        self._process.join(STOP_SECONDS)


def _ping(path: str, pipe: Connection) -> None:
    client = redis.Redis(unix_socket_path=path)
    everything, begin = array("d"), 0
    while True:
        try:
            while pipe.poll(EVERY):
                whole = pipe.recv()
                pipe.send(_summary(everything if whole else everything[begin:]))
                begin = begin if whole else len(everything)
            began = time.perf_counter()
            client.ping()
        except (EOFError, OSError, redis.ConnectionError):
            return
        everything.append((time.perf_counter() - began) * 1000)


def _summary(delays: array[float]) -> Delays:
    ordered = sorted(delays) or [0.0]
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return Delays(len(delays), round(p99, 2), round(ordered[-1], 2))
