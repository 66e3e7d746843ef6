"""archive_advance: stored -> trimmable; pipeline_lease_*: one run at a time."""

from __future__ import annotations

import pytest

from streamqd.store import archives
from streamqd.store.scripts import Call
from tests.contract.desk import TTL, Desk
from tests.contract.scenarios import trim_all


def advance(desk: Desk, entry_id: str) -> Call:
    return archives.advance(desk.keys, *desk.unit[:2], entry_id)


@pytest.mark.parametrize("entry_id", ["1-0", "1753185905123-7", "18446744073709551615-0"])
def test_notes_the_first_id(desk: Desk, entry_id: str) -> None:
    assert desk.expect("archive_advance", "OK", advance(desk, entry_id)) == []
    assert desk.state() == {"trim": {"archived": entry_id.encode()}}


@pytest.mark.parametrize(
    ("noted", "further"), [("9-0", "10-0"), ("5-9", "5-10"), ("5-18446744073709551615", "6-0")]
)
def test_archive_advance_never_moves_back(desk: Desk, noted: str, further: str) -> None:
    desk.expect("archive_advance", "OK", advance(desk, noted))
    desk.expect("archive_advance", "OK", advance(desk, further))
    assert desk.expect("archive_advance", "BEHIND", advance(desk, further)) == [further.encode()]
    assert desk.expect("archive_advance", "BEHIND", advance(desk, noted)) == [further.encode()]


def test_leaves_the_rest_of_the_record(desk: Desk) -> None:
    desk.do("HSET", desk.trim, "first", "3-0", "archived", "3-0")
    desk.expect("archive_advance", "OK", advance(desk, "4-0"))
    assert desk.state() == {"trim": {"first": b"3-0", "archived": b"4-0"}}


def test_archive_advance_frees_only_archived_entries(desk: Desk) -> None:
    desk.do("CONFIG", "SET", "stream-node-max-entries", 1)
    try:
        places = desk.pending("1-0", "2-0", "3-0")
    finally:
        desk.do("CONFIG", "SET", "stream-node-max-entries", 100)
    desk.do("XACK", desk.stream, desk.unit.group, *(place[2:] for place in places))
    rest = desk.expect("stream_trim", "OK", trim_all(desk, archive=True))
    assert rest == [0, b"0-0", b"@archive", b"1-0", 0]
    desk.expect("archive_advance", "OK", advance(desk, "2-0"))
    rest = desk.expect("stream_trim", "OK", trim_all(desk, archive=True))
    assert rest[:3] == [2, b"2-1", b"@archive"]
    assert list(desk.read_stream(desk.stream).entries) == ["3-0"]


# --- the lease of a pipeline ----------------------------------------------------------------------


def take(desk: Desk, token: str = "t1", name: str = "archive") -> Call:
    return archives.take_lease(desk.keys, desk.unit.topic, name, token, TTL)


def keep(desk: Desk, token: str = "t1") -> Call:
    return archives.keep_lease(desk.keys, desk.unit.topic, "archive", token, TTL)


def drop(desk: Desk, token: str = "t1") -> Call:
    return archives.drop_lease(desk.keys, desk.unit.topic, "archive", token)


def lease_of(desk: Desk) -> str:
    return desk.keys.pipeline(desk.unit.topic, "archive")


def life(desk: Desk) -> int:
    return int(desk.do("PTTL", lease_of(desk)))


def test_pipeline_lease_has_one_holder(desk: Desk) -> None:
    desk.expect("pipeline_lease_take", "OK", take(desk))
    assert desk.state() == {lease_of(desk): b"t1"}
    assert 0 < life(desk) <= TTL * 1000
    holder, left = desk.expect("pipeline_lease_take", "HELD", take(desk, "t2"))
    assert holder == b"t1"
    assert 0 < left <= TTL * 1000
    desk.expect("pipeline_lease_take", "OK", take(desk, "t2", name="other"))


def test_pipeline_lease_of_a_dead_run_is_free(desk: Desk) -> None:
    desk.expect("pipeline_lease_take", "OK", take(desk, "t1"))
    call = archives.take_lease(desk.keys, desk.unit.topic, "archive", "t2", TTL, "t0")
    desk.expect("pipeline_lease_take", "HELD", call)
    call = archives.take_lease(desk.keys, desk.unit.topic, "archive", "t2", TTL, "t1")
    desk.expect("pipeline_lease_take", "OK", call)
    assert desk.state() == {lease_of(desk): b"t2"}


def test_pipeline_lease_take_and_keep_extend_the_lease(desk: Desk) -> None:
    desk.expect("pipeline_lease_take", "OK", take(desk))
    desk.do("PEXPIRE", lease_of(desk), 1_000)
    desk.expect("pipeline_lease_take", "OK", take(desk))
    assert life(desk) > 1_000
    desk.do("PEXPIRE", lease_of(desk), 1_000)
    desk.expect("pipeline_lease_keep", "OK", keep(desk))
    assert life(desk) > 1_000


def test_pipeline_lease_is_lost_after_expiry(desk: Desk) -> None:
    desk.expect("pipeline_lease_take", "OK", take(desk))
    desk.do("DEL", lease_of(desk))
    desk.expect("pipeline_lease_keep", "LOST", keep(desk))
    desk.expect("pipeline_lease_drop", "LOST", drop(desk))


def test_pipeline_lease_ignores_another_run(desk: Desk) -> None:
    desk.expect("pipeline_lease_take", "OK", take(desk, "t2"))
    desk.expect("pipeline_lease_keep", "LOST", keep(desk))
    desk.expect("pipeline_lease_drop", "LOST", drop(desk))


def test_pipeline_lease_drop_frees_the_lease(desk: Desk) -> None:
    desk.expect("pipeline_lease_take", "OK", take(desk))
    desk.expect("pipeline_lease_drop", "OK", drop(desk))
    assert desk.state() == {}
    desk.expect("pipeline_lease_take", "OK", take(desk, "t2"))
