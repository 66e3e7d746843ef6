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
from tests.contract.harness import Harness, Stream

AGAIN = {b"retryCount": b"0", b"crashCount": b"0", b"replayCount": b"1"}
WHY = {
    name.encode(): f"its {name}".encode()
    for name in (
        *("originalTopic", "originalPartition", "timestamp", "instance", "attempts", "crashes"),
        *("reason", "errorClass", "errorMessage", "traceback", "fingerprint", "signal"),
        *("exitCode", "rss"),
    )
}


def replay(harness: Harness, dead_letter_id: str, group: str | None = "hits") -> Call:
    topic, partition, _ = harness.assignment
    return dead.replay(harness.keys, topic, partition, dead_letter_id, group, AGAIN)


def write_dead_letters(harness: Harness, *ids: str) -> list[str]:
    """Turn entries into dead letters. Return the IDs of the dead letters."""
    harness.groups()
    for entry_id in ids:
        harness.add(entry_id, "payload", b"\x00\xff", "key", "k", "headers", "{}", "own", "field")
    harness.fetch()
    epoch = int(harness.state().get("fence", {}).get("epoch", 0))
    harness.do("DEL", harness.lease)
    harness.own("t1", seen_epoch=epoch)
    letters = []
    for entry_id in ids:
        why = {b"originalId": entry_id.encode(), b"group": b"hits", b"retryCount": b"4", **WHY}
        call = messages.dead(harness.keys, harness.leased("t1"), [(f"m:{entry_id}".encode(), why)])
        letters += harness.expect_entries("settle_dead", ["MOVED"], call).dead_letters
    return [letter.decode() for letter in letters]


def test_dead_replay_writes_to_the_retry_stream(harness: Harness) -> None:
    letter = write_dead_letters(harness, "1-0")[0]
    before = harness.state()
    new_id = harness.expect("dead_replay", "OK", replay(harness, letter))[0].decode()
    changed = harness.changes(before)
    body = {"payload": b"\x00\xff", "key": b"k", "headers": b"{}", "own": b"field"}
    counts = {"originalId": b"1-0", "retryCount": b"0", "crashCount": b"0", "replayCount": b"1"}
    assert changed == {
        "dlq": Stream({}, {}),
        "retry": Stream({new_id: {**body, **counts}}, {"hits": ("0-0", {})}),
    }


def test_dead_replay_for_all_groups_writes_to_the_partition(harness: Harness) -> None:
    letter = write_dead_letters(harness, "1-0")[0]
    before = harness.state()
    new_id = harness.expect("dead_replay", "OK", replay(harness, letter, None))[0].decode()
    changed = harness.changes(before)
    assert sorted(changed) == ["dlq", "stream"]
    assert list(changed["stream"].entries) == ["1-0", new_id]
    assert changed["stream"].entries[new_id]["originalId"] == b"1-0"
    assert "reason" not in changed["stream"].entries[new_id]


def test_dead_replay_repeated_finds_no_dead_letter(harness: Harness) -> None:
    """If a replay competes with another replay or a purge, the loser gets GONE."""
    letter = write_dead_letters(harness, "1-0")[0]
    harness.expect("dead_replay", "OK", replay(harness, letter))
    harness.expect("dead_replay", "GONE", replay(harness, letter))
    harness.expect("dead_replay", "GONE", replay(harness, letter, None))


def test_dead_replay_refuses_a_dead_letter_of_another_group(harness: Harness) -> None:
    letter = write_dead_letters(harness, "1-0")[0]
    harness.do("XGROUP", "CREATE", harness.retry.replace("hits", "audit"), "audit", "0", "MKSTREAM")
    assert harness.expect("dead_replay", "MISMATCH", replay(harness, letter, "audit")) == [b"hits"]


def test_dead_replay_refuses_a_dead_letter_without_group(harness: Harness) -> None:
    harness.groups()
    harness.add("7-0", "payload", "x", stream=harness.dlq)
    assert harness.expect("dead_replay", "MISMATCH", replay(harness, "7-0")) == [b""]


