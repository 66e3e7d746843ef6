"""What processes cost: CPU seconds and memory of one process and all that came from it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import defaultdict
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have processes whose parent ends become children of this one, so that none gets lost."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def cpu_of(pid: int) -> float:
    """CPU seconds of one process so far, in steps of a hundredth."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def tree(root: int) -> list[int]:
    """A process and all that came from it."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children[int(_stat(int(entry.name))[1])].append(int(entry.name))
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, … (11 and 12: CPU ticks)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Cpu:
    """Adds up the CPU seconds of a tree of processes, also of those that end meanwhile.

    Looks ten times a second: what a process did after the last look at it is lost.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._began: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Cpu:
        self._look()
        self._began = dict(self._last)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()

    @property
    def seconds(self) -> float:
        """CPU seconds since the beginning."""
        return sum(self._last.values()) - sum(self._began.values())

    @property
    def total(self) -> float:
        """CPU seconds since the tree's first process began."""
        return sum(self._last.values())

    def by_kind(self) -> dict[str, float]:
        """The same, of the driver, Java and the workers."""
        found: dict[str, float] = defaultdict(float)
        for pid, seconds in self._last.items():
            found[_kind(pid, self._root)] += seconds - self._began.get(pid, 0.0)
        return {kind: round(seconds, 2) for kind, seconds in found.items()}

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            self._look()

    def _look(self) -> None:
        for pid in tree(self._root):
            with contextlib.suppress(OSError):
                self._last[pid] = cpu_of(pid)


class Memory:
    """Watches a tree of processes from a thread; `peak` is the largest PSS of each kind, in MiB."""

    def __init__(self, root: int, interval: float = 0.25) -> None:
        self.peak: dict[str, float] = {}
        self.samples: list[float] = []  # of all together, MiB
        self._root = root
        self._interval = interval
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._interval):
            found: dict[str, float] = defaultdict(float)
            for pid in tree(self._root):
                size = _pss(pid)
                found["all"] += size
                found[_kind(pid, self._root)] += size
            for kind, size in found.items():
                self.peak[kind] = max(self.peak.get(kind, 0.0), round(size, 1))
            self.samples.append(round(found["all"], 1))


def _kind(pid: int, root: int) -> str:
    if pid == root:
        return "driver"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "workers"
    return "java" if command[0].endswith(b"java") else "workers"


def _pss(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0
