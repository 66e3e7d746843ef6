"""Wait for a condition, with a deadline. Tests must never sleep in any other way."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], *, timeout: float = 10.0, what: str = "", every: float = 0.01
) -> T:
    """Call `condition` until it returns a true value, and return that value.

    After `timeout` seconds, fail the test, and show the text `what` and the last value seen.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            name = what or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout:g} s: {name} (last: {value!r})")
        time.sleep(every)
    return value


def seconds_unscheduled() -> float:
    """Return how long this thread was ready to run while other processes had the CPU.

    To apply an outside time limit fairly on a busy host, subtract the growth of this value.
    """
    waited_ns = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return int(waited_ns) / 1e9
