"""Call Redis within a deadline, and subscribe to wake-ups.

If a node does not answer, the client stops calling it for a while, and each further failure doubles
this pause. The other nodes are still called, because waiting for a silent node would delay the
renewals on the others until their leases expire.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import random
from typing import Any

from streamqd import logs
from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError
from streamqd.scoreboard import Scoreboard
from streamqd.store.client import Connection
from streamqd.store.scripts import Call, Reply

BACKOFF_SECONDS = (0.1, 2.0)
LISTEN_SECONDS = (1.0, 60.0)  # first and longest pause between two attempts to subscribe
# A node's failures are forgotten this many seconds after its pause has ended. By then, a node that
# still serves keys would have been called again.
SPENT_SECONDS = 3.0

# A callback that receives the reply to a call, or an error if the reply is invalid. It must not
# raise.
TakeReply = Callable[[Reply | RedisResponseError | ContractError], object]
Calls = list[tuple[Call, TakeReply]]

_ALL = "*"  # the name that stands for all nodes


class BoundedClient:
    """The supervisor's connection for calls, which pauses calls to nodes that do not answer.

    Within `deadline()`, no call waits longer than `timeout` seconds.
    """

    def __init__(
        self, link: Connection, board: Scoreboard, patience: float, longest_pause: float
    ) -> None:
        self.link = link
        self.timeout = patience
        self.retry_at = 0.0  # monotonic time before which no call is sent
        self._board = board
        self._episode = logs.Episode("redis.lost", "redis.recovered")
        self._backoff = NodeBackoff(
            BACKOFF_SECONDS[0], min(BACKOFF_SECONDS[1], longest_pause), random
        )

    @property
    def ok(self) -> bool:
        """True if every node answered when it was last called."""
        return not self._episode.open

    def deadline(self) -> AbstractContextManager[None]:
        """Return a context in which all calls together take no longer than `timeout` seconds."""
        return self.link.limit_time(self.timeout)

    def is_paused(self, key: str, now: float) -> bool:
        """Return True if calls to the node that serves a key are paused at `now`."""
        return bool(self._backoff) and self._backoff.is_paused(self.link.node_for_key(key), now)

    def pause_end(self, key: str) -> float:
        """Return when the node that serves a key may be called again (monotonic seconds)."""
        return self._backoff.pause_end(self.link.node_for_key(key))

    def run_calls(self, calls: Calls) -> None:
        """Send the calls in one write, and pass each reply to the callback of its call.

        If a node does not answer or replies with a transient error, calls to that node are paused,
        and the callbacks of its calls are not run. Raises RedisUnavailableError if no node answers.
        """
        self._board.add("round_trips")
        answered, silent = {_ALL}, dict[str, RedisUnavailableError]()
        replies = self.link.run_each([call for call, _ in calls])
        for (call, take), reply in zip(calls, replies, strict=True):
            node = self.link.node_for_key(call.key)
            if isinstance(reply, RedisResponseError) and reply.transient:
                silent[node] = RedisUnavailableError(str(reply), sent=True)
            elif isinstance(reply, RedisUnavailableError):
                silent[node] = reply
            else:
                answered.add(node)
                take(reply)
        if answered == {_ALL}:
            raise next(iter(silent.values()))
        for node in answered:
            self._backoff.record_reply(node)
        self._backoff.forget(time.monotonic())
        for node, error in silent.items():
            self._pause(node, error)
        if not self._backoff:
            self._episode.log_recovery()

    def read(self, keys: Iterable[str], commands: list[tuple[Any, ...]]) -> list[Any]:
        """Run commands that read these keys. If a node does not answer, its replies are errors.

        If no node of a cluster answers, calls to all nodes that serve the keys are paused, and
        every reply is an error. Raises RedisUnavailableError if the nodes are not known, as with a
        single server.
        """
        try:
            return self.link.pipeline_each(commands)
        except RedisUnavailableError as error:
            nodes = {self.link.node_for_key(key) for key in keys}
            if "" in nodes:
                raise
            for node in nodes:
                self._pause(node, error)
            return [error] * len(commands)

    def pause_all(self, error: RedisUnavailableError) -> None:
        """Record that no node answered, and pause all calls."""
        self._board.add("round_trip_errors")
        self._episode.log_failure(error=str(error))
        # Start the pause now. If it started when the call was sent, it might already be over.
        self.retry_at = self._backoff.record_silence(_ALL, time.monotonic())

    def _pause(self, node: str, error: RedisUnavailableError) -> None:
        self._board.add("round_trip_errors")
        self._episode.log_failure(error=str(error))
        self._backoff.record_silence(node, time.monotonic())


class NodeBackoff:
    """Decides how long calls to each silent node pause.

    The first pause takes `first` seconds, and each further failure doubles it, up to `longest`
    seconds. `jitter` returns a random number from 0 to 1, which changes each pause by up to half of
    its length.
    """

    def __init__(self, first: float, longest: float, jitter: Callable[[], float]) -> None:
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._until: dict[str, float] = {}
        self._next: dict[str, float] = {}

    def record_silence(self, node: str, now: float) -> float:
        """Record that a node did not answer. Return the monotonic time at which its pause ends."""
        pause = self._next.get(node, self._first)
        self._next[node] = min(pause * 2, self._longest)
        self._until[node] = now + pause * (0.5 + self._jitter())
        return self._until[node]

    def record_reply(self, node: str) -> None:
        """Record that a node has answered, so that its next pause is short again."""
        self._until.pop(node, None)
        self._next.pop(node, None)

    def forget(self, now: float) -> None:
        """Forget nodes that are no longer called because other nodes now serve their keys."""
        for node in [each for each, until in self._until.items() if now > until + SPENT_SECONDS]:
            self.record_reply(node)

    def is_paused(self, node: str, now: float) -> bool:
        """Return True if calls to a node are paused at `now`."""
        return self.pause_end(node) > now

    def pause_end(self, node: str) -> float:
        """Return the monotonic time at which a node's pause ends, or 0 if it has no pause."""
        return self._until.get(node, 0.0)

    def __bool__(self) -> bool:
        """Return True if at least one node has not answered since it last failed."""
        return bool(self._until)


