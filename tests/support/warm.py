"""Run all `streamqd` commands of a page in one process, so that Spark starts only once.

`Warm` puts a program named `streamqd` first on PATH. The program passes its streams, its directory,
its arguments and Ctrl-C to that process, and exits with the same exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.spark_process import ROOT, family

PROGRAM = """#!{python} -ES
import os, signal, socket, sys

with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    said = "\\0".join([os.getcwd(), *sys.argv[1:]])
    signal.signal(signal.SIGINT, lambda *_: os.kill({pid}, signal.SIGINT))
    socket.send_fds(line, [said.encode()], [0, 1, 2])
    sys.exit((line.recv(1) or b"\\1")[0])
"""


@contextlib.contextmanager
def warm(folder: Path) -> Iterator[None]:
    """Put a program `streamqd` into a folder. At the end, kill the process that serves it."""
    address = str(folder / "warm.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        serving = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(listener.fileno())],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    program = folder / "streamqd"
    program.write_text(PROGRAM.format(python=sys.executable, address=address, pid=serving.pid))
    program.chmod(0o755)
    try:
        yield
    finally:
        for each in family(serving.pid):
            each.kill()
        serving.wait()


def _serve(listener: socket.socket) -> None:
    from streamqd.cli.engine import Engine

    Engine.stop = lambda _: None  # type: ignore[method-assign]
    Engine("warm", None, (), quiet=True, verbose=False).light()
    own = [os.dup(number) for number in range(3)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        caller = None
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C arrived while no command was running
            caller, _ = listener.accept()
        if caller is None:
            continue
        with caller:
            said, streams, _, _ = socket.recv_fds(caller, 1 << 16, 3)
            _take(streams)
            folder, *words = said.decode().split("\0")
            os.chdir(folder)
            code = _run(words)
            _take([os.dup(number) for number in own])
            caller.send(bytes([code]))


def _take(streams: Sequence[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def _run(words: list[str]) -> int:
    from streamqd.cli import cli

    try:
        cli.main(words, prog_name="streamqd")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
