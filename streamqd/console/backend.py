"""The console's only access to Redis: a few threads, each with its own connection.

Views and acts are plain functions that get `Resources` and run in these threads. A round trip takes
at most `REDIS_TIMEOUT_SECONDS`, and a request waits for at most `CALL_SECONDS`. At most
`WAITING_MAX` calls may be waiting. All pages share one snapshot of the fleet, which
`Backend.fleet_now` reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from streamqd import config
from streamqd.admin import audit
from streamqd.admin.published import Fleet
from streamqd.console import overview
from streamqd.console.history import ConsoleHistory
from streamqd.console.jobs import ConsoleJob, Jobs
from streamqd.console.overview import FleetNow
from streamqd.errors import RedisResponseError, RedisUnavailableError, StreamqdError
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store

THREADS = 4
REDIS_TIMEOUT_SECONDS = 2.0  # seconds that a round trip to Redis may take
CALL_SECONDS = 15.0  # seconds that a view or an act may take while the browser waits
WAITING_MAX = 128
JOB_SECONDS = 5.0  # seconds that jobs may take to stop between two batches
SNAPSHOT_SECONDS = 2.0
# Maximum share of the time that is spent on reading snapshots, so a large fleet is read less often.
SNAPSHOT_SHARE = 0.1

P = ParamSpec("P")
T = TypeVar("T")


class ArchivePlace(Protocol):
    """The result of a search in an archive.

    `file` is '' if no file's range of IDs includes the entry.
    """

    @property
    def file(self) -> str:
        """The file whose range of IDs includes the entry."""

    @property
    def found(self) -> bool:
        """True if the file contains the entry."""


# A function that finds an entry in an archive by its topic, partition and ID. Its last argument
# holds the options of `[archive]`. It raises RequestRefusedError. The command passes it in, because
# the console does not depend on the packages for archives.
ArchiveLook = Callable[[str, str, int, str, Mapping[str, str]], ArchivePlace]


class TooBusyError(StreamqdError):
    """Raised if too many requests are waiting, or if a request took too long.

    The person can load the page again later.
    """


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a view: the connection of its thread, and access to the fleet."""

    settings: config.Settings
    store: Store
    fleet: Fleet
    backend: Backend

    @property
    def now(self) -> FleetNow:
        """The shared snapshot of the fleet.

        It is usually up to 2 s old. If reading it takes longer than 0.2 s, it is read less often,
        and may be as old as 10 times this duration. Raises RedisUnavailableError.
        """
        return self.backend.fleet_now(self)


class Backend:
    """The threads and connections of one console process."""

    def __init__(self, settings: config.Settings, find_in_archive: ArchiveLook) -> None:
        self._settings = settings
        self.find_in_archive = find_in_archive
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="console")
        self._local = threading.local()
        self._open_resources: list[Resources] = []
        self._waiting = 0
        self._lock = threading.Lock()  # held while a snapshot is read
        self.jobs = Jobs()
        self.history = ConsoleHistory()
        self._snapshot: FleetNow | None = None
        self._fresh_until = 0.0  # monotonic

    def close(self) -> None:
        """Stop the jobs, wait for running calls, and close the connections."""
        self.jobs.close(JOB_SECONDS)
        self._pool.shutdown(wait=True, cancel_futures=True)
        for resources in self._open_resources:
            resources.store.connection.close()

    # --- calls ---

    async def call(
        self, function: Callable[Concatenate[Resources, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function(resources, …)` in a thread.

        Raises the errors of the function, and TooBusyError if the function cannot run in time.
        """
        if self._waiting >= WAITING_MAX:
            raise TooBusyError("too many requests are waiting for Redis; reload the page")
        self._waiting += 1
        running: Future[T] = self._pool.submit(
            lambda: function(self._thread_resources(), *args, **kwargs)
        )
        try:
            return await asyncio.wait_for(asyncio.wrap_future(running), CALL_SECONDS)
        except TimeoutError:
            raise TooBusyError(
                f"Redis took longer than {CALL_SECONDS:g} s; reload the page"
            ) from None
        finally:
            self._waiting -= 1

    def _thread_resources(self) -> Resources:
        resources: Resources | None = getattr(self._local, "resources", None)
        if resources is None:
            resources = self._local.resources = self._new_resources()
            self._open_resources.append(resources)
        return resources

    def _new_resources(self) -> Resources:
        # The URL is resolved here, because an embedded server may start after the console.
        settings = config.resolve_url(self._settings)
        keys, daemon = settings.keys, settings.daemon
        link = connect(settings.redis, timeout=REDIS_TIMEOUT_SECONDS, name="streamqd:console")
        store = Store(link, Keys(keys.control, keys.streams))
        return Resources(settings, store, Fleet(store, daemon.fleet, daemon.lease_ttl), self)

    @contextlib.contextmanager
    def open_resources(self) -> Iterator[Resources]:
        """Yield resources with their own connection, for a job."""
        resources = self._new_resources()
        try:
            yield resources
        finally:
            resources.store.connection.close()

    def start_job(self, job: ConsoleJob, work: Callable[[Resources, ConsoleJob], str]) -> str:
        """Start a job in the name of the acting person, and return its ID.

        Raises RequestRefusedError if too many jobs are already running.
        """
        acting = audit.acting_person()

        def run(job: ConsoleJob) -> str:
            with self.open_resources() as resources, audit.acting_as(acting):
                return work(resources, job)

        return self.jobs.start(job, run)

    # --- the snapshot ---

    def fleet_now(self, resources: Resources) -> FleetNow:
        """Return the shared snapshot. If it is too old, read it again.

        Views use it through `Resources.now`.
        """
        if self._snapshot is not None and time.monotonic() < self._fresh_until:
            return self._snapshot
        with self._lock:
            began = time.monotonic()
            if self._snapshot is None or began >= self._fresh_until:
                self._snapshot = overview.read(resources.fleet, resources.settings, self._snapshot)
                took = time.monotonic() - began
                self._fresh_until = began + max(SNAPSHOT_SECONDS * 0.9, took / SNAPSHOT_SHARE)
            return self._snapshot


def run_as(person: str, function: Callable[[], T]) -> T:
    """Run a function, and record its changes in the audit log under this person's name."""
    with audit.acting_as(f"{person} (console)"):
        return function()


def record(
    resources: Resources,
    topics: Iterable[str],
    command: str,
    arguments: Mapping[str, object],
    counts: Mapping[str, int],
) -> bool:
    """Write an entry to each topic's audit log. Return False if Redis did not accept an entry."""
    try:
        for topic in topics:
            audit.record(resources.store, topic, command, arguments=arguments, counts=counts)
    except (RedisUnavailableError, RedisResponseError):
        return False
    return True


def explain(error: StreamqdError) -> str:
    """Return the sentence with which the banner explains an error of Redis."""
    if isinstance(error, RedisUnavailableError):
        return "Redis does not answer. Numbers are missing or out of date. Retrying automatically."
    return str(error)
