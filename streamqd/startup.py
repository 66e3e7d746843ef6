"""What must be true before work begins, checked in one place for the daemon and for `check`.

Every problem becomes one sentence that says what to do; all of them are collected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from streamqd import cgroups, config, embedded, extras, handlers, logs
from streamqd.config import Settings
from streamqd.embedded import EmbeddedServer
from streamqd.errors import (
    ConfigError,
    RedisRefused,
    RedisUnavailable,
    RefusalKind,
    Refused,
    StartRefused,
)
from streamqd.inspection import ask_servers, check_servers
from streamqd.model import Unit
from streamqd.paths import below
from streamqd.registration import ensure_topics
from streamqd.store.client import Connection, connect

NAME = "streamqd:start"
DESCRIPTORS = 65_536

SLOW_SECONDS = 2.0  # of an import, after which the command or the log says what it waits for
CORPSE_SECONDS = 5.0  # how long the children of a killed supervisor may take to die


@dataclass(frozen=True)
class Prepared:
    """Settings completed by what the handler modules declare, and everything wrong with them."""

    settings: Settings
    problems: list[str]
    sources: tuple[str, ...] = ()  # files of the user's modules


def prepare(
    settings: Settings,
    only: frozenset[str] = frozenset(),
    interrupted: Callable[[], bool] = lambda: False,
    slow: Callable[[str], None] | None = None,
) -> Prepared:
    """Import the handler modules in a probe child and merge what they declare.

    `only` keeps the TOPIC/GROUP consumers that it names, all when it is empty. `slow` gets a
    sentence when the import takes longer than SLOW_SECONDS; without it, that is logged.
    """
    began = time.monotonic()
    tell: Callable[[str], None] | None = slow or _log_slow_import

    def poll() -> bool:
        nonlocal tell
        if tell is not None and time.monotonic() - began > SLOW_SECONDS:
            tell(
                f"importing {', '.join(sorted(_modules(settings)))}; the limit is"
                f" daemon.boot_timeout, {settings.daemon.boot_timeout:g} s"
            )
            tell = None
        return interrupted()

    return complete(settings, _probed(settings, poll), only)


def _log_slow_import(text: str) -> None:
    logs.event("import.slow", logging.WARNING, about=text)


def _modules(settings: Settings) -> set[str]:
    named = {reference.partition(":")[0] for reference in references(settings)}
    return {*settings.daemon.handlers, *named}


def _probed(settings: Settings, interrupted: Callable[[], bool] = lambda: False) -> handlers.Probe:
    """What the handler modules declare, as a probe child finds it."""
    return handlers.probe(
        settings.daemon.handlers,
        references(settings),
        settings.base_dir,
        settings.daemon.boot_timeout,
        interrupted,
    )


@contextlib.contextmanager
def _connected(settings: Settings) -> Iterator[Connection]:
    """A connection to the server, closed behind the block."""
    link = connect(settings.redis, timeout=max(2.0, settings.redis.connect_timeout), name=NAME)
    try:
        yield link
    finally:
        link.close()


def everything_wrong(error: ConfigError) -> ConfigError:
    """Add to the mistakes of a file what is wrong with its handlers and its server.

    So one answer names all there is to fix. Only what the file did say rightly is looked at.
    """
    settings: Settings | None = error.salvaged
    if settings is None:
        return error
    problems = list(error.problems)
    found = _probed(settings)
    problems += [f"handlers: {problem}" for problem in found.problems]
    problems += handlers.misfits(settings.consumers, found.traits) + _missing_loop(settings)
    misread = any(problem.startswith("redis.") for problem in error.problems)
    if not misread and settings.redis.url != embedded.URL:
        with _connected(settings) as link:
            try:
                problems += check_servers(ask_servers(link, 0.0), settings)[0]
            except RedisUnavailable as unavailable:
                problems.append(_unavailable(link.address, unavailable))
    return ConfigError(problems)


def _unavailable(address: str, error: RedisUnavailable, seconds: float = 0.0) -> str:
    """Return a sentence that names the address once."""
    text = str(error)
    named = text if address in text else f"{address}: {text}"
    return f"redis: {named}" + (f" (tried for {seconds:.0f} s)" if seconds >= 1 else "")


def _rejected(address: str, error: RedisRefused) -> str:
    """Return a sentence about a command that Redis rejects."""
    advice = "; run `streamqd check`, which lists missing permissions"
    return f"redis: {address}: {error}{advice if error.kind is RefusalKind.FORBIDDEN else ''}"


def references(settings: Settings) -> list[str]:
    """Return the handlers that the configuration itself names."""
    return [consumer.handler for consumer in settings.consumers if consumer.handler]


def complete(settings: Settings, found: handlers.Probe, only: frozenset[str]) -> Prepared:
    """Merge what a probe found into the settings, and judge the result."""
    problems = [f"handlers: {problem}" for problem in found.problems]
    problems += _missing_loop(settings)
    try:
        settings = config.declare_consumers(settings, found.declared, whole=found.whole)
    except ConfigError as error:
        problems += error.problems + handlers.misfits(error.salvaged.consumers, found.traits)
        return Prepared(settings, problems)
    problems += handlers.misfits(settings.consumers, found.traits)
    if not found.whole:
        # What the module would have declared is not known: nothing can be said to be missing.
        return Prepared(settings, problems, tuple(found.sources))
    if not settings.consumers and not problems:
        problems.append(_nothing_to_do(settings.daemon.handlers))
    if only:
        settings, unknown = _restrict(settings, only)
        problems += unknown
    return Prepared(settings, problems, tuple(found.sources))


def _missing_loop(settings: Settings) -> list[str]:
    """Say that the event loop of the workers is not installed."""
    wanted = settings.daemon.event_loop
    if wanted == "asyncio" or importlib.util.find_spec(wanted) is not None:
        return []
    return [f'daemon.event_loop: "{wanted}" is not installed; {extras.hint(wanted)}']


def _nothing_to_do(modules: Sequence[str]) -> str:
    if not modules:
        return "consumers: nothing to do; name a module in daemon.handlers, or add [[consumers]]"
    return (
        f"daemon.handlers: {', '.join(modules)} declares no handler; put"
        " @handler(topic=..., group=...) above a function there, or add [[consumers]]"
    )


class Renewal(NamedTuple):
    """What a reload's task found: all that the supervisor needs to go over to new settings."""

    declared: list[dict[str, Any]]
    problems: list[str]
    partitions: dict[str, int]
    sources: list[str] = []  # noqa: RUF012 - as in Probe
    restored: int = 0  # how many groups had to be made again


