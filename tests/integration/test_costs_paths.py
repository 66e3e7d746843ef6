"""The cost of a message on other paths: with concurrency, in batches, retried, and replayed.

As in test_costs.py, every figure is in docs/internals/counted-costs.md, and no timer influences the
counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from streamqd import config
from streamqd.admin import dead_letters
from streamqd.admin.dead_letters import Target
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import PAGE_MAX
from streamqd.housekeeper import batch
from streamqd.housekeeper.figures import ask_time
from streamqd.housekeeper.promoter import Promoter, retry_promoter, send_promoter
from streamqd.message import Message
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment, Backoff
from streamqd.scoreboard import Scoreboard
from streamqd.store import topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support import users
from tests.support.costs import (
    FEW,
    MANY,
    Cost,
    Meter,
    Page,
    seed_backlog,
    seed_dead_letters,
    seed_delayed,
    seed_retries,
)
from tests.support.handling import BATCH, FIRST, FULL, PAGE, PROMOTED, READS, Handling
from tests.support.life import Life
from tests.support.servers import Server

LANES = 100
CALL = 100  # messages in one call of a handler
LETTERS = 5 * PAGE_MAX
# One round trip acknowledges the last batch and reads the next one behind the fence.
ROUND = ("multi", "xack", "xreadgroup", "exec", "watch", "hget")

pytestmark = pytest.mark.usefixtures("no_clock")


async def coroutine(_message: Message) -> None:
    """A handler whose concurrent runs share an event loop."""


def thread(_message: Message) -> None:
    """A handler whose concurrent runs have a thread each."""


_calls: list[int] = []


def handle_batch(messages: list[Message]) -> None:
    """A batch handler."""
    _calls.append(len(messages))


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


@pytest.fixture
def handling(harness: Harness, life: Life, meter: Meter) -> Handling:
    return Handling(harness, life, meter)


@pytest.fixture
def counting_link(server: Server, meter: Meter) -> Iterator[Connection]:
    """A connection whose traffic the meter counts."""
    assert meter, "sockets count from here on"
    link = connect(users.settings_as(server.settings, "admin"), timeout=10.0, name="test:ours")
    link.open()
    yield link
    link.close()


# --- concurrency and batches ----------------------------------------------------------------------


@pytest.mark.parametrize("handler", ["coroutine", "thread"])
def test_concurrent_messages_share_round_trips(
    handling: Handling, harness: Harness, page: Page, handler: str
) -> None:
    """Concurrent messages share round trips.

    The counts have only an upper bound, because the order in which runs finish depends on the
    machine.

    The worker reads when fewer messages wait than it has lanes, and then has room for BATCH. A read
    thus fetches more than BATCH - LANES entries, and carries the acknowledgments of finished runs.
    """
    cost = Cost()
    for count in (FIRST, FIRST + FULL):  # the first one loads the scripts
        cost = handling(
            count,
            seed=lambda count: seed_backlog(harness, count),
            handler=f"{__name__}:{handler}",
            concurrency=LANES,
            order="none",
        )
    reads = -(-FULL // (BATCH - LANES + 1))
    # At the start, the connections get their names, the worker reads the clock, recovers pending
    # entries and watches the fence. At the end, two reads find nothing, and all finished messages
    # are acknowledged.
    left = -(-(BATCH + LANES) // PAGE)
    start = 4 + 2
    assert cost.trips <= start + 2 * len(READS) + reads + 2 + left
    assert cost.scripts <= 1 + left
    assert cost.sent["xreadgroup"] <= 2 * len(READS) + reads + 2
    each = reads / FULL * 1000
    most = f"at most {each:.1f}", "0", f"at most {len(ROUND) * each:.1f}"
    page.check_row("Messages of a backlog, 100 at a time", "1,000 messages", *most)


def test_batch_handler_costs_the_same_as_a_message_handler(
    handling: Handling, harness: Harness, page: Page
) -> None:
    _calls.clear()
    cost = handling.measure_full_batches(
        seed=lambda count: seed_backlog(harness, count),
        handler=f"{__name__}:handle_batch",
        batch=CALL,
    )
    rounds = FULL // BATCH
    assert cost == Cost(Counter(dict.fromkeys(ROUND, rounds)), rounds)
    assert max(_calls) == CALL
    page.check_cost(
        "Messages of a backlog, in batches", cost, assignments=FULL / 1000, per="1,000 messages"
    )


def test_key_ordering_costs_nothing_without_failures(
    handling: Handling, harness: Harness, page: Page
) -> None:
    cost = handling.measure_full_batches(
        seed=lambda count: seed_backlog(harness, count), on_error="hold-key"
    )
    rounds = FULL // BATCH
    assert cost == Cost(Counter(dict.fromkeys(ROUND, rounds)), rounds)
    page.check_cost(
        "Messages of a backlog, hold-key", cost, assignments=FULL / 1000, per="1,000 messages"
    )


# --- failures in place ----------------------------------------------------------------------------

AT_ONCE = Backoff("fixed", 0.0, 0.0, "none")


def fail_once(message: Message) -> None:
    if message.attempt == 1:
        raise ValueError("not yet")


def test_blocked_failure_costs_a_note_and_a_counter_deletion(
    handling: Handling, harness: Harness, page: Page
) -> None:
    costs = [
        handling(
            count,
            fail_once,
            seed=lambda count: seed_backlog(harness, count),
            runs=2,
            on_error="block",
            backoff=AT_ONCE,
        )
        # The first measurement also loads the scripts. The last one has one more full read.
        for count in (READS[0], FIRST - 2 * BATCH, FIRST - BATCH)
    ]
    cost = costs[2] - costs[1]
    # Before a message waits, one script records its failure and another acknowledges the previous
    # message. They are separate, because the server has counted a failure of the previous message
    # as well.
    assert (cost.trips, cost.scripts) == (1 + 2 * BATCH, 2 * BATCH)
    page.check_cost(
        "Messages that fail once, block", cost, assignments=BATCH / 1000, per="1,000 messages"
    )


def test_failures_of_held_keys_are_settled_together(
    handling: Handling, harness: Harness, page: Page
) -> None:
    def seed(count: int) -> None:
        fields = ("payload", "x", "key")
        harness.link.pipeline([("XADD", harness.stream, "*", *fields, n) for n in range(count)])

    cost = handling.measure_full_batches(
        fail_once, seed=seed, runs=2, on_error="hold-key", backoff=AT_ONCE, prefetch_max=PAGE
    )
    # The worker reads a batch and records its failures. After their second run, scripts acknowledge
    # the messages, because the server has counted their failures.
    rounds = FULL // PAGE
    assert (cost.trips, cost.scripts) == (3 * rounds, 2 * rounds)
    page.check_cost(
        "Messages that fail once, hold-key", cost, assignments=FULL / 1000, per="1,000 messages"
    )


# --- delayed messages -----------------------------------------------------------------------------


@pytest.fixture
def view(counting_link: Connection, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> MetricsView:
    """Return a housekeeper's view that has the server's clock.

    Its turns stop only when nothing is due.
    """
    assert 0.05 <= batch.TURN_SECONDS <= 0.5, "others wait for as long as a turn takes"
    monkeypatch.setattr(batch, "TURN_SECONDS", 3600.0)
    found = MetricsView(instance="west-1", board=Scoreboard(1))
    ask_time(counting_link, found, keys.registry())
    return found


Place = tuple[str, int]


def promote(promoter: Promoter[Assignment] | Promoter[Place], target: Assignment | Place) -> None:
    """Promote entries until none is due."""
    while promoter.run({target: 1}) == 0.0:  # type: ignore[dict-item]
        pass


def test_due_retries_are_promoted_in_pages_and_read_again(
    handling: Handling, harness: Harness, counting_link: Connection, view: MetricsView, page: Page
) -> None:
    due = -FULL / 1000 - 10  # each entry is due one millisecond after the previous one

    def first() -> None:
        promote(retry_promoter(Store(counting_link, harness.keys), view), harness.assignment)

    cost = handling.measure_full_batches(
        seed=lambda count: seed_retries(harness, count, ahead=due), first=first
    )
    pages, rounds = FULL // PROMOTED, FULL // BATCH
    assert (cost.trips, cost.scripts) == (pages + rounds, pages)
    assert cost.sent["xreadgroup"] == rounds
    page.check_cost(
        "Due retries: promote and read again", cost, assignments=FULL / 1000, per="1,000 retries"
    )


def test_due_sends_are_promoted_in_pages_despite_later_ones(
    harness: Harness, counting_link: Connection, view: MetricsView, page: Page, meter: Meter
) -> None:
    costs = []
    for later in (FEW, MANY):
        for _ in range(2):  # the first one loads the script
            harness.do("FLUSHALL")
            seed_delayed(harness, FULL, ahead=-FULL / 1000 - 10)
            seed_delayed(harness, later)
            promoter = send_promoter(Store(counting_link, harness.keys), view)
            with meter.measuring() as cost:
                promote(promoter, harness.assignment[:2])
            assert harness.do("XLEN", harness.stream) == FULL
        costs.append(cost)
    assert costs[0] == costs[1]
    assert (cost.trips, cost.scripts) == (FULL // PROMOTED, FULL // PROMOTED)
    page.check_cost("Due sends: promote", cost, assignments=FULL / 1000, per="1,000 sends")


# --- dead letters ---------------------------------------------------------------------------------


def test_replay_costs_one_call_per_page(
    harness: Harness, counting_link: Connection, page: Page, meter: Meter
) -> None:
    costs = []
    for count in (LETTERS, LETTERS, 5 * LETTERS):  # the first one loads the scripts
        harness.do("FLUSHALL")
        topics.create(harness.store, harness.assignment.topic, config.Topic(partitions=1))
        harness.groups()
        seed_dead_letters(harness, count)
        with meter.measuring() as cost:
            done = dead_letters.replay(
                Store(counting_link, harness.keys),
                harness.assignment.topic,
                MessageFilter(),
                target=Target(),
            )
        assert done.replayed == count
        costs.append(cost)
    cost, more = costs[2] - costs[1], 4 * LETTERS
    # One script lists a page, and another round trip replays it with one script per dead letter.
    assert (cost.trips, cost.scripts) == (2 * more // PAGE_MAX, more + more // PAGE_MAX)
    page.check_cost("Dead letters: replay", cost, assignments=more / 1000, per="1,000 dead letters")
