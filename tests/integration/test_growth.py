"""A topic grows in phases, despite every interruption, with producers and a real daemon."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.admin import directives, growth, partitions
from streamqd.admin import topics as admin_topics
from streamqd.admin.published import Fleet
from streamqd.errors import RequestRefusedError, TopicNotFoundError
from streamqd.model import Assignment
from streamqd.policy.partitioning import crc32_partition
from streamqd.producer import Outgoing, Producer
from streamqd.store import growth as phases
from streamqd.store import spark, topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.node import Node
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support.costs import Meter, counting_sockets
from tests.support.daemon import TOPIC, Daemon
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until

HarnessAt = Callable[..., Harness]
MOVES = next(f"k{n}" for n in range(100) if crc32_partition(b"k%d" % n, 4) == 2)
STAYS = next(f"k{n}" for n in range(100) if crc32_partition(b"k%d" % n, 4) == 0)


@pytest.fixture
def harness_at(link: Connection, store: Store, keys: Keys) -> HarnessAt:
    """A function that makes a harness for a partition of access (two partitions) and a group."""
    topics.create(store, "access", config.Topic(partitions=2))
    return lambda partition, group="hits": Harness(
        link, keys, Assignment("access", partition, group)
    )


@pytest.fixture
def producer(server: Server) -> Iterator[Producer]:
    with Producer(server.url) as made:
        yield made


def lengths(link: Connection, keys: Keys, count: int = 4) -> list[int]:
    return [link.execute("XLEN", keys.stream("access", number)) for number in range(count)]


def write_backlog(harness_at: HarnessAt, group: str, *, fetched: int = 1) -> None:
    """Write three messages to each old partition, and deliver some of them."""
    for number in range(2):
        harness = harness_at(number, group)
        harness.groups()
        if not harness.do("XLEN", harness.stream):
            for entry_id in ("1-0", "2-0", "3-0"):
                harness.add(entry_id)
        harness.fetch(fetched)


def settle(harness_at: HarnessAt, group: str) -> None:
    for number in range(2):
        harness = harness_at(number, group)
        harness.fetch(10)
        harness.do("XACK", harness.stream, group, "1-0", "2-0", "3-0")


# --- phases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "why"),
    [(1, "cannot shrink"), (3, "choose 4"), (5, "choose 4 or 6"), (8192, "4096")],
)
def test_growth_refuses_an_invalid_partition_count(
    store: Store, harness_at: HarnessAt, count: int, why: str
) -> None:
    write_backlog(harness_at, "hits")
    before = harness_at(0).dump()
    with pytest.raises(RequestRefusedError, match=why):
        growth.grow(store, "access", count)
    assert harness_at(0).dump() == before


def test_growth_without_groups_finishes_immediately(store: Store, harness_at: HarnessAt) -> None:
    assert growth.grow(store, "access", 4) == growth.Progress("access", 2, 4, True, [])
    assert topics.partition_count(store, "access") == 4
    before = harness_at(0).dump()
    assert growth.grow(store, "access", 4).done
    assert harness_at(0).dump() == before
    with pytest.raises(TopicNotFoundError):
        growth.grow(store, "acces", 4)


def test_growth_does_not_wait_for_a_spark_query(store: Store, harness_at: HarnessAt) -> None:
    """Growth does not wait for a Spark query, but shows its position.

    The query itself is responsible for the order of its keys.
    """
    for number in range(2):
        harness_at(number).add("1-0")
        store.run(spark.query_position(store.keys, "access", number, "etl", "0-0", 0, hold=True))
    assert growth.grow(store, "access", 4) == growth.Progress("access", 2, 4, True, [])


def test_groups_get_new_partitions_after_settling_the_old(
    store: Store, harness_at: HarnessAt
) -> None:
    write_backlog(harness_at, "hits")
    write_backlog(harness_at, "agents", fetched=3)

    first = growth.grow(store, "access", 4)

    assert topics.partition_count(store, "access") == 4
    assert not first.done
    assert [(row.group, row.left, row.done) for row in first.groups] == [
        ("agents", 6, False),
        ("hits", 6, False),
    ]
    owners = {(row.partition, row.group): row.owner for row in partitions.view(store).assignments}
    assert {owners[number, "hits"] for number in (2, 3)} == {growth.OWNER}
    with pytest.raises(AssertionError, match="HELD"):
        harness_at(2).own(
            "t1", seen_epoch=int(harness_at(2).do("HGET", harness_at(2).fence, "epoch"))
        )
    assert admin_topics.describe(store, "access").growing_to == 4
    with pytest.raises(RequestRefusedError, match="growing to 4"):
        growth.grow(store, "access", 8)

    harness_at(0).add("9-0")  # later messages do not delay the growth
    settle(harness_at, "agents")
    second = growth.grow(store, "access", 4)

    assert [(row.group, row.done) for row in second.groups] == [("agents", True), ("hits", False)]
    assert growth.read_progress(store, "access") == growth.Progress(
        "access", 2, 4, False, [growth.GroupSettling("hits", 6, True, False)]
    )
    for number in (2, 3):
        agents = harness_at(number, "agents")
        assert agents.own("t1", seen_epoch=int(agents.do("HGET", agents.fence, "epoch")))
    settle(harness_at, "hits")
    assert growth.grow(store, "access", 4).done
    assert harness_at(2).own(
        "t1", seen_epoch=int(harness_at(2).do("HGET", harness_at(2).fence, "epoch"))
    )
    assert phases.in_progress(store, "access") is None
    assert growth.read_progress(store, "access") is None


def test_growth_waits_for_pending_messages_of_existing_groups(
    store: Store, harness_at: HarnessAt
) -> None:
    write_backlog(harness_at, "hits", fetched=3)
    harness_at(0).do("XACK", harness_at(0).stream, "hits", "1-0", "2-0")
    harness_at(1).do("XACK", harness_at(1).stream, "hits", "1-0", "2-0", "3-0")

    assert [row.left for row in growth.grow(store, "access", 4).groups] == [1]

    for number in range(2):
        harness_at(number).do("XGROUP", "DESTROY", harness_at(number).stream, "hits")
    assert growth.grow(store, "access", 4).done


class CutError(Exception):
    """Raised when the connection of an interrupted growth is lost."""


class Cut:
    """A node that is lost before its n-th exchange, or after it, so that the answer is lost."""

    left = 0
    behind = False

    def __init__(self, node: Node) -> None:
        self.uncut = node.exchange

    def exchange(self, commands: Any) -> list[Any]:
        self.left -= 1
        if self.left < 0 and not self.behind:
            raise CutError
        replies = self.uncut(commands)
        if self.left < 0:
            raise CutError
        return replies


@pytest.mark.parametrize("behind", [False, True], ids=["unsent", "answer lost"])
def test_growth_continues_after_any_interruption(
    server: Server,
    link: Connection,
    store: Store,
    keys: Keys,
    harness_at: HarnessAt,
    behind: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = connect(server.settings, timeout=10.0, name="test:cut")
    cut, cut_off = Cut(lost.node), Store(lost, keys)
    monkeypatch.setattr(lost.node, "exchange", cut.exchange)
    monkeypatch.setattr(lost.node, "exchange_each", cut.exchange)
    write_backlog(harness_at, "hits")
    exchanges, over = 0, False
    while not over:
        link.execute("FLUSHALL")
        topics.create(store, "access", config.Topic(partitions=2))
        write_backlog(harness_at, "hits")
        cut.left, cut.behind = exchanges, behind
        with contextlib.suppress(CutError):
            over = not growth.grow(cut_off, "access", 4).done
        assert [row.left for row in growth.grow(store, "access", 4).groups] == [6]
        settle(harness_at, "hits")
        cut.left = exchanges
        with contextlib.suppress(CutError):
            growth.grow(cut_off, "access", 4)
        assert growth.grow(store, "access", 4).done
        assert topics.partition_count(store, "access") == 4
        assert harness_at(2).own(
            "t1", seen_epoch=int(harness_at(2).do("HGET", harness_at(2).fence, "epoch"))
        )
        exchanges += 1
    lost.close()
    assert exchanges > 8


# --- producers ------------------------------------------------------------------------------------


def grow_now(link: Connection, keys: Keys) -> None:
    assert growth.grow(Store(link, keys), "access", 4).done


def test_producer_with_the_old_count_uses_the_new_one(
    link: Connection, keys: Keys, harness_at: HarnessAt, producer: Producer
) -> None:
    producer.send("access", b"1", key=MOVES)
    assert lengths(link, keys) == [1, 0, 0, 0]
    grow_now(link, keys)

    producer.send("access", b"2", key=MOVES)

    assert lengths(link, keys) == [1, 0, 1, 0]


@pytest.mark.parametrize("kind", ["dedup", "delay"])
def test_growth_reroutes_scripted_sends(
    link: Connection, keys: Keys, harness_at: HarnessAt, producer: Producer, kind: str
) -> None:
    options: dict[str, Any] = {"dedup_id": "d1"} if kind == "dedup" else {"delay": 60}
    producer.send("access", b"1", key=STAYS, **options)
    link.execute("SCRIPT", "FLUSH")
    grow_now(link, keys)

    producer.send("access", b"2", key=MOVES, **options)

    if kind == "dedup":
        assert lengths(link, keys) == [1, 0, 1, 0]
    else:
        waiting = [link.execute("ZCARD", keys.delayed_sends("access", n)) for n in range(4)]
        assert waiting == [1, 0, 1, 0]


def test_growth_reroutes_a_prepared_chunk(
    link: Connection, keys: Keys, harness_at: HarnessAt, producer: Producer
) -> None:
    def items() -> Iterator[Outgoing]:
        yield Outgoing(b"1", MOVES)
        yield Outgoing(b"2", STAYS)
        yield Outgoing(b"3", partition=1)
        grow_now(link, keys)
        yield Outgoing(b"4", MOVES)

    ids = producer.send_many("access", items())

    assert lengths(link, keys) == [1, 1, 2, 0]
    assert [
        entry[1][1] for entry in link.execute("XRANGE", keys.stream("access", 2), "-", "+")
    ] == [
        b"1",
        b"4",
    ]
    assert len(ids) == 4


def test_producer_notices_a_growth_after_a_reconnect(
    link: Connection, keys: Keys, harness_at: HarnessAt, producer: Producer
) -> None:
    producer.send("access", b"1", key=MOVES)
    link.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    grow_now(link, keys)

    producer.send("access", b"2", key=MOVES)

    assert lengths(link, keys) == [1, 0, 1, 0]


def test_producer_of_several_topics_notices_a_growth(
    link: Connection, keys: Keys, harness_at: HarnessAt, producer: Producer
) -> None:
    for number in range(12):
        producer.send(f"other{number % 3}", b"x")
        producer.send("access", b"1", key=MOVES)
    grow_now(link, keys)
    producer.send("other1", b"x")

    producer.send("access", b"2", key=MOVES)

    assert lengths(link, keys) == [12, 0, 1, 0]


def test_sends_to_forty_topics_cost_one_round_trip_each(
    server: Server, link: Connection, keys: Keys
) -> None:
    """Sends to forty topics take one round trip each, because the cache has room for all counts."""
    names = [f"other{number}" for number in range(40)]
    with counting_sockets(), Producer(server.url) as producer:
        for name in names:
            producer.send(name, b"x")
        with Meter(link).measuring() as cost:
            for name in names * 3:
                producer.send(name, b"y")

    assert cost.trips == cost.scripts == 120
    assert dict(cost.sent) == {"evalsha": 120, "hget": 120, "xadd": 120}


# --- the whole growth -----------------------------------------------------------------------------

ORDER = """
import os
import time
from pathlib import Path

