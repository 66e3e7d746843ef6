"""The work of every handler in the benchmark, which counts itself and records its delay.

Each system imports this module in its own environment, so it uses only the standard library.
BENCH_TALLY names a file of 4,096 counters of 8 bytes, one per process, which the harness adds up. A
payload that starts with digits contains its send time (CLOCK_MONOTONIC, ns). Its delay goes to
BENCH_LATE, in 8 bytes.

If BENCH_RUNS is set, the digits are the number of the job instead. Each run is recorded in that
file, and the first run of the job BENCH_VICTIM kills its own process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator

SLOTS = 4096

with open(os.environ["BENCH_TALLY"], "r+b") as _file:  # noqa: PTH123 - a slim import
    _cells = memoryview(mmap.mmap(_file.fileno(), SLOTS * 8)).cast("Q")
_late = os.open(os.environ["BENCH_LATE"], os.O_WRONLY | os.O_APPEND)
# Adding takes two steps of the interpreter. Only handlers in threads need the lock.
_guard: contextlib.AbstractContextManager[object] | None = None
if os.environ.get("BENCH_THREADS"):
    _guard = threading.Lock()
_slot = os.getpid() % SLOTS
_runs = os.environ.get("BENCH_RUNS", "")
if _runs:
    _noted = os.open(_runs, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _forked() -> None:
    global _slot
    _slot = os.getpid() % SLOTS


os.register_at_fork(after_in_child=_forked)


def done(payload: str | bytes, count: int = 1) -> None:
    """Count `count` handled jobs. The first of them carries `payload`."""
    if _guard is None:
        _cells[_slot] += count
    else:
        with _guard:
            _cells[_slot] += count
    if payload[0] not in ("x", 120):
        _note(int(payload[:20]))


def done_all(count: int, payloads: Iterator[str | bytes]) -> None:
    """Count the jobs of a batch."""
    if not _runs:
        done(next(payloads), count)
        return
    for each in payloads:
        done(each)


def _note(number: int) -> None:
    now = time.monotonic_ns()
    if not _runs:
        os.write(_late, struct.pack("=q", now - number))
        return
    if number == int(os.environ["BENCH_VICTIM"]) and _is_first(now):
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(_noted, struct.pack("=qq", number, now))


def _is_first(now: int) -> bool:
    try:
        mark = os.open(f"{_runs}.killed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    os.write(mark, struct.pack("=q", now))
    return True
