"""An environment for each system, so that none sees another's libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.peers.systems import System

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / ".cache" / "bench"


def prepare(system: System) -> Path | None:
    """Install it when it is not; return its folder of commands, None when it cannot be had."""
    if not system.environment:
        return Path(sys.executable).parent
    return _node(system) if system.node else _python(system)


def version(system: System, folder: Path) -> str:
    """Which version is installed."""
    if system.node:
        text = (folder.parent / "bullmq" / "package.json").read_text()
        return text.partition('"version": "')[2].partition('"')[0]
    name = system.environment or ("streamqd" if system.name.startswith("streamqd") else "redis")
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([folder / "python", "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def _python(system: System) -> Path | None:
    wanted = (HERE / "requirements" / f"{system.environment}.txt").read_text()
    home = CACHE / system.environment
    stamp = home / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        print(f"installing {system.environment} ...", file=sys.stderr)
        pip = [home / "bin" / "pip", "install", "--quiet", "-r"]
        pip.append(HERE / "requirements" / f"{system.environment}.txt")
        if not _runs(pip):
            return None
        stamp.write_text(wanted)
    return home / "bin"


def _node(system: System) -> Path | None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None
    home = CACHE / system.environment
    if not (home / "node_modules" / "bullmq").exists():
        home.mkdir(parents=True, exist_ok=True)
        print(f"installing {system.environment} ...", file=sys.stderr)
        npm = ["npm", "install", "--silent", "--no-save", "--prefix", home, "bullmq@5"]
        if not _runs(npm):
            return None
    # Modules are found from the script's own folder, not from the current one.
    shutil.copy(HERE / "apps" / "bullmq_app.mjs", home)
    return home / "node_modules" / ".bin"


def _runs(command: list[str | Path]) -> bool:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0
