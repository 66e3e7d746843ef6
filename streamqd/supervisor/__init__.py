"""The supervisor: the parent process. It decides which partitions to own, and runs their workers.

`supervisor` contains the main loop. In each tick, the loop observes the processes and Redis, plans
actions, and applies them. `plan` defines the actions as values. `partition` holds the state of one
assignment, `lease_manager` sends calls to Redis, and `worker_pool` manages the child processes.
`rebalance`, `drain`, `limits`, `process_capacity` and `rolling_replacement` propose actions, which
`plan` merges into one list. `control` applies the directives of operators, `reload` validates a new
configuration, and `report` publishes the status.

The supervisor never runs user code and never starts a thread. It does not block for longer than one
round trip to Redis, which takes no more than one second. There is one exception: after the
operating system has refused to start a process, the supervisor later forks some processes to test
whether it can start them again, and waits for them to exit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from streamqd import config, logs, process, startup
from streamqd.config import Daemon, Settings
from streamqd.embedded import URL as EMBEDDED
from streamqd.embedded import EmbeddedServer
from streamqd.errors import StartupError
from streamqd.supervisor.drain import EXIT_CONFIG, EXIT_DUPLICATE
from streamqd.supervisor.supervisor import Supervisor
from streamqd.supervisor.watcher import Watched

__all__ = ["run"]


def run(
    settings: Settings,
    *,
    load: Callable[[], Settings] | None = None,
    burst: bool = False,
    only: Sequence[str] = (),
    watch: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Run the daemon until it is stopped, and return its exit code.

    On SIGHUP, the daemon calls `load` to read the configuration again. If `burst` is true, it exits
    as soon as all messages are settled. `only` lists the consumers to run, as TOPIC/GROUP, and an
    empty sequence means all of them. If `watch` is true, the daemon reloads whenever the
    configuration or the code of a handler is saved. `stopped` returns True if a stop was requested
    before this function started to handle signals. Raises StartupError, which lists all problems,
    if the daemon cannot start.
    """
    logs.setup(role="supervisor", style=settings.log.format, level=settings.log.level)
    # From here on, signals are queued. Every wait during the start checks the queue.
    signals = process.SignalQueue()
    if stopped():
        logs.event("drain.finished", code=0)
        return 0
    daemon = settings.daemon
    lock: startup.InstanceLock | None = None
    embedded: EmbeddedServer | None = None
    try:
        startup.raise_descriptor_limit()
        startup.preload(settings)
        lock = _acquire_lock(daemon)
        process.set_title(f"streamqd: supervisor {daemon.instance}")
        chosen = frozenset(only)
        if watch:
            # Cached bytecode could hide the second of two edits within the same second.
            sys.dont_write_bytecode = True
        began_unix_ns = time.time_ns()
        prepared = startup.prepare(settings, chosen, signals.stop_waits)
        if prepared.problems and settings.redis.url == EMBEDDED:
            # Fail here, before an embedded server is started only to be stopped again.
            raise StartupError(EXIT_CONFIG, prepared.problems)
        embedded = startup.start_embedded(settings)
        settings = config.resolve_url(settings)
        settings, partitions = startup.begin(
            settings, chosen, interrupted=signals.stop_waits, prepared=prepared
        )
        return Supervisor(
            settings,
            partitions,
            lock,
            embedded,
            load,
            burst=burst,
            only=chosen,
            signals=signals,
            watched=Watched(list(prepared.sources), began_unix_ns) if watch else None,
        ).run()
    except StartupError:
        if signals.stop_waits():
            logs.event("drain.finished", code=0)
            return 0
        raise
    finally:
        if embedded is not None:
            embedded.stop(10.0)
            logs.event("embedded.stopped")
        if lock is not None:
            lock.release()
        logs.flush(1.0)
        signals.close()


def _acquire_lock(daemon: Daemon) -> startup.InstanceLock:
    """Acquire the lock of the instance. Raises StartupError if another process holds it."""
    lock = startup.InstanceLock(daemon.state_dir, daemon.instance)
    other = lock.acquire()
    if other is not None:
        advice = "stop it, or give this one another daemon.instance"
        raise StartupError(
            EXIT_DUPLICATE,
            [f"instance {daemon.instance} is already running as process {other}; {advice}"],
        )
    return lock