path = Path(os.environ["LEDGER"]).with_name("order")
file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def obey(message):
    number = message.text()
    line = f"{message.group} {message.key.decode()} {number} "
    os.write(file, (line + "start\\\\n").encode())
    if message.group == "slow" and int(number) < 5:
        time.sleep(0.001)
    os.write(file, (line + "end\\\\n").encode())
""".replace("\\\\n", "\\n")


class Source(threading.Thread):
    """A thread that sends its keys in rounds until two rounds after `last` is set.

    It pauses after each round. Otherwise, a busy machine would have ten times as many messages to
    handle after the growth.
    """

    def __init__(self, url: str, keys: list[str], last: threading.Event) -> None:
        super().__init__(daemon=True)
        self.url, self.keys, self.last, self.rounds = url, keys, last, 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Producer(self.url, create=False) as producer:
                while not self.last.wait(0.005):
                    self.send(producer)
                for _ in range(2):
                    self.send(producer)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            self.error = error

    def send(self, producer: Producer) -> None:
        text = str(self.rounds)
        producer.send_many(TOPIC, [Outgoing(text, key) for key in self.keys])
        self.rounds += 1


def find_misordered(path: Path) -> list[str]:
    """Return the messages that started before the previous message of their key had finished."""
    ended: dict[tuple[str, str], int] = defaultdict(lambda: -1)
    wrong = []
    for line in path.read_text().splitlines():
        group, key, number, kind = line.split()
        if kind == "start" and int(number) > ended[group, key] + 1:
            wrong.append(f"{line} after {ended[group, key]}")
        if kind == "end":
            ended[group, key] = max(ended[group, key], int(number))
    return wrong


@pytest.mark.slow
def test_growth_keeps_the_order_of_a_thousand_keys(
    tmp_path: Path, fresh_server: ProcessServer
) -> None:
    daemon = Daemon(tmp_path, fresh_server.url, partitions=4, groups=("fast", "slow"), code=ORDER)
    topics.create(daemon.store, TOPIC, config.Topic(partitions=2))
    names = [f"key-{number}" for number in range(1000)]
    last = threading.Event()
    sources = [Source(fresh_server.url, names[at::4], last) for at in range(4)]
    with daemon:
        for source in sources:
            source.start()
        wait_until(lambda: min(source.rounds for source in sources) >= 1, what="all write")

        fleet = Fleet(daemon.store, "default", 60.0)
        reload = functools.partial(directives.reload, fleet, None)
        switched = growth.grow(daemon.store, TOPIC, 4, notify=reload)
        assert "slow" in [row.group for row in switched.groups if not row.done]
        last.set()
        for source in sources:
            source.join(30)
            assert source.error is None
        command = ["-c", str(daemon.config_path), "topic", "grow", TOPIC, "4", "--yes", "--json"]
        grown = subprocess.run(
            [sys.executable, "-m", "streamqd", *command], capture_output=True, timeout=60
        )
        assert grown.returncode == 0, grown.stderr
        assert json.loads(grown.stdout)["done"]
        daemon.wait_settled(60)
        streams = [daemon.keys.stream(TOPIC, number) for number in range(4)]
        assert min(daemon.link.execute("XLEN", each) for each in streams) > 0
    order = tmp_path / "order"
    assert find_misordered(order) == []
    sent = sum(source.rounds for source in sources) * 250
    lines = order.read_text().splitlines()
    ended = Counter(line.split()[0] for line in {*lines} if line.endswith("end"))
    assert ended == {"fast": sent, "slow": sent}


def test_daemon_takes_new_partitions_of_an_idle_topic(
    tmp_path: Path, fresh_server: ProcessServer
) -> None:
    daemon = Daemon(tmp_path, fresh_server.url, partitions=2)
    topics.create(daemon.store, TOPIC, config.Topic(partitions=1))
    with daemon:
        command = ["-c", str(daemon.config_path), "topic", "grow", TOPIC, "2", "--yes"]
        grown = subprocess.run(
            [sys.executable, "-m", "streamqd", *command], capture_output=True, timeout=60
        )
        assert grown.returncode == 0, grown.stderr
        assert grown.stdout == b"orders has 2 partitions\n"

        sent = daemon.send(["ok"] * 4)

        daemon.wait_settled()
        assert set(sent) == daemon.ledger.finished_uids("bill")
