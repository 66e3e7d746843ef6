"""`streamqd doctor` finds wrong settings and missing permissions on a real server."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamqd.admin.diagnosis import facts, fleet, server
from streamqd.store.client import Connection, connect
from tests.benchmarks import bounds
from tests.support.clock import HOUR, Clock, seconds_ahead
from tests.support.doctor_case import DoctorCase
from tests.support.servers import ProcessServer
from tests.support.servers import Server as RunningServer
from tests.support.waiting import wait_until

Set = Callable[[str, object], None]
SlowDisk = Callable[..., ProcessServer]


@pytest.fixture
def doctor_case(tmp_path: Path, server: RunningServer, link: Connection) -> DoctorCase:
    return DoctorCase(tmp_path, server.url, link)


@pytest.fixture
def setting(link: Connection) -> Iterator[Set]:
    """A function that changes settings of the shared server for the duration of the test."""
    before: dict[str, Any] = {}

    def change(name: str, value: object) -> None:
        before.setdefault(name, link.execute("CONFIG", "GET", name)[1])
        link.execute("CONFIG", "SET", name, value)

    yield change
    for name, value in before.items():
        link.execute("CONFIG", "SET", name, value)


def info(link: Connection, name: str) -> str:
    for line in link.execute("INFO").decode().splitlines():
        if line.startswith(f"{name}:"):
            return str(line.partition(":")[2])
    raise AssertionError(name)


def info_or(link: Connection, name: str) -> str:
    return info(link, name) if f"{name}:" in link.execute("INFO").decode() else ""


def test_doctor_finds_an_eviction_policy(doctor_case: DoctorCase, setting: Set) -> None:
    doctor_case.silent("server.eviction")
    setting("maxmemory-policy", "allkeys-lru")
    found = doctor_case.finding("server.eviction")
    assert found["severity"] == "problem"
    assert "CONFIG SET maxmemory-policy noeviction" in found["fix"]

    doctor_case.write(redis="allow_eviction = true")
    assert doctor_case.finding("server.eviction")["severity"] == "warning"


def test_doctor_finds_a_disabled_append_only_file(doctor_case: DoctorCase) -> None:
    found = doctor_case.finding("server.persistence")
    assert found["evidence"]["aof_enabled"] == "0"
    assert found["evidence"]["appendfsync"] == "always"


def test_doctor_finds_an_append_only_file_without_fsync(
    tmp_path: Path, new_server: Callable[..., ProcessServer]
) -> None:
    durable = new_server(aof=True)
    link = connect(durable.settings, timeout=10.0, name="test:durable")
    doctor_case = DoctorCase(tmp_path, durable.url, link)
    doctor_case.silent("server.persistence")
    link.execute("CONFIG", "SET", "appendfsync", "no")
    assert "appendfsync no" in doctor_case.finding("server.persistence")["text"]

    doctor_case.silent("server.failing-writes")
    (durable.folder / "dump.rdb").mkdir()  # the snapshot cannot be renamed to this name
    link.execute("BGSAVE")
    wait_until(lambda: info(link, "rdb_last_bgsave_status") == "err", what="a failed snapshot")
    assert "rdb_last_bgsave_status" in doctor_case.finding("server.failing-writes")["text"]

    doctor_case.silent("server.replica")
    link.execute("REPLICAOF", "127.0.0.1", "1")
    assert "127.0.0.1:1" in doctor_case.finding("server.replica")["fix"]
    link.close()


@pytest.mark.fault("F19")
def test_doctor_finds_a_master_without_min_replicas(
    tmp_path: Path, new_server: Callable[..., ProcessServer]
) -> None:
    master, replica = new_server(tcp=True), new_server()
    link, other = (connect(each.settings, timeout=10.0, name="test") for each in (master, replica))
    doctor_case = DoctorCase(tmp_path, master.url, link)
    doctor_case.silent("server.min-replicas")
    other.execute("REPLICAOF", "127.0.0.1", master.port)
    wait_until(lambda: info(link, "connected_slaves") == "1", what="it has a replica")
    found = doctor_case.finding("server.min-replicas")
    assert found["severity"] == "warning"
    assert "CONFIG SET min-replicas-to-write 1" in found["fix"]
    link.execute("CONFIG", "SET", "min-replicas-to-write", 1)
    doctor_case.silent("server.min-replicas")
    link.close()
    other.close()


def test_doctor_finds_memory_problems(
    doctor_case: DoctorCase, link: Connection, setting: Set
) -> None:
    assert doctor_case.finding("server.memory-unlimited")["severity"] == "note"
    doctor_case.run("--only", "server.memory-unlimited", code=0)
    used = int(info(link, "used_memory"))
    setting("maxmemory", used * 10)
    doctor_case.silent("server.memory-unlimited")
    doctor_case.silent("server.memory-full")
    setting("maxmemory", round(used / 0.9))
    assert doctor_case.finding("server.memory-full")["severity"] == "warning"
    setting("maxmemory", round(used / 1.2))
    assert doctor_case.finding("server.memory-full")["severity"] == "problem"


def test_doctor_finds_too_few_client_connections(
    doctor_case: DoctorCase, link: Connection, setting: Set
) -> None:
    doctor_case.silent("server.clients")
    setting("maxclients", int(info(link, "connected_clients")) + 1)
    assert doctor_case.finding("server.clients")["evidence"]["connected_clients"] >= 2


@pytest.mark.fault("F10")
def test_doctor_finds_a_wrong_clock(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_case.silent("server.clock")
    wrong = SimpleNamespace(time=lambda: time.time() + 60, perf_counter=time.perf_counter)
    monkeypatch.setattr(facts, "time", wrong)
    found = doctor_case.finding("server.clock")
    assert "behind this host" in found["text"]
    assert -62 < found["evidence"]["skew_seconds"] < -58


@pytest.mark.fault("F10")
def test_doctor_finds_a_real_clock_offset(tmp_path: Path, fresh_server: ProcessServer) -> None:
    Clock(fresh_server).jump_to(-HOUR)
    link = connect(fresh_server.settings, timeout=10.0, name="test")
    wait_until(lambda: seconds_ahead(link) < -60, what="the server takes notice")
    found = DoctorCase(tmp_path, fresh_server.url, link).finding("server.clock")
    assert -HOUR - 2 < found["evidence"]["skew_seconds"] < -HOUR + 2
    assert "timedatectl set-ntp true" in found["fix"]
    link.close()


@pytest.mark.parametrize(
    ("product", "version", "to"),
    [
        ("redis", "6.2.23", ""),
        ("redis", "6.2.22", "6.2.23"),
        ("redis", "6.0.99", "6.2.23"),  # a version that no longer gets fixes
        ("redis", "7.0.15", "7.2.15"),
        ("redis", "7.2.14", "7.2.15"),
        ("redis", "7.4.10", ""),
        ("redis", "8.0.6", "8.2.9"),
        ("redis", "8.2.8", "8.2.9"),
        ("redis", "8.4.5", "8.4.6"),
        ("redis", "8.6.5", "8.6.6"),
        ("redis", "8.8.1", "8.8.2"),
        ("redis", "8.8.2", ""),
        ("redis", "8.10.0", "8.10.1"),
        ("redis", "8.10.1", ""),
        ("redis", "8.12.0", ""),
        ("redis", "9.0.0", ""),
        ("valkey", "7.2.13", "7.2.14"),
        ("valkey", "8.1.9", ""),
        ("valkey", "9.1.0", "9.1.1"),
        ("valkey", "9.1.2", ""),
        ("valkey", "9.2.0-rc1", ""),
        ("valkey", "255.255.255", ""),  # a server that was built from source
        ("redis", "", ""),
    ],
)
def test_fix_of_returns_the_version_without_vulnerability(
    product: str, version: str, to: str
) -> None:
    assert server.lowest_safe_version(product, version) == to


def test_doctor_finds_a_vulnerable_server(
    doctor_case: DoctorCase, link: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server, "FIXED_VERSIONS", {each: {(0, 1): 1} for each in ("redis", "valkey")}
    )
    doctor_case.silent("server.vulnerabilities")
    product, mine = ("valkey" if info_or(link, "valkey_version") else "redis"), (99, 1)
    monkeypatch.setattr(server, "FIXED_VERSIONS", {each: {mine: 2} for each in ("redis", "valkey")})
    found = doctor_case.finding("server.vulnerabilities")
    assert found["evidence"]["fixed_in"] == "99.1.2"
    assert f"update it to {product} 99.1.2" in found["fix"]


def test_doctor_finds_an_old_server_version(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_case.silent("server.version")
    monkeypatch.setattr(server, "OLDEST", {"redis": (99, 1), "valkey": (99, 1)})
    assert "99.1 or later" in doctor_case.finding("server.version")["fix"]


def test_doctor_finds_an_idle_timeout(doctor_case: DoctorCase, setting: Set) -> None:
    doctor_case.silent("server.idle-timeout")
    setting("timeout", 30)
    assert "silent for 30 s" in doctor_case.finding("server.idle-timeout")["text"]
    setting("timeout", 300)
    doctor_case.silent("server.idle-timeout")


def test_doctor_finds_a_message_limit_of_the_server(doctor_case: DoctorCase, setting: Set) -> None:
    doctor_case.silent("server.message-limit")
    setting("proto-max-bulk-len", 1 << 20)
    doctor_case.silent("server.message-limit")
    doctor_case.write(daemon='max_message_bytes = "2MiB"')
    assert (
        "CONFIG SET proto-max-bulk-len 2097152"
        in doctor_case.finding("server.message-limit")["fix"]
    )


def test_doctor_finds_slow_commands(doctor_case: DoctorCase, link: Connection) -> None:
    link.execute("SLOWLOG", "RESET")
    doctor_case.silent("server.slow-commands")
    loop = "for _ = 1, 100000000 do end return 1"
    link.execute("EVAL", loop, 1, "somebody:else")
    doctor_case.silent("server.slow-commands")
    link.execute("EVAL", loop, 1, doctor_case.harness.stream)
    found = doctor_case.finding("server.slow-commands")
    assert found["evidence"]["slow"][0]["key"] == doctor_case.harness.stream
    link.execute("SLOWLOG", "RESET")


def test_doctor_finds_a_lease_too_short_for_the_round_trip(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_case.silent("fleet.short-lease")
    monkeypatch.setattr(fleet, "ROUND_TRIPS", 1e9)
    assert "lease_ttl = " in doctor_case.finding("fleet.short-lease")["fix"]


def test_doctor_finds_missing_permissions(doctor_case: DoctorCase, link: Connection) -> None:
    doctor_case.silent("permissions.missing")
    link.execute("ACL", "SETUSER", "weak", "on", ">secret", "~*", "&*", "+@all", "-xclaim")
    try:
        (doctor_case.folder / "password").write_text("secret")
        (doctor_case.folder / "password").chmod(0o600)
        doctor_case.write(redis='username = "weak"\npassword_file = "password"')
        found = doctor_case.finding("permissions.missing")
        assert found["about"] == "XCLAIM"
        assert "ACL SETUSER weak +xclaim" in found["fix"]

        link.execute("ACL", "SETUSER", "weak", "+xclaim", "-slowlog", "-config")
        report = doctor_case.run("--only", "server", "--only", "permissions")
        assert report["unseen"] == [
            "everything that needs CONFIG GET, which this user may not run",
            "everything that needs SLOWLOG GET, which this user may not run",
        ]
    finally:
        link.execute("ACL", "DELUSER", "weak")


# --- a slow disk ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_sync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library that makes every sync of a server take SYNC_SECONDS."""
    if shutil.which("cc") is None:
        pytest.skip("cc, a compiler of C, is not installed")
    return bounds.compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def slow_disk(new_server: Callable[..., ProcessServer], slow_sync: Path) -> SlowDisk:
    """A function that starts a server whose syncs take `seconds`, with additional settings."""

    def start(seconds: float, **more: str) -> ProcessServer:
        server = new_server(aof=True)
        server.environment = {"LD_PRELOAD": str(slow_sync), "SYNC_SECONDS": str(seconds)}
        server.restart(**more)
        return server

    return start


