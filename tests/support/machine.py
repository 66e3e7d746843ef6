"""The machine on which figures were measured."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


def machine() -> dict[str, Any]:
    """Describe the machine and its software. `commit` is '' outside of a clone."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "redis_py": metadata.version("redis"),
        "hiredis": metadata.version("hiredis"),
        "commit": _commit(),
    }


def processor() -> str:
    """Return the CPU model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return ""