def renew(settings: Settings, only: frozenset[str]) -> Renewal:
    """Validate new settings and code, and register what they consume. Run it in a task."""
    found = handlers.examine(
        list(settings.daemon.handlers), references(settings), settings.base_dir
    )
    prepared = complete(settings, found, only)
    problems, partitions = prepared.problems, {}
    restored: list[Unit] = []
    if not problems:
        try:
            partitions = register(prepared.settings, restored)
        except ConfigError as error:
            problems = error.problems
        except (RedisUnavailable, RedisRefused) as error:
            problems = [f"redis: {error}; send the signal again when it answers"]
    return Renewal(found.declared, problems, partitions, found.sources, len(restored))


def restore(settings: Settings, known: Mapping[str, int]) -> tuple[str, int, dict[str, int]]:
    """Register again what an emptied server has lost. Run it in a task.

    `known` is how many partitions topics had. Returns what is wrong, '' for nothing, how many
    groups had to be made again, and how many partitions all topics have.
    """
    problem, restored, partitions = "", list[Unit](), dict[str, int]()
    try:
        partitions = register(settings, restored, known, emptied=True)
    except (ConfigError, RedisUnavailable, RedisRefused) as error:
        problem = str(error)
    return problem, len(restored), partitions


def register(
    settings: Settings,
    restored: list[Unit],
    known: Mapping[str, int] = MappingProxyType({}),
    *,
    emptied: bool = False,
) -> dict[str, int]:
    """Register topics and groups over a connection of its own; as `ensure_topics`."""
    with _connected(settings) as link:
        return ensure_topics(link, settings, known, emptied=emptied, restored=restored)


def preload(settings: Settings) -> None:
    """Import the libraries that workers share by copy-on-write. Never handler modules."""
    for name in settings.daemon.preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            problem = f"daemon.preload: cannot import {name}: {type(error).__name__}: {error}"
            raise StartRefused(3, [problem]) from error
    others = ", ".join(thread.name for thread in threading.enumerate()[1:])
    if others:
        problem = f"daemon.preload: a library started a thread ({others}); a process with threads"
        raise StartRefused(3, [f"{problem} cannot be forked safely, take the library out"])


