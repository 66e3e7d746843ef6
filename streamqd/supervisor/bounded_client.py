"""Asking Redis within a deadline, and hearing of wake-ups.

A node that does not answer is left alone for a while.
Where only some of the nodes answer, the others rest, each for itself: waiting for one node would
cost the leases at the others.
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
from streamqd.errors import BadValue, RedisRefused, RedisUnavailable
from streamqd.scoreboard import Scoreboard
from streamqd.store.client import Connection
from streamqd.store.scripts import Call, Reply

BACKOFF_SECONDS = (0.1, 2.0)
LISTEN_SECONDS = (1.0, 60.0)  # first and longest pause between two tries to subscribe
SPENT_SECONDS = 3.0  # after the end of a pause; a node that is wanted is asked within a tick

Answer = Callable[[Reply | RedisRefused], object]
Calls = list[tuple[Call, Answer]]

_ALL = "*"  # for the nodes of which none answered


class BoundedClient:
    """The supervisor's connection: it never waits for longer than `patience`, in seconds."""

    def __init__(
        self, link: Connection, board: Scoreboard, patience: float, longest_pause: float
    ) -> None:
        self.link = link
        self.patience = patience
        self.retry_at = 0.0  # monotonic; nothing is asked before
        self._board = board
        self._episode = logs.Episode("redis.lost", "redis.back")
        self._backoff = NodeBackoff(
            BACKOFF_SECONDS[0], min(BACKOFF_SECONDS[1], longest_pause), random
        )

    @property
    def ok(self) -> bool:
        """Whether all nodes answered when they were asked last."""
        return not self._episode.open

    def deadline(self) -> AbstractContextManager[None]:
        """All that is asked within this context shares one deadline."""
        return self.link.within(self.patience)

    def rests(self, key: str, now: float) -> bool:
        """Whether the node that serves a key did not answer a moment ago."""
        return bool(self._backoff) and self._backoff.rests(self.link.node_of(key), now)

    def rest_ends(self, key: str) -> float:
        """When the node that serves a key is asked again (monotonic)."""
        return self._backoff.end_of(self.link.node_of(key))

    def ask(self, calls: Calls) -> None:
        """Run the calls in one write and hand out the answers.

        A call whose node does not answer gets none. Raises RedisUnavailable when no node answers.
        """
        self._board.add("exchanges")
        answered, silent = {_ALL}, dict[str, RedisUnavailable]()
        replies = self.link.run_each([call for call, _ in calls])
        for (call, answer), reply in zip(calls, replies, strict=True):
            node = self.link.node_of(call.key)
            if isinstance(reply, RedisRefused) and reply.transient:
                silent[node] = RedisUnavailable(str(reply), sent=True)
            elif isinstance(reply, RedisUnavailable):
                silent[node] = reply
            else:
                answered.add(node)
                try:
                    answer(reply)
                except BadValue as bad:
                    logs.bad_value(bad)
        if answered == {_ALL}:
            raise next(iter(silent.values()))
        for node in answered:
            self._backoff.end(node)
        self._backoff.forget(time.monotonic())
        for node, error in silent.items():
            self._leave_alone(node, error)
        if not self._backoff:
            self._episode.recovered()

    def look(self, keys: Iterable[str], commands: list[tuple[Any, ...]]) -> list[Any]:
        """Run commands that read these keys; an error stands for each reply of a silent node."""
        try:
            return self.link.pipeline_each(commands)
        except RedisUnavailable as error:
            nodes = {self.link.node_of(key) for key in keys}
            if "" in nodes:
                raise
            for node in nodes:
                self._leave_alone(node, error)
            return [error] * len(commands)

    def failed(self, error: RedisUnavailable) -> None:
        """Note that no node has answered: all of them are left alone."""
        self._board.add("exchange_errors")
        self._episode.failed(error=str(error))
        # Not from the start of the try: waiting in vain is no pause.
        self.retry_at = self._backoff.begin(_ALL, time.monotonic())

    def _leave_alone(self, node: str, error: RedisUnavailable) -> None:
        self._board.add("exchange_errors")
        self._episode.failed(error=str(error))
        self._backoff.begin(node, time.monotonic())


class NodeBackoff:
    """A pause for each node that did not answer, the longer the more often that was so.

    `first` and `longest` are seconds; `jitter` gives numbers of 0 to 1.
    """

    def __init__(self, first: float, longest: float, jitter: Callable[[], float]) -> None:
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._until: dict[str, float] = {}
        self._next: dict[str, float] = {}

    def begin(self, node: str, now: float) -> float:
        """The node did not answer. Returns until when it is left alone (monotonic)."""
        pause = self._next.get(node, self._first)
        self._next[node] = min(pause * 2, self._longest)
        self._until[node] = now + pause * (0.5 + self._jitter())
        return self._until[node]

    def end(self, node: str) -> None:
        """The node has answered."""
        self._until.pop(node, None)
        self._next.pop(node, None)

    def forget(self, now: float) -> None:
        """Forget nodes that are not asked any more: the keys are with others."""
        for node in [each for each, until in self._until.items() if now > until + SPENT_SECONDS]:
            self.end(node)

    def rests(self, node: str, now: float) -> bool:
        """Whether the node is to be left alone now."""
        return self.end_of(node) > now

    def end_of(self, node: str) -> float:
        """When the pause of a node is over (monotonic); 0 when it has none."""
        return self._until.get(node, 0.0)

    def __bool__(self) -> bool:
        """Whether any node has not answered since."""
        return bool(self._until)


@dataclass
class PubSubListener:
    """Hears wake-ups of other instances, on a connection of its own.

    They are a convenience: heartbeats alone do as well, a little later. So trouble here is no
    trouble with Redis as such.
    """

    link: Connection
    channel: str
    _listen_at: float = 0.0  # monotonic
    _backoff: float = LISTEN_SECONDS[0]

    def next_at(self) -> float:
        """When to subscribe next (monotonic); never while it listens."""
        return float("inf") if self.link.connected else self._listen_at

    def listen(self, now: float, seconds: float) -> bool:
        """Subscribe, within `seconds`. Tells whether there is a reason to look at the fleet.

        There is as soon as it listens: what was published before is not heard, and what came
        with the answer has been read with it.
        """
        self._listen_at = now + self._backoff
        self._backoff = min(self._backoff * 2, LISTEN_SECONDS[1])
        try:
            with self.link.within(seconds):
                self.link.execute("SUBSCRIBE", self.channel)
        except (RedisRefused, RedisUnavailable):
            self.link.close()  # perhaps without the right to subscribe
            return False
        return True

    def drain(self) -> bool:
        """Take what has arrived. Tells whether there is a reason to look at the fleet."""
        if not self.link.connected:
            return False
        try:
            if self.link.node.socket().recv(65536):
                self._backoff = LISTEN_SECONDS[0]
            else:
                self.link.close()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return False
        except (OSError, RedisUnavailable):
            self.link.close()
        return True
