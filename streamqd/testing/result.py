"""What a run comes to: the verdict on its message, as a value that tests compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamqd.dead_letter import DeadLetter
from streamqd.message import Message

Verdict = Literal["ack", "retry", "dead", "release", "crash", "expired"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a handler, and what becomes of the message after it."""

    __module__ = "streamqd.testing"

    message: Message
    """The message, as the handler has got it."""
    attempt: int
    """Which run it was, from 1; crashes and releases do not count."""
    crashes: int
    """How many processes the message has killed, this run included."""
    verdict: Verdict
    """ack: done. retry: again after a wait. dead: a dead letter. release: given back, no attempt is
    spent. crash: the process died, and the next one runs the message again. expired: acknowledged
    without a run."""
    reason: str = ""
    """Of a dead letter the stable word: attempts, dead, undecodable, crashes, too-old …"""
    error: BaseException | None = None
    """What the handler has raised, or has returned instead."""
    delay: tuple[float, float] | None = None
    """The shortest and the longest wait before the next run, in seconds; chance chooses between
    them. None when there is no next run."""
    in_place: bool = False
    """Whether the message keeps its place meanwhile: `on_error` is block or hold-key."""
    letter: DeadLetter | None = None
    """The dead letter, of a dead message."""
    at: float = 0.0
    """When it began, in seconds after the first write of the message, by the clock of the test."""
