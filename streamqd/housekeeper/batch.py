"""Many scripts in bounded writes, and tasks that give way to each other.

The server answers everything that came in one write before it serves anybody else. So few scripts
that move or remove go in a write, and a task with much to do ends its turn after a moment: it goes
on in its next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.isolate import Isolate, directly
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

WORKS_MAX = 4  # scripts that move or remove in one write: each may take 1 or 2 ms
LOOKS_MAX = 16  # scripts or commands that only read in one write: each takes about 0.1 ms
TURN_SECONDS = 0.3  # how long a task works before the others have their turn

Target = TypeVar("Target")
Made = TypeVar("Made")
Steps = Generator[None, None, float | None]  # a write at each; returns when to come back sooner


def read_all(
    store: Store, calls: Sequence[Call]
) -> Generator[None, None, list[Reply | RedisRefused]]:
    """Run scripts that only read, a write at a step. Returns the answers."""
    replies: list[Reply | RedisRefused] = []
    for start in range(0, len(calls), LOOKS_MAX):
        replies += map(_refusal, store.run_each(calls[start : start + LOOKS_MAX]))
        yield
    return replies


def run_commands(store: Store, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Run commands that only read, in writes of bounded length."""
    replies: list[Any] = []
    for start in range(0, len(commands), LOOKS_MAX):
        replies += map(
            _refusal, store.connection.pipeline_each(commands[start : start + LOOKS_MAX])
        )
    return replies


def prepared(
    targets: Iterable[Target], call: Callable[[Target], Made], isolate: Isolate[Target]
) -> tuple[list[Target], list[Made]]:
    """Make the calls or commands for targets; those whose call cannot be made are left out."""
    made = [(target, isolate(target, call, target)) for target in targets]
    pairs = [(target, each) for target, each in made if each is not None]
    return [target for target, _ in pairs], [each for _, each in pairs]


def run_batched(
    store: Store,
    targets: Sequence[Target],
    call: Callable[[Target], Call],
    book: Callable[[Target, Reply | RedisRefused], bool],
    rounds: int,
    isolate: Isolate[Target] = directly,
) -> Generator[None, None, list[Target]]:
    """Run a script for each target, then again for those with more, and so on; a write at a step.

    `book` takes an answer and says whether there is more. Returns those that have more after so
    many `rounds`.
    """
    waiting = list(targets)
    for _ in range(rounds):
        more: list[Target] = []
        for start in range(0, len(waiting), WORKS_MAX):
            part, calls = prepared(waiting[start : start + WORKS_MAX], call, isolate)
            replies = map(_refusal, store.run_each(calls))
            more += [
                target
                for target, reply in zip(part, replies, strict=True)
                if isolate(target, book, target, reply)
            ]
            yield
        waiting = more
    return waiting


def _refusal(reply: Any) -> Any:
    """A node of a cluster that does not answer is like a bad key: the others' work goes on."""
    if isinstance(reply, RedisUnavailable):
        return RedisRefused("UNANSWERED", str(reply))
    return reply


class TimeSlice:
    """A task in steps, which takes as many turns as it needs."""

    def __init__(self, begin: Callable[[], Steps]) -> None:
        self._begin = begin
        self._steps: Steps | None = None

    def run(self) -> float | None:
        """Take a turn: begin, or go on. Return 0 when it has not come to its end.

        At the end return what the steps return. What they raise ends them too.
        """
        until = time.monotonic() + TURN_SECONDS
        steps, self._steps = self._steps or self._begin(), None
        while True:
            try:
                next(steps)
            except StopIteration as end:
                wanted: float | None = end.value
                return wanted
            if time.monotonic() >= until:
                self._steps = steps
                return 0.0


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

    def raise_first(self) -> None:
        """Raise the first refusal, and forget it."""
        first, self._first = self._first, None
        if first is not None:
            raise first
