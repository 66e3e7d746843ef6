"""A separate environment for each system, so that none of them sees another one's libraries.

requirements/NAME.in lists the required packages, and requirements/NAME.txt lists every installed
package with its version. `python -m tests.benchmarks.peers.environments NAME ...` rewrites the
second file from the first, with the newest available versions.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.systems import SYSTEMS, System
from tests.support import fetch_server

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / ".cache" / "bench"
OWN = ("streamqd", "redis", "hiredis", "psutil")  # imported by a worker of this repository
TOOLS = {"pip", "setuptools", "wheel"}  # these come with every new environment and are ignored


def prepare(system: System) -> Path | None:
    """Install a system if needed. Return its folder of commands, or None if it is not available.

    A system that needs its own server is not available if that server is missing.
    """
    if system.server and not _can_serve(system.server):
        return None
    if not system.environment:
        return Path(sys.executable).parent
    home = CACHE / system.environment
    pinned = _requirements_path(system.environment, "txt")
    stamp = home / "installed.txt"
    if not stamp.exists() or stamp.read_text() != pinned.read_text():
        print(f"installing {system.environment} ...", file=sys.stderr)
        if not _install(home, _read_requirements(pinned), node=system.node):
            return None
        shutil.copy(pinned, stamp)
    if not system.node:
        return home / "bin"
    # Modules are found from the script's own folder, not from the current one.
    shutil.copy(HERE / "apps" / system.app, home)
    return home / "node_modules" / ".bin"


def packages(system: System, folder: Path) -> dict[str, str]:
    """Return the versions that are installed in an environment, by package name."""
    if system.node:
        return _modules(folder.parents[1])
    code = (
        "import json; from importlib.metadata import distributions as d;"
        "print(json.dumps({each.name: each.version for each in d()}))"
    )
    done = subprocess.run([folder / "python", "-c", code], capture_output=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    wanted = set(found) - TOOLS if system.environment else OWN
    return {name: found[name] for name in sorted(wanted, key=str.lower)}


def versions(system: System, folder: Path, installed: dict[str, str]) -> dict[str, Any]:
    """Return the versions of a system and of its client libraries for Redis.

    If a library is compiled into the system's wheel, its version is in the wheel's list of parts.
    """
    parts: dict[str, str] = {}
    lists = f"lib/*/site-packages/{system.package}-*.dist-info/sboms/*.json"
    for path in folder.parent.glob(lists):
        found = json.loads(path.read_text())["components"]
        parts |= {each["name"]: each["version"] for each in found}
    known = parts | installed
    return {
        "version": installed[system.package],
        "package": system.package,
        "clients": {name: known[name] for name in system.clients},
    }


def rewrite_requirements(name: str) -> None:
    """Rewrite requirements/NAME.txt from a new environment that is made from NAME.in."""
    system = next(each for each in SYSTEMS if each.environment == name)
    home = CACHE / name
    if not _install(home, _read_requirements(_requirements_path(name, "in")), node=system.node):
        raise SystemExit(f"{name} cannot be installed here: see above why")
    folder = home / "node_modules" / ".bin" if system.node else home / "bin"
    equals = "@" if system.node else "=="
    found = packages(system, folder).items()
    lines = [f"{each}{equals}{version}\n" for each, version in found if each != "node"]
    _requirements_path(name, "txt").write_text("".join(lines))
    shutil.copy(_requirements_path(name, "txt"), home / "installed.txt")


def _requirements_path(name: str, kind: str) -> Path:
    return HERE / "requirements" / f"{name}.{kind}"


def _read_requirements(path: Path) -> list[str]:
    return path.read_text().split()


def _can_serve(name: str) -> bool:
    try:
        fetch_server.fetch(name)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the server {name} is not available: {error}", file=sys.stderr)
        return False
    return True


def _install(home: Path, wanted: Iterable[str], *, node: bool) -> bool:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if not node:
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        return _succeeds([home / "bin" / "pip", "install", "--quiet", *wanted])
    if shutil.which("node") is None or shutil.which("npm") is None:
        print("Node and npm are not installed", file=sys.stderr)
        return False
    return _succeeds(["npm", "install", "--silent", "--no-save", "--prefix", home, *wanted])


def _modules(home: Path) -> dict[str, str]:
    lock: dict[str, Any] = json.loads((home / "node_modules" / ".package-lock.json").read_text())
    found = {
        path.rpartition("node_modules/")[2]: each["version"]
        for path, each in lock["packages"].items()
        if "cpu" not in each  # packages for one type of CPU come with the package that needs them
    }
    done = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    return {"node": done.stdout.strip().removeprefix("v"), **found}


def _succeeds(command: Sequence[str | Path]) -> bool:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    for each in sys.argv[1:]:
        rewrite_requirements(each)
