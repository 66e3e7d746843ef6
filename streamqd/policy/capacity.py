"""Limit the partitions of an instance while the operating system refuses processes.

The first refusal that lasts sets the limit to the number of running workers. Trials then test if
more processes can be started. After a refusal, the pause between trials doubles. After a success,
the next trial is twice as large, until the limit is removed. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

GIVE_UP_SECONDS = 3.0  # refusals for this time release the partition
TRY_SECONDS = (5.0, 60.0)  # first and longest pause after a trial that fails
MORE_SECONDS = 2.0  # pause after a trial that succeeds
TOGETHER_MAX = 16  # processes in one trial


@dataclass
class Capacity:
    """`limit` is the number of partitions that can be served, None without a limit.

    `problem` is the operating system's error, '' for none. Times are seconds on any monotonic
    clock.
    """

    limit: int | None = None
    problem: str = ""
    _wait: float = TRY_SECONDS[0]
    _try_at: float = 0.0
    _more: int = 1

    def record_refusal(self, now: float, running: int, problem: str) -> None:
        """Record that the operating system starts no more than the `running` processes."""
        if self.limit is not None:
            self._wait = min(2 * self._wait, TRY_SECONDS[1])
        self.limit = running if self.limit is None else min(self.limit, running)
        self.problem = problem
        self._more = 1
        self._try_at = now + self._wait

    def count_to_try(self, now: float, running: int) -> int:
        """Return the number of further processes to try now, 0 for none."""
        if self.limit is None or now < self._try_at:
            return 0
        return min(max(0, self.limit - running) + self._more, TOGETHER_MAX)

    def record_trial(self, now: float, running: int, count: int, wanted: int) -> None:
        """Record that `count` more processes were started.

        The limit is removed when it reaches `wanted` partitions, or after a trial of TOGETHER_MAX.
        """
        self.limit = max(running + count, self.limit or 0)
        self._more = min(2 * self._more, TOGETHER_MAX)
        self._try_at = now + MORE_SECONDS
        if self.limit >= wanted or count == TOGETHER_MAX:
            self.limit, self.problem = None, ""
            self._wait, self._more = TRY_SECONDS[0], 1

    def room(self, owned: int) -> int | None:
        """Return how many more partitions may be acquired, None without a limit."""
        return None if self.limit is None else max(0, self.limit - owned)
