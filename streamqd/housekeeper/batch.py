"""Send many scripts to Redis in small writes, so that other clients and tasks are not delayed.

The server runs all commands of a write before it serves other clients. So a write contains only a
few scripts that move or remove entries. A task with much work stops after TURN_SECONDS, lets other
tasks run, and continues in its next turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError
from streamqd.isolate import Isolate, run_directly
from streamqd.store.replies import check_valid
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

# Largest number of scripts in one write that move or remove entries. Each takes up to 2 ms.
WRITES_MAX = 4
# Largest number of scripts or commands in one write that only read. Each takes about 0.1 ms.
READS_MAX = 16
TURN_SECONDS = 0.3  # longest turn of a task

Target = TypeVar("Target")
Made = TypeVar("Made")
# A generator that makes one write per step. It returns the seconds until its next run, or None.
Steps = Generator[None, None, float | None]


def read_all(
    store: Store, calls: Sequence[Call]
) -> Generator[None, None, list[Reply | RedisResponseError | ContractError]]:
    """Run scripts that only read, and return their replies in the same order.

    This generator makes one write per step.
    """
    replies: list[Reply | RedisResponseError | ContractError] = []
    for start in range(0, len(calls), READS_MAX):
        replies += map(_refusal, store.run_each(calls[start : start + READS_MAX]))
        yield
    return replies


def run_commands(store: Store, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Run commands that only read, in writes of up to READS_MAX, and return their replies."""
    replies: list[Any] = []
    for start in range(0, len(commands), READS_MAX):
        replies += map(
            _refusal, store.connection.pipeline_each(commands[start : start + READS_MAX])
        )
    return replies


def prepare_calls(
    targets: Iterable[Target], call: Callable[[Target], Made], isolate: Isolate[Target]
) -> tuple[list[Target], list[Made]]:
    """Build a call or command for each target. Return the targets and their calls, as two lists.

    Targets for which this fails are left out of both lists.
    """
    made = [(target, isolate(target, call, target)) for target in targets]
    pairs = [(target, each) for target, each in made if each is not None]
    return [target for target, _ in pairs], [each for _, each in pairs]


def run_batched(
    store: Store,
    targets: Sequence[Target],
    call: Callable[[Target], Call],
    book: Callable[[Target, Reply | RedisResponseError], bool],
    rounds: int,
    isolate: Isolate[Target] = run_directly,
) -> Generator[None, None, list[Target]]:
    """Run a script for each target, and run it again for targets that have more work.

    This generator makes one write per step. `call` builds the script's call for a target. `book`
    receives the target and the reply, and returns True if the target has more work. Return the
    targets that still have more work after `rounds` rounds.
    """
    waiting = list(targets)
    for _ in range(rounds):
        more: list[Target] = []
        for start in range(0, len(waiting), WRITES_MAX):
            part, calls = prepare_calls(waiting[start : start + WRITES_MAX], call, isolate)
            replies = map(_refusal, store.run_each(calls))
            more += [
                target
                for target, reply in zip(part, replies, strict=True)
                if isolate(target, _record_reply, book, target, reply)
            ]
            yield
        waiting = more
    return waiting


def _record_reply(
    book: Callable[[Target, Reply | RedisResponseError], bool],
    target: Target,
    reply: Reply | RedisResponseError | ContractError,
) -> bool:
    return book(target, check_valid(reply))


def _refusal(reply: Any) -> Any:
    """Return a reply, but turn the error of a silent cluster node into a refusal.

    A refusal affects only one target, whereas RedisUnavailableError would stop the whole task.
    """
    if isinstance(reply, RedisUnavailableError):
        return RedisResponseError("UNANSWERED", str(reply))
    return reply


class TimeSlice:
    """Spreads the steps of a task over as many turns as they need.

    `begin` starts the steps from the beginning.
    """

    def __init__(self, begin: Callable[[], Steps]) -> None:
        self._begin = begin
        self._steps: Steps | None = None

    def run(self) -> float | None:
        """Start or continue the steps, for up to TURN_SECONDS.

        If steps are left after that, return 0, so that the next turn follows soon. Otherwise,
        return the result of the steps. After an exception, the next turn starts with the first step
        again.
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
    """Collects the calls that Redis has refused, so that one bad key does not stop other work."""

    def __init__(self) -> None:
        self._first: RedisResponseError | None = None

    def accept(self, reply: Any) -> bool:
        """Return True unless a reply is a refusal. A refusal is recorded."""
        if isinstance(reply, RedisResponseError):
            self._first = self._first or reply
            return False
        return True

    def raise_first(self) -> None:
        """Raise the first refusal, if there was one, and forget it."""
        first, self._first = self._first, None
        if first is not None:
            raise first
