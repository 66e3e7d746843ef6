"""The kernel's control groups to which this process belongs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class GroupKillRisk(NamedTuple):
    """The effect on a daemon if the kernel kills its control group as a whole, and the remedy."""

    text: str
    fix: str


def memory_file(
    membership: Path, name: str, older: str = "", root: Path = CONTROL_GROUPS
) -> Path | None:
    """Return a file of the group that counts a process's memory, or None if it is not found.

    `membership` is the file that lists the process's groups, such as /proc/self/cgroup. `older` is
    the name of the wanted file in version 1 of control groups, or '' if version 1 does not have it.
    In a container, the group's path may start above the visible directories, so the search also
    tries the path without its first parts.
    """
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, wanted = (root / "memory", older) if controllers else (root, name)
            parts = Path(group).parts[1:]
            for start in range(len(parts) + 1) if wanted else ():
                path = folder.joinpath(*parts[start:], wanted)
                if path.exists():
                    return path
    return None


def find_oom_group(membership: Path, root: Path = CONTROL_GROUPS) -> Path | None:
    """Return the outermost of a process's groups that the kernel kills as a whole, or None."""
    own = memory_file(membership, "memory.oom.group", root=root)
    if own is None:
        return None
    around = [each for each in own.parents if each == root or root in each.parents]
    found = [each for each in around if _is_oom_group(each / "memory.oom.group")]
    return found[-1] if found else None


def group_kill_risk(group: Path | str) -> GroupKillRisk:
    """Return the effect if the kernel kills this group as a whole, and the remedy."""
    return GroupKillRisk(
        f"when memory is short the kernel kills all processes of {group} together"
        " (memory.oom.group): one worker that uses too much takes down the supervisor, every"
        " partition waits one daemon.lease_ttl, and the message that caused it is unknown",
        "under systemd write `OOMPolicy=continue` into the unit file, under Kubernetes set"
        " `singleProcessOOMKill: true` in the kubelet's configuration, elsewhere `echo 0 >"
        f" {group}/memory.oom.group`",
    )


def warnings() -> list[str]:
    """Return the risks of this process's control groups, each with its remedy."""
    group = find_oom_group(_OWN)
    return [] if group is None else ["; ".join(group_kill_risk(group))]


def _is_oom_group(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.read_text().strip() == "1"
    return False
