"""The control groups of the kernel, as they can be seen from here."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class Fate(NamedTuple):
    """What it means for a daemon that its group is killed as a whole, and what to do about it."""

    what: str
    mend: str


def memory_file(
    membership: Path, name: str, older: str = "", root: Path = CONTROL_GROUPS
) -> Path | None:
    """Return a file of the group that counts a process's memory; None when it cannot be found.

    `membership` is a file as /proc/self/cgroup. `older` is the file's name where each resource has
    groups of its own, '' for what does not exist there. In a container the path that is named may
    begin above what can be seen.
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


def killed_as_one(membership: Path, root: Path = CONTROL_GROUPS) -> Path | None:
    """Return the largest group around a process that the kernel kills as a whole; None for none."""
    own = memory_file(membership, "memory.oom.group", root=root)
    if own is None:
        return None
    around = [each for each in own.parents if each == root or root in each.parents]
    found = [each for each in around if _says_one(each / "memory.oom.group")]
    return found[-1] if found else None


def fate_of(group: Path | str) -> Fate:
    """Say what it means that the kernel kills a group as a whole."""
    return Fate(
        f"when memory is short the kernel kills all processes of {group} at once"
        " (memory.oom.group): the supervisor dies with the one worker that took it, every partition"
        " waits one daemon.lease_ttl, and nobody can tell which message it was",
        "under systemd write `OOMPolicy=continue` into the unit file; under Kubernetes set"
        " `singleProcessOOMKill: true` in the kubelet's configuration; elsewhere"
        f" `echo 0 > {group}/memory.oom.group`",
    )


def warnings() -> list[str]:
    """What is unwise about the groups around this process, in sentences that say what to do."""
    group = killed_as_one(_OWN)
    return [] if group is None else ["; ".join(fate_of(group))]


def _says_one(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.read_text().strip() == "1"
    return False
