"""Fixtures for every test: a real server, a connection to it, and the key names."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest

from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support import databases, optional, quick, servers, users
from tests.support.proxy import FaultProxy

HERE = Path(__file__).parent
# Tests of whole daemons and fleets. With --quick, only those that prove a promise run.
SLOW = frozenset({"acceptance", "faults", "simulation", "soak", "spark"})
MEMORY = Path("/dev/shm")
THREAD_SECONDS = 10.0  # seconds within which a thread that a test started must exit after the test
LONG_FIRST = ("acceptance", "faults", "integration", "contract")  # all other folders follow these


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server",
        default=os.environ.get("STREAMQD_TEST_SERVER", "valkey"),
        help="valkey | redis7 | redis62 | redis82 | redis:PATH | testcontainers | URL",
    )

    parser.addoption(
        "--acl",
        action="store_true",
        help="run the tested code as the restricted users of etc/acl",
    )

    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out slow tests, and run fewer examples of properties",
    )

    parser.addoption(
        "--slow",
        action="store_true",
        help="run only slow tests, and properties with all their examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The background processes of a shell ignore these signals, and the tests' processes would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _have_memory(config)
    else:
        # A process of pytest-xdist has a thread that receives its tests. Depending on the nice
        # value, Python 3.15 may therefore warn at each fork: it takes the space in the process
        # title for the end of a field. Threads that tests start are checked by `no_thread_is_left`
        # and `process.spawn`.
        config.addinivalue_line("filterwarnings", "ignore:.*use of fork.*:DeprecationWarning")
    if config.getoption("--acl"):
        users.enable()
    quick.set_profile(few=config.getoption("--quick"))


def _have_memory(config: pytest.Config) -> None:
    """Keep the memory files of killed daemons in a folder that is deleted after this run."""
    if os.access(MEMORY, os.W_OK):
        folder = tempfile.mkdtemp(prefix="sqm-", dir=MEMORY)
        os.environ["RUNTIME_DIRECTORY"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported and collected objects from garbage collection: they exist until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a test module, and name the reason, if a package that it imports is not installed."""
    report = yield
    call: pytest.CallInfo[object] | None = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None:
        reason = optional.missing(call.excinfo.value)
        if reason:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: {reason}")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quickly = [item for item in items if not _is_slow(item)]
    slowly = [item for item in items if _is_slow(item) or _is_property(item)]
    for option, chosen in (("--quick", quickly), ("--slow", slowly)):
        if config.getoption(option):
            left = set(items).difference(chosen)
            config.hook.pytest_deselected(items=list(left))
            items[:] = chosen
    # A Spark session leaves threads that never exit, and a process with threads must not fork as
    # the supervisor does. Most other tests fork, so Spark's tests come last.
    items.sort(key=lambda item: (_folder(item.path) == "spark", _rank(item.path)))
    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _dealt(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return the tests in blocks, one per process, each with its share of the daemon tests.

    Daemon tests are long and mostly wait. xdist gives each process one block. While some processes
    wait, others compute. Each block ends with short tests, which xdist can easily move to another
    process.
    """
    long = [item for item in items if _folder(item.path) in SLOW]
    short = [item for item in items if _folder(item.path) not in SLOW]
    size = len(items) // processes
    dealt: list[pytest.Item] = []
    for process in range(processes):
        mine = long[process::processes]
        room = max(0, size - len(mine))
        rest, short = short[:room], short[room:]
        step = len(rest) * 3 // (4 * max(1, len(mine)))
        for item in mine:
            dealt += [item, *rest[:step]]
            del rest[:step]
        dealt += rest
    return dealt + short


@cache
def _folder(path: Path) -> str:
    """Return the folder of tests/ that contains a test, or '' for a test outside of it."""
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""


def _is_slow(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow"):
        return True
    return _folder(item.path) in SLOW and not item.get_closest_marker("promise")


def _is_property(item: pytest.Item) -> bool:
    """Return True if hypothesis generates the examples of a test."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


@cache
def _rank(path: Path) -> int:
    """Return the position of a test's folder in an order that keeps all processes busy."""
    folder = _folder(path)
    return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)


def pytest_report_header(config: pytest.Config) -> str:
    with_users = " with the users of etc/acl" if users.are_enabled() else ""
    return f"server: {config.getoption('--server')}{with_users}"


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    """The server that all tests of this process share. Never stop it: use `fresh_server`."""
    started = servers.require(servers.start, request.config.getoption("--server"))
    yield started
    started.close()


