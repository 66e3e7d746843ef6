"""The checks that run before the first fork, for both the daemon and the `check` command.

Each problem becomes one sentence with its remedy. All problems are collected before an error is
raised, so that an operator sees them together.
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
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
    RequestRefusedError,
    StartupError,
)
from streamqd.inspection import ask_servers, check_servers
from streamqd.model import Assignment
from streamqd.paths import join_parts
from streamqd.registration import ensure_topics
from streamqd.store.client import Connection, connect

NAME = "streamqd:start"
DESCRIPTORS = 65_536

_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql"}

SLOW_IMPORT_SECONDS = 2.0  # duration above which an import is reported as slow
UNREAPED_SECONDS = 5.0  # seconds that the children of a killed supervisor have to exit


@dataclass(frozen=True)
class Prepared:
    """The settings, with the consumers that handler modules declare, and all problems found."""

    settings: Settings
    problems: list[str]
    sources: tuple[str, ...] = ()  # files of the user's modules


def prepare(
    settings: Settings,
    only: frozenset[str] = frozenset(),
    interrupted: Callable[[], bool] = lambda: False,
    slow: Callable[[str], None] | None = None,
) -> Prepared:
    """Import the handler modules in a probe child, and merge the consumers that they declare.

    `only` selects consumers by TOPIC/GROUP, and an empty set selects all of them. If the import
    takes longer than SLOW_IMPORT_SECONDS, `slow` is called with a sentence that reports this. If
    `slow` is None, the sentence is logged.
    """
    began = time.monotonic()
    on_slow: Callable[[str], None] | None = slow or _log_slow_import

    def poll() -> bool:
        nonlocal on_slow
        if on_slow is not None and time.monotonic() - began > SLOW_IMPORT_SECONDS:
            on_slow(
                f"importing {', '.join(sorted(_modules(settings)))} (limit: daemon.boot_timeout,"
                f" {settings.daemon.boot_timeout:g} s)"
            )
            on_slow = None
        return interrupted()

    return complete(settings, _probe_handlers(settings, poll), only)


def _log_slow_import(text: str) -> None:
    logs.event("import.delayed", logging.WARNING, about=text)


def _modules(settings: Settings) -> set[str]:
    named = {reference.partition(":")[0] for reference in references(settings)}
    return {*settings.daemon.handlers, *named}


def _probe_handlers(
    settings: Settings, interrupted: Callable[[], bool] = lambda: False
) -> handlers.Probe:
    """Return the declarations of the handler modules, which a probe child imports."""
    return handlers.probe(
        settings.daemon.handlers,
        references(settings),
        settings.base_dir,
        settings.daemon.boot_timeout,
        interrupted,
    )


@contextlib.contextmanager
def _open_connection(settings: Settings) -> Iterator[Connection]:
    """Yield a connection to the server, which is closed at the end of the block."""
    link = connect(settings.redis, timeout=max(2.0, settings.redis.connect_timeout), name=NAME)
    try:
        yield link
    finally:
        link.close()


def collect_problems(error: ConfigError) -> ConfigError:
    """Return an error that also lists the problems of the handlers and of the server.

    Handlers and server are checked with the settings in the file that are valid. If there are none,
    return the error unchanged.
    """
    settings: Settings | None = error.salvaged
    if settings is None:
        return error
    problems = list(error.problems)
    found = _probe_handlers(settings)
    problems += [f"handlers: {problem}" for problem in found.problems]
    problems += handlers.find_mismatches(settings.consumers, found.traits) + _missing_loop(settings)
    misread = any(problem.startswith("redis.") for problem in error.problems)
    if not misread and settings.redis.url != embedded.URL:
        with _open_connection(settings) as link:
            try:
                problems += check_servers(ask_servers(link, 0.0), settings)[0]
            except RedisUnavailableError as unavailable:
                problems.append(_unavailable(link.address, unavailable))
    return ConfigError(problems)


def _unavailable(address: str, error: RedisUnavailableError, seconds: float = 0.0) -> str:
    """Return a sentence about an unavailable server, in which the address occurs only once."""
    text = str(error)
    named = text if address in text else f"{address}: {text}"
    return f"redis: {named}" + (f" (tried for {seconds:.0f} s)" if seconds >= 1 else "")


def _rejection_text(address: str, error: RedisResponseError) -> str:
    """Return a sentence about a command that Redis has rejected."""
    advice = "; run `streamqd check`, which lists missing permissions"
    return f"redis: {address}: {error}{advice if error.kind is RefusalKind.FORBIDDEN else ''}"


def references(settings: Settings) -> list[str]:
    """Return the handlers that the configuration file names."""
    return [consumer.handler for consumer in settings.consumers if consumer.handler]


def complete(settings: Settings, found: handlers.Probe, only: frozenset[str]) -> Prepared:
    """Merge the declarations from a probe into the settings, and check the result."""
    problems = [f"handlers: {problem}" for problem in found.problems]
    problems += _missing_loop(settings)
    problems += _unusable_outboxes(settings)
    try:
        settings = config.declare_consumers(settings, found.declared, whole=found.complete)
    except ConfigError as error:
        problems += error.problems + handlers.find_mismatches(
            error.salvaged.consumers, found.traits
        )
        return Prepared(settings, problems)
    problems += handlers.find_mismatches(settings.consumers, found.traits)
    if not found.complete:
        # If a module could not be imported, its declarations are unknown. A consumer that seems to
        # be missing may be among them, so it is not reported.
        return Prepared(settings, problems, tuple(found.sources))
    if not (settings.consumers or settings.outboxes or problems):
        problems.append(_describe_no_consumers(settings.daemon.handlers))
    if only:
        settings, unknown = _restrict(settings, only)
        problems += unknown
    return Prepared(settings, problems, tuple(found.sources))


def _unusable_outboxes(settings: Settings) -> list[str]:
    """Return a problem for each outbox whose password, variable or driver is missing here."""
    found = []
    for outbox in settings.outboxes:
        fault = outbox.fault()
        driver = _DRIVERS.get("" if fault else outbox.dialect())
        if driver and importlib.util.find_spec(driver) is None:
            fault = (
                f"database of outbox {outbox.name}: it needs the package {driver}; run"
                f" {extras.hint('outbox')}"
            )
        found += [fault] if fault else []
    return found


def _missing_loop(settings: Settings) -> list[str]:
    """Return a problem if the event loop for the workers is not installed."""
    wanted = settings.daemon.event_loop
    if wanted == "asyncio" or importlib.util.find_spec(wanted) is not None:
        return []
    return [f'daemon.event_loop: "{wanted}" is not installed; {extras.hint(wanted)}']


def _describe_no_consumers(modules: Sequence[str]) -> str:
    if not modules:
        return (
            "consumers: none are configured; add a module to daemon.handlers, or add [[consumers]]"
        )
    return (
        f"daemon.handlers: {', '.join(modules)} declares no handler; put"
        " @handler(topic=..., group=...) above a function there, or add [[consumers]]"
    )


class Renewal(NamedTuple):
    """The result of a reload's task, with which the supervisor switches to the new settings."""

    declared: list[dict[str, Any]]
    problems: list[str]
    partitions: dict[str, int]
    sources: list[str] = []  # noqa: RUF012 - as in Probe
    restored: int = 0  # number of groups that had to be created again


