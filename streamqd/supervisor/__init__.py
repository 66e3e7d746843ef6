"""The supervisor: the parent process. The control plane: who owns what, and which process runs it.

`supervisor` is the loop: observe, plan, apply. `plan` is what a tick does, as a value. `partition`
is one unit's state, `lease_manager` exchanges calls with Redis, `worker_pool` has the children.
`rebalance`, `drain`, `limits`, `process_capacity` and `rolling_replacement` answer with wishes.
`control` reads what operators want, `reload` validates a new configuration, `report` publishes.
It never runs user code and never starts a thread. It blocks for one exchange with Redis at most (a
second), but for the end of trial processes, which it forks when a configuration needs more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from streamqd import config, logs, process, startup
from streamqd.config import Daemon, Settings
from streamqd.embedded import URL as EMBEDDED
from streamqd.embedded import EmbeddedServer
from streamqd.errors import StartRefused
from streamqd.supervisor.drain import EXIT_CONFIG, EXIT_TWIN
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
    """Run the daemon until it is stopped. Returns the exit code.

    `load` reads the configuration again, for SIGHUP. `only` restricts it to TOPIC/GROUP consumers.
    `watch` reloads whenever the configuration or the code of a handler is saved.
    `stopped` says whether a stop was wanted before signals were listened to here.
    Raises StartRefused with every problem when it cannot begin.
    """
    logs.setup(role="supervisor", style=settings.log.format, level=settings.log.level)
    # From here on signals are queued; what waits during the start looks at the queue.
    signals = process.SignalQueue()
    if stopped():
        logs.event("drained", code=0)
        return 0
    daemon = settings.daemon
    lock: startup.InstanceLock | None = None
    embedded: EmbeddedServer | None = None
    try:
        startup.raise_descriptor_limit()
        startup.preload(settings)
        lock = _claimed(daemon)
        process.set_title(f"streamqd: supervisor {daemon.instance}")
        chosen = frozenset(only)
        if watch:
            # Two edits within a second may leave files that Python cannot tell apart by their age.
            sys.dont_write_bytecode = True
        began_unix_ns = time.time_ns()
        prepared = startup.prepare(settings, chosen, signals.stop_waits)
        if prepared.problems and settings.redis.url == EMBEDDED:
            # No server is started only to be stopped; there is nothing to say of it either.
            raise StartRefused(EXIT_CONFIG, prepared.problems)
        embedded = startup.start_embedded(settings)
        settings = config.resolved(settings)
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
    except StartRefused:
        if signals.stop_waits():
            logs.event("drained", code=0)
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


def _claimed(daemon: Daemon) -> startup.InstanceLock:
    """Take the lock of the instance. Raises StartRefused when a twin has it."""
    lock = startup.InstanceLock(daemon.state_dir, daemon.instance)
    twin = lock.acquire()
    if twin is not None:
        advice = "stop it, or give this one another daemon.instance"
        raise StartRefused(
            EXIT_TWIN,
            [f"instance {daemon.instance} is already running as process {twin}; {advice}"],
        )
    return lock