@pytest.fixture
def process_server(server: servers.Server) -> servers.ProcessServer:
    """The shared server, if its process and its socket are accessible."""
    if not isinstance(server, servers.ProcessServer):
        pytest.skip("needs the server's socket")
    return server


@pytest.fixture
def proxy(process_server: servers.ProcessServer, link: Connection) -> Iterator[FaultProxy]:
    """A proxy in front of the shared server, which is emptied first."""
    with FaultProxy(process_server.socket_path) as made:
        yield made


@pytest.fixture(scope="session")
def binary(request: pytest.FixtureRequest) -> Path:
    """The program of the chosen server, for tests that start several connected servers."""
    word = request.config.getoption("--server")
    if "://" in word or word == "testcontainers":
        pytest.skip("needs server processes of its own")
    return servers.require(servers.find_binary, word)


@pytest.fixture
def new_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., servers.ProcessServer]]:
    """Start private servers for this test: `new_server(aof=True, tcp=True)`."""
    word = request.config.getoption("--server")
    started: list[servers.Server] = []

    def start(*, aof: bool = False, tcp: bool = False) -> servers.ProcessServer:
        if "://" in word or word == "testcontainers":
            pytest.skip("needs a server process of its own")
        server = servers.require(servers.start, word, aof=aof, tcp=tcp)
        assert isinstance(server, servers.ProcessServer)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def fresh_server(new_server: Callable[..., servers.ProcessServer]) -> servers.ProcessServer:
    """A private server with an append-only file, which a test may pause, kill and restart."""
    return new_server(aof=True)


@pytest.fixture
def link(server: servers.Server) -> Iterator[Connection]:
    """A connection to the shared server, which is emptied first."""
    opened = connect(server.settings, timeout=10.0, name="test")
    opened.execute("FLUSHALL")
    yield opened
    opened.close()


@pytest.fixture
def new_link(server: servers.Server) -> Iterator[Callable[..., Connection]]:
    """Open more connections to the shared server: `new_link(name="other", timeout=1.0)`."""
    made: list[Connection] = []

    def make(*, name: str = "test:more", timeout: float = 10.0) -> Connection:
        made.append(connect(server.settings, timeout=timeout, name=name))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def new_database_server() -> Iterator[Callable[[str], databases.DatabaseServer]]:
    """Return a function that returns the shared server of a dialect.

    The server starts when it is first used. Never stop it.
    """
    started: dict[str, databases.DatabaseServer] = {}

    def start(dialect: str) -> databases.DatabaseServer:
        if dialect not in started:
            started[dialect] = servers.require(databases.start, dialect)
        return started[dialect]

    yield start
    for each in started.values():
        each.close()


@pytest.fixture(params=databases.DIALECTS)
def database_server(
    request: pytest.FixtureRequest,
    new_database_server: Callable[[str], databases.DatabaseServer],
) -> databases.DatabaseServer:
    """The shared server of each dialect in turn: PostgreSQL, MariaDB and SQLite."""
    return new_database_server(request.param)


@pytest.fixture
def database_url(database_server: databases.DatabaseServer) -> str:
    """The URL of an empty database for this test, in each dialect in turn."""
    return database_server.new()


@pytest.fixture
def keys() -> Keys:
    """The key names with their default prefixes."""
    return Keys()


@pytest.fixture
def store(link: Connection, keys: Keys) -> Store:
    """A store on the shared server, which is emptied first, with the default key names."""
    return Store(link, keys)


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A folder whose path is short enough for a socket, which the path of `tmp_path` may not be."""
    folder = Path(tempfile.mkdtemp(prefix="sqe-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fail if a test leaves a thread, because later tests must be able to fork.

    A process with threads must not fork. If a thread of a Rust library (deltalake, Polars) has ever
    called Python, it stays listed forever, so such threads are removed from the list. No process of
    the product that forks loads such a library.
    """
    for each in threading.enumerate():
        if isinstance(each, threading._DummyThread):
            threading._active.pop(each.ident, None)  # type: ignore[attr-defined]
    before = set(threading.enumerate())
    yield
    for each in set(threading.enumerate()) - before:
        if not isinstance(each, threading._DummyThread):
            each.join(THREAD_SECONDS)
            assert not each.is_alive(), f"the test left a thread: {each!r}"
