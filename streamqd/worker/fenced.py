"""Run the scripts of an owner. After a change of ownership, Redis rejects them."""

from __future__ import annotations

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from streamqd.store.scripts import Call, Reply


class Fenced(Exception):  # noqa: N818 - a signal to the worker's loop
    """Another instance owns the assignment. The worker drops all entries and exits."""


class FencedCalls:
    """Runs the scripts of one worker over one connection, and checks the fence in each reply."""

    def __init__(self, link: Connection, slot: WorkerSlot) -> None:
        self.link = link
        self._slot = slot

    def run(self, call: Call) -> Reply:
        """Run a script. Raises Fenced, RedisUnavailableError, RedisResponseError."""
        reply = self.link.run(call)
        self._slot.add("round_trips")
        _check(reply)
        if reply.word == "SESSION":
            # A late copy of an earlier recovery replaced the session. The assignment is still ours.
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
