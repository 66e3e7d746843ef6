"""Housekeeper tasks with much work make small writes in short turns, and starve no other task.

The tests only count. In a turn with a time budget of zero, a task makes one write.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from streamqd.config import Consumer, Daemon, Http, Retention, Settings, Topic
from streamqd.errors import RedisResponseError
from streamqd.housekeeper import (
    Housekeeper,
    batch,
    promoter,
    reclaimer,
    retention_enforcer,
    trimmer,
)
from streamqd.housekeeper import dead_letter_expirer as letters
from streamqd.housekeeper.dead_letter_expirer import DeadLetterExpirer
from streamqd.housekeeper.promoter import retry_promoter
from streamqd.housekeeper.reclaimer import NEXT_PAGE_SECONDS, Reclaimer
from streamqd.housekeeper.trimmer import Trimmer
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support import users
from tests.support.costs import Cost, Meter
from tests.support.loglines import LogLines
from tests.support.owning import create_groups, make_owned_board
from tests.support.servers import Server
from tests.support.waiting import wait_until

PLACES = 256
KEPT = Topic(partitions=PLACES, dlq_retention=60.0)


@pytest.fixture
def assignments(link: Connection, keys: Keys) -> list[Assignment]:
    return create_groups(link, keys, PLACES)


@pytest.fixture
def board(assignments: list[Assignment]) -> Scoreboard:
    return make_owned_board(assignments)


@pytest.fixture
def counting_link(meter: Meter, server: Server) -> Iterator[Connection]:
    """A connection whose round trips the meter counts."""
    link = connect(users.settings_as(server.settings, "daemon"), timeout=10.0, name="counted")
    with closing(link):
        yield link


@pytest.fixture
def single_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "TURN_SECONDS", 0.0)


def settings(server: Server, topic: Topic, **changes: object) -> Settings:
    made = Settings(
        redis=users.settings_as(server.settings, "daemon"),
        daemon=Daemon(instance="web-1"),
        http=Http(bind=""),
        topics={"access": topic},
        consumers=(Consumer(topic="access", group="hits", handler="weblog:count"),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def fill(link: Connection, streams: list[str], count: int) -> None:
    """Write the given number of old entries to each stream."""
    for stream in streams:
        link.pipeline([("XADD", stream, f"1-{n + 1}", "payload", "x") for n in range(count)])


def lengths(link: Connection, streams: list[str]) -> list[int]:
    return link.pipeline([("XLEN", stream) for stream in streams])


def measure_costs(run: Callable[[], object], meter: Meter, times: int) -> list[Cost]:
    """Return the cost of each of these turns."""
    costs = []
    for _ in range(times):
        with meter.measuring() as cost:
            run()
        costs.append(cost)
    return costs


def run_turns(run: Callable[[], float | None], meter: Meter) -> list[Cost]:
    """Run until no work is due. Return the cost of each turn."""
    costs: list[Cost] = []
    sooner: float | None = 0.0
    while sooner == 0.0:
        with meter.measuring() as cost:
            sooner = run()
        costs.append(cost)
    return costs


# --- deleting, trimming, dropping -----------------------------------------------------------------


@pytest.mark.usefixtures("single_writes")
def test_dead_letters_expire_in_small_writes(
    link: Connection,
    keys: Keys,
    assignments: list[Assignment],
    view: MetricsView,
    server: Server,
    meter: Meter,
    counting_link: Connection,
) -> None:
    streams = [keys.dlq("access", assignment.partition) for assignment in assignments]
    fill(link, streams, letters.PAGE + 1)
    undertaker = DeadLetterExpirer(Store(counting_link, keys), view, settings(server, KEPT))
    first = measure_costs(undertaker.run, meter, PLACES // batch.WRITES_MAX)
    assert lengths(link, streams) == [1] * PLACES, "each had its share before one had a second"
    rest = run_turns(undertaker.run, meter)
    assert lengths(link, streams) == [0] * PLACES
    for cost in [*first[2:], *rest[:-1]]:  # the first turns read settings and load scripts
        assert (cost.trips, cost.scripts) == (1, batch.WRITES_MAX)
    assert sum(view.tally("expired").values()) == PLACES * (letters.PAGE + 1)


@pytest.mark.usefixtures("single_writes")
def test_drops_over_many_turns_are_counted_exactly(
    link: Connection,
    keys: Keys,
    assignments: list[Assignment],
    view: MetricsView,
    server: Server,
    meter: Meter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention_enforcer, "PAGE", 200)
    monkeypatch.setattr(retention_enforcer, "ROUNDS_MAX", 2)
    monkeypatch.setattr(trimmer, "ROUNDS_MAX", 2)
    several = assignments[:6]
    streams = [keys.stream("access", assignment.partition) for assignment in several]
    fill(link, streams, 1_000)
    for assignment, stream in zip(several, streams, strict=True):
        link.execute(
            "XREADGROUP", "GROUP", assignment.group, "w", "COUNT", 150, "STREAMS", stream, ">"
        )
    topic = Topic(partitions=PLACES, retention=Retention(drop_unacked_above=100))
    work = Trimmer(Store(link, keys), view, settings(server, topic))
    with LogLines() as lines:
        assert len(run_turns(work.run, meter)) > len(several) * 800 // 200 // batch.WRITES_MAX
        told = sum(line["entries"] for line in lines.events("retention.dropped"))
    left = lengths(link, streams)
    assert all(100 <= length <= 200 for length in left)
    lost = sum(1_000 - length for length in left)
    assert sum(view.tally("dropped").values()) == told == lost
    assert sum(view.tally("trimmed").values()) == lost


@pytest.mark.usefixtures("single_writes")
def test_expirer_reports_a_bad_key_after_the_other_turns(
    link: Connection, keys: Keys, assignments: list[Assignment], view: MetricsView, server: Server
) -> None:
    streams = [keys.dlq("access", assignment.partition) for assignment in assignments]
    link.execute("SET", streams.pop(0), "x")
    fill(link, streams, letters.PAGE + 1)
    undertaker = DeadLetterExpirer(Store(link, keys), view, settings(server, KEPT))
    for _ in range(2 * len(assignments) // batch.WRITES_MAX):
        assert undertaker.run() == 0.0
    with pytest.raises(RedisResponseError, match="WRONGTYPE"):
        undertaker.run()
    assert lengths(link, streams) == [0] * (PLACES - 1)


# --- promoting ------------------------------------------------------------------------------------


def add_delayed(
    link: Connection, keys: Keys, assignment: Assignment, due_unix_ms: int, count: int
) -> None:
    """Delay some entries in the same way as a worker."""
    due = [part for n in range(count) for part in (due_unix_ms, f"m:{n + 1}-0")]
    items = [part for n in range(count) for part in (f"m:{n + 1}-0", b"\x92\xa7payload\xa1x")]
    link.execute("ZADD", keys.retry(*assignment), *due)
    link.execute("HSET", keys.retry_items(*assignment), *items)


@pytest.mark.usefixtures("single_writes")
def test_assignment_with_many_due_retries_does_not_starve_others(
    link: Connection, keys: Keys, assignments: list[Assignment], view: MetricsView, meter: Meter
) -> None:
    retries = retry_promoter(Store(link, keys), view)
    hints = dict.fromkeys(assignments, 0)
    for _ in range(1 + PLACES // batch.WRITES_MAX):
        retries.run(hints)  # each assignment is asked once
    many, few = assignments[:4], assignments[-1]
    for assignment in many:
        add_delayed(link, keys, assignment, 1, 10 * promoter.PAGE)
    hints.update(dict.fromkeys(many, 1))
    retries.run(hints)
    add_delayed(link, keys, few, 2, 1)
    hints[few] = 2
    ran = 0
    while not link.execute("XLEN", keys.retry_stream(*few)):
        assert retries.run(hints) == 0.0
        ran += 1
    assert ran <= 2, "units that had their turn come later"
    assert link.execute("ZCARD", keys.retry(*many[0])) > 0
    while retries.run(hints) == 0.0:
        pass
    assert [link.execute("ZCARD", keys.retry(*assignment)) for assignment in many] == [0] * 4


def test_due_retries_of_one_assignment_add_no_reads_for_others(
    link: Connection, keys: Keys, assignments: list[Assignment], view: MetricsView, meter: Meter
) -> None:
    retries = retry_promoter(Store(link, keys), view)
    retries._check_interval = 1_000.0
    looks = 0

    def targets() -> dict[Assignment, int]:
        nonlocal looks
        looks += 1
        return dict.fromkeys(assignments, 0)

    now = view.now_unix_ms()
    for after in range(0, 300, 60):
        link.execute("ZADD", keys.retry(*assignments[7]), now + after, f"m:{after + 1}-0")
        link.execute(
            "HSET", keys.retry_items(*assignments[7]), f"m:{after + 1}-0", b"\x92\xa7payload\xa1x"
        )
    wait_until(lambda: retries.turn(targets) > 0.0)  # a busy machine needs several turns
    with meter.measuring() as cost:
        wait_until(
            lambda: retries.turn(targets) and not link.execute("ZCARD", keys.retry(*assignments[7]))
        )
    assert looks == 1, "the others are gone through at a look alone"
    assert cost.scripts <= 5
    view.measured_ns = promoter.now_ns()
    retries.turn(targets)
    assert looks == 2, "new figures are looked at at once"


# --- the round of tasks ---------------------------------------------------------------------------


@pytest.fixture
def keeper(board: Scoreboard, server: Server) -> Iterator[Housekeeper]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        made = Housekeeper(board, settings(server, KEPT), theirs)
        yield made
        made._store.connection.close()


@pytest.mark.usefixtures("single_writes")
def test_retries_are_promoted_while_many_dead_letters_expire(
    link: Connection,
    keys: Keys,
    assignments: list[Assignment],
    board: Scoreboard,
    keeper: Housekeeper,
) -> None:
    for slot in board.slots()[16:-1]:
        slot.owned = 0
    for _ in range(6):
        keeper._round()  # each assignment is asked once for its retries
    streams = [keys.dlq("access", assignment.partition) for assignment in assignments[:16]]
    fill(link, streams, 3 * letters.PAGE)
    table = {task.name: task for task in keeper._tasks}
    table["expire_dead_letters"].due = 0.0
    keeper._round()
    add_delayed(link, keys, assignments[-1], 1, 1)
    board.slots()[-1].next_due_unix_ms = 1
    promoted = None
    published = keys.instance("default", "web-1")
    link.execute("DEL", published)
    rounds = 0
    while sum(lengths(link, streams)):
        for name in ("publish", "measure"):  # new figures make the promoters look again
            table[name].due = 0.0
        board.housekeeper_progress_ns = 0
        keeper._round()
        rounds += 1
        assert board.housekeeper_progress_ns > 0
        if promoted is None and link.execute("XLEN", keys.retry_stream(*assignments[-1])):
            promoted = sum(lengths(link, streams))
    assert promoted, "letters were still there"
    assert link.execute("EXISTS", published), "the summary was not kept waiting either"
    assert rounds > 5


def test_housekeeper_reports_progress_at_each_task(board: Scoreboard, keeper: Housekeeper) -> None:
    told: list[int] = []
    for task in keeper._tasks:
        task.run = lambda: told.append(board.housekeeper_progress_ns)  # type: ignore[func-returns-value]
    keeper._round()
    assert len(told) == len(keeper._tasks)
    assert sorted(set(told)) == told


# --- entries of foreign consumers -----------------------------------------------------------------


@pytest.fixture
def foreign_entries(link: Connection, keys: Keys, assignments: list[Assignment]) -> Harness:
    """Give a consumer fresh entries that fill three pages and one entry more."""
    harness = Harness(link, keys, assignments[0])
    fill(link, [harness.stream], 3 * reclaimer.PAGE + 1)
    harness.fetch(3 * reclaimer.PAGE + 1, "by-hand")
    return harness


def test_reclaimer_finds_an_idle_entry_after_many_fresh_ones(
    foreign_entries: Harness, view: MetricsView, meter: Meter, counting_link: Connection
) -> None:
    consumer = Consumer(topic="access", group="hits", handler="w:c", reclaim_idle=600.0)
    looks = Reclaimer(Store(counting_link, foreign_entries.keys), [consumer])
    slot = view.board.slots()[0]
    last = f"1-{3 * reclaimer.PAGE + 1}"
    summaries = 2 * len(list(view.owned_slots()))  # one for each of a partition's two streams
    for page in range(4):  # the first page and three more
        with meter.measuring() as cost:
            sooner = looks.run(view.owned_slots())
        assert cost.commands["xpending"] == 1 + (0 if page else summaries)
    assert (sooner, slot.reclaim_requested) == (None, 0), "nothing is idle"

    foreign_entries.do(
        "XCLAIM", foreign_entries.stream, "hits", "by-hand", 0, last, "IDLE", 700_000, "JUSTID"
    )
    for _ in range(3):
        assert looks.run(view.owned_slots()) == NEXT_PAGE_SECONDS
        assert slot.reclaim_requested == 0
    assert looks.run(view.owned_slots()) is None
    assert slot.reclaim_requested == 1
    with meter.measuring() as cost:
        looks.run(view.owned_slots())
    assert cost.commands["xpending"] == summaries, "no page, because the flag is enough"


def test_reclaimer_rechecks_the_start_of_a_long_list(
    foreign_entries: Harness, view: MetricsView
) -> None:
    consumer = Consumer(topic="access", group="hits", handler="w:c", reclaim_idle=600.0)
    looks = Reclaimer(foreign_entries.store, [consumer])
    assert looks.run(view.owned_slots()) == NEXT_PAGE_SECONDS
    foreign_entries.do(
        "XCLAIM", foreign_entries.stream, "hits", "by-hand", 0, "1-1", "IDLE", 700_000, "JUSTID"
    )
    looks._list_at = 0.0  # a quarter of the idle time has passed
    looks.run(view.owned_slots())
    assert view.board.slots()[0].reclaim_requested == 1


def test_long_pending_lists_are_read_in_turn(
    foreign_entries: Harness, view: MetricsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaimer, "PAGES_MAX", 1)
    other = Harness(
        foreign_entries.link, foreign_entries.keys, foreign_entries.assignment._replace(partition=1)
    )
    fill(other.link, [other.stream], 1)
    other.fetch(1, "by-hand")
    other.do("XCLAIM", other.stream, "hits", "by-hand", 0, "1-1", "IDLE", 700_000, "JUSTID")
    consumer = Consumer(topic="access", group="hits", handler="w:c", reclaim_idle=600.0)
    looks = Reclaimer(foreign_entries.store, [consumer])
    for _ in range(2):
        assert looks.run(view.owned_slots()) == NEXT_PAGE_SECONDS
    assert view.board.slots()[1].reclaim_requested == 1
