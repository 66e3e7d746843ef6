"""Wake-ups from other instances. They are a convenience: beats alone do as well, a little later."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store.client import Connection

RETRY_SECONDS = (1.0, 60.0)


@dataclass
class PubSubListener:
    """Listens on a connection of its own. Trouble here is no trouble with Redis as such."""

    link: Connection
    channel: str
    _listen_at: float = 0.0  # monotonic
    _backoff: float = RETRY_SECONDS[0]

    def next_at(self) -> float:
        """When to subscribe next (monotonic); never while it listens."""
        return float("inf") if self.link.connected else self._listen_at

    def listen(self, now: float, seconds: float) -> None:
        """Subscribe, within `seconds`."""
        self._listen_at = now + self._backoff
        self._backoff = min(self._backoff * 2, RETRY_SECONDS[1])
        try:
            with self.link.within(seconds):
                self.link.execute("SUBSCRIBE", self.channel)
                self.link.socket().setblocking(False)
        except (RedisRefused, RedisUnavailable):
            self.link.close()  # perhaps without the right to subscribe

    def drain(self) -> bool:
        """Take what has arrived. Tells whether there is a reason to look at the fleet."""
        if not self.link.connected:
            return False
        try:
            if self.link.socket().recv(65536):
                self._backoff = RETRY_SECONDS[0]
            else:
                self.link.close()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return False
        except (OSError, RedisUnavailable):
            self.link.close()
        return True
