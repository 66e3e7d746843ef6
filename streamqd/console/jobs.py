"""Changes that take longer than a request. Each job has its own thread and connection.

A job runs in this process. If the console stops, the job stops between two batches, as a command
does after Ctrl-C, and the audit log then contains its counts.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from streamqd.errors import RequestRefusedError, StreamqdError

JOBS_MAX = 4  # jobs that may run at the same time
KEPT_MAX = 100


@dataclass(slots=True, eq=False)
class ConsoleJob:
    """One job on a topic or its dead letters. `note` describes its state as a clause, or is ''.

    `id` is '' until the job starts. `total` is the number of messages that it should change, or
    None if this is unknown, and `done` is the number changed so far. `examined` is the number of
    dead letters read so far, out of `dead_letters`. When the job has finished, `result` is a
    sentence about its result, and `failed` is True if it did not do its work. `started_unix_ms` is
    the start time on this host's clock.

    `replayed_since_unix_ms` is the start time of a replay on Redis's clock, or None for other jobs.
    A dead letter after this time may be a replayed message that has failed again. If the job has a
    limit, `remaining_form` contains the values of the form that replays the dead letters beyond the
    limit. Otherwise it is None or empty.
    """

    person: str
    title: str
    topic: str
    total: int | None = None
    dead_letters: int = 0
    replayed_since_unix_ms: int | None = None
    remaining_form: Mapping[str, str] | None = None
    id: str = ""
    started: float = field(default_factory=time.monotonic)
    started_unix_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    done: int = 0
    examined: int = 0
    note: str = ""
    result: str = ""
    failed: bool = False
    seconds: float = 0.0
    stopping: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def running(self) -> bool:
        """True until the job has finished."""
        return not self.ended.is_set()

    @property
    def elapsed(self) -> float:
        """Seconds since the job started. Once it has finished, this is its duration."""
        return time.monotonic() - self.started if self.running else self.seconds

    def progress(self, count: int) -> None:
        """Add to the number of messages that have been changed."""
        self.done += count

    def count_examined(self, count: int) -> None:
        """Add to the number of dead letters that have been read."""
        self.examined += count

    def stop(self) -> bool:
        """Return True if the job must end early: a person stopped it, or the console is closing."""
        return self.stopping.is_set()


class Jobs:
    """The jobs of one console, oldest first."""

    def __init__(self) -> None:
        self._jobs: dict[str, ConsoleJob] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def recent(self, topic: str = "") -> list[ConsoleJob]:
        """Return the jobs of one topic, or of all topics if it is '', latest first."""
        return [job for job in reversed(self._jobs.values()) if topic in ("", job.topic)]

    def get(self, job_id: str) -> ConsoleJob:
        """Return a job. Raises RequestRefusedError if it does not exist."""
        job = self._jobs.get(job_id)
        if job is None:
            raise RequestRefusedError(
                f"job {job_id} not found, because the console was restarted; its result is in the"
                " audit log"
            )
        return job

    def start(self, job: ConsoleJob, run: Callable[[ConsoleJob], str]) -> str:
        """Start a job and return its ID.

        `run` does the work and returns a sentence about the result. Raises RequestRefusedError if
        too many jobs are already running.
        """
        with self._lock:
            if sum(each.running for each in self._jobs.values()) >= JOBS_MAX:
                raise RequestRefusedError(
                    f"{JOBS_MAX} jobs are already running; wait for one, or stop one"
                )
            job.id = str(next(self._numbers))
            self._jobs[job.id] = job
            for old in [each for each in self._jobs.values() if not each.running][:-KEPT_MAX]:
                del self._jobs[old.id]
        threading.Thread(
            target=self._run, args=(job, run), name=f"console-job-{job.id}", daemon=True
        ).start()
        return job.id

    def close(self, seconds: float) -> None:
        """Stop all jobs between two batches, and wait up to `seconds` until they have finished."""
        running = [each for each in self._jobs.values() if each.running]
        for job in running:
            job.stopping.set()
        until = time.monotonic() + seconds
        for job in running:
            job.ended.wait(max(0.0, until - time.monotonic()))

    def _run(self, job: ConsoleJob, run: Callable[[ConsoleJob], str]) -> None:
        try:
            job.result = run(job)
        except StreamqdError as error:
            job.result, job.failed = str(error), True
        except Exception as error:  # noqa: BLE001 - an unexpected error stops the job and is shown
            job.result, job.failed = f"Internal error: {type(error).__name__}: {error}", True
        finally:
            job.seconds = time.monotonic() - job.started
            job.ended.set()
