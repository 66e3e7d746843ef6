"""Handle SIGTERM and SIGINT while the rest of the command is still being imported.

The imports take some tenths of a second. During this time, the daemon has nothing to drain, so it
exits with code 0 on a signal, just as it does later. A command, however, is terminated by the
signal, like any other program. The garbage collector is stopped until the imports are done.
"""

from __future__ import annotations

import gc
import os
import signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: list[int] = []


def record_signals() -> None:
    """Start recording signals, and stop the garbage collector.

    This function is called before anything else, which is why this module imports so little. The
    garbage collector would spend a fifth of the import time on modules and classes that exist as
    long as the process.
    """
    gc.disable()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)


def resume_collection() -> None:
    """Restart the garbage collector after the imports, but exempt the imported objects from it.

    Does nothing if `record_signals` has not stopped the garbage collector.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def stopped() -> bool:
    """Return True if a signal has already asked the daemon to stop.

    The daemon checks this after it has installed its own signal handlers.
    """
    return bool(_received)


def restore_signals() -> None:
    """Restore the default handlers of the signals, and send the first recorded signal again.

    Commands call this function, because a signal should terminate them as usual.
    """
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _received:
        signal.signal(_received[0], signal.SIG_DFL)
        os.kill(os.getpid(), _received[0])


def _note(number: int, _frame: object) -> None:
    _received.append(number)
