"""Measure the CPU seconds and the memory of a process and all its descendants."""

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
    """Let this process adopt processes whose parent exits, so that none of them is lost."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of one process so far, in steps of a hundredth."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
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
    """Return the fields of /proc/PID/stat after the name: state, parent, … (11, 12: CPU ticks)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Cpu:
    """Adds up the CPU seconds of a process tree, including processes that exit in the meantime.

    It takes a sample ten times a second. The CPU time of a process after its last sample is lost.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._began: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Cpu:
        self._sample()
        self._began = dict(self._last)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._sample()

    @property
    def seconds(self) -> float:
        """The CPU seconds since the block started."""
        return sum(self._last.values()) - sum(self._began.values())

    @property
    def total(self) -> float:
        """The CPU seconds since the first process of the tree started."""
        return sum(self._last.values())

    def by_kind(self) -> dict[str, float]:
        """Return the CPU seconds of the block for the driver, Java and the workers."""
        found: dict[str, float] = defaultdict(float)
        for pid, seconds in self._last.items():
            found[_kind(pid, self._root)] += seconds - self._began.get(pid, 0.0)
        return {kind: round(seconds, 2) for kind, seconds in found.items()}

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            self._sample()

    def _sample(self) -> None:
        for pid in tree(self._root):
            with contextlib.suppress(OSError):
                self._last[pid] = read_cpu_seconds(pid)


class Memory:
    """Observes a process tree from a thread. `peak` is the largest PSS of each kind, in MiB."""

    def __init__(self, root: int, interval: float = 0.25) -> None:
        self.peak: dict[str, float] = {}
        self.samples: list[float] = []  # memory of all processes together, MiB
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
