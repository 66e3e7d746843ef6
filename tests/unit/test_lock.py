"""The lock file pins every dependency of the daemon to an allowed version and its hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
HASHES = r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
PINNED = re.compile(rf"^([a-z0-9-]+)==(\S+) \\\n({HASHES})", re.MULTILINE)


def test_lock_file_has_every_dependency_in_range() -> None:
    text = (ROOT / "etc" / "requirements.lock").read_text()
    locked = {name: version for name, version, _ in PINNED.findall(text)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    for each in map(Requirement, project["dependencies"]):
        assert each.specifier.contains(locked[canonicalize_name(each.name)]), each.name
    assert "hiredis" in locked


def test_lock_file_contains_only_pinned_packages() -> None:
    text = (ROOT / "etc" / "requirements.lock").read_text()
    rest = [line for line in PINNED.sub("", text).splitlines() if line and not line.startswith("#")]
    assert rest == []
