"""`streamqd doctor` finds that a host has too few resources for the daemon."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from streamqd import config
from streamqd.admin.diagnosis import examine_without_redis, host, select_checks
from streamqd.admin.diagnosis.facts import DiagnosisFacts, Host
from streamqd.store.client import Connection
from tests.support.doctor_case import DoctorCase
from tests.support.servers import Server

ROOT = Path(__file__).parents[2]
NOBODY = 65_534


@pytest.fixture
def doctor_case(tmp_path: Path, server: Server, link: Connection) -> DoctorCase:
    made = DoctorCase(tmp_path, server.url, link)
    made.settle_in()
    return made


# --- the time limit of a stop ---------------------------------------------------------------------


def test_doctor_finds_a_too_short_stop_timeout(doctor_case: DoctorCase) -> None:
    unit = doctor_case.folder / "streamqd.service"
    unit.write_text("[Unit]\nTimeoutStopSec=1\n[Service]\nTimeoutStopSec=30s\n")
    doctor_case.write(daemon='drain_timeout = "30s"')
    found = doctor_case.finding("host.stop-timeout", "--unit", str(unit))
    assert found["evidence"] == {
        "timeout_stop_seconds": 30.0,
        "drain_timeout_seconds": 30.0,
        "from": str(unit),
    }
    assert "TimeoutStopSec=47" in found["fix"]

    drop_in = doctor_case.folder / "streamqd.service.d" / "stop.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nTimeoutStopSec=1min\n")
    doctor_case.silent("host.stop-timeout", "--unit", str(unit))


def test_doctor_accepts_the_shipped_units(doctor_case: DoctorCase) -> None:
    for name in ("streamqd.service", "streamqd@.service"):
        doctor_case.silent("host.stop-timeout", "--unit", str(ROOT / "systemd" / name))


@pytest.mark.parametrize("name", ["streamqd@west", "streamqd@west.service"])
def test_doctor_finds_a_systemd_unit_by_its_name(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(host, "SYSTEMD_RUNTIME", doctor_case.folder / "none")
    shipped = (ROOT / "systemd" / "streamqd@.service").read_text()
    unit = doctor_case.folder / "streamqd@.service"
    unit.write_text(shipped.replace("Type=notify", "Type=exec"))
    monkeypatch.setattr(host, "FOLDERS", (doctor_case.folder,))
    doctor_case.write(daemon='drain_timeout = "2m"')
    found = doctor_case.finding("host.stop-timeout", "--unit", name)
    assert found["evidence"]["from"] == str(unit)
    assert found["evidence"]["timeout_stop_seconds"] == 60


def test_doctor_accepts_any_stop_timeout_of_a_notify_unit(doctor_case: DoctorCase) -> None:
    """The doctor accepts any timeout of a unit of type notify, because the daemon extends it.

    The transcript of systemd shows that.
    """
    unit = doctor_case.folder / "streamqd.service"
    unit.write_text("[Service]\nType=notify\nTimeoutStopSec=4\n")
    doctor_case.write(daemon='drain_timeout = "2m"')
    doctor_case.silent("host.stop-timeout", "--unit", str(unit))


def test_doctor_assumes_the_systemd_default_stop_timeout(doctor_case: DoctorCase) -> None:
    unit = doctor_case.folder / "streamqd.service"
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    doctor_case.silent("host.stop-timeout", "--unit", str(unit))
    doctor_case.write(daemon='drain_timeout = "2m"')
    doctor_case.finding("host.stop-timeout", "--unit", str(unit))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1min 30s", 90.0),
        ("2h", 7_200.0),
        ("500ms", 0.5),
        ("infinity", float("inf")),
        ("", None),
        ("soon", None),
        ("3 fortnights", None),
    ],
)
def test_read_span_parses_systemd_time_spans(text: str, seconds: float | None) -> None:
    assert host.read_span(text) == seconds


# --- memory ---------------------------------------------------------------------------------------


def test_doctor_finds_a_cgroup_killed_as_a_whole(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_case.silent("host.oom-group")
    (check,) = select_checks(["host.oom-group"])
    told = Host(doctor_case.folder, oom_group="/sys/fs/cgroup/pod1")
    [found] = check.run(DiagnosisFacts(config.load(doctor_case.path), 0, host=told))
    assert "OOMPolicy=continue" in found.fix
    assert "singleProcessOOMKill" in found.fix

    # The cgroup to check is the daemon's if it is running, and otherwise the one of this process.
    asked: list[Path] = []
    monkeypatch.setattr(host.cgroups, "find_oom_group", asked.append)
    lock = doctor_case.folder / "var" / "one.lock"
    for pid in ("", "1", "4194304"):
        lock.write_text(pid)
        doctor_case.silent("host.oom-group")
    assert asked == [Path(f"/proc/{each}/cgroup") for each in ("self", "1", "self")]


def test_shipped_units_survive_one_oom_killed_worker() -> None:
    for name in ("streamqd.service", "streamqd@.service"):
        assert "OOMPolicy=continue\n" in (ROOT / "systemd" / name).read_text()


# --- the directory --------------------------------------------------------------------------------


def test_doctor_accepts_a_missing_state_directory(doctor_case: DoctorCase) -> None:
    doctor_case.silent("host.state-dir")
    (doctor_case.folder / "var").rmdir()
    doctor_case.silent("host.state-dir")  # no finding, because the daemon creates the directory


def test_doctor_finds_an_unwritable_state_directory(doctor_case: DoctorCase) -> None:
    settings = config.load(doctor_case.path)
    (doctor_case.folder / "var").chmod(0o500)
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)  # because root may write everywhere
    try:
        report = examine_without_redis(settings, select_checks(["host.state-dir"]), "not asked")
    finally:
        os.seteuid(was)
    [found] = report.findings
    assert found.check == "host.state-dir"
    assert "this user cannot write to" in found.text


def test_doctor_finds_state_files_of_another_user(doctor_case: DoctorCase) -> None:
    lock = doctor_case.folder / "var" / "one.lock"
    lock.write_text("")
    doctor_case.silent("host.state-dir-owner")
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(lock, 12_345, -1)
    found = doctor_case.finding("host.state-dir-owner")
    assert found["evidence"]["owners"] == {str(lock): 12_345}


def test_doctor_finds_a_full_disk(doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor_case.silent("host.disk-full")
    # Every system has a file system without free space mounted, which the test uses.
    (doctor_case.folder / "var").rmdir()
    (doctor_case.folder / "var").symlink_to("/proc")
    assert doctor_case.finding("host.disk-full")["evidence"]["free_bytes"] == 0


def test_doctor_finds_a_disk_too_small_for_a_rewrite(
    doctor_case: DoctorCase, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = doctor_case.folder / "var" / "redis"
    data.mkdir()
    with (data / "appendonly.aof").open("wb") as file:
        file.truncate(1 << 20)
    doctor_case.url = "embedded:"
    doctor_case.write()
    (doctor_case.folder / "var" / "redis.sock").symlink_to(server.url.removeprefix("unix://"))
    doctor_case.silent("host.embedded-disk")
    with (data / "appendonly.aof").open("wb") as file:
        file.truncate(1 << 43)  # a sparse file, because only its length counts
    assert doctor_case.finding("host.embedded-disk")["evidence"]["files_bytes"] == 1 << 43


# --- descriptors ----------------------------------------------------------------------------------


def test_doctor_finds_too_few_file_descriptors(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor_case.silent("host.file-descriptors")
    wanted = 2 * host.DESCRIPTORS_EACH + host.BASE_DESCRIPTORS
    done = subprocess.run(
        [
            *(sys.executable, "-m", "streamqd", "--config", str(doctor_case.path)),
            *("doctor", "--only", "host.file-descriptors", "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (wanted - 1, wanted - 1)),
    )
    assert done.returncode == 1, done.stderr
    [found] = json.loads(done.stdout)["findings"]
    assert found["evidence"] == {"limit": wanted - 1, "needed": wanted, "assignments": 2}


def test_doctor_reads_the_limit_of_the_running_daemon(doctor_case: DoctorCase) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as daemon:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (20, 20))
        (doctor_case.folder / "var" / "one.lock").write_text(str(daemon.pid))
        found = doctor_case.finding("host.file-descriptors")
        assert f"the daemon with the process id {daemon.pid}" in found["text"]


def test_doctor_reports_a_low_system_wide_file_limit(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROCESS_DESCRIPTORS", 1 << 62)
    assert "fs.file-max" in doctor_case.finding("host.file-descriptors")["text"]
