"""The Redis side of the Spark source on a real server, without Spark: the view of a task."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from streamqd import config
from streamqd.errors import RequestRefusedError, TopicNotFoundError
from streamqd.model import Assignment, RawEntry, TopicPartition
from streamqd.spark import offsets
from streamqd.spark.offsets import EARLIEST, LATEST, Loss, Position, Span
from streamqd.spark.options import ReadOptions, read_options
from streamqd.spark.reader import BATCH_ROWS, EntryReader
from streamqd.spark.streams import Catalog, DataLossError
from streamqd.store import messages, retention, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.node import Node
from streamqd.store.store import Store
from streamqd.store.transport import ReplyTooLargeError
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer, Server

PLACE: TopicPartition = ("access", 0)


class Shop:
    """A topic of two partitions, and its readers."""

    def __init__(self, server: Server, link: Connection, keys: Keys) -> None:
        self.server, self.link, self.keys = server, link, keys
        topics.create(Store(link, keys), "access", config.Topic(partitions=2))

    def options(self, **given: object) -> ReadOptions:
        every = {"url": self.server.url, "subscribe": "access"} | given
        return read_options({n.lower(): str(v) for n, v in every.items() if v is not None}, {})

    def catalog(self, **given: object) -> Catalog:
        return Catalog(self.options(**given))

    def add(self, *ids: str, partition: int = 0, size: int = 3) -> None:
        key = self.keys.stream("access", partition)
        self.link.pipeline([("XADD", key, each, "payload", b"x" * size) for each in ids])

    def trim(self, keep_from: str) -> None:
        """Trim exactly, and leave a record, as the housekeeper does.

        A foreign XTRIM would leave none.
        """
        self.link.execute("XTRIM", self.keys.stream("access", 0), "MINID", "=", keep_from)

    def span(self, catalog: Catalog) -> Span:
        facts = catalog.facts([PLACE])
        ends = {PLACE: facts[PLACE].latest}
        return catalog.spans(catalog.starts(facts, EARLIEST), ends, facts)[PLACE]


@pytest.fixture
def shop(server: Server, link: Connection, keys: Keys) -> Shop:
    return Shop(server, link, keys)


def read_ids(options: ReadOptions, span: Span) -> list[str]:
    return [entry[0].decode() for batch in EntryReader(options, span).batches() for entry in batch]


# --- places and facts -----------------------------------------------------------------------------


def test_catalog_lists_the_places_of_its_topics(shop: Shop, store: Store) -> None:
    topics.create(store, "web-1", config.Topic(partitions=1))
    assert shop.catalog().places() == [("access", 0), ("access", 1)]
    assert shop.catalog(subscribe="access:dlq").places() == [("access:dlq", 0), ("access:dlq", 1)]
    found = shop.catalog(subscribe=None, subscribePattern="web-.*:dlq").places()
    assert found == [("web-1:dlq", 0)]
    assert shop.catalog(subscribe=None, subscribePattern="web").places() == []
    assert shop.catalog(subscribe=None, assign='{"access": [1]}').places() == [("access", 1)]
    with pytest.raises(RequestRefusedError, match="partition 2 of topic access not found"):
        shop.catalog(subscribe=None, assign='{"access": [2]}').places()
    with pytest.raises(
        TopicNotFoundError, match="exist; create it with `streamqd topic create orders`"
    ):
        shop.catalog(subscribe="orders").places()
    with pytest.raises(TopicNotFoundError, match="did you mean access, or create it"):
        shop.catalog(subscribe="acess").places()


def test_catalog_reads_the_facts_of_a_stream(shop: Shop, link: Connection, keys: Keys) -> None:
    assert shop.catalog().facts([PLACE])[PLACE] == offsets.StreamFacts()
    shop.add("1-0", "2-0", "3-0")
    assert shop.catalog().facts([PLACE])[PLACE].counted == (shop.server.version >= (7,))
    shop.trim("2-0")
    facts = shop.catalog().facts([PLACE, ("access:dlq", 0)])
    if shop.server.version >= (7,):
        assert facts[PLACE] == offsets.StreamFacts(length=2, added=3, first=(2, 0), last=(3, 0))
    assert facts["access:dlq", 0] == offsets.StreamFacts(exact=False)
    link.execute("XADD", keys.dlq("access", 0), "7-0", "payload", "x")
    letters = shop.catalog(subscribe="access:dlq").facts([("access:dlq", 0)])
    assert letters["access:dlq", 0] == offsets.StreamFacts(1, 1, (7, 0), (7, 0), exact=False)


def test_group_start_precedes_its_pending_entries(shop: Shop, link: Connection, keys: Keys) -> None:
    shop.add("1-0", "2-0", "3-0")
    catalog = shop.catalog(startingOffsets="group:hits")
    with pytest.raises(RequestRefusedError, match="group hits does not exist on access/0"):
        catalog.starts(catalog.facts([PLACE]), LATEST)
    link.run(messages.ensure_group(keys, Assignment("access", 0, "hits"), "0"))
    stream = keys.stream("access", 0)
    read = ("XREADGROUP", "GROUP", "hits", "w", "COUNT", 2, "STREAMS", stream, ">")
    link.execute(*read)
    facts = catalog.facts([PLACE])
    assert catalog.starts(facts, LATEST)[PLACE].id == (0, offsets.PART_MAX)
    link.execute("XACK", stream, "hits", "1-0")
    assert catalog.starts(facts, LATEST)[PLACE].id == (1, offsets.PART_MAX)
    link.execute("XACK", stream, "hits", "2-0")
    assert catalog.starts(facts, LATEST)[PLACE].id == (2, 0)


def test_starts_must_name_every_partition(shop: Shop) -> None:
    catalog = shop.catalog(startingOffsets='{"access": {"0": "1-0"}}')
    with pytest.raises(RequestRefusedError, match="lacks 1 partitions, such as access 1"):
        catalog.starts(catalog.facts(catalog.places()), LATEST)


def test_walk_counts_entries_in_short_steps(shop: Shop) -> None:
    shop.add(*(f"{n}-0" for n in range(1, 2501)))
    shop.add("1-0", "2-0", partition=1)
    catalog = shop.catalog()
    last = (2500, 0)
    walked = catalog.walk({PLACE: ((0, 0), last, 2100), ("access", 1): ((0, 0), last, 2100)})
    assert walked == {PLACE: Position((2100, 0), 2100), ("access", 1): Position((2, 0), 2)}
    facts = catalog.facts([PLACE])
    counted = catalog.add_counts({PLACE: Position((400, 5))}, facts)
    assert counted == {PLACE: Position((400, 5), 400)}


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 32, 33, 1000])
def test_reader_keeps_the_order_for_every_fetch_size(shop: Shop, size: int) -> None:
    wanted = [f"{n}-{n % 3}" for n in range(1, 201)]
    shop.add(*wanted)
    catalog = shop.catalog()
    span = shop.span(catalog)
    assert span.rows == 200
    assert read_ids(shop.options(fetchSize=size), span) == wanted
    inner = Span(PLACE, (5, 2), (9, 0))
    assert read_ids(shop.options(fetchSize=size), inner) == ["6-0", "7-1", "8-2", "9-0"]


def test_reader_bounds_each_fetch_by_bytes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first, small fetch, no fetch requests more bytes than its bound allows."""
    shop.add(*(f"{n}-0" for n in range(1, 301)), size=1000)
    asked: list[int] = []
    fetch = EntryReader._fetch

    def spied(self: EntryReader, cursor: str, end: str, count: int) -> tuple[list[RawEntry], int]:
        asked.append(count)
        return fetch(self, cursor, end, count)

    monkeypatch.setattr(EntryReader, "_fetch", spied)
    options = shop.options(fetchBytes=10_000)
    sizes = [len(batch) for batch in EntryReader(options, shop.span(Catalog(options))).batches()]
    assert sum(sizes) == 300
    assert max(asked[1:]) <= 11
    assert max(sizes[1:]) <= 20


