"""What stops a partition that would only fail: a dependency that is down, a flood of letters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from streamqd.config.setting import Kind, described

CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
CLASS_HINT = "write the names of exception classes"


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker: failures that are not the message's fault stop the group."""

    failures: int = field(
        default=0,
        metadata=described(
            "Failures of the classes in `on`, within `window`, that open it: of all partitions of"
            " the group in one instance. 0: it never opens.",
            Kind.INTEGER,
            min=0,
            max=10_000,
        ),
    )
    window: float = field(
        default=30.0,
        metadata=described(
            "The time in which the failures count.",
            Kind.DURATION,
            min=0.1,
            max=86_400,
        ),
    )
    probe_every: float = field(
        default=10.0,
        metadata=described(
            "How long nothing is begun while it is open, before one message of the group is tried.",
            Kind.DURATION,
            min=0.01,
            max=3_600,
        ),
    )
    on: tuple[str, ...] = field(
        default=(),
        metadata=described(
            'Exception classes that tell that a dependency is down, such as "ConnectionError" or'
            ' "requests.ConnectionError"; their subclasses too. Empty: every class.',
            Kind.TEXTS,
            pattern=CLASS,
            pattern_hint=CLASS_HINT,
        ),
    )


@dataclass(frozen=True, slots=True)
class FloodGuard:
    """A flood guard: a partition that makes dead letters in numbers is paused."""

    letters: int = field(
        default=0,
        metadata=described(
            "Dead letters within `window` that pause the partition. 0: any number is let through.",
            Kind.INTEGER,
            min=0,
            max=100_000,
        ),
    )
    window: float = field(
        default=60.0,
        metadata=described(
            "The time in which the dead letters count.",
            Kind.DURATION,
            min=0.1,
            max=86_400,
        ),
    )
    share: float = field(
        default=0.5,
        metadata=described(
            "Part of the messages settled in that time that must have died, from 0 to 1.",
            Kind.NUMBER,
            min=0,
            max=1,
        ),
    )
