"""Checks of this host: what a daemon of the configuration needs of it."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd import cgroups
from streamqd.admin.diagnosis.declaration import Check, CheckResult, Need, Severity
from streamqd.admin.diagnosis.facts import DiagnosisFacts

FREE_BYTES = 64 << 20
STOP_MARGIN_SECONDS = 5.0  # beyond drain_timeout: killing and releasing what was not finished
DESCRIPTORS_EACH = 2  # that a worker costs the supervisor
DESCRIPTORS_BESIDE = 64
PROCESS_DESCRIPTORS = 32  # that one worker opens, about


def _stop_timeout(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    host, drain = facts.host, facts.settings.daemon.drain_timeout
    if host is None or host.stop_seconds is None:
        return
    needed = drain + STOP_MARGIN_SECONDS
    if host.stop_seconds < needed:
        yield CheckResult(
            f"the service manager kills a stop after {host.stop_seconds:g} s (TimeoutStopSec), and"
            f" daemon.drain_timeout is {drain:g} s: messages that still run are cut off and"
            " handled again",
            f"`systemctl edit streamqd`, write `[Service]` and `TimeoutStopSec={needed:.0f}`; or"
            " lower daemon.drain_timeout",
            evidence={
                "timeout_stop_seconds": host.stop_seconds,
                "drain_timeout_seconds": drain,
                "from": host.unit_source,
            },
        )


def _state_dir(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    host = facts.host
    if host is not None and host.state_dir_problem:
        yield CheckResult(
            f"daemon.state_dir {host.state_dir} cannot be used: {host.state_dir_problem}",
            f"`install -d -m 700 -o USER {host.state_dir}` with the daemon's user, or name another"
            " directory",
            evidence={"state_dir": str(host.state_dir), "problem": host.state_dir_problem},
        )


def _owners(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    host = facts.host
    if host is not None and host.strange_owners:
        yield CheckResult(
            f"{', '.join(host.strange_owners)} belong to another user than {host.state_dir}: the"
            " daemon was once run as another user, and cannot start as its own",
            f"`chown -R --reference={host.state_dir} {' '.join(host.strange_owners)}`",
            evidence={"owners": dict(host.strange_owners)},
        )


def _disk_full(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    host = facts.host
    if host is not None and host.free_bytes is not None and host.free_bytes < FREE_BYTES:
        yield CheckResult(
            f"the disk of daemon.state_dir {host.state_dir} has {host.free_bytes:,} bytes left",
            f"make room (`du -xsh {host.state_dir}/*`), or name a directory on another disk",
            evidence={"state_dir": str(host.state_dir), "free_bytes": host.free_bytes},
        )


def _embedded_disk(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    host = facts.host
    if host is None or host.free_bytes is None or not host.embedded_bytes:
        return
    if host.free_bytes < host.embedded_bytes:
        yield CheckResult(
            f"the embedded server's files take {host.embedded_bytes:,} bytes, and the disk has"
            f" {host.free_bytes:,} left: it needs as much again when it rewrites them",
            f"make room on the disk of {host.state_dir}, bound the topics (`streamqd topic settings"
            " TOPIC retention.max_bytes=…`), or purge dead letters (`streamqd dlq purge TOPIC`)",
            evidence={"files_bytes": host.embedded_bytes, "free_bytes": host.free_bytes},
        )


def _descriptors(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    host = facts.host
    if host is None:
        return
    needed = host.units * DESCRIPTORS_EACH + DESCRIPTORS_BESIDE
    if host.descriptors is not None and host.descriptors < needed:
        yield CheckResult(
            f"{host.descriptors_of} may open {host.descriptors:,} files, and the {host.units:,}"
            f" partitions of the configuration need about {needed:,}",
            f"write `LimitNOFILE={max(65_536, needed)}` into the unit file, or `ulimit -Hn"
            f" {max(65_536, needed)}` before the start; or limit daemon.max_partitions",
            evidence={"limit": host.descriptors, "needed": needed, "units": host.units},
        )
    everybody = host.units * PROCESS_DESCRIPTORS
    if host.descriptors_of_system is not None and host.descriptors_of_system < everybody:
        yield CheckResult(
            f"all processes of this host together may open {host.descriptors_of_system:,} files"
            f" (fs.file-max), and {host.units:,} workers need about {everybody:,}",
            f"`sysctl -w fs.file-max={2 * everybody}`, and the same in /etc/sysctl.d",
            evidence={"file_max": host.descriptors_of_system, "needed": everybody},
        )


def _oom_group(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    if facts.host is not None and facts.host.oom_group:
        group = facts.host.oom_group
        yield CheckResult(*cgroups.fate_of(group), evidence={"memory.oom.group": group})


_NEEDS, _PROBLEM, _WARNING = (Need.HOST,), Severity.PROBLEM, Severity.WARNING
CHECKS = (
    Check(
        "host.stop-timeout",
        _WARNING,
        "TimeoutStopSec is not 5 s longer than drain_timeout.",
        _NEEDS,
        _stop_timeout,
    ),
    Check("host.state-dir", _PROBLEM, "state_dir cannot be written to.", _NEEDS, _state_dir),
    Check(
        "host.state-dir-owner",
        _PROBLEM,
        "The lock or the embedded server's data belong to another user than state_dir.",
        _NEEDS,
        _owners,
    ),
    Check(
        "host.disk-full",
        _PROBLEM,
        "The disk of state_dir has less than 64 MiB left.",
        _NEEDS,
        _disk_full,
    ),
    Check(
        "host.embedded-disk",
        _WARNING,
        "The disk has less room than the embedded server's files take.",
        _NEEDS,
        _embedded_disk,
    ),
    Check(
        "host.descriptors",
        _PROBLEM,
        "Fewer files may be open than the consumers' partitions need.",
        (Need.TOPICS, Need.HOST),
        _descriptors,
    ),
    Check(
        "host.oom-group",
        _WARNING,
        "The kernel kills the whole service when one worker takes too much memory.",
        _NEEDS,
        _oom_group,
    ),
)
