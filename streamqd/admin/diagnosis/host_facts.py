"""What this host gives a daemon: its directory, the disk, descriptors, the time that a stop has."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from streamqd import cgroups, embedded
from streamqd.admin.diagnosis.facts import Host
from streamqd.config import Settings
from streamqd.errors import Refused

UNIT = "streamqd.service"
FOLDERS = (
    Path("/etc/systemd/system"),
    Path("/usr/lib/systemd/system"),
    Path("/lib/systemd/system"),
)
RUNNING = Path("/run/systemd/system")  # exists where systemd manages the host
DEFAULT_STOP_SECONDS = 90.0  # systemd's own, when a unit file says nothing
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


def gather(settings: Settings, unit: str, units: int) -> Host:
    """Look at the host. `unit` is a name or a file of systemd, '' for the usual ones.

    `units` are those of the configuration's consumers. Refused: there is no such file.
    """
    folder = settings.daemon.state_dir
    there = next(each for each in (folder, *folder.absolute().parents) if _exists(each))
    source, seconds = _stop_seconds(unit)
    descriptors, whose = _descriptors(settings)
    return Host(
        state_dir=folder,
        state_dir_problem=_unusable(there),
        strange_owners=_strange_owners(settings),
        free_bytes=shutil.disk_usage(there).free,
        embedded_bytes=_embedded_bytes(settings),
        unit_source=source,
        stop_seconds=seconds,
        descriptors=descriptors,
        descriptors_of=whose,
        descriptors_of_system=_number(Path("/proc/sys/fs/file-max")),
        units=units,
        oom_group=_oom_group(settings),
    )


def _exists(path: Path) -> bool:
    """Whether it is there, as far as this user may look."""
    try:
        return path.exists()
    except PermissionError:
        return False


def _unusable(folder: Path) -> str:
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return f"this user cannot write to {folder}"
    return ""


def _strange_owners(settings: Settings) -> dict[str, int]:
    """Files of the state directory that belong to another user than the directory itself."""
    folder = settings.daemon.state_dir
    owners: dict[str, int] = {}
    try:
        owner = folder.stat().st_uid
        for path in (folder / f"{settings.daemon.instance}.lock", folder / "redis"):
            if path.exists():
                owners[str(path)] = path.lstat().st_uid
    except OSError:
        return {}  # it is not there, or is not ours to look at
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


def _descriptors(settings: Settings) -> tuple[int | None, str]:
    """The hard limit of open files of the daemon that runs here, else of this process."""
    pid = _daemon(settings)
    if pid is not None:
        limit = _limit_of(pid)
        if limit is not None:
            return limit, f"the daemon with the process id {pid}"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard, "this process"


def _daemon(settings: Settings) -> int | None:
    """The process id of the daemon that runs here, or ran here last."""
    return _number(settings.daemon.state_dir / f"{settings.daemon.instance}.lock")


def _oom_group(settings: Settings) -> str:
    """The control group of the daemon, or else of this process, that is killed as a whole."""
    pid = _daemon(settings)
    membership = Path(f"/proc/{pid or 'self'}/cgroup")
    if not membership.exists():
        membership = Path("/proc/self/cgroup")
    return str(cgroups.killed_as_one(membership) or "")


def _limit_of(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[4] for line in lines if line.startswith("Max open files")]
    return int(found[0]) if found and found[0].isdigit() else None


# --- the service manager --------------------------------------------------------------------------


def _stop_seconds(unit: str) -> tuple[str, float | None]:
    """How long the service manager lets a stop take, and who says so; '' when nobody does."""
    if "/" in unit:
        if not Path(unit).is_file():
            raise Refused(f"there is no unit file {unit}")
        return unit, of_unit_file(Path(unit))
    name = unit or UNIT
    if "." not in name:
        name += ".service"
    if RUNNING.is_dir():
        asked = _systemctl(name)
        if asked is not None:
            return f"systemctl show {name}", asked
    template = re.sub(r"@.*\.", "@.", name)
    for path in (folder / each for folder in FOLDERS for each in (name, template)):
        if path.is_file():
            return str(path), of_unit_file(path)
    if unit:
        raise Refused(f"there is no unit {unit}; name the file, with a / in its path")
    return "", None


def _systemctl(name: str) -> float | None:
    program = shutil.which("systemctl")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "show", "--property=LoadState,TimeoutStopUSec", name],
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    told = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    return read_span(told.get("TimeoutStopUSec", "")) if told.get("LoadState") == "loaded" else None


def of_unit_file(path: Path) -> float | None:
    """Read the limit of a unit file and its drop-ins; None: what they say cannot be read."""
    said = str(DEFAULT_STOP_SECONDS)
    for each in (path, *sorted(path.with_name(path.name + ".d").glob("*.conf"))):
        section = ""
        for line in each.read_text().splitlines():
            name, _, value = (part.strip() for part in line.partition("="))
            if line.startswith("["):
                section = line.strip()
            elif section == "[Service]" and name in ("TimeoutStopSec", "TimeoutSec"):
                said = value or str(DEFAULT_STOP_SECONDS)
    return read_span(said)


def read_span(text: str) -> float | None:
    """Read a time span of systemd, such as `1min 30s`; infinity is inf, None is none."""
    text = text.strip()
    if text == "infinity":
        return float("inf")
    if not text or _SPAN.sub("", text):
        return None
    found = _SPAN.findall(text)
    if any(unit not in _SPAN_UNITS for _, unit in found):
        return None
    return sum(float(number) * _SPAN_UNITS[unit] for number, unit in found)
