"""Fetch node-redis, a Redis client for JavaScript, into `.cache/interop/` with npm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PACKAGE = "redis@6.3.1"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "interop"
SECONDS = 60.0


class NoNodeError(Exception):
    """Raised if Node.js, npm or the package is not available. The text names the missing part."""


def fetch() -> Path:
    """Install the package if it is missing, and return the folder `node_modules`.

    Raises NoNodeError.
    """
    modules = FOLDER / "node_modules"
    if shutil.which("node") is None:
        raise NoNodeError("there is no node on PATH: install Node.js 20.15 or later")
    if (modules / "redis" / "package.json").exists():
        return modules
    if shutil.which("npm") is None:
        raise NoNodeError("there is no npm on PATH, which fetches node-redis")
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(FOLDER), "--no-audit", "--no-fund", PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NoNodeError(f"npm has not fetched {PACKAGE} within {SECONDS:g} s") from None
    except subprocess.CalledProcessError as error:
        told = (error.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NoNodeError(f"npm cannot fetch {PACKAGE}: {told}") from None
    return modules


if __name__ == "__main__":
    print(fetch())
