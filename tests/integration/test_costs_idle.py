"""The cost of an instance for Redis apart from its messages, in machine-independent counts.

As in test_costs.py, every figure is in docs/internals/counted-costs.md.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from streamqd.config import Consumer, Daemon, Http, Retention, Settings, Topic
from streamqd.housekeeper import Housekeeper, batch, promoter
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard, now_ns
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.supervisor.lease_manager import TOGETHER, LeaseManager
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.worker import worker
from streamqd.worker.turns import BLOCK_SECONDS
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
from tests.support.owning import create_groups, make_owned_board
from tests.support.servers import Server

ASSIGNMENTS = 32
IDLE_MAX = 2.0  # commands per second and partition
LATER = b"9000000000000-0"  # the ID of no entry, so that a worker that waits after it is healthy


def settings(server: Server) -> Settings:
    """Return the settings of an instance that owns ASSIGNMENTS partitions and trims entries."""
    return Settings(
        redis=users.settings_as(server.settings, "daemon"),
        daemon=Daemon(instance="web-1"),
        http=Http(bind=""),
        topics={
            "access": Topic(
                partitions=ASSIGNMENTS, retention=Retention(max_length=1), dlq_retention=3600.0
            )
        },
        consumers=(Consumer(topic="access", group="hits", handler="weblog:count"),),
    )


@pytest.fixture
def owned_assignments(link: Connection, keys: Keys) -> list[Assignment]:
    """Return the assignments that an instance owns. Their groups exist."""
    return create_groups(link, keys, ASSIGNMENTS)


def test_lease_renewals_cost_one_round_trip(
    server: Server, owned_assignments: list[Assignment], meter: Meter, page: Page
) -> None:
    board = Scoreboard(ASSIGNMENTS)
    ours = settings(server)
    holdings = {
        assignment: AssignmentState(assignment, ours.consumers[0], board.allot(assignment))
        for assignment in owned_assignments
    }
    exchange = LeaseManager(ours, board, "lock")

    def tick() -> None:
        exchange.tick(time.monotonic(), holdings, owned_assignments)

    try:
        for each in holdings.values():
            each.acquire(0)
        while exchange.next_at() <= time.monotonic() or not all(
            each.phase is Phase.HELD and each.groups_ready for each in holdings.values()
        ):
            tick()
        exchange.membership.heartbeat_at = float("inf")
        for _ in range(2):  # the first turn also loads the script
            for each in holdings.values():
                each.renew_at = 0.0
            with meter.measuring() as cost:
                tick()
        assert (cost.trips, cost.scripts) == (1, ASSIGNMENTS)
        page.check_cost("Renewal of all leases, every 2.4 to 3 s", cost, per="32 assignments")
        with meter.measuring() as cost:
            tick()
        assert cost == Cost(), "nothing is due"
        first, *others, last = holdings.values()
        first.renew_at, last.renew_at = 0.0, time.monotonic() + exchange.interval
        for each in others:
            each.renew_at = time.monotonic() + exchange.interval * TOGETHER / 2
        with meter.measuring() as cost:
            tick()
        assert (cost.trips, cost.scripts) == (1, ASSIGNMENTS - 1), (
            "renewals that are due soon are included"
        )
        assert len({round(each.renew_at, 1) for each in (first, *others)}) <= 2, "and stays with it"
        exchange.membership.heartbeat_at = 0.0
        with meter.measuring() as cost:
            tick()
            tick()  # checks the assignments of other instances, of which there are none
        assert (cost.trips, cost.scripts) == (1, 1)
        page.check_cost("Heartbeat of an instance, every 2.4 to 3 s", cost, per="instance")
    finally:
        exchange.close()


# The cost of each housekeeper task: the scripts per partition, and the maximum number of round
# trips for 32 partitions with one group each. One write carries 16 reading scripts or commands, or
# 4 that remove entries. No message is delayed, so the promoters send nothing and rely on the
# measured figures.
TASKS = {
    "probe": (0, 1),
    "listen": (0, 1),
    "promote_retries": (0, 0),
    "promote_delayed": (0, 0),
    "declare_schedules": (0, 0),
    "move_schedules": (0, 1),
    "fire_schedules": (0, 1),
    "measure": (2, 4),
    "publish": (0, 1),
    "trim": (1, 8),
    "expire_dead_letters": (1, 8),
    "load_scripts": (0, 1),
    "reclaim": (0, 4),
    "history": (0, 0),  # apart from one XADD per minute
}


@pytest.fixture
def keeper(
    server: Server,
    owned_assignments: list[Assignment],
    meter: Meter,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Housekeeper]:
    # A turn may reach its time limit on a busy machine, and would then leave work to the next turn.
    monkeypatch.setattr(batch, "TURN_SECONDS", 60.0)
    board = make_owned_board(owned_assignments)
    for slot in board.slots():
        slot.poll.begin(now_ns(), LATER, LATER)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        made = Housekeeper(board, settings(server), theirs)
        yield made
        made._store.connection.close()


def measure_turns(keeper: Housekeeper, meter: Meter) -> dict[str, Cost]:
    """Return the cost of a run of each task, after a first run that is not counted."""
    found = {}
    for task in keeper._tasks:
        task.run()
        with meter.measuring() as found[task.name]:
            task.run()
    return found


def count_dead_letters(keeper: Housekeeper) -> None:
    """Measure until each dead letter is counted once. Each turn counts one page."""
    [measure] = [task for task in keeper._tasks if task.name == "measure"]
    for _ in range(100):
        measure.run()
        if all(each.whole for each in keeper.view.dead_letters.values()):
            return
    raise AssertionError(f"not counted: {keeper.view.dead_letters}")


def test_housekeeper_turn_is_bounded(keeper: Housekeeper, meter: Meter, page: Page) -> None:
    found = measure_turns(keeper, meter)
    assert found.keys() == TASKS.keys()
    for name, (scripts, trips) in TASKS.items():
        cost = found[name]
        assert (cost.scripts, cost.trips) == (ASSIGNMENTS * scripts, trips), (name, cost)
        if cost.total:
            page.check_cost(f"Housekeeper: {name}", cost, per="32 partitions")
    sent = {name: cost.scripts or cost.total for name, cost in found.items()}
    every = {task.name: task.every for task in keeper._tasks}
    idle = sum(sent[name] / every[name] for name in sent) / ASSIGNMENTS
    # A long poll takes six commands, comparing the pending entries takes two, and a renewal one.
    idle += 6 / BLOCK_SECONDS + 2 / worker.IDLE_CHECK_SECONDS
    idle += 1 / (keeper._settings.daemon.lease_ttl / 5)
    assert idle <= IDLE_MAX
    page.check_row("An idle partition", f"{idle:.1f} commands/s")


def test_housekeeper_turn_cost_is_independent_of_stored_data(
    keeper: Housekeeper,
    meter: Meter,
    page: Page,
    link: Connection,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A shorter interval would cause needless requests to partitions with delayed messages. A longer
    # one would delay the messages.
    assert 0.05 <= promoter.HINT_INTERVAL_SECONDS <= 1.0
    assert 0.5 <= promoter.POLL_SECONDS <= 5.0
    monkeypatch.setattr(promoter, "POLL_SECONDS", 0.0)
    # Each turn checks as if a check were due.
    monkeypatch.setattr(promoter.Promoter, "turn", lambda self, targets: self.run(targets()))
    harness = Harness(link, keys)
    harness.own("t1")
    costs = []
    for count in (FEW, MANY - FEW):  # all on the same partition
        seed_pending(harness, count)
        seed_backlog(harness, count)
        seed_undue_entries(harness, count)
        count_dead_letters(keeper)
        costs.append(measure_turns(keeper, meter))
    assert costs[0] == costs[1]
    for name, (scripts, trips) in TASKS.items():
        cost = costs[1][name]
        if name.startswith("promote"):  # the promoters ask only partitions that have such messages
            assert (cost.scripts, cost.trips) == (1, 1), name
            page.check_cost(
                f"Housekeeper: {name}", cost, per="partition with delayed sends or waiting retries"
            )
        elif name == "measure":  # also counts new dead letters in partitions that have some
            assert (cost.scripts, cost.trips) == (ASSIGNMENTS * scripts + 1, trips + 1)
        else:
            assert (cost.scripts, cost.trips) == (ASSIGNMENTS * scripts, trips), name
