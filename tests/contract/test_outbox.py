"""outbox_take, outbox_keep, outbox_drop: one relay; outbox_fence, outbox_publish: each row once."""

from __future__ import annotations

import pytest

from streamqd.errors import BadValue, ContractError, RedisRefused
from streamqd.store import outbox
from streamqd.store.outbox import OutboxView, OutgoingRow, Published
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk

NAME = "shop"
TTL = 15.0
NEVER = "18446744073709551615"


def uid(number: int) -> str:
    return f"{number:032x}"


def rows(*numbers: int, due: int | None = None) -> list[OutgoingRow]:
    return [OutgoingRow(each - 2, uid(each), due, [b"payload", b"%d" % each]) for each in numbers]


def take(desk: Desk, token: str = "t1", *, above: int = 0, dead: str = "") -> Call:
    return outbox.take(desk.keys, NAME, token, TTL, f"host of {token}", above, dead)


def keep(desk: Desk, token: str = "t1", **figures: object) -> Call:
    return outbox.keep(desk.keys, NAME, token, TTL, figures)


def drop(desk: Desk, token: str = "t1") -> Call:
    return outbox.drop(desk.keys, NAME, token)


def fence(desk: Desk, epoch: int, partitions: int = 2) -> Call:
    meta = desk.keys.meta("access")
    return outbox.fence(desk.keys, NAME, "access", 0, epoch, partitions, meta)


def publish(
    desk: Desk,
    some: list[OutgoingRow],
    epoch: int = 5,
    partitions: int = 2,
    limit: int | None = None,
) -> Call:
    meta = desk.keys.meta("access")
    return outbox.publish(
        desk.keys, NAME, "access", 0, some, epoch, partitions, meta, max_backlog=limit
    )


def register(desk: Desk, count: object = 2) -> None:
    desk.do("HSET", desk.keys.meta("access"), "partitionCount", count)


def record(desk: Desk) -> dict[str, bytes]:
    return desk.state().get(desk.keys.outbox_record("access", 0, NAME), {})


def recorded(desk: Desk) -> list[str]:
    return [row.uid for row in outbox.rows_of(record(desk)["rows"], "k")]


def payloads(desk: Desk) -> list[bytes]:
    return [fields[1] for _, fields in desk.do("XRANGE", desk.stream, "-", "+")]


def fenced(desk: Desk, epoch: int = 5) -> None:
    register(desk)
    desk.expect("outbox_fence", "OK", fence(desk, epoch))


# --- one relay ------------------------------------------------------------------------------------


def test_outbox_take_sets_a_later_epoch_each_time(desk: Desk) -> None:
    with desk.instant() as now:
        epoch = int(desk.expect("outbox_take", "OK", take(desk))[0])
    assert now == epoch
    again = int(desk.expect("outbox_take", "OK", take(desk))[0])
    assert again > epoch
    assert int(desk.expect("outbox_take", "OK", take(desk, above=again + 10**6))[0]) > again + 10**6
    held = desk.state()[desk.keys.outbox(NAME)]
    assert (held["token"], held["owner"]) == (b"t1", b"host of t1")
    assert 0 < desk.do("PTTL", desk.keys.outbox_lease(NAME)) <= TTL * 1000


def test_outbox_take_survives_a_clock_that_is_set_back(desk: Desk) -> None:
    desk.do("HSET", desk.keys.outbox(NAME), "epoch", 9 * 10**12)
    assert int(desk.expect("outbox_take", "OK", take(desk))[0]) == 9 * 10**12 + 1


def test_outbox_take_refuses_while_another_relay_holds_it(desk: Desk) -> None:
    desk.expect("outbox_take", "OK", take(desk))
    token, ttl_ms, owner = desk.expect("outbox_take", "HELD", take(desk, "t2"))
    assert (token, owner) == (b"t1", b"host of t1")
    assert 0 < ttl_ms <= TTL * 1000
    desk.expect("outbox_take", "HELD", take(desk, "t2", dead="t0"))
    desk.expect("outbox_take", "OK", take(desk, "t2", dead="t1"))
    desk.do("DEL", desk.keys.outbox_lease(NAME))
    desk.expect("outbox_take", "OK", take(desk, "t3"))


def test_outbox_take_names_an_unreadable_epoch(desk: Desk) -> None:
    desk.do("HSET", desk.keys.outbox(NAME), "epoch", "soon")
    desk.expect_error("BADVALUE", take(desk))


