"""Limit the partitions of an instance while the operating system refuses to start processes.

If the operating system keeps refusing, the number of running workers becomes the limit. From then
on, the instance tries at intervals to start more processes. Each failed trial doubles the pause
before the next one. Each successful trial doubles the number of processes that the next one starts,
until the limit is removed. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

GIVE_UP_SECONDS = 3.0  # how long a partition waits for a process before it is released
TRY_SECONDS = (5.0, 60.0)  # first and longest pause after a trial that fails
MORE_SECONDS = 2.0  # pause after a trial that succeeds
TOGETHER_MAX = 16  # maximum number of processes in one trial


@dataclass
class Capacity:
    """The current limit on the partitions of an instance.

    `limit` is the number of partitions for which processes can be started, or None if there is no
    limit. `problem` is the error of the operating system, or ''. All times are in seconds on any
    monotonic clock.
    """

    limit: int | None = None
    problem: str = ""
    _wait: float = TRY_SECONDS[0]
    _try_at: float = 0.0
    _more: int = 1

    def record_refusal(self, now: float, running: int, problem: str) -> None:
        """Record that the operating system refused to start more than `running` processes."""
        if self.limit is not None:
            self._wait = min(2 * self._wait, TRY_SECONDS[1])
        self.limit = running if self.limit is None else min(self.limit, running)
        self.problem = problem
        self._more = 1
        self._try_at = now + self._wait

    def count_to_try(self, now: float, running: int) -> int:
        """Return the number of processes to start in a trial now, or 0 if none is due."""
        if self.limit is None or now < self._try_at:
            return 0
        return min(max(0, self.limit - running) + self._more, TOGETHER_MAX)

    def record_trial(self, now: float, running: int, count: int, wanted: int) -> None:
        """Record that a trial has started `count` processes in addition to the `running` ones.

        The limit is removed when it reaches the `wanted` number of partitions, or after a trial
        with TOGETHER_MAX processes.
        """
        self.limit = max(running + count, self.limit or 0)
        self._more = min(2 * self._more, TOGETHER_MAX)
        self._try_at = now + MORE_SECONDS
        if self.limit >= wanted or count == TOGETHER_MAX:
            self.limit, self.problem = None, ""
            self._wait, self._more = TRY_SECONDS[0], 1

    def room(self, owned: int) -> int | None:
        """Return how many more partitions may be acquired, or None if there is no limit."""
        return None if self.limit is None else max(0, self.limit - owned)
