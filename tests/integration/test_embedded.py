"""The embedded server starts and stops, survives crashes, keeps its data, and restricts access."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streamqd import embedded
from streamqd.embedded import AlreadyRunningError, EmbeddedServer
from streamqd.errors import RedisResponseError
from streamqd.store.client import connect, server_facts
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until

Make = Callable[[], EmbeddedServer]

HOLDER = """
import os, signal, sys
from pathlib import Path
from streamqd import embedded
embedded.find_server = lambda: Path(sys.argv[2])
server = embedded.EmbeddedServer(Path(sys.argv[1]))
server.start()
server.wait_ready(20)
# Not by print: the signal may come in the midst of one.
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted\\n"))
print(server.pid, flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def program(server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Embed the kind of server that the tests are running on."""
    binary = server.binary if isinstance(server, ProcessServer) else embedded.find_server()
    monkeypatch.setattr(embedded, "find_server", lambda: binary)
    return binary


@pytest.fixture
def make(state_dir: Path) -> Iterator[Make]:
    """A function that makes embedded servers on the state directory.

    They are stopped after the test.
    """
    made: list[EmbeddedServer] = []

    def make_one() -> EmbeddedServer:
        made.append(EmbeddedServer(state_dir))
        return made[-1]

    yield make_one
    for each in made:
        each.stop(10)


@pytest.fixture
def running(make: Make) -> EmbeddedServer:
    """An embedded server that is running."""
    server = make()
    server.start()
    server.wait_ready(20)
    return server


@pytest.fixture
def holder(state_dir: Path, program: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that runs an embedded server like a supervisor. It prints the pid."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state_dir), str(program)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        if process.poll() is None:
            servers = psutil.Process(process.pid).children()
            process.kill()
            psutil.wait_procs(servers, timeout=10)  # they write until they have exited


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _ask(server: EmbeddedServer, *command: str) -> object:
    link = connect(server.settings, timeout=5.0, name="test:embedded")
    try:
        return link.execute(*command)
    finally:
        link.close()


def _has_written_all(server: EmbeddedServer) -> bool:
    """Return True if no write of the server is waiting for a sync of the disk."""
    return b"aof_buffer_length:0\r\n" in _ask(server, "INFO", "persistence")


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- start and stop -------------------------------------------------------------------------------


def test_embedded_server_starts_and_stops(make: Make, state_dir: Path) -> None:
    server = make()
    assert not server.running
    assert server.pid is None
    server.start()
    server.wait_ready(20)
    assert server.running
    assert _ask(server, "PING") == b"PONG"
    assert server.settings.url == f"unix://{state_dir}/redis.sock"
    pid = server.pid
    server.start()
    assert server.pid == pid, "starting twice starts one"
    assert server.stop(20)
    assert not server.running
    assert not server.ready()
    assert server.ending.startswith("exited with code 0")
    assert not server.socket_path.exists()


def test_embedded_server_is_private_to_its_user(running: EmbeddedServer) -> None:
    assert _mode(running.socket_path) == 0o700
    assert _mode(running.folder) == 0o700
    assert running.pid is not None
    process = psutil.Process(running.pid)
    assert [each for each in process.net_connections("inet") if each.status == "LISTEN"] == []
    files = [path for path in running.folder.rglob("*") if path.is_file()]
    assert files
    assert {path.name for path in files if _mode(path) & 0o077} == set()


def test_embedded_server_has_durable_settings(running: EmbeddedServer) -> None:
    link = connect(running.settings, timeout=5.0, name="test")
    facts = server_facts(link)
    assert facts.aof
    assert facts.maxmemory_policy == "noeviction"
    assert link.execute("CONFIG", "GET", "appendfsync") == [b"appendfsync", b"everysec"]
    assert link.execute("CONFIG", "GET", "save") == [b"save", b""]
    link.close()


@pytest.mark.parametrize(
    "command",
    [
        "CONFIG SET dir /",
        "MODULE LOAD /x.so",
        "DEBUG SLEEP 0",
        "REPLICAOF 127.0.0.1 1",
        "ACL SETUSER default +@all",
        "SHUTDOWN NOSAVE",
        "MONITOR",
    ],
)
def test_embedded_server_refuses_dangerous_commands(running: EmbeddedServer, command: str) -> None:
    with pytest.raises(RedisResponseError) as caught:
        _ask(running, *command.split())
    # Redis 7 and later refuse DEBUG and MODULE even before they check our permissions.
    assert caught.value.code == "NOPERM" or "not allowed" in str(caught.value)


def test_embedded_server_has_its_own_process_title(running: EmbeddedServer) -> None:
    title = Path(f"/proc/{running.pid}/cmdline").read_bytes()
    assert title.startswith(b"streamqd: redis")


def test_embedded_server_inherits_only_what_it_needs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/none")
    with tempfile.TemporaryFile() as ours:
        os.set_inheritable(ours.fileno(), True)
        server = make()
        server.start()
        server.wait_ready(20)
        assert server.pid is not None
        assert "NOTIFY_SOCKET" not in psutil.Process(server.pid).environ()
        folder = Path(f"/proc/{server.pid}/fd")
        targets = set()
        for entry in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # the server has closed it in the meantime
                targets.add(str(entry.readlink()))
        assert not any("deleted" in target for target in targets)
        assert f"{server.folder}/daemon.lock" not in targets
        assert f"{server.folder}/server.lock" in targets


def test_embedded_server_receives_signals_blocked_by_us(make: Make) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        server = make()
        server.start()
        server.wait_ready(20)
        assert server.stop(20)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_embedded_server_stops_while_suspended(running: EmbeddedServer) -> None:
    assert running.pid is not None
    os.kill(running.pid, signal.SIGSTOP)
    assert running.stop(20)


def test_embedded_server_without_a_response_is_killed(running: EmbeddedServer, make: Make) -> None:
    _ask(running, "SET", "a", "1")
    busy = connect(running.settings, timeout=5.0, name="test:busy")
    busy.node.post([("EVAL", "while true do end", "0")])
    wait_until(lambda: not running.ready(), what="the script runs")
    started = time.monotonic()
    assert not running.stop(0.3)
    assert time.monotonic() - started < 5
    busy.close()
    assert running.ending.startswith("was killed by signal 9")
    again = make()
    again.start()
    again.wait_ready(20)
    assert _ask(again, "GET", "a") == b"1"


# --- crashes --------------------------------------------------------------------------------------


def test_embedded_server_restarts_with_its_data_after_a_kill(running: EmbeddedServer) -> None:
    for count in range(1, 101):
        assert _ask(running, "INCR", "n") == count
    wait_until(lambda: _has_written_all(running))
    pid = running.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not running.running, what="the death is noticed")
    assert running.ending.startswith("was killed by signal 9")
    assert running.socket_path.exists(), "a killed server leaves its socket"
    running.start()
    running.wait_ready(20)
    assert running.pid != pid
    assert _ask(running, "GET", "n") == b"100"


def test_embedded_server_ignores_ctrl_c(holder: subprocess.Popen[str]) -> None:
    pid = int(_read(holder))
    os.killpg(holder.pid, signal.SIGINT)
    assert _read(holder) == "interrupted"
    process = psutil.Process(pid)
    assert os.getsid(pid) == pid
    os.killpg(holder.pid, signal.SIGINT)
    assert _read(holder) == "interrupted"
    assert _lives(process)


def test_embedded_server_exits_with_a_killed_supervisor(
    holder: subprocess.Popen[str], make: Make
) -> None:
    pid = int(_read(holder))
    old = psutil.Process(pid)
    server = make()
    _ask(server, "SET", "a", "1")
    # A stopped process cannot exit, so the next start has to wait.
    old.suspend()
    holder.kill()
    holder.wait(10)
    with pytest.raises(AlreadyRunningError, match="earlier daemon"):
        server.start(patience=0.3)
    assert _lives(old)
    old.resume()
    server.start(patience=20)
    assert not _lives(old)
    server.wait_ready(20)
    assert _ask(server, "GET", "a") == b"1"


def test_embedded_server_refuses_a_second_daemon(holder: subprocess.Popen[str], make: Make) -> None:
    _read(holder)
    server = make()
    started = time.monotonic()
    with pytest.raises(AlreadyRunningError, match="another daemon"):
        server.start(patience=20)
    assert time.monotonic() - started < 5, "no use in waiting for a daemon that lives"
    assert not server.running
    assert _ask(server, "PING") == b"PONG", "the first one is not disturbed"


def test_embedded_server_is_not_stopped_by_a_forked_child(running: EmbeddedServer) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                running.detach()
                gc.collect()
            code = 0 if running.pid is None and not seen else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert running.running
    with pytest.raises(AlreadyRunningError):
        EmbeddedServer(running.state_dir).start()
