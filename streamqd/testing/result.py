"""The result of a run: the verdict on its message, as a value that tests can compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamqd.dead_letter import DeadLetter
from streamqd.message import Message

Verdict = Literal["ack", "retry", "dead", "release", "crash", "expired"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a handler, and the verdict on its message."""

    __module__ = "streamqd.testing"

    message: Message
    """The message that the handler received."""
    attempt: int
    """The number of the run, from 1. Crashes and releases do not count."""
    crashes: int
    """The number of processes that the message has crashed, including this run."""
    verdict: Verdict
    """The verdict on the message, as one of the following words.

    ack: the message was acknowledged. retry: it runs again after a delay. dead: it was
    dead-lettered. release: it runs again without counting an attempt. crash: the process crashed,
    and the next one runs the message again. expired: it was acknowledged without a run.
    """
    reason: str = ""
    """The reason if the verdict is dead, such as `attempts` or `undecodable`, otherwise ''."""
    error: BaseException | None = None
    """The exception that the handler raised or returned."""
    delay: tuple[float, float] | None = None
    """The shortest and the longest delay before the next run, in seconds.

    They differ because of jitter. None if the message does not run again.
    """
    in_place: bool = False
    """True if other messages wait for the retry, because `on_error` is block or hold-key."""
    dead_letter: DeadLetter | None = None
    """The dead letter if the verdict is dead, otherwise None."""
    at: float = 0.0
    """The start of the run on the test's clock, in seconds after the message's first write."""
