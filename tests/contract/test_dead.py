"""dead_replay: dead -> ready; dead_purge: dead -> gone."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import dead, messages
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.desk import Desk, Stream

AGAIN = {b"retryCount": b"0", b"crashCount": b"0", b"replayCount": b"1"}
WHY = {
    name.encode(): f"its {name}".encode()
    for name in (
        *("originalTopic", "originalPartition", "timestamp", "instance", "attempts", "crashes"),
        *("reason", "errorClass", "errorMessage", "traceback", "fingerprint", "signal"),
        *("exitCode", "rss"),
    )
}


def replay(desk: Desk, letter_id: str, group: str | None = "hits") -> Call:
    topic, partition, _ = desk.unit
    return dead.replay(desk.keys, topic, partition, letter_id, group, AGAIN)


def die(desk: Desk, *ids: str) -> list[str]:
    """Make dead letters of entries; return their ids."""
    desk.groups()
    for entry_id in ids:
        desk.add(entry_id, "payload", b"\x00\xff", "key", "k", "headers", "{}", "own", "field")
    desk.fetch()
    epoch = int(desk.state().get("fence", {}).get("epoch", 0))
    desk.do("DEL", desk.lease)
    desk.own("t1", seen_epoch=epoch)
    letters = []
    for entry_id in ids:
        why = {b"originalId": entry_id.encode(), b"group": b"hits", b"retryCount": b"4", **WHY}
        call = messages.dead(desk.keys, desk.unit, "t1", [(f"m:{entry_id}".encode(), why)])
        letters += desk.expect_entries("settle_dead", ["MOVED"], call).letters
    return [letter.decode() for letter in letters]


def test_replays_into_the_groups_retry_stream(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    before = desk.state()
    new_id = desk.expect("dead_replay", "OK", replay(desk, letter))[0].decode()
    changed = desk.changes(before)
    body = {"payload": b"\x00\xff", "key": b"k", "headers": b"{}", "own": b"field"}
    counts = {"originalId": b"1-0", "retryCount": b"0", "crashCount": b"0", "replayCount": b"1"}
    assert changed == {
        "dlq": Stream({}, {}),
        "retry": Stream({new_id: {**body, **counts}}, {"hits": ("0-0", {})}),
    }


def test_replays_for_everyone(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    before = desk.state()
    new_id = desk.expect("dead_replay", "OK", replay(desk, letter, None))[0].decode()
    changed = desk.changes(before)
    assert sorted(changed) == ["dlq", "stream"]
    assert list(changed["stream"].entries) == ["1-0", new_id]
    assert changed["stream"].entries[new_id]["originalId"] == b"1-0"
    assert "reason" not in changed["stream"].entries[new_id]


def test_the_second_finds_no_letter(desk: Desk) -> None:
    """Q31: replay against replay, against purge: the loser is told."""
    letter = die(desk, "1-0")[0]
    desk.expect("dead_replay", "OK", replay(desk, letter))
    desk.expect("dead_replay", "GONE", replay(desk, letter))
    desk.expect("dead_replay", "GONE", replay(desk, letter, None))


def test_the_letter_of_another_group_is_refused(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    desk.do("XGROUP", "CREATE", desk.retry.replace("hits", "audit"), "audit", "0", "MKSTREAM")
    assert desk.expect("dead_replay", "MISMATCH", replay(desk, letter, "audit")) == [b"hits"]


def test_a_letter_without_a_group_is_refused(desk: Desk) -> None:
    desk.groups()
    desk.add("7-0", "payload", "x", stream=desk.dlq)
    assert desk.expect("dead_replay", "MISMATCH", replay(desk, "7-0")) == [b""]


@pytest.mark.parametrize("how", [("XGROUP", "DESTROY"), ("DEL",)])
def test_a_group_that_is_gone_is_refused(desk: Desk, how: tuple[str, ...]) -> None:
    letter = die(desk, "1-0")[0]
    desk.do(*how, desk.retry, *(["hits"] if len(how) > 1 else []))
    desk.expect("dead_replay", "NOGROUP", replay(desk, letter))


def test_a_group_has_a_name() -> None:
    with pytest.raises(ContractError):
        dead.replay(Keys(), "access", 0, "1-0", "", {})


def test_purges_the_letters_named(desk: Desk) -> None:
    letters = die(desk, "1-0", "2-0", "3-0")
    before = desk.state()
    call = dead.purge(desk.keys, "access", 0, [letters[2], letters[0], "9-0"])
    assert desk.expect("dead_purge", "OK", call) == [2]
    left = {letters[1]: before["dlq"].entries[letters[1]]}
    assert desk.changes(before) == {"dlq": Stream(left, {})}
    assert desk.expect("dead_purge", "OK", call) == [0]


def test_purges_the_oldest_so_many_at_a_time(desk: Desk) -> None:
    for n in range(8, 13):
        desk.add(f"{n}-0", stream=desk.dlq)

    def purged(before: str, count: int) -> int:
        call = dead.purge_before(desk.keys, "access", 0, before, count)
        return int(desk.expect("dead_purge", "OK", call)[0])

    assert purged("8-0", 10) == 0
    assert purged("11-0", 2) == 2
    assert list(desk.state()["dlq"].entries) == ["10-0", "11-0", "12-0"]
    assert purged("11-0", 10) == 1
    assert purged("99", 10) == 2
    assert purged("99", 10) == 0


def test_purging_a_partition_without_letters(desk: Desk) -> None:
    call = dead.purge_before(desk.keys, "access", 0, "99-0", 10)
    assert desk.expect("dead_purge", "OK", call) == [0]
    assert desk.state() == {}
    with pytest.raises(ContractError):
        dead.purge(desk.keys, "access", 0, ["1-0"] * 513)
    with pytest.raises(ContractError):
        dead.purge_before(desk.keys, "access", 0, "", 10)