def renew(settings: Settings, only: frozenset[str]) -> Renewal:
    """Validate new settings and code, and register their topics and groups.

    Run this in a `SubprocessTask`, so that the supervisor can renew its leases in the meantime.
    """
    found = handlers.examine(
        list(settings.daemon.handlers), references(settings), settings.base_dir
    )
    prepared = complete(settings, found, only)
    problems, partitions = prepared.problems, {}
    restored: list[Assignment] = []
    if not problems:
        try:
            partitions = register(prepared.settings, restored)
        except ConfigError as error:
            problems = error.problems
        except (RedisUnavailableError, RedisResponseError) as error:
            problems = [f"redis: {error}; send the signal again when it answers"]
    return Renewal(found.declared, problems, partitions, found.sources, len(restored))


def restore(settings: Settings, known: Mapping[str, int]) -> tuple[str, int, dict[str, int]]:
    """Register topics and groups again after the server has lost its data.

    Run this in a `SubprocessTask`, so that the supervisor can renew its leases in the meantime.
    `known` maps topics to their previous partition counts. Returns the problem (or ''), the number
    of groups that were created again, and the partition counts of all topics.
    """
    problem, restored, partitions = "", list[Assignment](), dict[str, int]()
    try:
        partitions = register(settings, restored, known, emptied=True)
    except (ConfigError, RedisUnavailableError, RedisResponseError) as error:
        problem = str(error)
    return problem, len(restored), partitions


