"""What a worker waits for that could work, as a cause: word, sentence, advice. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamqd.admin.live import LiveUnit


class Said(NamedTuple):
    """One cause: a stable word, and what it tells people."""

    word: str
    sentence: str
    advice: str


def said(told: LiveUnit, *, moving: bool, last_error: str) -> Iterator[Said]:
    """Say what holds a unit; `last_error` completes a sentence.

    `moving` tells that messages are settled besides those that are held.
    """
    name, on = told.name, f"on {told.owner}"
    left = told.waits_seconds
    when = "" if left is None else f", the next try in {left:.0f} s"
    if told.state == "blocked":
        yield Said(
            "blocked",
            f"{name} waits {on} for the message at the head of its line, which has"
            f" failed{when}{last_error}",
            'mend what it fails of; with on_error = "block" nothing gets past it',
        )
    elif told.state in ("halted", "probing"):
        half = told.state == "probing"
        begins = "half-open" if half else "open"
        then = "one message at a time is tried" if half else "no message is started"
        yield Said(
            "circuit-open",
            f"the circuit breaker of {name} is {begins} {on}: {then}{when}{last_error}",
            "fix what the handler depends on: the circuit closes by itself when a message succeeds",
        )
    elif told.state == "flooded":
        yield Said(
            "flood",
            f"the flood guard has stopped {name} {on}, because most of its messages die"
            f"{last_error}",
            f"mend the handler, then `streamqd resume {name}`",
        )
    elif told.state == "throttled":
        yield Said(
            "throttled",
            f"{name} is held {on} by its rate of {told.rate or 0:g} runs/s, which the group has in"
            " each partition",
            "wait, or raise the rate of the consumer; more partitions have more rate",
        )
    elif told.held and not moving:
        full = ", as many as it may, and reads no more" if told.state == "full" else ""
        keys = "one held key" if told.held_keys == 1 else f"{told.held_keys:,} held keys"
        yield Said(
            "keys-held",
            f"the worker of {name} {on} keeps {told.held:,} messages of {keys}{full}{when}"
            f"{last_error}",
            "mend what the first message of each fails of; held_max is how many it may keep",
        )
