"""How many partitions an instance can serve while the system refuses it more processes.

The first refusal that lasts sets the limit to what runs. From then on it is tried whether more
processes can be started: after a refusal ever more rarely, after a success for twice as many, until
the limit is no longer one. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

GIVE_UP_SECONDS = 3.0  # for which a process is refused until its partition is given up
TRY_SECONDS = (5.0, 60.0)  # between two tries that fail: at first, and at most
MORE_SECONDS = 2.0  # between two tries that succeed
TOGETHER_MAX = 16  # processes that are tried at once


@dataclass
class Capacity:
    """`limit` is the number of partitions that can be served, None while the system sets none.

    `problem` is what the system said, '' for nothing. Times are seconds of any monotonic clock.
    """

    limit: int | None = None
    problem: str = ""
    _wait: float = TRY_SECONDS[0]
    _try_at: float = 0.0
    _more: int = 1

    def refused(self, now: float, running: int, problem: str) -> None:
        """Take note that the system starts no more than the `running` processes."""
        if self.limit is not None:
            self._wait = min(2 * self._wait, TRY_SECONDS[1])
        self.limit = running if self.limit is None else min(self.limit, running)
        self.problem = problem
        self._more = 1
        self._try_at = now + self._wait

    def to_try(self, now: float, running: int) -> int:
        """How many processes, beside those that run, should be tried now; 0 for none."""
        if self.limit is None or now < self._try_at:
            return 0
        return min(max(0, self.limit - running) + self._more, TOGETHER_MAX)

    def tried(self, now: float, running: int, count: int, wanted: int) -> None:
        """Take note that `count` more can be started. With room for `wanted` there is no limit."""
        self.limit = max(running + count, self.limit or 0)
        self._more = min(2 * self._more, TOGETHER_MAX)
        self._try_at = now + MORE_SECONDS
        if self.limit >= wanted or count == TOGETHER_MAX:
            self.limit, self.problem = None, ""
            self._wait, self._more = TRY_SECONDS[0], 1

    def room(self, owned: int) -> int | None:
        """How many more partitions may be taken, None when the system sets no limit."""
        return None if self.limit is None else max(0, self.limit - owned)