def register(
    settings: Settings,
    restored: list[Assignment],
    known: Mapping[str, int] = MappingProxyType({}),
    *,
    emptied: bool = False,
) -> dict[str, int]:
    """Call `ensure_topics` with a connection of its own."""
    with _open_connection(settings) as link:
        return ensure_topics(link, settings, known, emptied=emptied, restored=restored)


def preload(settings: Settings) -> None:
    """Import the libraries that workers share by copy-on-write, but no handler modules.

    Raises StartupError if an import fails or starts a thread.
    """
    for name in settings.daemon.preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            problem = f"daemon.preload: cannot import {name}: {type(error).__name__}: {error}"
            raise StartupError(3, [problem]) from error
    others = ", ".join(thread.name for thread in threading.enumerate()[1:])
    if others:
        problem = f"daemon.preload: a library started a thread ({others}); a process with threads"
        raise StartupError(3, [f"{problem} cannot be forked safely; remove the library"])


def raise_descriptor_limit() -> None:
    """Raise the soft limit for open files, up to 65,536.

    The supervisor needs three file descriptors for each worker.
    """
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
    """Run all steps that must succeed before the first fork.

    `prepared` is an earlier result of `prepare`, which may have been made before the server's
    address was known. Waits up to `patience` seconds for the server. Returns the complete settings,
    and the registered partition count of each consumed topic. Raises StartupError with all problems
    and the matching exit code.
    """
    prepared = prepared or prepare(settings, only, interrupted)
    problems, code = list(prepared.problems), 3
    settings = replace(prepared.settings, redis=settings.redis)
    began = time.monotonic()

    def waits(error: Exception) -> None:
        logs.event("redis.unavailable", logging.WARNING, seconds=patience, error=str(error))

    with _open_connection(settings) as link:
        try:
            # If there are other problems, the start fails in any case, so do not wait for the
            # server.
            servers = ask_servers(link, 0.0 if problems else patience, interrupted, waits)
            refused, warnings = check_servers(servers, settings)
            problems += refused
            ours = [*config.warnings(settings), *config.root_warnings(), *cgroups.warnings()]
            for warning in [*ours, *warnings]:
                logs.event("config.warning", logging.WARNING, about=warning)
            if not problems:
                return settings, ensure_topics(link, settings)
        except RedisUnavailableError as error:
            if not problems:
                code = 4
            problems.append(_unavailable(link.address, error, time.monotonic() - began))
        except RedisResponseError as error:
            code = 4
            problems.append(_rejection_text(link.address, error))
        except ConfigError as error:
            problems += error.problems
    raise StartupError(code, problems)