@contextlib.contextmanager
def writing(server: ProcessServer) -> Iterator[Connection]:
    """Write to a server repeatedly in a thread, and yield another connection."""
    over = threading.Event()

    def write() -> None:
        link = connect(server.settings, timeout=30.0, name="test:writer")
        link.execute("SELECT", "1")  # a directory that the doctor does not check
        while not over.wait(0.01):
            link.execute("XADD", "any", "MAXLEN", "100", "*", "f", "v")
        link.close()

    writer = threading.Thread(target=write)
    writer.start()
    link = connect(server.settings, timeout=30.0, name="test:slow-disk")
    try:
        yield link
    finally:
        link.close()
        over.set()
        writer.join()


def test_doctor_finds_a_disk_with_slow_syncs(slow_disk: SlowDisk, tmp_path: Path) -> None:
    """The doctor finds a disk whose syncs take 1.5 s.

    Writes that are acknowledged during a sync are lost if the process dies.
    """
    server = slow_disk(1.5, appendfsync="everysec")
    with writing(server) as link:
        doctor_case = DoctorCase(tmp_path, server.url, link)
        wait_until(lambda: info(link, "aof_pending_bio_fsync") != "0", what="a sync is under way")
        found = doctor_case.finding("server.slow-disk")
    assert "acknowledged writes of up to 2 s are lost" in found["text"]
    assert found["evidence"]["syncing_seconds"] >= 0.1
    assert found["evidence"]["aof_delayed_fsync"] == 0


