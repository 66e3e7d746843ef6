"""A user's type checker, which runs in strict mode on the user's modules."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_with_errors(folder: Path, modules: Mapping[str, str]) -> dict[str, set[int]]:
    """Check modules (name -> code), of which one is wrong. Return the lines of each with errors."""
    for name, code in modules.items():
        (folder / name).write_text(code)
    # The cache is separate, because the project's own runs have other options.
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *modules],
        cwd=folder, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    print(ended.stdout)
    found: dict[str, set[int]] = {}
    for file, line in re.findall(r"^(.+?):(\d+): error:", ended.stdout, re.MULTILINE):
        found.setdefault(file, set()).add(int(line))
    return found