def raise_descriptor_limit() -> None:
    """Allow as many open files as the system lets us: a worker costs the supervisor three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def begin(
    settings: Settings,
    only: frozenset[str],
    patience: float = 5.0,
    interrupted: Callable[[], bool] = lambda: False,
    prepared: Prepared | None = None,
) -> tuple[Settings, dict[str, int]]:
    """Do everything that must succeed before the first fork.

    `prepared` is what `prepare` has found already, perhaps before the server's address was known.
    Returns the complete settings and the registered partition count of every consumed topic.
    Raises StartRefused with all problems and the exit code that fits.
    """
    prepared = prepared or prepare(settings, only, interrupted)
    problems, code = list(prepared.problems), 3
    settings = replace(prepared.settings, redis=settings.redis)
    began = time.monotonic()

    def waits(error: Exception) -> None:
        logs.event("redis.unavailable", logging.WARNING, seconds=patience, error=str(error))

    with _connected(settings) as link:
        try:
            # Waiting for a server that starts up makes sense only if it could help.
            servers = ask_servers(link, 0.0 if problems else patience, interrupted, waits)
            refused, warnings = check_servers(servers, settings)
            problems += refused
            ours = [*config.warnings(settings), *config.as_root(), *cgroups.warnings()]
            for warning in [*ours, *warnings]:
                logs.event("config.warning", logging.WARNING, about=warning)
            if not problems:
                return settings, ensure_topics(link, settings)
        except RedisUnavailable as error:
            if not problems:
                code = 4
            problems.append(_unavailable(link.address, error, time.monotonic() - began))
        except RedisRefused as error:
            code = 4
            problems.append(_rejected(link.address, error))
        except ConfigError as error:
            problems += error.problems
    raise StartRefused(code, problems)


def _restrict(settings: Settings, only: frozenset[str]) -> tuple[Settings, list[str]]:
    """Keep the consumers that `--only TOPIC/GROUP` names."""
    known = {one.name: one for one in settings.consumers}
    unknown = sorted(only - known.keys())
    problems = [
        f"--only {name}: there is no such consumer; there are {', '.join(sorted(known)) or 'none'}"
        for name in unknown
    ]
    kept = tuple(one for name, one in known.items() if name in only)
    return replace(settings, consumers=kept), problems


def start_embedded(settings: Settings) -> EmbeddedServer | None:
    """Start the embedded server when the configuration asks for it."""
    if settings.redis.url != embedded.URL:
        return None
    server: EmbeddedServer | None = None
    try:
        server = EmbeddedServer(settings.daemon.state_dir, config.claim_socket_path(settings))
        server.start()
        server.wait_ready(30.0)
    except ConfigError as error:
        raise StartRefused(3, error.problems) from error
    except Refused as error:
        raise StartRefused(5, [str(error)]) from error
    except RedisUnavailable as error:
        if server is not None:
            server.stop(2.0)
        raise StartRefused(4, [f"redis: the embedded server does not start: {error}"]) from error
    logs.event("embedded.started", child=server.pid)
    return server


class InstanceLock:
    """The lock that makes one id one instance on this host.

    The children inherit it, so holding it proves that no process of a predecessor is left.
    """

    def __init__(self, state_dir: Path, instance: str) -> None:
        """Prepare. Raises StartRefused when the lock would not be a file in `state_dir`."""
        try:
            self.path = below(state_dir, f"{instance}.lock")
        except Refused as error:
            raise StartRefused(3, [f"daemon.state_dir: {error}"]) from error
        self._file: IO[str] | None = None

    def acquire(self) -> int | None:
        """Take the lock; return the pid of the running twin when there is one, else None."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = _opened_by_us_alone(self.path)
        except OSError as error:
            problem = f"daemon.state_dir: cannot write to {self.path.parent} ({error.strerror})"
            raise StartRefused(3, [f"{problem}; name a directory that this user owns"]) from error
        deadline = time.monotonic() + CORPSE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip()
                alive = holder.isdigit() and _is_alive(int(holder))
                if alive or time.monotonic() > deadline:
                    file.close()
                    return int(holder) if holder.isdigit() else 0
                # Its supervisor is dead, its children are about to notice.
                time.sleep(0.02)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return None

    def fileno(self) -> int:
        """The descriptor that children must keep open."""
        assert self._file is not None
        return self._file.fileno()

    @property
    def identity(self) -> str:
        """Name the lock for others: the holder of this very file has no living predecessor."""
        return _lock_identity(os.fstat(self.fileno()))

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock_identity(found: os.stat_result) -> str:
    return f"{boot_id()}:{found.st_dev}:{found.st_ino}"


def _opened_by_us_alone(path: Path) -> IO[str]:
    """Open the lock's file so that no other user can: who can open a file for reading can lock it.

    Raises OSError, also for a file that another user has put there.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise PermissionError(errno.EPERM, f"{path.name} belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o600:
            os.fchmod(descriptor, 0o600)  # a version before made it readable for everybody
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "a+")


def lock_identity(settings: Settings) -> str:
    """Return the `identity` that the instance's lock has or had on this host; '' without a file."""
    try:
        return _lock_identity(_lock_path(settings).stat())
    except OSError:
        return ""


def _lock_path(settings: Settings) -> Path:
    return settings.daemon.state_dir / f"{settings.daemon.instance}.lock"


def is_running(settings: Settings) -> bool:
    """Whether the daemon of this instance runs on this host: it holds its lock."""
    try:
        with _lock_path(settings).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def boot_id() -> str:
    """A name for this boot of this host: with it a pid is unique."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
