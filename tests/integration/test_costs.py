"""The cost of messages for Redis, in counts that do not depend on the machine.

Every figure is in docs/internals/counted-costs.md, next to its arithmetic. Timers that would send
earlier on a slow machine are disabled, so that the counts depend only on the number of messages.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from array import array
from collections import Counter

import pytest

from streamqd import AsyncProducer, BufferedProducer, Dead, Producer, config
from streamqd.housekeeper.script_loader import ScriptLoader
from streamqd.message import Message
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from streamqd.worker import turns
from tests.contract.harness import Harness
from tests.support import users
from tests.support.costs import (
    FEW,
    MANY,
    Cost,
    Meter,
    Page,
    seed_backlog,
    seed_pending,
    seed_undue_entries,
)
from tests.support.handling import BATCH, FIRST, FULL, PAGE, READS, RECOVERED, Handling, Seed
from tests.support.life import Life, Work
from tests.support.servers import Server

CHUNK = 512  # messages in one transaction of a producer

pytestmark = pytest.mark.usefixtures("no_clock")


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


def fail(_message: Message) -> None:
    raise ValueError("no")


def dead_letter(_message: Message) -> None:
    raise Dead("no")


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture
def handling(harness: Harness, life: Life, meter: Meter) -> Handling:
    return Handling(harness, life, meter)


def test_backlog_costs_one_round_trip_per_full_batch(
    handling: Handling, harness: Harness, page: Page
) -> None:
    def seed(count: int) -> None:
        seed_backlog(harness, count)

    cost = handling.measure_full_batches(seed=seed)
    rounds = FULL // BATCH
    # One round trip acknowledges the last batch and reads the next one behind the fence: MULTI XACK
    # XREADGROUP EXEC WATCH HGET.
    each = ("multi", "xack", "xreadgroup", "exec", "watch", "hget")
    assert cost == Cost(Counter(dict.fromkeys(each, rounds)), rounds)
    page.check_cost("Messages of a backlog", cost, assignments=FULL / 1000, per="1,000 messages")

    first = handling(FIRST, seed=seed)
    # At the start, the connection logs in and gets its name, the worker reads the clock, recovers
    # pending entries and watches the fence. At the end, two scripts acknowledge the last read.
    assert first.trips == 4 + len(READS) + BATCH // PAGE
    assert first.scripts == 1 + BATCH // PAGE
    page.check_cost("A worker's first 1,020 messages", first, per="worker")


@pytest.mark.parametrize("group", ["backlog", "others"])
def test_handling_cost_is_independent_of_stored_data(
    handling: Handling, harness: Harness, group: str
) -> None:
    def seeded(around: int) -> Seed:
        def seed(count: int) -> None:
            if group == "others":
                seed_undue_entries(harness, around)
                seed_pending(harness, around, "someone")
                around_here = 0
            else:
                around_here = around
            seed_backlog(harness, count + around_here)

        return seed

    handling(FIRST, seed=seeded(FEW))
    assert handling(FIRST, seed=seeded(FEW)) == handling(FIRST, seed=seeded(MANY))


def test_recovery_costs_one_call_per_page(handling: Handling, harness: Harness, page: Page) -> None:
    cost = handling.measure_full_batches(seed=lambda count: seed_pending(harness, count))
    # One script lists a page, and another one acknowledges it.
    pages = FULL // RECOVERED
    assert (cost.trips, cost.scripts) == (2 * pages, 2 * pages)
    page.check_cost(
        "Messages pending at a takeover", cost, assignments=FULL / 1000, per="1,000 messages"
    )


@pytest.mark.parametrize(
    ("work", "what"),
    [(fail, "Messages that fail"), (dead_letter, "Messages that are dead-lettered")],
)
def test_verdicts_of_a_batch_are_settled_together(
    handling: Handling, harness: Harness, page: Page, work: Work, what: str
) -> None:
    cost = handling.measure_full_batches(work, seed=lambda count: seed_backlog(harness, count))
    # One round trip reads a batch, and another one settles it with scripts of 128 entries each.
    rounds = FULL // BATCH
    assert cost.trips == 2 * rounds
    assert cost.scripts == FULL // PAGE
    sent = cost.sent
    assert {sent[name] for name in ("multi", "xreadgroup", "exec", "watch")} == {rounds}
    # Entries that are neighbors in the stream are looked up together.
    assert {sent[name] for name in ("xpending", "xrange")} == {FULL // PAGE}
    page.check_cost(what, cost, assignments=FULL / 1000, per="1,000 messages")


def test_failed_messages_are_looked_up_one_by_one(handling: Handling, harness: Harness) -> None:
    """A worker looks up failed messages one by one, because each of them may be large."""
    runs_so_far = 0

    def fail_every_other(_message: Message) -> None:
        nonlocal runs_so_far
        runs_so_far += 1
        if runs_so_far % 2:
            raise ValueError("no")

    cost = handling.measure_full_batches(
        fail_every_other, seed=lambda count: seed_backlog(harness, count)
    )
    assert {cost.sent[name] for name in ("xpending", "xrange")} == {FULL // 2}


def test_idle_worker_costs_six_commands_for_each_long_poll(
    harness: Harness, life: Life, meter: Meter, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "BLOCK_SECONDS", 0.001)
    harness.pending()
    harness.own("t1")
    one = life.worker("t1")
    one._attach()
    with meter.measuring() as cost:
        for _ in range(10):
            one._start_poll()
            while (answer := one._await_poll()) is None:
                pass
            assert not answer.main
    each = ("xread", "multi", "xreadgroup", "exec", "watch", "hget")
    assert cost == Cost(Counter(dict.fromkeys(each, 10)), 10)
    page.check_cost("An idle worker, every 15 s", cost, assignments=10, per="long poll")
    with meter.measuring() as cost:
        assert not one.settler.pending_differs(kept=0)
    assert cost == Cost(Counter({"xpending": 2}), 1)
    page.check_cost("An idle worker, every 30 s", cost, per="long poll")
    one.link.close()


def test_message_allocations_are_reported(
    harness: Harness, life: Life, handling: Handling, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    held = array("Q")

    def look(_message: Message) -> None:
        if not held:
            gc.collect()  # so that allocations of the start are not counted for a message
        held.append(sys.getallocatedblocks())

    handling(FIRST + FULL, look, lambda count: seed_backlog(harness, count))
    full = held[FIRST:]
    starts, ends = full[::BATCH], full[BATCH - 1 :: BATCH]
    in_flight = (starts[-1] - held[0]) / BATCH
    kept = max(0.0, (ends[-1] - ends[0]) / (FULL - BATCH))
    text = f"{in_flight:.1f} blocks while its batch is in memory, {kept:.2f} afterwards"
    page.write_row("Memory of a message", text)
    with capsys.disabled():
        print(f"\na message: {text}")


# --- producers ------------------------------------------------------------------------------------


@pytest.fixture
def producer_as_user(server: Server, link: Connection, store: Store) -> config.Settings:
    """Create a topic, and return settings that have only a producer's permissions."""
    topics.create(store, "access", config.Topic(partitions=4))
    ScriptLoader(link).run()  # producers may run scripts, but not load them
    return config.Settings(redis=users.settings_as(server.settings, "producer-scripts"))


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("A send", {}),
        ("A send with dedup_id", {"dedup_id": "x"}),
        ("A send with delay", {"delay": 3600.0}),
    ],
)
def test_send_costs_one_round_trip(
    producer_as_user: config.Settings,
    meter: Meter,
    page: Page,
    what: str,
    options: dict[str, object],
) -> None:
    with Producer(settings=producer_as_user) as producer:
        producer.send("access", b"x", **options)
        with meter.measuring() as cost:
            for number in range(100):
                changed = {"dedup_id": f"{number}"} if "dedup_id" in options else {}
                producer.send("access", b"x", **{**options, **changed})
    assert (cost.trips, cost.scripts) == (100, 100)
    if not options:  # the script reads the partition count and writes the message
        assert cost.sent == dict.fromkeys(("evalsha", "hget", "xadd"), 100)
    page.check_cost(what, cost, assignments=100, per="send")