def test_doctor_names_writes_delayed_by_the_disk(slow_disk: SlowDisk, tmp_path: Path) -> None:
    """The doctor names delayed writes. The server counts those that waited for more than 2 s."""
    server = slow_disk(3.0, appendfsync="everysec")
    with writing(server) as link:
        doctor_case = DoctorCase(tmp_path, server.url, link)
        wait_until(
            lambda: info(link, "aof_delayed_fsync") != "0", timeout=60.0, what="a write waits"
        )
        found = doctor_case.finding("server.slow-disk")
    assert "waited more than 2 s for a sync" in found["text"]


def test_doctor_names_slow_syncs_with_appendfsync_always(
    slow_disk: SlowDisk, tmp_path: Path
) -> None:
    """The doctor names slow syncs, because appendfsync always makes each write wait.

    Nothing is lost.
    """
    server = slow_disk(0.2, appendfsync="always", latency_monitor_threshold="50")
    with writing(server) as link:
        doctor_case = DoctorCase(tmp_path, server.url, link)
        wait_until(lambda: link.execute("LATENCY", "LATEST"), what="the server notes a slow sync")
        found = doctor_case.finding("server.slow-disk")
    assert "are lost" not in found["text"]
    assert found["evidence"]["latency_ms"]["aof-fsync-always"] >= 100


def test_doctor_accepts_a_disk_with_fast_syncs(slow_disk: SlowDisk, tmp_path: Path) -> None:
    """A disk whose syncs take 10 ms is never a finding."""
    server = slow_disk(0.01, appendfsync="everysec")
    with writing(server) as link:
        DoctorCase(tmp_path, server.url, link).silent("server.slow-disk")