def test_reader_adapts_to_large_entries_after_small_ones(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After small entries, the requested count is far too high for large ones.

    The reader requests the rest again.
    """
    shop.add(*(f"{n}-0" for n in range(1, 1001)), size=10)
    shop.add(*(f"{n}-0" for n in range(1001, 1101)), size=20_000)
    shop.add(*(f"{n}-0" for n in range(1101, 1201)), size=10)
    came: list[int] = []
    refused = 0
    weighed = Node.execute_limited

    def spied(node: Node, *command: Any, bytes_max: float) -> tuple[list[RawEntry], int]:
        nonlocal refused
        try:
            page, received = weighed(node, *command, bytes_max=bytes_max)
        except ReplyTooLargeError:
            refused += 1
            raise
        came.append(received)
        return page, received

    monkeypatch.setattr(Node, "execute_limited", spied)
    options = shop.options(fetchBytes=50_000)
    batches = list(EntryReader(options, shop.span(Catalog(options))).batches())
    ids = [entry[0].decode() for batch in batches for entry in batch]
    assert ids == [f"{n}-0" for n in range(1, 1201)]
    assert refused > 0
    assert max(came) < 4 * 50_000 + (1 << 18), "the allowed bytes and the last piece"
    heaviest = max(sum(len(entry[1][1]) for entry in batch) for batch in batches)
    assert heaviest <= 5 * 50_000


def test_reader_accepts_one_entry_above_fetch_bytes(shop: Shop) -> None:
    shop.add(*(f"{n}-0" for n in range(1, 6)), size=100_000)
    options = shop.options(fetchBytes=1000)
    assert len(read_ids(options, shop.span(Catalog(options)))) == 5


@pytest.mark.parametrize("limit", [1, 9, 10, 11, 99, 100, 101])
def test_limited_read_reports_its_end(shop: Shop, limit: int) -> None:
    shop.add(*(f"{n}-0" for n in range(1, 101)))
    options = shop.options(fetchSize=10)
    span = shop.span(Catalog(options))._replace(rows=None)
    reader = EntryReader(options, span, limit)
    read = [entry for batch in reader.batches() for entry in batch]
    assert len(read) == reader.rows == min(limit, 100)
    assert reader.end == (min(limit, 100), 0)


def test_limited_read_overtaken_by_trimming_reads_to_the_end(shop: Shop) -> None:
    """The read continues to the end, where the number of entries that Redis has issued is known."""
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")
    shop.add(*(f"{n}-0" for n in range(1, 101)))
    options = shop.options(fetchSize=10, failOnDataLoss="false")
    reader = EntryReader(options, shop.span(Catalog(options))._replace(rows=None), 50)
    pages = reader._pages()
    next(pages)
    shop.trim("31-0")
    for _ in pages:
        pass
    assert (reader.rows, reader.end) == (80, (100, 0))


def test_reader_adds_up_its_progress(shop: Shop, link: Connection) -> None:
    shop.add(*(f"{n}-0" for n in range(1, 51)))
    read_ids(shop.options(progressKey="p"), shop.span(shop.catalog()))
    read_ids(shop.options(progressKey="p"), shop.span(shop.catalog()))
    assert link.execute("HGETALL", "p") == [b"access/0", b"100"]
    assert link.execute("TTL", "p") > 0


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.DROP_REPLY, Fault.CUT_REPLY])
@pytest.mark.parametrize("rows", [50, BATCH_ROWS + 50], ids=["at the end", "meanwhile"])
def test_failed_progress_report_fails_no_task(
    shop: Shop, link: Connection, server: Server, fault: Fault, rows: int
) -> None:
    if not isinstance(server, ProcessServer):
        pytest.skip("needs the server's socket")
    shop.add(*(f"{n}-0" for n in range(1, rows + 1)))
    with FaultProxy(server.socket_path) as proxy:
        options = shop.options(url=proxy.url, progressKey="p", retryIntervalMs=1)
        trigger = proxy.arm(fault, command="HINCRBY")
        assert len(read_ids(options, shop.span(Catalog(options)))) == rows
        assert trigger.hit
    assert int(link.execute("HGET", "p", "access/0") or 0) <= rows, "nothing counts twice"


def test_reader_reconnects_after_a_lost_connection(shop: Shop, link: Connection) -> None:
    shop.add(*(f"{n}-0" for n in range(1, 101)))
    options = shop.options(fetchSize=10, retryIntervalMs=1)
    found = EntryReader(options, shop.span(Catalog(options)))._pages()
    first = next(found)
    link.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert len(first) + sum(map(len, found)) == 100


# --- trimming during a read -----------------------------------------------------------------------


def test_reader_counts_entries_trimmed_before_planning(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")
    shop.add(*(f"{n}-0" for n in range(1, 11)))
    start = {PLACE: Position((3, 0), 3)}
    shop.trim("4-0")
    catalog, lenient = shop.catalog(), shop.catalog(failOnDataLoss="false")
    facts = catalog.facts([PLACE])
    ends = {PLACE: facts[PLACE].latest}
    assert catalog.spans(start, ends, facts)[PLACE].rows == 7
    shop.trim("6-0")
    facts = catalog.facts([PLACE])
    with pytest.raises(DataLossError, match="2 entries of access partition 0 after 3-0"):
        catalog.spans(start, ends, facts)
    with caplog.at_level(logging.WARNING, "streamqd.spark"):
        left = lenient.spans(start, ends, facts)[PLACE]
    assert "2 entries" in caplog.text
    assert (left.rows, read_ids(shop.options(), left)) == (5, [f"{n}-0" for n in range(6, 11)])


@pytest.mark.parametrize("known", [True, False])
def test_reader_finds_entries_trimmed_during_the_read(
    shop: Shop, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    """The reader finds the loss by counting rows or, without a count, by the gap in the IDs."""
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")

    def read(options: ReadOptions, cut: Callable[[], None]) -> int:
        reader = EntryReader(options, span)
        rows = 0
        for number, page in enumerate(reader._pages()):
            rows += len(page)
            if number == 2:
                cut()
        reader._settle()
        return rows

    shop.add(*(f"{n}-0" for n in range(1, 101)))
    whole = shop.span(shop.catalog())
    span = whole if known else whole._replace(rows=None)
    assert read(shop.options(fetchSize=10), lambda: shop.trim("30-0")) == 100
    span = span._replace(removed=29, start=(29, 0), rows=71 if known else None)
    with pytest.raises(DataLossError, match="5 entries" if known else "an unknown number"):
        read(shop.options(fetchSize=10), lambda: shop.trim("65-0"))
    span = span._replace(removed=64, start=(64, 0), rows=36 if known else None)
    lenient = shop.options(fetchSize=10, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "streamqd.spark"):
        assert read(lenient, lambda: shop.trim("98-0")) == 33
    assert "Continuing with the remaining entries" in caplog.text


def test_reader_finds_entries_trimmed_before_the_first_fetch(shop: Shop) -> None:
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")
    shop.add(*(f"{n}-0" for n in range(1, 101)))
    options = shop.options()
    pieces = offsets.split(shop.span(Catalog(options)), 2)
    shop.trim("60-0")
    for piece in pieces:
        with pytest.raises(DataLossError):
            read_ids(options, piece)


def test_trim_record_counts_losses_on_every_server(
    shop: Shop, link: Connection, keys: Keys
) -> None:
    link.run(messages.ensure_group(keys, Assignment("access", 0, "hits"), "0"))
    shop.add(*(f"{n}-0" for n in range(1, 251)))
    stream = keys.stream("access", 0)
    link.execute("XREADGROUP", "GROUP", "hits", "w", "COUNT", 250, "STREAMS", stream, ">")
    link.execute("XACK", stream, "hits", *(f"{n}-0" for n in range(1, 251)))
    link.run(
        retention.trim(
            *(keys, "access", 0),
            keep_from="",
            max_length=0,
            archive=False,
            limit=200,
            expected=[],
        )
    )
    catalog = shop.catalog()
    facts = catalog.facts([PLACE])[PLACE]
    assert facts.added == 250
    assert facts.removed > 0
    gone = facts.removed
    assert offsets.find_loss(Position((gone, 0), gone), facts) is None
    assert offsets.find_loss(Position((gone - 1, 0), gone - 1), facts) == Loss("trimmed", 1)


def test_reader_accepts_removed_dead_letters(shop: Shop, link: Connection, keys: Keys) -> None:
    place = ("access:dlq", 0)
    dlq = keys.dlq("access", 0)
    link.pipeline([("XADD", dlq, f"{n}-0", "payload", "x") for n in range(1, 101)])
    options = shop.options(subscribe="access:dlq", fetchSize=10)
    catalog = Catalog(options)
    facts = catalog.facts([place])
    starts = catalog.starts(facts, EARLIEST)
    span = catalog.spans(starts, {place: facts[place].latest}, facts)[place]
    pages = EntryReader(options, span)._pages()
    read = len(next(pages))
    link.execute("XDEL", dlq, *(f"{n}-0" for n in range(1, 51)))
    assert read + sum(map(len, pages)) == read + 50
    assert read_ids(options, span) == [f"{n}-0" for n in range(51, 101)]
