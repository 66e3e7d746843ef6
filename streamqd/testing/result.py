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
    """The decision about the message after the run.

    ack: the message was acknowledged. retry: the message runs again after a delay, and an attempt
    is counted. dead: the message was dead-lettered. release: the message runs again, but no attempt
    is counted. crash: the process crashed, and the next process runs the message again. expired:
    the message was acknowledged without a run, because its `expires` time had passed.
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
