"""Run the scripts of an owner, which Redis rejects once the assignment has another owner."""

from __future__ import annotations

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from streamqd.store.scripts import Call, Reply


class Fenced(Exception):  # noqa: N818 - a signal to the worker's loop
    """Raised when the assignment has a newer owner. The worker drops all entries and exits."""


class FencedCalls:
    """Runs a worker's scripts over one connection, and checks each reply for a lost lease."""

    def __init__(self, link: Connection, slot: WorkerSlot) -> None:
        self.link = link
        self._slot = slot

    def run(self, call: Call) -> Reply:
        """Run a script. Raises Fenced, RedisUnavailableError, RedisResponseError."""
        reply = self.link.run(call)
        self._slot.add("round_trips")
        _check(reply)
        if reply.word == "SESSION":
            # A late copy of an earlier recovery call has replaced the session, but this worker
            # still owns the assignment.
            raise RedisUnavailableError("the session is not the last one opened", sent=True)
        return reply

    def run_many(self, calls: list[Call]) -> list[Reply | RedisResponseError]:
        """Run scripts in one write. Raises Fenced, RedisUnavailableError."""
        replies = self.link.run_many(calls)
        self._slot.add("round_trips")
        for reply in replies:
            if not isinstance(reply, RedisResponseError):
                _check(reply)
        return replies


def _check(reply: Reply) -> None:
    if reply.word == "FENCED":
        raise Fenced
