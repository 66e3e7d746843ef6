"""A Python with Django 6, which has `django.tasks` and needs Python 3.12 or newer.

The interpreter that runs the tests is used if it has one. Otherwise, an environment is created once
in `.cache/django` with another Python from PATH or pyenv, by `python -m
tests.support.django_environment`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import optional

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "django"
NEEDS = ["-e", f"{ROOT}[django,embedded,outbox]", "django>=6.0"]
VERSIONS = ("3.14", "3.13", "3.12")


@cache
def interpreter() -> Path:
    """Return a Python that has Django 6 and this tree of streamqd. Skip the test if there is none.

    With STREAMQD_TEST_ALL=1, it is an error if an environment cannot be created.
    """
    if int(importlib.metadata.version("django").partition(".")[0]) >= 6:
        return Path(sys.executable)
    base = next(_candidates(), None)
    if base is None:
        pytest.skip("Django 6 needs Python 3.12 or newer, and there is none in PATH or in pyenv")
    try:
        return _made(base)
    except subprocess.CalledProcessError as error:
        if optional.all_required():
            raise
        pytest.skip(f"Django 6 could not be installed for {base}: {error.output[-200:]!r}")


def _candidates() -> Iterator[str]:
    """Return the interpreters that can create an environment, the newest first."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        found = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
        for path in filter(None, found):
            code = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
            if subprocess.run([path, "-c", code], check=False, capture_output=True).returncode == 0:
                yield str(path)


def _made(base: str) -> Path:
    """Return the interpreter of the environment. Recreate it if the packages have changed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    needed = f"{base} {NEEDS} {(ROOT / 'pyproject.toml').read_text()}"
    stamp, digest = FOLDER / "made-of", hashlib.sha256(needed.encode()).hexdigest()
    environment = FOLDER / "venv"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes wait for the environment here
        if not stamp.exists() or stamp.read_text() != digest:
            stamp.unlink(missing_ok=True)
            _run(base, "-m", "venv", "--clear", str(environment))
            _run(str(environment / "bin" / "python"), "-m", "pip", "install", "-q", *NEEDS)
            stamp.write_text(digest)
    return environment / "bin" / "python"


def _run(*command: str) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run(
            command, cwd=elsewhere, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


if __name__ == "__main__":
    print(interpreter())