def test_outbox_keep_publishes_figures_and_the_lease_again(desk: Desk) -> None:
    epoch = int(desk.expect("outbox_take", "OK", take(desk))[0])
    desk.do("DEL", desk.keys.outbox_lease(NAME))
    with desk.instant() as now:
        desk.expect("outbox_keep", "OK", keep(desk, rows=3, more=1, oldest_ms=1500, error="full"))
    replies = [desk.do(*command) for command in outbox.view(desk.keys, NAME)]
    seen = OutboxView.parse(NAME, *replies, "the outbox")
    assert (seen.epoch, seen.owner, seen.rows, seen.more) == (epoch, "host of t1", 3, True)
    assert (seen.oldest_seconds, seen.error, seen.relayed) == (1.5, "full", True)
    assert now == seen.at_unix_ms
    desk.expect("outbox_take", "OK", take(desk))  # an error is forgotten, the figures stay
    replies = [desk.do(*command) for command in outbox.view(desk.keys, NAME)]
    seen = OutboxView.parse(NAME, *replies, "the outbox")
    assert (seen.rows, seen.error) == (3, "")
    with pytest.raises(ContractError, match="colour"):
        keep(desk, colour=1)


def test_outbox_keep_and_drop_refuse_a_relay_that_was_replaced(desk: Desk) -> None:
    desk.expect("outbox_keep", "FENCED", keep(desk))
    desk.expect("outbox_take", "OK", take(desk))
    desk.expect("outbox_take", "OK", take(desk, "t2", dead="t1"))
    desk.expect("outbox_keep", "FENCED", keep(desk))
    desk.expect("outbox_drop", "FENCED", drop(desk))
    epoch = desk.state()[desk.keys.outbox(NAME)]["epoch"]
    desk.expect("outbox_drop", "OK", drop(desk, "t2"))
    desk.expect("outbox_drop", "FENCED", drop(desk, "t2"))
    assert desk.do("EXISTS", desk.keys.outbox_lease(NAME)) == 0
    assert int(desk.expect("outbox_take", "OK", take(desk))[0]) > int(epoch)


def test_outbox_drop_leaves_the_lease_of_another(desk: Desk) -> None:
    desk.expect("outbox_take", "OK", take(desk))
    desk.do("SET", desk.keys.outbox_lease(NAME), "t2")
    desk.expect("outbox_drop", "OK", drop(desk))
    assert desk.do("GET", desk.keys.outbox_lease(NAME)) == b"t2"


# --- the fence ------------------------------------------------------------------------------------


def test_outbox_fence_returns_the_last_batch_and_refuses_earlier_epochs(desk: Desk) -> None:
    fenced(desk)
    desk.expect("outbox_publish", "OK", publish(desk, rows(1, 2)))
    [raw] = desk.expect("outbox_fence", "OK", fence(desk, 6))
    assert outbox.rows_of(raw, "k") == [(-1, uid(1)), (0, uid(2))]
    assert desk.expect("outbox_fence", "FENCED", fence(desk, 5)) == [b"6"]
    assert desk.expect("outbox_publish", "FENCED", publish(desk, rows(3))) == [b"6"]
    desk.expect("outbox_fence", "OK", fence(desk, 6))
    assert record(desk) == {"epoch": b"6", "rows": raw}


@pytest.mark.parametrize(("present", "said"), [(4, b"4"), (None, b"")])
def test_outbox_calls_refuse_a_changed_partition_count(
    desk: Desk, present: object, said: bytes
) -> None:
    fenced(desk)
    desk.do("DEL", desk.keys.meta("access"))
    if present is not None:
        register(desk, present)
    assert desk.expect("outbox_fence", "MOVED", fence(desk, 6)) == [said]
    assert desk.expect("outbox_publish", "MOVED", publish(desk, rows(1))) == [said]
    # A relay that was replaced is told so first.
    assert desk.expect("outbox_publish", "FENCED", publish(desk, rows(1), epoch=4)) == [b"5"]


def test_outbox_calls_name_an_unreadable_epoch(desk: Desk) -> None:
    fenced(desk)
    desk.do("HSET", desk.keys.outbox_record("access", 0, NAME), "epoch", "x")
    desk.expect_error("BADVALUE", fence(desk, 6))
    desk.expect_error("BADVALUE", publish(desk, rows(1)))


def test_rows_of_another_client_are_named() -> None:
    for raw in (b"x" * 48, b"0" * 47, b"\xff" * 48):
        with pytest.raises(BadValue, match="rows"):
            outbox.rows_of(raw, "the record")


# --- publishing -----------------------------------------------------------------------------------


def test_outbox_publish_refuses_without_a_fence_of_this_epoch(desk: Desk) -> None:
    register(desk)
    desk.expect("outbox_publish", "UNFENCED", publish(desk, rows(1)))
    desk.expect("outbox_fence", "OK", fence(desk, 5))
    desk.expect("outbox_publish", "UNFENCED", publish(desk, rows(1), epoch=6))


