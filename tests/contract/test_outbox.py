"""outbox_acquire, outbox_renew and outbox_release allow only one relay at a time.

outbox_fence and outbox_publish write each row once.
"""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError, InvalidValueError, RedisResponseError
from streamqd.store import outbox
from streamqd.store.outbox import OutboxView, OutgoingRow, Published
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import Harness

NAME = "shop"
TTL = 15.0
NEVER = "18446744073709551615"


def uid(number: int) -> str:
    return f"{number:032x}"


def rows(*numbers: int, due: int | None = None) -> list[OutgoingRow]:
    return [OutgoingRow(each - 2, uid(each), due, [b"payload", b"%d" % each]) for each in numbers]


def acquire(harness: Harness, token: str = "t1", *, above: int = 0, dead: str = "") -> Call:
    return outbox.acquire(harness.keys, NAME, token, TTL, f"host of {token}", above, dead)


def renew(harness: Harness, token: str = "t1", **figures: object) -> Call:
    return outbox.renew(harness.keys, NAME, token, TTL, figures)


def release(harness: Harness, token: str = "t1") -> Call:
    return outbox.release(harness.keys, NAME, token)


def fence(harness: Harness, epoch: int, partitions: int = 2) -> Call:
    meta = harness.keys.meta("access")
    return outbox.fence(harness.keys, NAME, "access", 0, epoch, partitions, meta)


def publish(
    harness: Harness,
    some: list[OutgoingRow],
    epoch: int = 5,
    partitions: int = 2,
    limit: int | None = None,
) -> Call:
    meta = harness.keys.meta("access")
    return outbox.publish(
        harness.keys, NAME, "access", 0, some, epoch, partitions, meta, max_backlog=limit
    )


def register(harness: Harness, count: object = 2) -> None:
    harness.do("HSET", harness.keys.meta("access"), "partitionCount", count)


def record(harness: Harness) -> dict[str, bytes]:
    return harness.state().get(harness.keys.outbox_record("access", 0, NAME), {})


def recorded_uids(harness: Harness) -> list[str]:
    return [row.uid for row in outbox.parse_rows(record(harness)["rows"], "k")]


def payloads(harness: Harness) -> list[bytes]:
    return [fields[1] for _, fields in harness.do("XRANGE", harness.stream, "-", "+")]


def set_fence(harness: Harness, epoch: int = 5) -> None:
    register(harness)
    harness.expect("outbox_fence", "OK", fence(harness, epoch))


# --- one relay ------------------------------------------------------------------------------------


def test_outbox_acquire_increases_the_epoch(harness: Harness) -> None:
    with harness.instant() as now:
        epoch = int(harness.expect("outbox_acquire", "OK", acquire(harness))[0])
    assert now == epoch
    again = int(harness.expect("outbox_acquire", "OK", acquire(harness))[0])
    assert again > epoch
    assert (
        int(harness.expect("outbox_acquire", "OK", acquire(harness, above=again + 10**6))[0])
        > again + 10**6
    )
    held = harness.state()[harness.keys.outbox(NAME)]
    assert (held["token"], held["owner"]) == (b"t1", b"host of t1")
    assert 0 < harness.do("PTTL", harness.keys.outbox_lease(NAME)) <= TTL * 1000


def test_outbox_acquire_increases_the_epoch_despite_the_clock(harness: Harness) -> None:
    harness.do("HSET", harness.keys.outbox(NAME), "epoch", 9 * 10**12)
    assert int(harness.expect("outbox_acquire", "OK", acquire(harness))[0]) == 9 * 10**12 + 1


def test_outbox_acquire_refuses_a_held_outbox(harness: Harness) -> None:
    harness.expect("outbox_acquire", "OK", acquire(harness))
    token, ttl_ms, owner = harness.expect("outbox_acquire", "HELD", acquire(harness, "t2"))
    assert (token, owner) == (b"t1", b"host of t1")
    assert 0 < ttl_ms <= TTL * 1000
    harness.expect("outbox_acquire", "HELD", acquire(harness, "t2", dead="t0"))
    harness.expect("outbox_acquire", "OK", acquire(harness, "t2", dead="t1"))
    harness.do("DEL", harness.keys.outbox_lease(NAME))
    harness.expect("outbox_acquire", "OK", acquire(harness, "t3"))


def test_outbox_acquire_reports_an_unreadable_epoch(harness: Harness) -> None:
    harness.do("HSET", harness.keys.outbox(NAME), "epoch", "soon")
    harness.expect_error("BADVALUE", acquire(harness))


