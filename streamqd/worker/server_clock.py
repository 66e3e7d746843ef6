"""The server's clock, as a worker estimates it."""

from __future__ import annotations

from streamqd.scoreboard import now_ns
from streamqd.store.client import Connection

AGE_NS = 60_000_000_000  # age of a reading after which the server's clock is read again


class ServerClock:
    """Estimates the time of the server's clock, to compare it with the times in message IDs.

    The server creates the IDs. The worker's own clock is no substitute, because the clocks of two
    hosts can differ.
    """

    def __init__(self) -> None:
        self.offset_ns = 0  # the server's unix time minus `now_ns`
        self._read_ns = 0  # time of the last reading (`now_ns`), 0 if there is none

    def read(self, link: Connection) -> None:
        """Read the server's clock in one round trip.

        Raises RedisUnavailableError if Redis does not answer, and RedisResponseError if it refuses.
        """
        seconds, micros = link.execute("TIME")
        self._read_ns = now_ns()
        self.offset_ns = (int(seconds) * 1_000_000 + int(micros)) * 1000 - self._read_ns

    def is_old(self, now: int) -> bool:
        """Return True if the last reading is so old that `read` should be called again."""
        return bool(self._read_ns) and now - self._read_ns > AGE_NS

    def time(self) -> float:
        """Return the server's unix time in seconds, computed from the last reading."""
        return (now_ns() + self.offset_ns) / 1e9
