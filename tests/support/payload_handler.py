"""A handler that does what the payload says, and keeps the ledger. A `Daemon` copies it.

A payload is a word and its arguments: `ok`, `sleep 0.01`, `fail`, `dead WORDS`, `exit 9`, `segv`,
`kill`, `hold` (forever in C, holding the interpreter), `await FILE`, `leak 1000000`, `spawn` and
`fork` (a process that stays; if a FILE is given, it waits for that file).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from itertools import repeat
from pathlib import Path

from streamqd import Dead, Message
from tests.support.ledger import Ledger

VERSION = "1"

ledger = Ledger.from_environment(VERSION)
kept: list[bytearray] = []


def obey(message: Message) -> None:
    """Do what the payload says."""
    with ledger.run(message):
        word, *arguments = message.text().split()
        _WORDS[word](message, *arguments)


def _ok(_message: Message) -> None:
    pass


def _sleep(_message: Message, seconds: str) -> None:
    time.sleep(float(seconds))


def _fail(message: Message) -> None:
    raise ValueError(f"told to fail, attempt {message.attempt}")


def _dead(_message: Message, *words: str) -> None:
    raise Dead(" ".join(("told to be dead", *words)))


def _exit(_message: Message, code: str) -> None:
    os._exit(int(code))


def _segv(_message: Message) -> None:
    # Without this, the interpreter's fault handler would first print the stack of every thread.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)


def _kill(_message: Message) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hold(_message: Message) -> None:
    # This call never returns from C, so no signal handler and no other thread of the process runs.
    deque(repeat(None), maxlen=0)


def _await(_message: Message, path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.002)


def _leak(_message: Message, size: str) -> None:
    kept.append(bytearray(os.urandom(4096) * (int(size) // 4096)))
    time.sleep(0.02)


def _spawn(message: Message, path: str = "") -> None:
    ledger.note(message, str(subprocess.Popen(["sleep", "600"]).pid))
    if path:
        _await(message, path)


def _fork(message: Message, path: str = "") -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    ledger.note(message, str(pid))
    if path:
        _await(message, path)


_WORDS = {
    "ok": _ok,
    "sleep": _sleep,
    "fail": _fail,
    "dead": _dead,
    "exit": _exit,
    "segv": _segv,
    "kill": _kill,
    "hold": _hold,
    "await": _await,
    "leak": _leak,
    "spawn": _spawn,
    "fork": _fork,
}
