"""A worker for coroutines has an event loop, tasks, and reads that overlap with runs."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from streamqd.message import Message
from streamqd.scoreboard import RUNNING, WorkerSlot
from streamqd.worker import ExitCode, assembly
from streamqd.worker.concurrent import ConcurrentExecutor
from streamqd.worker.eventloop import EventLoop, PreciseSelector, new_loop
from tests.contract.harness import Harness
from tests.support.life import Life

SEVERAL = {"concurrency": 4, "order": "none"}


def is_settled(harness: Harness) -> bool:
    return harness.state()["stream"].groups["hits"][1] == {}


# --- tasks that cannot be made --------------------------------------------------------------------

_begun: list[str] = []


async def limit_tasks(message: Message) -> None:
    """Allow only one more task after the first run."""
    _begun.append(message.id)
    if len(_begun) == 1:
        asyncio.get_running_loop().set_task_factory(failing_factory)


def failing_factory(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **named: Any
) -> asyncio.Task[Any]:
    """A task factory that raises before and after it makes a task, and then removes itself."""
    if _refused:
        loop.set_task_factory(None)
        _refused.append(asyncio.Task(work, loop=loop, **named))
    else:
        _refused.append(None)
    raise RuntimeError("no more tasks")


_refused: list[asyncio.Task[Any] | None] = []


@pytest.mark.parametrize(
    "settings",
    [SEVERAL, {**SEVERAL, "timeout": 60.0}, {}, {"timeout": 60.0}],
    ids=["several", "several with a limit", "one by one", "one by one with a limit"],
)
def test_failing_task_factory_fails_only_one_run(
    harness: Harness, life: Life, slot: WorkerSlot, settings: dict[str, Any]
):
    for number in range(1, 13):
        harness.add(f"{number}-0")
    _begun.clear()
    _refused.clear()
    # The first read fetches only one entry, so that the factory is set before the next ones start.
    largest = life.settings.daemon.max_message_bytes
    bounds = {"max_messages": 12, "prefetch_bytes": largest}
    worker = life.worker("t1", handler=f"{__name__}:limit_tasks", **bounds, **settings)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert len(_refused) == 2
    assert len(_begun) == len(set(_begun)) == 10
    assert (slot.counter("failed"), slot.counter("acked"), is_settled(harness)) == (2, 10, True)
    assert bytes(slot.states).count(RUNNING) == 0


# --- timers ---------------------------------------------------------------------------------------


def measure_sleep(loop: EventLoop, seconds: float) -> float:
    """Sleep in a loop and return the elapsed seconds."""
    began = time.monotonic()
    assert loop.wait(lambda: asyncio.sleep(seconds, "slept")) == "slept"
    return time.monotonic() - began


def test_timers_have_sub_millisecond_precision(monkeypatch: pytest.MonkeyPatch):
    """If a wait has less than a millisecond left, the loop uses a timer with a finer resolution."""
    waits: list[float] = []
    select = PreciseSelector.select

    def told(selector: PreciseSelector, timeout: float | None = None) -> Any:
        began = time.monotonic()
        found = select(selector, timeout)
        if timeout and not found:
            waits.append(time.monotonic() - began - timeout)
        return found

    monkeypatch.setattr(PreciseSelector, "select", told)
    loop = EventLoop()
    late = sorted(measure_sleep(loop, 0.0101) - 0.0101 for _ in range(20))
    loop.close()
    print(f"late by {late[10] * 1e3:.2f} ms in the middle")
    # If waits were rounded up, each would take 0.9 ms too long.
    assert min(waits) < 0.0009


def test_loop_with_1100_open_descriptors_waits_as_precisely():
    """A loop with 1,100 open descriptors waits as precisely.

    `select` would fail for descriptors above 1,023, and `epoll` rounds waits up to 1 ms.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with ExitStack() as stack:
            for _ in range(1100):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            loop = EventLoop()
            late = sorted(measure_sleep(loop, 0.0101) - 0.0101 for _ in range(20))
            loop.close()
        assert late[0] >= 0
        assert late[0] < 0.0009, "none waits for whole milliseconds alone"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class OwnLoop(asyncio.SelectorEventLoop):
    """A loop of a class that the handler's module chooses."""


def test_event_loop_of_the_handler_module_is_used(monkeypatch: pytest.MonkeyPatch):
    """The loop is used without a policy of asyncio, because Python 3.16 removes policies."""
    monkeypatch.setattr(asyncio, "new_event_loop", OwnLoop)
    loop = new_loop()
    loop.close()
    assert type(loop) is OwnLoop


# --- reads beside runs ----------------------------------------------------------------------------


async def return_immediately(_message: Message) -> None:
    """A handler that returns immediately."""


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({}, True),
        ({"ack": "each"}, False),
        ({"on_error": "hold-key", "order": "key", "concurrency": 16}, False),
    ],
    ids=["plain", "each acknowledged before the next", "hold-key"],
)
def test_next_read_is_sent_before_held_messages_start(
    harness: Harness,
    life: Life,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    ahead: bool,
):
    """Held messages run while Redis prepares its answer, unless a run must wait for that answer."""
    for number in range(1, 201):
        harness.add(f"{number}-0", "payload", "x", "key", f"k{number}")
    events: list[str] = []

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*given: Any, **named: Any) -> Any:
            events.append(name)
            return function(*given, **named)

        return tell

    worker = life.worker(
        *("t1",),
        handler=f"{__name__}:return_immediately",
        max_messages=200,
        prefetch_max=8,
        prefetch_bytes=1 << 30,
        **{**SEVERAL, **settings},
    )
    fetcher = worker.reader.fetcher
    monkeypatch.setattr(fetcher, "send_round", told("ask ", fetcher.send_round))
    monkeypatch.setattr(fetcher, "receive_round", told("answer ", fetcher.receive_round))
    begin = ConcurrentExecutor._mark_running
    monkeypatch.setattr(
        ConcurrentExecutor,
        "_mark_running",
        lambda runner, entries: told("begin ", begin)(runner, entries) if entries else None,
    )
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert is_settled(harness)
    assert ("ask begin answer" in "".join(events)) is ahead


_retried: list[int] = []
_slots: list[WorkerSlot] = []


async def fail_first(message: Message) -> None:
    """A handler that fails once. A much later run checks if the failure has been settled."""
    if message.id == "1-0":
        raise ValueError
    if message.id == "150-0":
        _retried.append(_slots[-1].counter("retried"))


def test_coroutine_failure_is_settled_before_the_next_read(
    harness: Harness, life: Life, slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
):
    """A failure is settled even if each read fetches so few that another read is always due."""
    # A fast machine finishes before a failure has waited long enough among successes.
    monkeypatch.setattr(assembly, "ACK_DELAY_NS", 0)
    for number in range(1, 201):
        harness.add(f"{number}-0")
    _retried.clear()
    _slots.append(slot)
    worker = life.worker(
        "t1", handler=f"{__name__}:fail_first", max_messages=200, prefetch_max=2, **SEVERAL
    )
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert _retried == [1]
    assert is_settled(harness)
