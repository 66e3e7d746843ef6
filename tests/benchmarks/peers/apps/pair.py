"""Two processes of a bare loop, which exit together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait


def run(work: Callable[[str], None], streams: Sequence[str]) -> None:
    """Run one process per stream, until one of the processes exits."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(stream,)) for stream in streams]
    for worker in workers:
        worker.start()
    wait([worker.sentinel for worker in workers])
    for worker in workers:
        worker.kill()
