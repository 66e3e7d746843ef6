"""Run a worker's scripts, which Redis rejects as soon as the assignment has another owner."""

from __future__ import annotations

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from streamqd.store.scripts import Call, Reply


class Fenced(Exception):  # noqa: N818 - a signal to the worker's loop
    """Raised if Redis rejects a call because the assignment has a newer owner.

    The worker must drop all its entries and exit.
    """


class FencedCalls:
    """Runs a worker's scripts over one connection, and raises Fenced if its lease is lost."""

    def __init__(self, link: Connection, slot: WorkerSlot) -> None:
        self.link = link
        self._slot = slot

    def run(self, call: Call) -> Reply:
        """Run a script and return its reply.

        Raises Fenced if the lease is lost, RedisUnavailableError if Redis does not answer, and
        RedisResponseError if it refuses the call.
        """
        reply = self.link.run(call)
        self._slot.add("round_trips")
        _check(reply)
        if reply.word == "SESSION":
            # This worker still owns the assignment, but a late copy of an earlier call has replaced
            # the session in the fence. So connect again, which opens a new session.
            raise RedisUnavailableError("the session is not the last one opened", sent=True)
        return reply

    def run_many(self, calls: list[Call]) -> list[Reply | RedisResponseError]:
        """Run scripts in one write. The result contains an error for each call that Redis refuses.

        Raises Fenced if the lease is lost, and RedisUnavailableError if Redis does not answer.
        """
        replies = self.link.run_many(calls)
        self._slot.add("round_trips")
        for reply in replies:
            if not isinstance(reply, RedisResponseError):
                _check(reply)
        return replies


def _check(reply: Reply) -> None:
    if reply.word == "FENCED":
        raise Fenced
