"""One call copies a bounded number of bytes, because the server runs nothing else during it."""

from __future__ import annotations

import pytest

from streamqd.model import Lease
from streamqd.store import dead, messages, publishing, retries, spark
from streamqd.store.items import BYTES_MAX, portions
from streamqd.store.messages import Recovered, Snapshot
from streamqd.store.retention import Trimmed
from streamqd.store.scripts import load
from streamqd.worker.settler import FailedEntry, _batches
from tests.contract.harness import ASSIGNMENT, Harness
from tests.contract.scenarios import drop_all, trim_all
from tests.support import costs

BODY = b"x" * (BYTES_MAX // 4)
PER_CALL = 4  # bodies that exceed BYTES_MAX if their overhead is included
COUNT = 10


@pytest.fixture
def ids(harness: Harness) -> list[str]:
    """Write large entries that no consumer has read. Return their IDs."""
    harness.groups()
    names = [f"{number}-0" for number in range(1, 1 + COUNT)]
    for name in names:
        harness.add(name, "payload", BODY)
    return names


def delay_retries(harness: Harness, ids: list[str]) -> None:
    """Turn these entries into waiting retries that are due now."""
    harness.fetch()
    harness.own("t1")
    items = [(f"m:{each}".encode(), 0.0, {b"retryCount": b"1"}) for each in ids]
    for each in items:
        harness.expect(
            "settle_retry", "OK", messages.retry(harness.keys, Lease(ASSIGNMENT, "t1"), [each])
        )


def test_byte_bound_is_equal_in_lua_and_python() -> None:
    assert f"local BYTES_MAX = {BYTES_MAX}\n".encode() in load()["message_promote"].source


def test_message_promote_is_bounded_by_bytes(harness: Harness, ids: list[str]) -> None:
    delay_retries(harness, ids)
    call = messages.promote_retries(harness.keys, ASSIGNMENT, 100)
    moved = []
    while True:
        done = messages.Promoted.parse(harness.link.run(call))
        moved.append(done.moved)
        if not done.more:
            break
        assert done.next_due_unix_ms is not None
    assert moved == [PER_CALL, PER_CALL, COUNT - 2 * PER_CALL]
    assert harness.do("XLEN", harness.retry) == COUNT


def test_message_promote_moves_one_item_above_the_bound(harness: Harness) -> None:
    harness.groups()
    for name in ("s1", "s2"):
        fields = ["payload", 2 * BYTES_MAX * b"x"]
        harness.link.run(publishing.schedule(harness.keys, "access", 0, 0.0, name, fields))
    call = messages.promote_delayed(harness.keys, "access", 0, 100)
    for left in (1, 0):
        done = messages.Promoted.parse(harness.link.run(call))
        assert (done.moved, done.more) == (1, bool(left))


def test_retry_page_is_bounded_by_bytes(harness: Harness, ids: list[str]) -> None:
    delay_retries(harness, ids)
    places: list[str] = []
    after, sizes, more = (0, ""), [], True
    while more:
        page, more = retries.rows(
            harness.link.run(retries.page(harness.keys, ASSIGNMENT, after, 100))
        )
        places += [row.place for row in page]
        sizes.append(len(page))
        after = (page[-1].due_unix_ms, page[-1].place)
    assert sorted(places) == sorted(f"m:{each}" for each in ids)
    assert sizes == [PER_CALL, PER_CALL, COUNT - 2 * PER_CALL]


def test_dead_purge_is_bounded_by_bytes(harness: Harness) -> None:
    for number in range(COUNT):
        harness.add(f"{number + 1}-0", "payload", BODY, stream=harness.dlq)
    call = dead.purge_before(harness.keys, "access", 0, "99-0", 100)
    replies = [harness.expect("dead_purge", "OK", call) for _ in range(3)]
    assert replies == [[7, 1, 0], [COUNT - 7, 0, 0], [0, 0, 0]], "read by one, two and four"
    assert harness.do("XLEN", harness.dlq) == 0


def test_message_recover_is_bounded_by_bytes(harness: Harness, ids: list[str]) -> None:
    harness.fetch()
    harness.own("t1")
    found: list[bytes] = []
    sizes, more = [], True
    while more:
        after = found[-1] if found else b""
        call = messages.recover(
            harness.keys, Lease(ASSIGNMENT, "t1"), "s1", not found, after, "", 100
        )
        page = Recovered.parse(harness.link.run(call))
        found += [entry.id for entry in page.main]
        sizes.append(len(page.main))
        more = page.more_main
        assert not page.more_retry
    assert [each.decode() for each in found] == ids
    assert sizes == [PER_CALL, PER_CALL, COUNT - 2 * PER_CALL]


def test_message_recover_returns_the_requested_count(harness: Harness) -> None:
    harness.pending("1-0", "2-0")
    harness.own("t1")
    for count, more in ((1, True), (2, True), (3, False)):
        call = messages.recover(harness.keys, Lease(ASSIGNMENT, "t1"), "s1", True, "", "", count)
        assert Recovered.parse(harness.link.run(call)).more_main is more


def test_message_reclaim_is_bounded_by_bytes(harness: Harness, ids: list[str]) -> None:
    harness.fetch(consumer="foreign")
    harness.own("t1")
    harness.link.run(messages.recover(harness.keys, Lease(ASSIGNMENT, "t1"), "s1", True, "", "", 1))
    call = messages.reclaim(harness.keys, Lease(ASSIGNMENT, "t1"), "s1", "m", 0.0, 100)
    taken = [messages.Reclaimed.parse(harness.link.run(call)).entries for _ in range(4)]
    assert [len(each) for each in taken] == [PER_CALL, PER_CALL, COUNT - 2 * PER_CALL, 0]
    assert [entry.decode() for each in taken for entry, _ in each] == ids


def test_stream_step_is_bounded_by_bytes(harness: Harness, ids: list[str]) -> None:
    """To stay below the bound, a count reads one entry, then two, and then up to four at a time."""
    call = spark.step(harness.stream, "0-0", "9-0", 100)
    assert harness.expect("stream_step", "OK", call) == [7, b"7-0", 1]
    call = spark.step(harness.stream, "7-0", "9-0", 100)
    assert harness.expect("stream_step", "OK", call) == [2, b"9-0", 0]
    snapshot = Snapshot.parse(harness.link.run(messages.snapshot(harness.keys, ASSIGNMENT)))
    assert snapshot is not None
    assert (snapshot.length, snapshot.unread) == (COUNT, -1)


def test_stream_step_exceeds_the_byte_bound_by_one_read(harness: Harness) -> None:
    costs.seed_backlog(harness, 40, "x" * (BYTES_MAX // 16))
    call = spark.step(harness.stream, "0-0", "9999999999999-0", 100)
    assert harness.expect("stream_step", "OK", call)[0] == 1 + 2 + 4 + 4 + 4 + 4


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([1, 1, 1, 1, 1, 1], [[1, 1, 1, 1, 1], [1]]),
        ([BYTES_MAX, 0, 1], [[BYTES_MAX, 0], [1]]),
        ([1, BYTES_MAX * 3, 1], [[1], [BYTES_MAX * 3], [1]]),
        ([BYTES_MAX // 2] * 3, [[BYTES_MAX // 2] * 2, [BYTES_MAX // 2]]),
    ],
)
def test_portions_split_entries_by_size(sizes: list[int], parts: list[list[int]]) -> None:
    assert list(portions(sizes, int, 5)) == parts


@pytest.mark.parametrize("drops", [False, True], ids=["trim", "drop"])
def test_stream_drop_is_bounded_by_bytes(harness: Harness, drops: bool) -> None:
    harness.groups()
    costs.seed_backlog(harness, 300, "x" * (256 << 10))
    if not drops:
        harness.do("XGROUP", "SETID", harness.stream, ASSIGNMENT.group, "$")
    call = trim_all(harness, limit=10_000)
    if drops:
        call = drop_all(harness, limit=10_000, drop_before="9999999999999-0")
    removed = []
    while harness.do("XLEN", harness.stream):
        removed.append(harness.link.run(call).values[0])
    assert min(removed[:-1]) >= 50
    assert max(removed) <= 65, "64 would be 16 MiB, and one more may go"


def test_stream_drop_reports_remaining_entries(harness: Harness) -> None:
    harness.groups()
    costs.seed_backlog(harness, 1200, "x" * (32 << 10))
    harness.do("XGROUP", "SETID", harness.stream, ASSIGNMENT.group, "$")
    left, more = 1200, True
    while more:
        assert left
        found = Trimmed.parse(harness.link.run(trim_all(harness, limit=10_000)))
        left, more = left - found.removed, found.more
    assert left == 0
    assert not Trimmed.parse(harness.link.run(trim_all(harness))).more


@pytest.mark.parametrize("large", [16 << 10, 256 << 10, 1 << 20])
def test_stream_drop_handles_entries_of_mixed_sizes(harness: Harness, large: int) -> None:
    """Entries may have mixed sizes. The size of the first does not predict those of the next."""
    harness.groups()
    for count, size in ((150, 10), ((64 << 20) // large, large), (3000, 10)):
        costs.seed_backlog(harness, count, "x" * size)
    harness.do("XGROUP", "SETID", harness.stream, ASSIGNMENT.group, "$")
    freed = []
    while harness.do("XLEN", harness.stream):
        before = harness.do("MEMORY", "USAGE", harness.stream, "SAMPLES", 0)
        assert harness.link.run(trim_all(harness, limit=10_000)).values[0]
        freed.append(before - harness.do("MEMORY", "USAGE", harness.stream, "SAMPLES", 0))
    # Even the smallest entries fill a default node if there are a few of them.
    assert max(freed) <= (16 << 20) + 2 * large
    assert len(freed) <= 12, "and goes on"


def test_stream_drop_works_without_memory_permission(harness: Harness) -> None:
    """Without the permission for MEMORY USAGE, entries are dropped in small parts."""
    harness.groups()
    costs.seed_backlog(harness, 250, "x" * 100_000)
    harness.do("XGROUP", "SETID", harness.stream, ASSIGNMENT.group, "$")
    harness.do("ACL", "SETUSER", "default", "-memory")
    try:
        found = [Trimmed.parse(harness.link.run(trim_all(harness, limit=10_000))) for _ in range(4)]
    finally:
        harness.do("ACL", "SETUSER", "default", "+memory")
    assert [each.removed for each in found] == [100, 100, 50, 0]
    assert [each.more for each in found] == [True, True, True, False]


def test_worker_settles_large_batches_in_portions() -> None:
    body = [b"payload", BODY]
    size = sum(map(len, body))
    items = [
        FailedEntry(b"m:%d-0" % number, number, None if number % 2 else 1.0, {}, body, size)
        for number in range(COUNT)
    ]
    batches = [(dead, [item.at for item in part]) for dead, part in _batches(items)]
    assert batches == [(False, [0, 2, 4]), (False, [6, 8]), (True, [1, 3, 5]), (True, [7, 9])]
