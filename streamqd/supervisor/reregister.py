"""Register topics, groups and partition counts again after a fence or topic was deleted.

A child process does this, because it takes a round trip for each topic and group, which would block
the supervisor for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamqd import logs, startup
from streamqd.config import Settings
from streamqd.subprocess_task import SubprocessTask

RETRY_SECONDS = 2.0


class Registered(NamedTuple):
    """The result of a child process that has registered topics again.

    `complete` is true if no error occurred. `groups_restored` is the number of missing consumer
    groups that it has created. `partitions` maps each topic that it could read to its partition
    count.
    """

    complete: bool = False
    groups_restored: int = 0
    partitions: Mapping[str, int] = {}


@dataclass
class Reregister:
    """Runs the child process that registers topics again, one at a time."""

    forget: Sequence[Callable[[], None]]  # passed to `process.spawn`
    _task: SubprocessTask | None = None
    _next_at: float = 0.0
    _refusals: logs.Episode = field(
        default_factory=lambda: logs.Episode("topics.refused", "topics.restored")
    )

    @property
    def pids(self) -> set[int]:
        """The process ID of the running child, if there is one."""
        return {self._task.pid} if self._task is not None else set()

    def collect(self, now: float) -> Registered:
        """Return the result of a child that has just finished, or an empty result.

        This never blocks.
        """
        found = self._task.poll() if self._task is not None else None
        if found is None:
            return Registered()
        self._task = None
        problem, restored, partitions = found.result or ("", 0, {})
        error = found.error or problem
        if error:
            self._next_at = now + RETRY_SECONDS
            self._refusals.log_failure(error=error)
        else:
            self._refusals.log_recovery()
        return Registered(not error, restored, partitions)

    def begin(self, now: float, settings: Settings, known: Mapping[str, int]) -> None:
        """Start a child, unless one is running or the last one failed within `RETRY_SECONDS`.

        `known` maps topics to their partition counts, as far as this instance knows them.
        """
        if self._task is not None or now < self._next_at:
            return
        try:
            self._task = SubprocessTask(
                lambda: startup.restore(settings, known),
                title="streamqd: restore",
                timeout=settings.daemon.boot_timeout,
                forget=self.forget,
            )
        except OSError as error:
            self._next_at = now + RETRY_SECONDS
            self._refusals.log_failure(error=str(error))
