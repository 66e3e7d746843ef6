"""Whether the kernel has killed a process because memory was short.

A death by SIGKILL does not tell who sent it. The kernel counts its own kills for each control
group; a kill that was counted a moment ago explains such a death.
"""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

from streamqd.cgroups import CONTROL_GROUPS, memory_file
from streamqd.process import Exit

BELIEVED_SECONDS = 5.0  # between the count and the death that it explains
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomMonitor:
    """The kernel's kills in the control group of this process, if they may be read."""

    def __init__(self, path: Path | None = None) -> None:
        """Count from now on. `path` is the file with the kernel's count; found when not given."""
        self._path = path or counter_of(Path("/proc/self/cgroup"))
        self._seen = self._count()
        self._recent: list[float] = []

    def look(self, now: float) -> None:
        """Note what was counted since the last look. `now` is a monotonic time in seconds."""
        count = self._count()
        if count > self._seen or self._recent:
            fresh = [at for at in self._recent if now - at < BELIEVED_SECONDS]
            self._recent = fresh + [now] * (count - self._seen)
        self._seen = count

    def explain(self, exit_: Exit) -> Exit:
        """Return an exit, marked when it was the kernel's choice. Each kill explains one."""
        if exit_.signal != signal.SIGKILL or not self._recent:
            return exit_
        self._recent.pop()
        return exit_._replace(out_of_memory=True)

    def _count(self) -> int:
        if self._path is not None:
            with contextlib.suppress(OSError):
                found = _COUNT.search(self._path.read_text())
                return int(found[1]) if found else 0
        return 0


def counter_of(membership: Path, root: Path = CONTROL_GROUPS) -> Path | None:
    """Return the file in which the kernel counts its kills; None when it cannot be found.

    `membership` is a file as /proc/self/cgroup.
    """
    return memory_file(membership, "memory.events", "memory.oom_control", root)
