"""Many scripts in few writes, and one bad key that does not stop the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store.client import Link
from streamqd.store.scripts import Call, Reply

CALLS_MAX = 128  # scripts or commands in one write


def run_calls(link: Link, calls: Sequence[Call]) -> list[Reply | RedisRefused]:
    """Run scripts in pipelines of bounded length."""
    replies: list[Reply | RedisRefused] = []
    for start in range(0, len(calls), CALLS_MAX):
        replies += map(_refusal, link.run_each(calls[start : start + CALLS_MAX]))
    return replies


def run_commands(link: Link, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Run commands in pipelines of bounded length."""
    replies: list[Any] = []
    for start in range(0, len(commands), CALLS_MAX):
        replies += map(_refusal, link.pipeline_each(commands[start : start + CALLS_MAX]))
    return replies


def _refusal(reply: Any) -> Any:
    """A node of a cluster that does not answer is like a bad key: the others' work goes on."""
    if isinstance(reply, RedisUnavailable):
        return RedisRefused("UNANSWERED", str(reply))
    return reply


class Refusals:
    """Collects what was refused in a run, so that one bad key does not stop the others."""

    def __init__(self) -> None:
        self._first: RedisRefused | None = None

    def took(self, reply: Any) -> bool:
        """Return whether the reply is an answer; remember it when it is a refusal."""
        if isinstance(reply, RedisRefused):
            self._first = self._first or reply
            return False
        return True

    def tell(self) -> None:
        """Raise the first refusal."""
        if self._first is not None:
            raise self._first
