"""Databases for tests of the outbox: PostgreSQL, MariaDB and SQLite, each in its own folder.

A server listens only on a unix socket, runs as an unprivileged user, and dies with the test
process. The services of the system are not used. Each test gets its own database.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from tests.support import optional
from tests.support.servers import NoServerError
from tests.support.waiting import wait_until

DIALECTS = ("postgresql", "mysql", "sqlite")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class DatabaseServer(Protocol):
    """A server for tests. `connect` opens a connection of the driver that is not in autocommit."""

    dialect: str

    def new(self) -> str:
        """Create an empty database and return its URL."""

    def connect(self, url: str, *, autocommit: bool = False) -> Any: ...

    def close(self) -> None:
        """Stop the server and remove its files."""


class _Process:
    """A server process in its own folder.

    The folder is not pytest's, because the path of a socket must be short.
    """

    user_names: tuple[str, ...] = ()
    death_signal = signal.SIGKILL  # the signal that it gets when the test process dies

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sqdb-"))
        self.folder.chmod(0o755)
        self.user = _unprivileged(self.user_names)
        if self.user:
            shutil.chown(self.folder, self.user)
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count(1)
        try:
            self.initialize()
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def initialize(self) -> None:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def ping(self) -> None:
        raise NotImplementedError

    def run(self, *command: str) -> None:
        # If two MariaDB servers were set up at the same time, they would share names in the common
        # folder.
        done = subprocess.run(
            command,
            user=self.user,
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"

    def start(self) -> None:
        """Start the server with its previous data, and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                user=self.user,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, self.death_signal),
            )

        def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()
            with contextlib.suppress(Exception):
                self.ping()
                return True
            return False

        wait_until(answers, timeout=30)

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        """Kill the server, by default without giving it a chance to finish anything."""
        if self._process is not None:
            self._process.send_signal(with_signal)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(30)
            self._process = None

    def close(self) -> None:
        self.kill(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)


class PostgreSQL(_Process):
    """A PostgreSQL server. Its superuser is `postgres`, and no login needs a password."""

    dialect = "postgresql"
    user_names = ("postgres", "nobody")
    death_signal = signal.SIGQUIT  # its processes exit immediately; they would outlive a SIGKILL

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        initdb = str(found[-1]) if found else shutil.which("initdb")
        if initdb is None:
            raise NoServerError("PostgreSQL is not installed: apt-get install postgresql")
        self._bin = Path(initdb).parent
        super().__init__()

    def initialize(self) -> None:
        self.run(
            *(str(self._bin / "initdb"), "--pgdata", str(self.data), "--username", "postgres"),
            *("--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync"),
        )

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "shared_buffers": "16MB",
            "max_connections": "60",
            "fsync": "off",
            "full_page_writes": "off",
            "autovacuum": "off",
            "lc_messages": "C",
        }
        flags = [each for name, value in settings.items() for each in ("-c", f"{name}={value}")]
        return [str(self._bin / "postgres"), "-D", str(self.data), *flags]

    def ping(self) -> None:
        self.connect(self.url("postgres")).close()

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        # After a SIGTERM, the server would wait for all clients. After a SIGKILL, its other
        # processes would stay.
        super().kill(signal.SIGQUIT if with_signal == signal.SIGKILL else signal.SIGINT)

    def url(self, name: str, user: str = "postgres") -> str:
        return f"postgresql://{user}@/{name}?host={quote(str(self.folder), safe='')}"

    def new(self) -> str:
        name = f"test{next(self._names)}"
        with contextlib.closing(self.connect(self.url("postgres"), autocommit=True)) as connection:
            connection.execute(f"CREATE DATABASE {name} STRATEGY file_copy TEMPLATE template0")
        return self.url(name)

    def connect(self, url: str, *, autocommit: bool = False) -> Any:
        import psycopg

        return psycopg.connect(url, autocommit=autocommit, connect_timeout=10)


class MariaDB(_Process):
    """A MariaDB server. Its superuser is `root`, which needs no password."""

    dialect = "mysql"
    user_names = ("mysql", "nobody")

    def __init__(self) -> None:
        server, install = shutil.which("mariadbd", path=_path()), shutil.which("mariadb-install-db")
        if server is None or install is None:
            raise NoServerError("MariaDB is not installed: apt-get install mariadb-server")
        self._server, self._install = server, install
        super().__init__()

    @property
    def address(self) -> Path:
        return self.folder / "sock"

    def initialize(self) -> None:
        self.run(
            *(self._install, "--no-defaults", f"--datadir={self.data}", "--skip-test-db"),
            *("--auth-root-authentication-method=normal", "--skip-log-bin"),
        )

    def command(self) -> list[str]:
        return [
            *(self._server, "--no-defaults", f"--datadir={self.data}", f"--socket={self.address}"),
            *("--skip-networking", "--skip-log-bin", "--innodb-buffer-pool-size=16M"),
            *("--innodb-flush-log-at-trx-commit=0", "--innodb-log-file-size=16M"),
            *(f"--pid-file={self.folder}/pid", f"--tmpdir={self.folder}", "--skip-name-resolve"),
        ]

    def ping(self) -> None:
        # The driver does not close its socket if an attempt fails.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.address))
        self.connect(self.url("mysql")).close()

    def url(self, name: str, user: str = "root") -> str:
        return f"mysql://{user}@localhost/{name}?unix_socket={quote(str(self.address), safe='')}"

    def new(self) -> str:
        name = f"test{next(self._names)}"
        with contextlib.closing(self.connect(self.url("mysql"))) as connection:
            connection.cursor().execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def connect(self, url: str, *, autocommit: bool = False) -> Any:
        import pymysql

        user, _, rest = url.removeprefix("mysql://").partition("@")
        name = rest.partition("?")[0].rpartition("/")[2]
        return pymysql.connect(
            unix_socket=str(self.address),
            user=user,
            database=name,
            autocommit=autocommit,
            ssl_disabled=True,  # reading the system's certificates costs 20 ms each time
        )


class SQLite:
    """A folder with SQLite files."""

    dialect = "sqlite"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sqdb-"))
        self._names = itertools.count(1)

    def new(self) -> str:
        path = self.folder / f"test{next(self._names)}.db"
        path.touch()
        return f"sqlite:///{path}"

    def connect(self, url: str, *, autocommit: bool = False) -> Any:
        path = url.removeprefix("sqlite:///")
        return sqlite3.connect(path, isolation_level=None if autocommit else "")

    def close(self) -> None:
        shutil.rmtree(self.folder)


SERVERS: dict[str, Callable[[], DatabaseServer]] = {
    "postgresql": PostgreSQL,
    "mysql": MariaDB,
    "sqlite": SQLite,
}


def start(dialect: str) -> DatabaseServer:
    """Start a server. Skip the test if the driver is missing.

    Raises NoServerError if the server is not installed.
    """
    if package := {"postgresql": "psycopg", "mysql": "pymysql"}.get(dialect):
        optional.skip_without(package)
    return SERVERS[dialect]()


def _unprivileged(names: tuple[str, ...]) -> str | None:
    """Return the user for a server that refuses to run as root, or None to keep the user."""
    if os.geteuid() != 0:
        return None
    for name in names:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise NoServerError(f"no user {' or '.join(names)} exists, and a database does not run as root")


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
