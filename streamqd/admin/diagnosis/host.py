"""Examine the resources that this host has for a daemon, and check whether they are sufficient."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from streamqd import cgroups, embedded
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import DiagnosisFacts, Host
from streamqd.config import Settings
from streamqd.errors import RequestRefusedError

UNIT = "streamqd.service"
FOLDERS = (
    Path("/etc/systemd/system"),
    Path("/usr/lib/systemd/system"),
    Path("/lib/systemd/system"),
)
SYSTEMD_RUNTIME = Path("/run/systemd/system")  # exists where systemd manages the host
DEFAULT_STOP_SECONDS = 90.0  # systemd's default, for a unit file without a value
SYSTEMCTL_SECONDS = 5.0

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*")
_SPAN_UNITS = {
    **dict.fromkeys(("us", "usec"), 1e-6),
    **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3_600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604_800.0),
}


def gather(settings: Settings, unit: str, assignments: int) -> Host:
    """Examine the host.

    `unit` is the name or the file of a systemd unit, or '' to look for the usual ones.
    `assignments` is the number of assignments that the configured consumers have. Raises
    RequestRefusedError if the given unit or file does not exist.
    """
    folder = settings.daemon.state_dir
    nearest = _nearest_folder(folder)
    source, seconds = _stop_seconds(unit)
    descriptors, limited_process = _limit_of_files(settings)
    return Host(
        state_dir=folder,
        state_dir_problem=access_problem(folder),
        other_owners=_other_owners(settings),
        free_bytes=shutil.disk_usage(nearest).free,
        embedded_bytes=_embedded_bytes(settings),
        unit_source=source,
        stop_seconds=seconds,
        descriptors=descriptors,
        descriptors_owner=limited_process,
        system_descriptors=_number(Path("/proc/sys/fs/file-max")),
        assignments=assignments,
        oom_group=_find_oom_group(settings),
    )


def _exists(path: Path) -> bool:
    """Return True if a path exists. If this user may not read its directory, return False."""
    try:
        return path.exists()
    except PermissionError:
        return False


def _nearest_folder(folder: Path) -> Path:
    """Return this directory, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.absolute().parents) if _exists(each))


def access_problem(folder: Path) -> str:
    """Return the reason why this user cannot write to a directory or create it, or ''."""
    nearest = _nearest_folder(folder)
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        return f"this user cannot write to {nearest}"
    return ""


def _other_owners(settings: Settings) -> dict[str, int]:
    """Return the files in the state directory whose owner differs from that of the directory."""
    folder = settings.daemon.state_dir
    owners: dict[str, int] = {}
    try:
        owner = folder.stat().st_uid
        for path in (folder / f"{settings.daemon.instance}.lock", folder / "redis"):
            if path.exists():
                owners[str(path)] = path.lstat().st_uid
    except OSError:
        return {}  # it is missing, or belongs to another user
    return {path: found for path, found in owners.items() if found != owner}


def _embedded_bytes(settings: Settings) -> int | None:
    if settings.redis.url != embedded.URL:
        return None
    folder = settings.daemon.state_dir / "redis"
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # the server may rewrite its files just now
                total += (Path(where) / name).lstat().st_size
    return total


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.isdigit() else None


# --- descriptors ----------------------------------------------------------------------------------


def _limit_of_files(settings: Settings) -> tuple[int | None, str]:
    """Return the hard limit of open files, for the daemon on this host or else for this process."""
    pid = _daemon(settings)
    if pid is not None:
        limit = _descriptor_limit(pid)
        if limit is not None:
            return limit, f"the daemon with the process id {pid}"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard, "this process"


def _daemon(settings: Settings) -> int | None:
    """Return the process ID of the daemon that is running here, or that ran here last."""
    return _number(settings.daemon.state_dir / f"{settings.daemon.instance}.lock")


def _find_oom_group(settings: Settings) -> str:
    """Return the control group that the kernel kills as a whole if it runs out of memory, or ''.

    This is the control group of the daemon on this host, or else of this process.
    """
    pid = _daemon(settings)
    membership = Path(f"/proc/{pid or 'self'}/cgroup")
    if not membership.exists():
        membership = Path("/proc/self/cgroup")
    return str(cgroups.find_oom_group(membership) or "")