def test_outbox_renew_writes_figures_and_restores_the_lease(harness: Harness) -> None:
    epoch = int(harness.expect("outbox_acquire", "OK", acquire(harness))[0])
    harness.do("DEL", harness.keys.outbox_lease(NAME))
    with harness.instant() as now:
        harness.expect(
            "outbox_renew", "OK", renew(harness, rows=3, more=1, oldest_ms=1500, error="full")
        )
    replies = [harness.do(*command) for command in outbox.view_commands(harness.keys, NAME)]
    seen = OutboxView.parse(NAME, *replies, "the outbox")
    assert (seen.epoch, seen.owner, seen.rows, seen.more) == (epoch, "host of t1", 3, True)
    assert (seen.oldest_seconds, seen.error, seen.relayed) == (1.5, "full", True)
    assert now == seen.at_unix_ms
    harness.expect("outbox_acquire", "OK", acquire(harness))  # removes the error, keeps the figures
    replies = [harness.do(*command) for command in outbox.view_commands(harness.keys, NAME)]
    seen = OutboxView.parse(NAME, *replies, "the outbox")
    assert (seen.rows, seen.error) == (3, "")
    with pytest.raises(ContractError, match="colour"):
        renew(harness, colour=1)


def test_outbox_renew_and_release_refuse_a_replaced_relay(harness: Harness) -> None:
    harness.expect("outbox_renew", "FENCED", renew(harness))
    harness.expect("outbox_acquire", "OK", acquire(harness))
    harness.expect("outbox_acquire", "OK", acquire(harness, "t2", dead="t1"))
    harness.expect("outbox_renew", "FENCED", renew(harness))
    harness.expect("outbox_release", "FENCED", release(harness))
    epoch = harness.state()[harness.keys.outbox(NAME)]["epoch"]
    harness.expect("outbox_release", "OK", release(harness, "t2"))
    harness.expect("outbox_release", "FENCED", release(harness, "t2"))
    assert harness.do("EXISTS", harness.keys.outbox_lease(NAME)) == 0
    assert int(harness.expect("outbox_acquire", "OK", acquire(harness))[0]) > int(epoch)


def test_outbox_release_keeps_the_lease_of_another_relay(harness: Harness) -> None:
    harness.expect("outbox_acquire", "OK", acquire(harness))
    harness.do("SET", harness.keys.outbox_lease(NAME), "t2")
    harness.expect("outbox_release", "OK", release(harness))
    assert harness.do("GET", harness.keys.outbox_lease(NAME)) == b"t2"


# --- the fence ------------------------------------------------------------------------------------


def test_outbox_fence_returns_last_batch_and_refuses_old_epochs(harness: Harness) -> None:
    set_fence(harness)
    harness.expect("outbox_publish", "OK", publish(harness, rows(1, 2)))
    [raw] = harness.expect("outbox_fence", "OK", fence(harness, 6))
    assert outbox.parse_rows(raw, "k") == [(-1, uid(1)), (0, uid(2))]
    assert harness.expect("outbox_fence", "FENCED", fence(harness, 5)) == [b"6"]
    assert harness.expect("outbox_publish", "FENCED", publish(harness, rows(3))) == [b"6"]
    harness.expect("outbox_fence", "OK", fence(harness, 6))
    assert record(harness) == {"epoch": b"6", "rows": raw}


@pytest.mark.parametrize(("present", "said"), [(4, b"4"), (None, b"")])
def test_outbox_calls_refuse_a_changed_partition_count(
    harness: Harness, present: object, said: bytes
) -> None:
    set_fence(harness)
    harness.do("DEL", harness.keys.meta("access"))
    if present is not None:
        register(harness, present)
    assert harness.expect("outbox_fence", "MOVED", fence(harness, 6)) == [said]
    assert harness.expect("outbox_publish", "MOVED", publish(harness, rows(1))) == [said]
    # A relay that was replaced gets FENCED, not MOVED.
    assert harness.expect("outbox_publish", "FENCED", publish(harness, rows(1), epoch=4)) == [b"5"]


def test_outbox_calls_report_an_unreadable_epoch(harness: Harness) -> None:
    set_fence(harness)
    harness.do("HSET", harness.keys.outbox_record("access", 0, NAME), "epoch", "x")
    harness.expect_error("BADVALUE", fence(harness, 6))
    harness.expect_error("BADVALUE", publish(harness, rows(1)))


def test_outbox_rows_parser_refuses_invalid_rows() -> None:
    for raw in (b"x" * 48, b"0" * 47, b"\xff" * 48):
        with pytest.raises(InvalidValueError, match="rows"):
            outbox.parse_rows(raw, "the record")


# --- publishing -----------------------------------------------------------------------------------


def test_outbox_publish_requires_a_fence_of_its_epoch(harness: Harness) -> None:
    register(harness)
    harness.expect("outbox_publish", "UNFENCED", publish(harness, rows(1)))
    harness.expect("outbox_fence", "OK", fence(harness, 5))
    harness.expect("outbox_publish", "UNFENCED", publish(harness, rows(1), epoch=6))


