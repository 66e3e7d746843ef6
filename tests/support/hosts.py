"""Hosts that can be lost: process trees of their own, in which a handler can kill everything.

A host is a pid namespace. Its first process is a shell that waits for the daemon; when that is gone
the shell ends, and the kernel kills whatever else lives there, as a power cut does.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.daemon import OBEDIENT, Daemon

VARIABLE = "OUTSIDE"  # the pid namespace of the test, in the environment
NAMESPACE = "/proc/self/ns/pid"
_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
_INIT = ["sh", "-c", '"$@"; exit $?', "host"]

# `lose SECONDS` ends, after that, every process of the host, unless that is the host of the test.
CODE = (
    OBEDIENT.read_text()
    + f"""

def _lose(_message: Message, seconds: str = "0") -> None:
    time.sleep(float(seconds))
    assert os.readlink("{NAMESPACE}") != os.environ["{VARIABLE}"], "not on a host of its own"
    os.kill(-1, signal.SIGKILL)
    signal.pause()  # whoever calls that is spared, until its parent is gone


_WORDS["lose"] = _lose
"""
)


def need_hosts() -> None:
    """Skip the test where this process may not make namespaces."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare in PATH")
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no pid namespaces here: {tried.stderr.strip()}")


def settle(daemon: Daemon) -> Daemon:
    """Let the daemon live on a host of its own from now on."""
    daemon.within = [*_UNSHARE, *_INIT]
    daemon.environment = {VARIABLE: str(Path(NAMESPACE).readlink())}
    return daemon