def test_send_many_costs_one_round_trip_per_chunk(
    producer_as_user: config.Settings, meter: Meter, page: Page
) -> None:
    with Producer(settings=producer_as_user) as producer:
        producer.send("access", b"x")
        with meter.measuring() as cost:
            producer.send_many("access", [b"x"] * 10 * CHUNK)
    assert (cost.trips, cost.scripts) == (10, 10 * 4), "one script for each partition"
    assert cost.total == 10 * (CHUNK + 2 + 2 * 4)
    page.check_cost("send_many", cost, assignments=10 * CHUNK / 1000, per="1,000 messages")


def test_buffered_producer_costs_the_same_as_send_many(
    producer_as_user: config.Settings, meter: Meter, page: Page
) -> None:
    with BufferedProducer(settings=producer_as_user, linger="1h", max_batch=CHUNK) as producer:
        producer.send("access", b"x")
        assert producer.flush()
        with meter.measuring() as cost:
            for _ in range(10 * CHUNK):
                producer.send("access", b"x")
            assert producer.flush()
    assert (cost.trips, cost.total) == (10, 10 * (CHUNK + 2 + 2 * 4))
    page.check_cost("BufferedProducer", cost, assignments=10 * CHUNK / 1000, per="1,000 messages")


def test_concurrent_async_sends_share_round_trips(
    producer_as_user: config.Settings, meter: Meter
) -> None:
    reached, opened = threading.Event(), threading.Event()

    def held(_key: bytes | None, _partitions: int) -> int:
        reached.set()
        assert opened.wait(10)
        return 0

    async def work() -> Cost:
        made = AsyncProducer(settings=producer_as_user, partitioner=held)
        async with made as producer:
            opened.set()
            await producer.send("access", b"x")
            opened.clear()
            reached.clear()
            with meter.measuring() as cost:
                # All other messages arrive while the first write is held back.
                sends = [asyncio.create_task(producer.send("access", b"x")) for _ in range(1025)]
                while not reached.is_set() or producer._buffer._held < len(sends):
                    await asyncio.sleep(0)
                opened.set()
                await asyncio.gather(*sends)
        return cost

    cost = asyncio.run(work())
    # The first chunk may contain only one message, or all that have arrived by then. The other
    # messages fill whole chunks.
    assert cost.trips <= 1 + -(-1025 // CHUNK)
    assert cost.total <= 1025 + 4 * cost.trips