def test_outbox_publish_skips_recorded_rows(harness: Harness) -> None:
    set_fence(harness)
    assert harness.expect("outbox_publish", "OK", publish(harness, rows(1, 2))) == [2, 2, b""]
    before = harness.dump()
    assert harness.expect("outbox_publish", "OK", publish(harness, rows(1, 2))) == [2, 0, b""]
    assert harness.dump() == before
    assert harness.expect("outbox_publish", "OK", publish(harness, rows(2, 3))) == [2, 1, b""]
    assert payloads(harness) == [b"1", b"2", b"3"]
    assert recorded_uids(harness) == [uid(2), uid(3)]


def test_outbox_publish_writes_a_duplicate_row_once(harness: Harness) -> None:
    set_fence(harness)
    assert harness.expect("outbox_publish", "OK", publish(harness, rows(1, 1, 2))) == [3, 2, b""]
    assert payloads(harness) == [b"1", b"2"]


def test_outbox_publish_delays_rows_until_they_are_due(harness: Harness) -> None:
    set_fence(harness)
    later = harness.now_unix_ms() + 60_000
    some = [*rows(1, due=later), *rows(2, due=1), *rows(3)]
    with harness.instant() as now:
        assert harness.expect("outbox_publish", "OK", publish(harness, some)) == [3, 3, b""]
    assert payloads(harness) == [b"2", b"3"]
    state = harness.state()
    assert state["delayed_sends"] == {uid(1): later}
    item = state["delayed_send_items"][uid(1)]
    assert now == item.pop("sentAt")
    assert item == {"payload": b"1"}
    assert harness.expect("outbox_publish", "OK", publish(harness, some)) == [3, 0, b""]


def test_outbox_publish_records_rows_before_a_full_stream(harness: Harness) -> None:
    set_fence(harness)
    harness.expect("outbox_publish", "OK", publish(harness, rows(1)))
    harness.do("DEL", harness.stream)
    harness.add(f"{NEVER}-{int(NEVER) - 1}")
    settled, written, refusal = harness.expect(
        "outbox_publish", "OK", publish(harness, rows(2, 3, 1))
    )
    assert (settled, written, type(refusal)) == (1, 1, RedisResponseError)
    # The row after the refused one had already been written, so it stays recorded.
    assert recorded_uids(harness) == [uid(2), uid(1)]
    before = harness.dump()
    with pytest.raises(RedisResponseError):
        harness.link.run(publish(harness, rows(3)))
    assert harness.dump() == before


def test_outbox_publish_writes_the_rows_that_fit(harness: Harness) -> None:
    set_fence(harness)
    harness.groups()
    harness.expect("outbox_publish", "OK", publish(harness, rows(1, 2)))
    assert harness.expect("outbox_publish", "OK", publish(harness, rows(2, 3, 4), limit=3)) == [
        2,
        1,
        2,
    ]
    assert payloads(harness) == [b"1", b"2", b"3"]
    assert harness.expect("outbox_publish", "FULL", publish(harness, rows(4), limit=3)) == [3]
    found = Published.parse(harness.link.run(publish(harness, rows(4), limit=3)))
    assert found == Published(0, 0, None, full=True)
    # Rows that are already recorded need no room.
    assert harness.expect("outbox_publish", "OK", publish(harness, rows(3, 4), limit=3)) == [
        1,
        0,
        3,
    ]
    harness.do("XACK", harness.stream, harness.assignment.group, *harness.fetch(3))
    assert harness.expect("outbox_publish", "OK", publish(harness, rows(4), limit=3)) == [1, 1, b""]


@pytest.mark.fault("F21")
def test_outbox_publish_settles_rows_with_full_memory(harness: Harness) -> None:
    set_fence(harness)
    harness.expect("outbox_publish", "OK", publish(harness, rows(1, 2)))
    with harness.full_memory():
        assert harness.expect("outbox_publish", "OK", publish(harness, rows(1, 2))) == [2, 0, b""]
        harness.expect_error("OOM", publish(harness, rows(2, 3)))


def test_outbox_publish_skips_count_check_on_a_cluster(harness: Harness) -> None:
    call = outbox.fence(harness.keys, NAME, "access", 0, 5, 2, None)
    harness.expect("outbox_fence", "OK", call)
    call = outbox.publish(harness.keys, NAME, "access", 0, rows(1), 5, 2, None)
    harness.expect("outbox_publish", "OK", call)


def test_outbox_publish_refuses_empty_and_incomplete_calls(harness: Harness) -> None:
    for some in ([], [OutgoingRow(1, uid(1), None, [b"payload"])]):
        with pytest.raises(ContractError):
            publish(harness, some)


def test_published_parses_the_full_reply() -> None:
    assert Published.parse(Reply("OK", [2, 1, b""])) == Published(2, 1, None, full=False)
    assert Published.parse(Reply("OK", [2, 1, 7])) == Published(2, 1, None, full=True)
