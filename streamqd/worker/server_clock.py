"""The server's clock, as one worker knows it: it gave the messages their ids."""

from __future__ import annotations

from streamqd.scoreboard import now_ns
from streamqd.store.client import Connection

AGE_NS = 60_000_000_000  # how old a reading may be


class ServerClock:
    """Tells the server's time between two readings. Hosts need not agree on theirs."""

    def __init__(self) -> None:
        self._ahead_ns = 0  # the server's unix time less `now_ns`
        self._read_ns = 0  # 0 = not read yet

    def read(self, link: Connection) -> None:
        """Ask the server. Raises RedisUnavailable, RedisRefused."""
        seconds, micros = link.execute("TIME")
        self._read_ns = now_ns()
        self._ahead_ns = (int(seconds) * 1_000_000 + int(micros)) * 1000 - self._read_ns

    def is_old(self, now: int) -> bool:
        """Whether `read` should be called again."""
        return bool(self._read_ns) and now - self._read_ns > AGE_NS

    def time(self) -> float:
        """Return the server's unix time, by the last reading."""
        return (now_ns() + self._ahead_ns) / 1e9