def _restrict(settings: Settings, only: frozenset[str]) -> tuple[Settings, list[str]]:
    """Return settings with the consumers that `--only TOPIC/GROUP` selects, and the problems."""
    known = {one.name: one for one in settings.consumers}
    unknown = sorted(only - known.keys())
    problems = [
        f"--only {name}: unknown consumer; the consumers are {', '.join(sorted(known)) or 'none'}"
        for name in unknown
    ]
    kept = tuple(one for name, one in known.items() if name in only)
    return replace(settings, consumers=kept), problems


def start_embedded(settings: Settings) -> EmbeddedServer | None:
    """Start the embedded server, and wait until it answers.

    Returns None if no embedded server is configured. Raises StartupError if it cannot be started.
    """
    if settings.redis.url != embedded.URL:
        return None
    server: EmbeddedServer | None = None
    try:
        server = EmbeddedServer(settings.daemon.state_dir, config.claim_socket_path(settings))
        server.start()
        server.wait_ready(30.0)
    except ConfigError as error:
        raise StartupError(3, error.problems) from error
    except RequestRefusedError as error:
        raise StartupError(5, [str(error)]) from error
    except RedisUnavailableError as error:
        if server is not None:
            server.stop(2.0)
        raise StartupError(4, [f"redis: the embedded server does not start: {error}"]) from error
    logs.event("embedded.started", child=server.pid)
    return server


class InstanceLock:
    """The lock that allows only one running instance per name and state directory.

    All children inherit the lock. A process that acquires it can therefore be sure that no process
    of an earlier run is left.
    """

    def __init__(self, state_dir: Path, instance: str) -> None:
        """Set the path of the lock. Raises StartupError if it is not inside `state_dir`."""
        try:
            self.path = join_parts(state_dir, f"{instance}.lock")
        except RequestRefusedError as error:
            raise StartupError(3, [f"daemon.state_dir: {error}"]) from error
        self._file: IO[str] | None = None

    def acquire(self) -> int | None:
        """Acquire the lock. Return None, or the pid of the instance that holds it (0 if unknown).

        If a supervisor was killed, wait up to 5 s for its children to exit. Raises StartupError if
        the state directory is not writable.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = _open_private(self.path)
        except OSError as error:
            problem = f"daemon.state_dir: cannot write to {self.path.parent} ({error.strerror})"
            raise StartupError(3, [f"{problem}; name a directory that this user owns"]) from error
        deadline = time.monotonic() + UNREAPED_SECONDS
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
                # The previous supervisor is dead, and its children are about to exit.
                time.sleep(0.02)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return None

    def fileno(self) -> int:
        """Return the file descriptor that children must keep open to hold the lock."""
        assert self._file is not None
        return self._file.fileno()

    @property
    def identity(self) -> str:
        """The identity of the lock's file: boot ID, device and inode.

        If another process has acquired the lock on the same file, all processes of the previous
        holder have exited.
        """
        return _lock_identity(os.fstat(self.fileno()))

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock_identity(found: os.stat_result) -> str:
    return f"{boot_id()}:{found.st_dev}:{found.st_ino}"


def _open_private(path: Path) -> IO[str]:
    """Open the lock's file with mode 0600, because a user who can read a file can also lock it.

    Raises OSError, for example PermissionError if the file belongs to another user.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise PermissionError(errno.EPERM, f"{path.name} belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o600:
            os.fchmod(descriptor, 0o600)  # an earlier version let all users read it
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "a+")


def lock_identity(settings: Settings) -> str:
    """Return the `identity` of the instance's lock on this host, or '' if its file does not exist.

    The lock need not be held.
    """
    try:
        return _lock_identity(_lock_path(settings).stat())
    except OSError:
        return ""


def _lock_path(settings: Settings) -> Path:
    return settings.daemon.state_dir / f"{settings.daemon.instance}.lock"


def is_running(settings: Settings) -> bool:
    """Return True if the daemon of this instance is running on this host and holds its lock."""
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
    """Return the ID of the host's current boot, or '' if it is unknown.

    Source: /proc/sys/kernel/random/boot_id.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