@dataclass
class PubSubListener:
    """Receives wake-ups from other instances on a separate connection.

    Wake-ups only save time, because the next heartbeat has the same effect. A failure of this
    connection is therefore not treated as a failure of Redis.
    """

    link: Connection
    channel: str
    _listen_at: float = 0.0  # monotonic time of the next attempt to subscribe
    _backoff: float = LISTEN_SECONDS[0]

    def next_at(self) -> float:
        """Return the monotonic time of the next attempt, or infinity while subscribed."""
        return float("inf") if self.link.connected else self._listen_at

    def listen(self, now: float, seconds: float) -> bool:
        """Try to subscribe within `seconds`. Return True if the subscription succeeded.

        The caller should then read the state of the fleet from Redis, because wake-ups may have
        been missed before the subscription or may have arrived together with the reply.
        """
        self._listen_at = now + self._backoff
        self._backoff = min(self._backoff * 2, LISTEN_SECONDS[1])
        try:
            with self.link.limit_time(seconds):
                self.link.execute("SUBSCRIBE", self.channel)
        except (RedisResponseError, RedisUnavailableError):
            self.link.close()  # the Redis user may lack the permission to subscribe
            return False
        return True

    def drain(self) -> bool:
        """Read the wake-ups that have arrived. Return True if there were any.

        The caller should then read the state of the fleet from Redis. The result is also True if
        the connection is lost, because wake-ups may have been missed.
        """
        if not self.link.connected:
            return False
        try:
            if self.link.node.socket().recv(65536):
                self._backoff = LISTEN_SECONDS[0]
            else:
                self.link.close()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return False
        except (OSError, RedisUnavailableError):
            self.link.close()
        return True