@pytest.mark.parametrize("how", [("XGROUP", "DESTROY"), ("DEL",)])
def test_dead_replay_refuses_a_missing_group(harness: Harness, how: tuple[str, ...]) -> None:
    letter = write_dead_letters(harness, "1-0")[0]
    harness.do(*how, harness.retry, *(["hits"] if len(how) > 1 else []))
    harness.expect("dead_replay", "NOGROUP", replay(harness, letter))


def test_dead_replay_rejects_an_empty_group() -> None:
    with pytest.raises(ContractError):
        dead.replay(Keys(), "access", 0, "1-0", "", {})


def test_dead_purge_removes_named_dead_letters(harness: Harness) -> None:
    letters = write_dead_letters(harness, "1-0", "2-0", "3-0")
    before = harness.state()
    call = dead.purge(harness.keys, "access", 0, [letters[2], letters[0], "9-0"])
    assert harness.expect("dead_purge", "OK", call) == [2, 0, 0]
    left = {letters[1]: before["dlq"].entries[letters[1]]}
    assert harness.changes(before) == {"dlq": Stream(left, {})}
    assert harness.expect("dead_purge", "OK", call) == [0, 0, 0]


def test_dead_purge_removes_the_oldest_in_batches(harness: Harness) -> None:
    for n in range(8, 13):
        harness.add(f"{n}-0", stream=harness.dlq)

    def purged(before: str, count: int) -> int:
        call = dead.purge_before(harness.keys, "access", 0, before, count)
        return int(harness.expect("dead_purge", "OK", call)[0])

    assert purged("0-0", 10) == 0, "nothing is older than that"
    assert purged("8-0", 10) == 0
    assert purged("11-0", 2) == 2
    assert list(harness.state()["dlq"].entries) == ["10-0", "11-0", "12-0"]
    assert purged("11-0", 10) == 1
    assert purged("99", 10) == 2
    assert purged("99", 10) == 0


def test_dead_purge_accepts_an_empty_partition(harness: Harness) -> None:
    call = dead.purge_before(harness.keys, "access", 0, "99-0", 10)
    assert harness.expect("dead_purge", "OK", call) == [0, 0, 0]
    assert harness.state() == {}
    with pytest.raises(ContractError):
        dead.purge(harness.keys, "access", 0, ["1-0"] * 513)
    with pytest.raises(ContractError):
        dead.purge_before(harness.keys, "access", 0, "", 10)


@pytest.mark.parametrize(
    ("mark", "count"), [("", 0), ("junk", 0), ("8-5", 1), ("9-0", 2), ("99-0", 3)]
)
@pytest.mark.parametrize("by_name", [True, False])
def test_dead_purge_leaves_unarchived_dead_letters(
    harness: Harness, mark: str, count: int, *, by_name: bool
) -> None:
    letters = [f"{n}-0" for n in range(8, 11)]
    for letter in letters:
        harness.add(letter, stream=harness.dlq)
    harness.do("HSET", harness.trim, "archived", "99-0", *(("dead_archived", mark) if mark else ()))
    place = (harness.keys, "access", 0)
    if by_name:
        call = dead.purge(*place, letters, archived_only=True)
    else:
        call = dead.purge_before(*place, "99", 10, archived_only=True)
    assert harness.expect("dead_purge", "OK", call) == [count, 0, 3 - count if by_name else 0]
    left = harness.state().get("dlq")
    assert (list(left.entries) if left else []) == letters[count:]


# --- moving a letter out of its slot --------------------------------------------------------------


def mark(harness: Harness, dead_letter_id: str, target: str = "other/1") -> Call:
    return dead.mark(harness.keys, "access", 0, dead_letter_id, target)


def deliver(harness: Harness, group: str | None = None, name: str = "dlq:access:0:1-0") -> Call:
    fields = {b"payload": b"\x00\xff", b"originalId": b"1-0"}
    return dead.deliver(harness.keys, "access", 0, group, fields, name, 60.0)