def _descriptor_limit(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[4] for line in lines if line.startswith("Max open files")]
    return int(found[0]) if found and found[0].isdigit() else None


# --- the service manager --------------------------------------------------------------------------


def _stop_seconds(unit: str) -> tuple[str, float | None]:
    """Return where the service manager's stop timeout is set, and the timeout in seconds.

    The first value is '' if there is no service manager.
    """
    if "/" in unit:
        if not Path(unit).is_file():
            raise RequestRefusedError(f"unit file {unit} not found")
        return unit, read_unit_file(Path(unit))
    name = unit or UNIT
    if "." not in name:
        name += ".service"
    if SYSTEMD_RUNTIME.is_dir():
        asked = _systemctl(name)
        if asked is not None:
            return f"systemctl show {name}", asked
    template = re.sub(r"@.*\.", "@.", name)
    for path in (folder / each for folder in FOLDERS for each in (name, template)):
        if path.is_file():
            return str(path), read_unit_file(path)
    if unit:
        raise RequestRefusedError(f"unit {unit} not found; pass its file, with a / in its path")
    return "", None


def _systemctl(name: str) -> float | None:
    program = shutil.which("systemctl")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "show", "--property=LoadState,Type,TimeoutStopUSec", name],
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    shown = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    if shown.get("LoadState") != "loaded":
        return None
    return _stop_limit(shown.get("Type", ""), shown.get("TimeoutStopUSec", ""))


def read_unit_file(path: Path) -> float | None:
    """Return the stop timeout (seconds) that a unit file and its drop-ins set.

    Return inf for Type=notify, where a daemon extends the timeout itself, and None if the value
    cannot be parsed.
    """
    kind, limit = "", str(DEFAULT_STOP_SECONDS)
    for each in (path, *sorted(path.with_name(path.name + ".d").glob("*.conf"))):
        section = ""
        for line in each.read_text().splitlines():
            name, _, value = (part.strip() for part in line.partition("="))
            if line.startswith("["):
                section = line.strip()
            elif section == "[Service]" and name in ("TimeoutStopSec", "TimeoutSec"):
                limit = value or str(DEFAULT_STOP_SECONDS)
            elif section == "[Service]" and name == "Type":
                kind = value
    return _stop_limit(kind, limit)


def _stop_limit(kind: str, limit: str) -> float | None:
    # A daemon with Type=notify extends the timeout while it drains (EXTEND_TIMEOUT_USEC).
    return math.inf if kind.startswith("notify") else read_span(limit)


def read_span(text: str) -> float | None:
    """Convert a systemd time span, such as `1min 30s`, to seconds. `infinity` is inf.

    Return None for any other string.
    """
    text = text.strip()
    if text == "infinity":
        return float("inf")
    if not text or _SPAN.sub("", text):
        return None
    found = _SPAN.findall(text)
    if any(unit not in _SPAN_UNITS for _, unit in found):
        return None
    return sum(float(number) * _SPAN_UNITS[unit] for number, unit in found)


FREE_BYTES = 64 << 20
STOP_MARGIN_SECONDS = 17.0  # after drain_timeout: releases 5, housekeeper 2, embedded server 10
DESCRIPTORS_EACH = 3  # descriptors of the supervisor for each worker
BASE_DESCRIPTORS = 64
PROCESS_DESCRIPTORS = 32  # approximate number of descriptors that one worker opens


