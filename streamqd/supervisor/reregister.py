"""After a fence or a topic was gone: register topics and groups again, with their partitions.

Done in an errand, because it takes an exchange for each topic and group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamqd import logs, startup
from streamqd.config import Settings
from streamqd.subprocess_task import SubprocessTask
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.worker_pool import WorkerPool

RETRY_SECONDS = 2.0


@dataclass
class Reregister:
    """Wanted until it succeeds; one errand at a time."""

    exchange: LeaseManager
    crew: WorkerPool
    _errand: SubprocessTask | None = None
    _next_at: float = 0.0
    _refusals: logs.Episode = field(
        default_factory=lambda: logs.Episode("topics.refused", "topics.restored")
    )

    @property
    def pids(self) -> set[int]:
        """Process id of the errand under way."""
        return {self._errand.pid} if self._errand is not None else set()

    def tick(self, now: float, settings: Settings, known: Mapping[str, int]) -> dict[str, int]:
        """Begin when it is wanted, collect what became of it. Never blocks.

        `known` are the topics of which this instance knows how many partitions they have. Returns
        the partition counts that were found, of all topics, once in a while; mostly nothing.
        """
        partitions: dict[str, int] = {}
        if self._errand is not None:
            found = self._errand.poll()
            if found is None:
                return {}
            self._errand = None
            problem, restored, partitions = found.result or ("", 0, {})
            trouble = found.trouble or problem
            self.exchange.board.add("groups_restored", restored)
            if trouble:
                self._next_at = now + RETRY_SECONDS
                self._refusals.failed(error=trouble)
            else:
                self._refusals.recovered()
                self.exchange.suspects_empty = False
        if self.exchange.suspects_empty and self.exchange.ok and now >= self._next_at:
            try:
                self._errand = SubprocessTask(
                    lambda: startup.restore(settings, known),
                    title="streamqd: restore",
                    timeout=settings.daemon.boot_timeout,
                    forget=self.crew.forget,
                )
            except OSError as error:
                self._next_at = now + RETRY_SECONDS
                self._refusals.failed(error=str(error))
        return partitions
