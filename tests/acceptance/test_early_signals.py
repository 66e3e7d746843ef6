"""Signals take effect while the command is being imported.

This module also tests that garbage collection is enabled after the imports.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The signal arrives when the command already listens for signals, but has not yet imported its
# subcommands.
PROGRAM = """
import os, sys
from streamqd import cli
from streamqd.cli import early
early.record_signals()
assert "streamqd.cli.root" not in sys.modules
os.kill(os.getpid(), int(sys.argv.pop(1)))
cli.main()
"""


def run(number: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(number), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "streamq.toml"
    path.write_text('[daemon]\nstate_dir = "./state"\n')
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_signaled_during_its_imports_exits_0(config: Path, number: int) -> None:
    done = run(number, "-c", config)

    assert done.returncode == 0, done.stderr
    assert "drain.finished" in done.stderr
    assert not (config.parent / "state").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_signaled_during_its_imports_exits(config: Path, number: int) -> None:
    done = run(number, "-c", config, "config", "show")

    assert done.returncode == -number
    assert "Traceback" not in done.stderr


# At exit, this code prints the state of the garbage collector.
COLLECTION = """
import atexit, gc
from streamqd import cli
atexit.register(lambda: print("collects:", gc.isenabled(), "spares:", gc.get_freeze_count() > 0))
cli.main()
"""


@pytest.mark.parametrize("arguments", [[], ["config", "show"]])
def test_garbage_collection_is_enabled_after_the_imports(
    config: Path, arguments: list[str]
) -> None:
    command = [sys.executable, "-c", COLLECTION, "-c", config, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.stdout.splitlines()[-1] == "collects: True spares: True", done.stderr