@check("host.stop-timeout", Severity.WARNING, Need.HOST)
def _stop_timeout(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """TimeoutStopSec is less than drain_timeout plus 17 s, and the unit is not Type=notify."""
    host, drain = facts.host, facts.settings.daemon.drain_timeout
    if host is None or host.stop_seconds is None:
        return
    needed = drain + STOP_MARGIN_SECONDS
    if host.stop_seconds < needed:
        yield CheckResult(
            f"the service manager kills a stopping daemon after {host.stop_seconds:g} s"
            f" (TimeoutStopSec), but daemon.drain_timeout is {drain:g} s, so running messages are"
            " killed and handled again",
            "run `systemctl edit streamqd`, and write `[Service]` and"
            f" `TimeoutStopSec={needed:.0f}`. Or lower daemon.drain_timeout",
            evidence={
                "timeout_stop_seconds": host.stop_seconds,
                "drain_timeout_seconds": drain,
                "from": host.unit_source,
            },
        )


@check("host.state-dir", Severity.PROBLEM, Need.HOST)
def _state_dir(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """state_dir cannot be written to."""
    host = facts.host
    if host is not None and host.state_dir_problem:
        yield CheckResult(
            f"daemon.state_dir {host.state_dir} cannot be used: {host.state_dir_problem}",
            f"run `install -d -m 700 -o USER {host.state_dir}` with the user of the daemon, or set"
            " another directory",
            evidence={"state_dir": str(host.state_dir), "problem": host.state_dir_problem},
        )


@check("host.state-dir-owner", Severity.PROBLEM, Need.HOST)
def _owners(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The lock or the embedded server's data have a different owner than state_dir."""
    host = facts.host
    if host is not None and host.other_owners:
        yield CheckResult(
            f"{', '.join(host.other_owners)} have a different owner than {host.state_dir}: the"
            f" daemon once ran as another user, and cannot start as this one",
            f"`chown -R --reference={host.state_dir} {' '.join(host.other_owners)}`",
            evidence={"owners": dict(host.other_owners)},
        )


@check("host.disk-full", Severity.PROBLEM, Need.HOST)
def _disk_full(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The disk of state_dir has less than 64 MiB left."""
    host = facts.host
    if host is not None and host.free_bytes is not None and host.free_bytes < FREE_BYTES:
        yield CheckResult(
            f"the disk of daemon.state_dir {host.state_dir} has {host.free_bytes:,} bytes left",
            f"free disk space (see `du -xsh {host.state_dir}/*`), or set a directory on another"
            " disk",
            evidence={"state_dir": str(host.state_dir), "free_bytes": host.free_bytes},
        )


@check("host.embedded-disk", Severity.WARNING, Need.HOST)
def _embedded_disk(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The disk has less space than the embedded server needs to rewrite its files."""
    host = facts.host
    if host is None or host.free_bytes is None or not host.embedded_bytes:
        return
    if host.free_bytes < host.embedded_bytes:
        yield CheckResult(
            f"the files of the embedded server use {host.embedded_bytes:,} bytes. A rewrite needs"
            f" the same space again, but the disk has only {host.free_bytes:,} bytes left",
            f"free space on the disk of {host.state_dir}, limit the topics (`streamqd topic"
            " settings TOPIC retention.max_bytes=…`), or purge dead letters (`streamqd dlq purge"
            " TOPIC`)",
            evidence={"files_bytes": host.embedded_bytes, "free_bytes": host.free_bytes},
        )


@check("host.file-descriptors", Severity.PROBLEM, Need.TOPICS, Need.HOST)
def _descriptors(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The limit of open files is too low for the consumers' partitions."""
    host = facts.host
    if host is None:
        return
    needed = host.assignments * DESCRIPTORS_EACH + BASE_DESCRIPTORS
    if host.descriptors is not None and host.descriptors < needed:
        yield CheckResult(
            f"{host.descriptors_owner} may open {host.descriptors:,} files, but the"
            f" {host.assignments:,} partitions of the configuration need about {needed:,}",
            f"write `LimitNOFILE={max(65_536, needed)}` into the unit file, or `ulimit -Hn"
            f" {max(65_536, needed)}` before the start, or limit daemon.max_partitions",
            evidence={"limit": host.descriptors, "needed": needed, "assignments": host.assignments},
        )
    needed_by_all = host.assignments * PROCESS_DESCRIPTORS
    if host.system_descriptors is not None and host.system_descriptors < needed_by_all:
        yield CheckResult(
            f"all processes of this host together may open {host.system_descriptors:,} files"
            f" (fs.file-max), but {host.assignments:,} workers need about {needed_by_all:,}",
            f"run `sysctl -w fs.file-max={2 * needed_by_all}`, and write the setting to a file in"
            " /etc/sysctl.d",
            evidence={"file_max": host.system_descriptors, "needed": needed_by_all},
        )


@check("host.oom-group", Severity.WARNING, Need.HOST)
def _oom_group(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The kernel kills the whole service when one worker takes too much memory."""
    if facts.host is not None and facts.host.oom_group:
        group = facts.host.oom_group
        yield CheckResult(*cgroups.group_kill_risk(group), evidence={"memory.oom.group": group})