def test_outbox_publish_skips_recorded_rows_and_replaces_the_record(desk: Desk) -> None:
    fenced(desk)
    assert desk.expect("outbox_publish", "OK", publish(desk, rows(1, 2))) == [2, 2, b""]
    before = desk.dump()
    assert desk.expect("outbox_publish", "OK", publish(desk, rows(1, 2))) == [2, 0, b""]
    assert desk.dump() == before
    assert desk.expect("outbox_publish", "OK", publish(desk, rows(2, 3))) == [2, 1, b""]
    assert payloads(desk) == [b"1", b"2", b"3"]
    assert recorded(desk) == [uid(2), uid(3)]


def test_outbox_publish_writes_a_row_once_that_a_batch_has_twice(desk: Desk) -> None:
    fenced(desk)
    assert desk.expect("outbox_publish", "OK", publish(desk, rows(1, 1, 2))) == [3, 2, b""]
    assert payloads(desk) == [b"1", b"2"]


def test_outbox_publish_delays_rows_until_they_are_due(desk: Desk) -> None:
    fenced(desk)
    later = desk.now_unix_ms() + 60_000
    some = [*rows(1, due=later), *rows(2, due=1), *rows(3)]
    with desk.instant() as now:
        assert desk.expect("outbox_publish", "OK", publish(desk, some)) == [3, 3, b""]
    assert payloads(desk) == [b"2", b"3"]
    state = desk.state()
    assert state["scheduled"] == {uid(1): later}
    item = state["scheduled_items"][uid(1)]
    assert now == item.pop("sentAt")
    assert item == {"payload": b"1"}
    assert desk.expect("outbox_publish", "OK", publish(desk, some)) == [3, 0, b""]


def test_outbox_publish_to_a_full_stream_records_what_it_wrote(desk: Desk) -> None:
    fenced(desk)
    desk.expect("outbox_publish", "OK", publish(desk, rows(1)))
    desk.do("DEL", desk.stream)
    desk.add(f"{NEVER}-{int(NEVER) - 1}")
    settled, written, refusal = desk.expect("outbox_publish", "OK", publish(desk, rows(2, 3, 1)))
    assert (settled, written, type(refusal)) == (1, 1, RedisRefused)
    # The row after the refused one was written before, so it stays recorded.
    assert recorded(desk) == [uid(2), uid(1)]
    before = desk.dump()
    with pytest.raises(RedisRefused):
        desk.link.run(publish(desk, rows(3)))
    assert desk.dump() == before


def test_outbox_publish_writes_as_many_as_fit(desk: Desk) -> None:
    fenced(desk)
    desk.groups()
    desk.expect("outbox_publish", "OK", publish(desk, rows(1, 2)))
    assert desk.expect("outbox_publish", "OK", publish(desk, rows(2, 3, 4), limit=3)) == [2, 1, 2]
    assert payloads(desk) == [b"1", b"2", b"3"]
    assert desk.expect("outbox_publish", "FULL", publish(desk, rows(4), limit=3)) == [3]
    found = Published.parse(desk.link.run(publish(desk, rows(4), limit=3)))
    assert found == Published(0, 0, None, full=True)
    # Recorded rows need no room.
    assert desk.expect("outbox_publish", "OK", publish(desk, rows(3, 4), limit=3)) == [1, 0, 3]
    desk.do("XACK", desk.stream, desk.unit.group, *desk.fetch(3))
    assert desk.expect("outbox_publish", "OK", publish(desk, rows(4), limit=3)) == [1, 1, b""]


@pytest.mark.fault("F21")
def test_recorded_rows_are_settled_while_memory_is_full(desk: Desk) -> None:
    fenced(desk)
    desk.expect("outbox_publish", "OK", publish(desk, rows(1, 2)))
    with desk.full_memory():
        assert desk.expect("outbox_publish", "OK", publish(desk, rows(1, 2))) == [2, 0, b""]
        desk.expect_error("OOM", publish(desk, rows(2, 3)))


def test_on_a_cluster_the_count_of_an_outbox_is_not_compared(desk: Desk) -> None:
    call = outbox.fence(desk.keys, NAME, "access", 0, 5, 2, None)
    desk.expect("outbox_fence", "OK", call)
    call = outbox.publish(desk.keys, NAME, "access", 0, rows(1), 5, 2, None)
    desk.expect("outbox_publish", "OK", call)


def test_outbox_publish_refuses_no_rows_and_half_of_a_pair(desk: Desk) -> None:
    for some in ([], [OutgoingRow(1, uid(1), None, [b"payload"])]):
        with pytest.raises(ContractError):
            publish(desk, some)


def test_published_reads_a_full_answer() -> None:
    assert Published.parse(Reply("OK", [2, 1, b""])) == Published(2, 1, None, full=False)
    assert Published.parse(Reply("OK", [2, 1, 7])) == Published(2, 1, None, full=True)
