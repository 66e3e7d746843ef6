"""Handle TERM and INT while the command is still being imported, for some tenths of a second.

At that point, the daemon has nothing to drain, so it exits with code 0, as it does after the start.
A command is terminated by the signal, like any other program. The garbage collector waits until the
imports are done.
"""

from __future__ import annotations

import gc
import os
import signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: list[int] = []


def record_signals() -> None:
    """Record signals from now on. Called first, which is why this module imports little.

    Stops the garbage collector, which would spend a fifth of the time of the imports on modules and
    classes that live as long as the process.
    """
    gc.disable()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)


def resume_collection() -> None:
    """Start the garbage collector again, without the imported objects. Called after the imports.

    Does nothing if `record_signals` has not stopped it.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def stopped() -> bool:
    """Return True if a signal already asked the daemon to stop. Called when it takes over."""
    return bool(_received)


def restore_signals() -> None:
    """Restore the default effect of the signals, and repeat a recorded one. For commands."""
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _received:
        signal.signal(_received[0], signal.SIG_DFL)
        os.kill(os.getpid(), _received[0])


def _note(number: int, _frame: object) -> None:
    _received.append(number)
