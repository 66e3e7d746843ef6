"""The soft time limit, which raises an exception inside the running handler, as the daemon does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from streamqd.handlers import SoftTimeout

Interrupt = Callable[[BaseException], None]


def check_thread(seconds: float | None, interrupt: Interrupt | None) -> None:
    """Raise RuntimeError if `soft_limit` cannot work, as signals reach only the main thread."""
    here = threading.current_thread() is threading.main_thread()
    if seconds is not None and interrupt is None and not here:
        raise RuntimeError(
            "the time limit of a handler is enforced only in the main thread; run it there, or"
            " pass timeout=None"
        )


@contextlib.contextmanager
def soft_limit(seconds: float | None, interrupt: Interrupt | None) -> Iterator[None]:
    """Interrupt the block with SoftTimeout after `seconds`. None means that there is no limit.

    `interrupt` raises the exception in a coroutine. If it is None, a handler of SIGUSR1 raises the
    exception in the main thread.
    """
    if seconds is None:
        yield
        return
    error = SoftTimeout(f"the handler ran longer than its time limit of {seconds:g} s")
    if interrupt is not None:
        timer = threading.Timer(seconds, interrupt, [error])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
        return
    inside = False

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal inside
        if inside:
            inside = False  # an exception at the start of `finally` would skip the reset there
            raise error

    main = threading.get_ident()
    timer = threading.Timer(seconds, signal.pthread_kill, [main, signal.SIGUSR1])
    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        timer.start()
        try:
            inside = True
            yield
        finally:
            inside = False
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)
