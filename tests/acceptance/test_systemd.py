"""systemd accepts the unit files, and the daemon reports its state to its service manager."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
UNITS = ("streamqd.service", "streamqd@.service")
EXPOSURE_MAX = 15  # in tenths, as for `systemd-analyze security --threshold`
WATCHDOG_SECONDS = 2.0

NewDaemon = Callable[..., Daemon]


# --- the unit files -------------------------------------------------------------------------------


@pytest.fixture
def analyze() -> Callable[..., subprocess.CompletedProcess[str]]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [tool, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


def install_unit(name: str, folder: Path) -> Path:
    """Copy a unit, with a command that exists and an instance's name. Return the copy."""
    text = (ROOT / "systemd" / name).read_text()
    assert text.count("/opt/streamqd/bin/streamqd") == 1
    copy = folder / name.replace("@.", "@web-1.")
    copy.write_text(text.replace("/opt/streamqd/bin/streamqd", sys.executable))
    return copy


def init_unit(folder: Path) -> Path:
    """Return a copy of the unit from `streamqd init`, in a directory whose name needs quoting."""
    project = folder / "hits & 100%: a project"
    done = subprocess.run(
        [sys.executable, "-m", "streamqd", "init", str(project)],
        env=os.environ | {"LOGNAME": "www-data", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # systemd-analyze does not accept such a path, but that is not under test here.
    return shutil.copy(project / "streamqd.service", folder / "streamqd.service")


@pytest.mark.parametrize("name", [*UNITS, "init"])
def test_systemd_analyze_verify_accepts_the_units(
    analyze: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    unit = init_unit(tmp_path) if name == "init" else install_unit(name, tmp_path)

    done = analyze("verify", unit)

    # Messages about other units of this host do not matter.
    assert [line for line in done.stderr.splitlines() if "streamqd" in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*UNITS, "init"])
def test_systemd_exposure_level_is_low(
    analyze: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    unit = init_unit(tmp_path) if name == "init" else install_unit(name, tmp_path)

    done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", unit)

    assert "Overall exposure level" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout


# --- sd_notify ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Datagram:
    """A datagram that the daemon sent with sd_notify."""

    at: float  # seconds, monotonic
    pid: int
    words: dict[str, str]


class Manager:
    """A service manager's socket, which records every datagram and its sender."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[Datagram] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, extra, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
            if data == b"close":
                return
            pid = struct.unpack("3i", extra[0][2])[0]
            lines = (line.partition("=") for line in data.decode().splitlines())
            words = {name: value for name, _, value in lines}
            self.heard.append(Datagram(time.monotonic(), pid, words))

    def with_word(self, name: str) -> list[Datagram]:
        return [said for said in list(self.heard) if name in said.words]

    def wait(self, name: str, value: str | None = None, after: int = 0) -> Datagram:
        """Wait for a datagram with this word, ignoring the first `after` datagrams. Return it."""

        def found() -> Datagram | None:
            for said in self.heard[after:]:
                if name in said.words and value in (None, said.words[name]):
                    return said
            return None

        return wait_until(found, timeout=20.0, what=f"{name}={value} is said: {self.heard}")

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"close", str(self.path))
        self._thread.join(5.0)
        self._socket.close()


@pytest.fixture
def manager(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    listening = Manager(state_dir / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(listening.path))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1_000_000)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    yield listening
    listening.close()


def test_daemon_notifies_systemd_of_its_states(
    new_daemon: NewDaemon, manager: Manager, tmp_path: Path
) -> None:
    with new_daemon(partitions=2, daemon={"drain_timeout": "100s"}) as daemon:
        ready = manager.wait("READY", "1")
        assert ready.words["STATUS"] == "2/2 partitions running"
        before_ready = [said for said in manager.heard if said.at < ready.at]
        assert any("EXTEND_TIMEOUT_USEC" in said.words for said in before_ready)

        # A reload must send the clock in the same datagram, because notify-reload ignores it
        # otherwise.
        heard = len(manager.heard)
        clock = time.monotonic_ns() // 1000
        daemon.signal(signal.SIGHUP)
        reloading = manager.wait("RELOADING", "1", after=heard)
        assert clock <= int(reloading.words["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        again = manager.wait("READY", "1", after=heard)
        assert again.at >= reloading.at
        assert again.words["STATUS"] == "reloaded"
        daemon.wait_event("reload.finished")

        # A drain takes as long as its messages need.
        gate = tmp_path / "gate"
        [uid] = daemon.send([f"await {gate}"], partition=0)
        daemon.wait_run(uid)
        heard = len(manager.heard)
        daemon.signal(signal.SIGTERM)
        manager.wait("STOPPING", "1", after=heard)
        whole = manager.wait("EXTEND_TIMEOUT_USEC", after=heard)
        assert int(whole.words["EXTEND_TIMEOUT_USEC"]) > 100_000_000
        more = manager.wait("EXTEND_TIMEOUT_USEC", "20000000", after=heard)
        # The daemon repeats the extension for as long as the drain makes progress.
        manager.wait("EXTEND_TIMEOUT_USEC", "20000000", after=manager.heard.index(more) + 1)
        assert manager.wait("STATUS", "draining, 1 partitions left", after=heard)
        gate.touch()
        assert daemon.wait() == 0
        assert {said.pid for said in manager.heard} == {daemon.pid}


def test_watchdog_is_not_fed_by_a_stopped_supervisor(
    new_daemon: NewDaemon, manager: Manager
) -> None:
    with new_daemon() as daemon:
        wait_until(
            lambda: len(manager.with_word("WATCHDOG")) >= 6,
            timeout=20.0,
            what="the watchdog was fed six times",
        )
        times = [said.at for said in manager.with_word("WATCHDOG")]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert max(gaps) < WATCHDOG_SECONDS * 3 / 4
        assert min(gaps) > WATCHDOG_SECONDS / 10

        # A stopped process sends nothing. After SIGCONT, it sends datagrams again.
        os.kill(daemon.pid, signal.SIGSTOP)
        fed = manager.with_word("WATCHDOG")
        time_up = time.monotonic() + 1.5 * WATCHDOG_SECONDS
        wait_until(lambda: time.monotonic() > time_up, timeout=10.0, what="the time is up")
        assert len(manager.with_word("WATCHDOG")) <= len(fed) + 1
        os.kill(daemon.pid, signal.SIGCONT)
        manager.wait("WATCHDOG", "1", after=len(manager.heard))
        assert daemon.stop() == 0


def test_no_watchdog_datagram_is_sent_without_a_watchdog(
    new_daemon: NewDaemon, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHDOG_USEC")
    with new_daemon() as daemon:
        manager.wait("READY", "1")
        assert daemon.stop() == 0

    assert manager.with_word("WATCHDOG") == []
