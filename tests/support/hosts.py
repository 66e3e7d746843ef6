"""Hosts that can be lost: separate process trees, in which a handler can kill every process.

A host is a pid namespace whose first process is a shell that waits for the daemon. When the daemon
exits, the shell exits too, and the kernel kills all other processes of the host, like a power cut.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.daemon import PAYLOAD_HANDLER, Daemon

VARIABLE = "OUTSIDE"  # the environment variable with the pid namespace of the test
NAMESPACE = "/proc/self/ns/pid"
_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
_INIT = ["sh", "-c", '"$@"; exit $?', "host"]

# `lose SECONDS` kills every process of the host after that time, but never on the host of the test.
CODE = (
    PAYLOAD_HANDLER.read_text()
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
    """Skip the test if this process may not create namespaces."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare in PATH")
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no pid namespaces here: {tried.stderr.strip()}")


def settle(daemon: Daemon) -> Daemon:
    """Make the daemon run on its own host from now on."""
    daemon.within = [*_UNSHARE, *_INIT]
    daemon.environment = {VARIABLE: str(Path(NAMESPACE).readlink())}
    return daemon
