"""If a lease expires while a worker waits for Redis, no run starts before the lease is renewed.

Settling between two messages takes as long as the server needs. Another owner may have the
partition by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from streamqd.message import Message
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from tests.contract.harness import Harness
from tests.support import life as lives
from tests.support.life import NEVER, Life
from tests.support.proxy import Fault, FaultProxy

LONG_AGO = 1  # nanoseconds since the machine was started


def handle_batch(messages: list[Message]) -> None:
    """A batch handler that does the same as `handle` of a life."""
    for message in messages:
        lives.handle(message)


@pytest.mark.fault("F8", "F9", "F11")
@pytest.mark.parametrize(
    "settings",
    [{}, {"handler": f"{__name__}:handle_batch", "batch": 1}],
    ids=["one by one", "in batches"],
)
def test_lease_expiring_during_a_slow_settle_delays_runs(
    link: Connection,
    keys: Any,
    proxy: FaultProxy,
    slot: WorkerSlot,
    new_life: Callable[[str], Life],
    settings: dict[str, Any],
):
    harness = Harness(link, keys)
    harness.groups()
    harness.own("t1")
    begun: list[str] = []
    looks = threading.Event()
    life = new_life(proxy.url)
    worker = life.worker("t1", max_messages=2, **settings)
    for number in (1, 2):
        harness.add(f"{number}-0")
    late = proxy.arm(Fault.HOLD_REPLY, wanted=lambda words: b"1-0" in words[-1])

    def work(message: Message) -> None:
        begun.append(message.id)
        worker.settler.since_ns = LONG_AGO  # as if a long run had to be settled before the next one

    def await_trust() -> int:
        looks.set()
        return found()

    found, worker.channel.await_trust = worker.channel.await_trust, await_trust  # type: ignore[method-assign]

    def slow() -> None:
        late.wait()
        slot.trusted_until_ns = LONG_AGO
        late.release()
        looks.wait(5)
        too_soon.extend(begun)
        slot.trusted_until_ns = NEVER

    too_soon: list[str] = []
    helper = threading.Thread(target=slow)
    helper.start()
    life.run(worker, work)
    helper.join()
    assert too_soon == ["1-0"]
    assert begun == ["1-0", "2-0"]
