"""The control groups of the kernel, as far as they can be seen from here."""

from __future__ import annotations

import contextlib
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


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


def _says_one(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.read_text().strip() == "1"
    return False