def test_dead_mark_marks_a_dead_letter_once(harness: Harness) -> None:
    letter = write_dead_letters(harness, "1-0")[0]
    before = harness.state()
    with harness.instant() as when:
        assert harness.expect("dead_mark", "OK", mark(harness, letter)) == [b"other/1", b"0"]
    [(name, value)] = harness.state()[harness.keys.moving("access", 0)].items()
    assert harness.changes(before) == {harness.keys.moving("access", 0): {name: value}}
    assert name == letter
    assert when == value.split()[0]
    assert value.split()[1] == b"other/1"

    after = harness.dump()
    where, age = harness.expect("dead_mark", "OK", mark(harness, letter, "third/0"))
    assert where == b"other/1"
    assert int(age) >= 0
    assert harness.dump() == after


def test_dead_mark_can_be_removed(harness: Harness) -> None:
    letter = write_dead_letters(harness, "1-0")[0]
    before = harness.state()
    harness.expect("dead_mark", "OK", mark(harness, letter))
    assert harness.expect("dead_mark", "OK", mark(harness, letter, ""))[0] == b""
    assert harness.changes(before) == {}


def test_dead_mark_reports_a_missing_dead_letter(harness: Harness) -> None:
    harness.expect("dead_mark", "GONE", mark(harness, "7-0"))


def test_dead_replay_refuses_a_moving_dead_letter(harness: Harness) -> None:
    letter = write_dead_letters(harness, "1-0")[0]
    harness.expect("dead_mark", "OK", mark(harness, letter))
    assert harness.expect("dead_replay", "MOVING", replay(harness, letter)) == [b"other/1"]
    assert harness.expect("dead_replay", "MOVING", replay(harness, letter, None)) == [b"other/1"]


def test_dead_purge_deletes_the_marks(harness: Harness) -> None:
    letters = write_dead_letters(harness, "1-0", "2-0", "3-0")
    for letter in letters:
        harness.expect("dead_mark", "OK", mark(harness, letter))
    moving = harness.keys.moving("access", 0)
    harness.expect("dead_purge", "OK", dead.purge(harness.keys, "access", 0, letters[:1]))
    assert sorted(harness.state()[moving]) == letters[1:]
    oldest = dead.purge_before(harness.keys, "access", 0, letters[2], 10)
    harness.expect("dead_purge", "OK", oldest)
    assert list(harness.state()[moving]) == letters[2:]


@pytest.mark.parametrize("group", [None, "hits"])
def test_dead_deliver_delivers_a_dead_letter_once(harness: Harness, group: str | None) -> None:
    harness.groups()
    before = harness.state()
    new_id = harness.expect("dead_deliver", "OK", deliver(harness, group))[0].decode()
    name = harness.keys.dedup("access", 0, "dlq:access:0:1-0")
    fields = {"payload": b"\x00\xff", "originalId": b"1-0"}
    assert harness.changes(before) == {
        "retry" if group else "stream": Stream({new_id: fields}, {"hits": ("0-0", {})}),
        name: new_id.encode(),
    }
    assert 0 < harness.do("PTTL", name) <= 60_000
    assert harness.expect("dead_deliver", "DUPLICATE", deliver(harness, group)) == [new_id.encode()]
    harness.expect("dead_deliver", "OK", deliver(harness, group, name="dlq:access:0:2-0"))


def test_dead_deliver_refuses_a_missing_group(harness: Harness) -> None:
    harness.expect("dead_deliver", "NOGROUP", deliver(harness, "hits"))
    harness.groups()
    harness.expect("dead_deliver", "NOGROUP", deliver(harness, "audit"))


def test_dead_deliver_rejects_invalid_arguments() -> None:
    wide = {b"%d" % number: b"" for number in range(dead.DELIVER_MAX)}
    for group, fields in (("", {b"payload": b"x"}), (None, {}), (None, wide)):
        with pytest.raises(ContractError):
            dead.deliver(Keys(), "access", 0, group, fields, "n", 60.0)


def test_dead_letter_fields_are_equal_in_python_and_lua() -> None:
    text = (Path(__file__).parents[2] / "lua" / "dead_replay.lua").read_text()
    table = re.search(r"DEAD_ONLY = \{(.*?)\}", text, re.DOTALL)
    assert table
    assert set(re.findall(r"(\w+) = true", table[1])) == {each.decode() for each in DEAD_ONLY}
