"""TERM and INT while the command is still being imported, which takes some tenths of a second.

A daemon that gets one then has nothing to drain: it ends with 0, as it would a moment later.
A command ends by the signal, as programs do.
"""

from __future__ import annotations

import os
import signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_came: list[int] = []


def listen() -> None:
    """Remember what comes from now on. Called first of all: this module imports little."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)


def stopped() -> bool:
    """Whether the daemon, which takes over the signals now, shall stop already."""
    return bool(_came)


def give_back() -> None:
    """Let signals do to a command what they do to any program; first the one that has come."""
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _came:
        signal.signal(_came[0], signal.SIG_DFL)
        os.kill(os.getpid(), _came[0])


def _note(number: int, _frame: object) -> None:
    _came.append(number)
