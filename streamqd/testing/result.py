"""The result of a run: the verdict on its message, as a value for tests to compare."""

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
    """The number of processes that the message killed, including this run."""
    verdict: Verdict
    """ack: done. retry: runs again after a wait. dead: dead-lettered. release: runs again without
    counting an attempt. crash: the process died, and the next one runs the message again. expired:
    acknowledged without a run."""
    reason: str = ""
    """The reason of a dead letter, a stable word: attempts, dead, undecodable, crashes, too-old …
    Empty for other verdicts."""
    error: BaseException | None = None
    """The exception that the handler raised or returned."""
    delay: tuple[float, float] | None = None
    """The shortest and the longest wait before the next run, in seconds. Jitter chooses between
    them. None if the message does not run again."""
    in_place: bool = False
    """True if the message keeps its place during the wait: `on_error` is block or hold-key."""
    dead_letter: DeadLetter | None = None
    """The dead letter of a dead message."""
    at: float = 0.0
    """The start of the run, in seconds after the first write of the message, by the test's
    clock."""
