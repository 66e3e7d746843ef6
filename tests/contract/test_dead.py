"""dead_replay: dead -> ready; dead_purge: dead -> gone; dead_mark, dead_deliver: elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamqd.admin.dead_letters.selection import DEAD_ONLY
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
        call = messages.dead(desk.keys, desk.leased("t1"), [(f"m:{entry_id}".encode(), why)])
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


def test_dead_replay_for_everyone_writes_to_the_partition(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    before = desk.state()
    new_id = desk.expect("dead_replay", "OK", replay(desk, letter, None))[0].decode()
    changed = desk.changes(before)
    assert sorted(changed) == ["dlq", "stream"]
    assert list(changed["stream"].entries) == ["1-0", new_id]
    assert changed["stream"].entries[new_id]["originalId"] == b"1-0"
    assert "reason" not in changed["stream"].entries[new_id]


def test_dead_replay_repeated_finds_no_dead_letter(desk: Desk) -> None:
    """Q31: replay against replay or purge: the loser gets GONE."""
    letter = die(desk, "1-0")[0]
    desk.expect("dead_replay", "OK", replay(desk, letter))
    desk.expect("dead_replay", "GONE", replay(desk, letter))
    desk.expect("dead_replay", "GONE", replay(desk, letter, None))


def test_dead_replay_refuses_a_letter_of_another_group(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    desk.do("XGROUP", "CREATE", desk.retry.replace("hits", "audit"), "audit", "0", "MKSTREAM")
    assert desk.expect("dead_replay", "MISMATCH", replay(desk, letter, "audit")) == [b"hits"]


def test_dead_replay_refuses_a_letter_without_group(desk: Desk) -> None:
    desk.groups()
    desk.add("7-0", "payload", "x", stream=desk.dlq)
    assert desk.expect("dead_replay", "MISMATCH", replay(desk, "7-0")) == [b""]


@pytest.mark.parametrize("how", [("XGROUP", "DESTROY"), ("DEL",)])
def test_dead_replay_refuses_a_missing_group(desk: Desk, how: tuple[str, ...]) -> None:
    letter = die(desk, "1-0")[0]
    desk.do(*how, desk.retry, *(["hits"] if len(how) > 1 else []))
    desk.expect("dead_replay", "NOGROUP", replay(desk, letter))


def test_dead_replay_rejects_an_empty_group() -> None:
    with pytest.raises(ContractError):
        dead.replay(Keys(), "access", 0, "1-0", "", {})


def test_dead_purge_removes_named_dead_letters(desk: Desk) -> None:
    letters = die(desk, "1-0", "2-0", "3-0")
    before = desk.state()
    call = dead.purge(desk.keys, "access", 0, [letters[2], letters[0], "9-0"])
    assert desk.expect("dead_purge", "OK", call) == [2, 0]
    left = {letters[1]: before["dlq"].entries[letters[1]]}
    assert desk.changes(before) == {"dlq": Stream(left, {})}
    assert desk.expect("dead_purge", "OK", call) == [0, 0]


def test_dead_purge_removes_the_oldest_in_batches(desk: Desk) -> None:
    for n in range(8, 13):
        desk.add(f"{n}-0", stream=desk.dlq)

    def purged(before: str, count: int) -> int:
        call = dead.purge_before(desk.keys, "access", 0, before, count)
        return int(desk.expect("dead_purge", "OK", call)[0])

    assert purged("0-0", 10) == 0, "nothing is older than that"
    assert purged("8-0", 10) == 0
    assert purged("11-0", 2) == 2
    assert list(desk.state()["dlq"].entries) == ["10-0", "11-0", "12-0"]
    assert purged("11-0", 10) == 1
    assert purged("99", 10) == 2
    assert purged("99", 10) == 0


def test_dead_purge_accepts_an_empty_partition(desk: Desk) -> None:
    call = dead.purge_before(desk.keys, "access", 0, "99-0", 10)
    assert desk.expect("dead_purge", "OK", call) == [0, 0]
    assert desk.state() == {}
    with pytest.raises(ContractError):
        dead.purge(desk.keys, "access", 0, ["1-0"] * 513)
    with pytest.raises(ContractError):
        dead.purge_before(desk.keys, "access", 0, "", 10)


# --- moving a letter out of its slot --------------------------------------------------------------


def mark(desk: Desk, letter_id: str, target: str = "other/1") -> Call:
    return dead.mark(desk.keys, "access", 0, letter_id, target)


def deliver(desk: Desk, group: str | None = None, name: str = "dlq:access:0:1-0") -> Call:
    fields = {b"payload": b"\x00\xff", b"originalId": b"1-0"}
    return dead.deliver(desk.keys, "access", 0, group, fields, name, 60.0)


def test_dead_mark_marks_a_dead_letter_once(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    before = desk.state()
    with desk.instant() as when:
        assert desk.expect("dead_mark", "OK", mark(desk, letter)) == [b"other/1", b"0"]
    [(name, value)] = desk.state()[desk.keys.moving("access", 0)].items()
    assert desk.changes(before) == {desk.keys.moving("access", 0): {name: value}}
    assert name == letter
    assert when == value.split()[0]
    assert value.split()[1] == b"other/1"

    after = desk.dump()
    where, age = desk.expect("dead_mark", "OK", mark(desk, letter, "third/0"))
    assert where == b"other/1"
    assert int(age) >= 0
    assert desk.dump() == after


def test_dead_mark_can_be_removed(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    before = desk.state()
    desk.expect("dead_mark", "OK", mark(desk, letter))
    assert desk.expect("dead_mark", "OK", mark(desk, letter, ""))[0] == b""
    assert desk.changes(before) == {}


def test_dead_mark_reports_a_missing_dead_letter(desk: Desk) -> None:
    desk.expect("dead_mark", "GONE", mark(desk, "7-0"))


def test_dead_replay_refuses_a_moving_dead_letter(desk: Desk) -> None:
    letter = die(desk, "1-0")[0]
    desk.expect("dead_mark", "OK", mark(desk, letter))
    assert desk.expect("dead_replay", "MOVING", replay(desk, letter)) == [b"other/1"]
    assert desk.expect("dead_replay", "MOVING", replay(desk, letter, None)) == [b"other/1"]


def test_purging_takes_the_marks_along(desk: Desk) -> None:
    letters = die(desk, "1-0", "2-0", "3-0")
    for letter in letters:
        desk.expect("dead_mark", "OK", mark(desk, letter))
    moving = desk.keys.moving("access", 0)
    desk.expect("dead_purge", "OK", dead.purge(desk.keys, "access", 0, letters[:1]))
    assert sorted(desk.state()[moving]) == letters[1:]
    oldest = dead.purge_before(desk.keys, "access", 0, letters[2], 10)
    desk.expect("dead_purge", "OK", oldest)
    assert list(desk.state()[moving]) == letters[2:]


@pytest.mark.parametrize("group", [None, "hits"])
def test_dead_deliver_delivers_a_dead_letter_once(desk: Desk, group: str | None) -> None:
    desk.groups()
    before = desk.state()
    new_id = desk.expect("dead_deliver", "OK", deliver(desk, group))[0].decode()
    name = desk.keys.dedup("access", 0, "dlq:access:0:1-0")
    fields = {"payload": b"\x00\xff", "originalId": b"1-0"}
    assert desk.changes(before) == {
        "retry" if group else "stream": Stream({new_id: fields}, {"hits": ("0-0", {})}),
        name: new_id.encode(),
    }
    assert 0 < desk.do("PTTL", name) <= 60_000
    assert desk.expect("dead_deliver", "DUP", deliver(desk, group)) == [new_id.encode()]
    desk.expect("dead_deliver", "OK", deliver(desk, group, name="dlq:access:0:2-0"))


def test_nothing_is_delivered_to_a_group_that_is_not_there(desk: Desk) -> None:
    desk.expect("dead_deliver", "NOGROUP", deliver(desk, "hits"))
    desk.groups()
    desk.expect("dead_deliver", "NOGROUP", deliver(desk, "audit"))


def test_dead_deliver_rejects_invalid_arguments() -> None:
    wide = {b"%d" % number: b"" for number in range(dead.DELIVER_MAX)}
    for group, fields in (("", {b"payload": b"x"}), (None, {}), (None, wide)):
        with pytest.raises(ContractError):
            dead.deliver(Keys(), "access", 0, group, fields, "n", 60.0)


def test_python_and_lua_drop_the_same_dead_letter_fields() -> None:
    text = (Path(__file__).parents[2] / "lua" / "dead_replay.lua").read_text()
    table = re.search(r"DEAD_ONLY = \{(.*?)\}", text, re.DOTALL)
    assert table
    assert set(re.findall(r"(\w+) = true", table[1])) == {each.decode() for each in DEAD_ONLY}
