"""archive_advance: stored -> trimmable; pipeline_lease_*: one run at a time."""

from __future__ import annotations

import pytest

from streamqd.store import archives
from streamqd.store.scripts import Call
from tests.contract.harness import TTL, Harness
from tests.contract.scenarios import trim_all


def advance(harness: Harness, entry_id: str) -> Call:
    return archives.advance(harness.keys, *harness.assignment[:2], entry_id)


def test_archive_advance_keeps_dead_letters_apart(harness: Harness) -> None:
    call = archives.advance(harness.keys, *harness.assignment[:2], "5-0", dead=True)
    harness.expect("archive_advance", "OK", advance(harness, "9-0"))
    harness.expect("archive_advance", "OK", call)
    assert harness.expect("archive_advance", "UNCHANGED", call) == [b"5-0"]
    assert harness.state() == {"trim": {"archived": b"9-0", "dead_archived": b"5-0"}}


@pytest.mark.parametrize("entry_id", ["1-0", "1753185905123-7", "18446744073709551615-0"])
def test_archive_advance_stores_the_first_id(harness: Harness, entry_id: str) -> None:
    assert harness.expect("archive_advance", "OK", advance(harness, entry_id)) == []
    assert harness.state() == {"trim": {"archived": entry_id.encode()}}


@pytest.mark.parametrize(
    ("noted", "further"), [("9-0", "10-0"), ("5-9", "5-10"), ("5-18446744073709551615", "6-0")]
)
def test_archive_advance_never_moves_back(harness: Harness, noted: str, further: str) -> None:
    harness.expect("archive_advance", "OK", advance(harness, noted))
    harness.expect("archive_advance", "OK", advance(harness, further))
    assert harness.expect("archive_advance", "UNCHANGED", advance(harness, further)) == [
        further.encode()
    ]
    assert harness.expect("archive_advance", "UNCHANGED", advance(harness, noted)) == [
        further.encode()
    ]


def test_archive_advance_keeps_other_fields_of_the_record(harness: Harness) -> None:
    harness.do("HSET", harness.trim, "first", "3-0", "archived", "3-0")
    harness.expect("archive_advance", "OK", advance(harness, "4-0"))
    assert harness.state() == {"trim": {"first": b"3-0", "archived": b"4-0"}}


def test_archive_advance_frees_only_archived_entries(harness: Harness) -> None:
    harness.do("CONFIG", "SET", "stream-node-max-entries", 1)
    try:
        places = harness.pending("1-0", "2-0", "3-0")
    finally:
        harness.do("CONFIG", "SET", "stream-node-max-entries", 100)
    harness.do("XACK", harness.stream, harness.assignment.group, *(place[2:] for place in places))
    rest = harness.expect("stream_trim", "OK", trim_all(harness, archive=True))
    assert rest == [0, b"0-0", b"@archive", b"1-0", 0]
    harness.expect("archive_advance", "OK", advance(harness, "2-0"))
    rest = harness.expect("stream_trim", "OK", trim_all(harness, archive=True))
    assert rest[:3] == [2, b"2-1", b"@archive"]
    assert list(harness.read_stream(harness.stream).entries) == ["3-0"]


# --- the lease of a pipeline ----------------------------------------------------------------------


def acquire(harness: Harness, token: str = "t1", name: str = "archive") -> Call:
    return archives.acquire_lease(harness.keys, harness.assignment.topic, name, token, TTL)


def renew(harness: Harness, token: str = "t1") -> Call:
    return archives.renew_lease(harness.keys, harness.assignment.topic, "archive", token, TTL)


def release(harness: Harness, token: str = "t1") -> Call:
    return archives.release_lease(harness.keys, harness.assignment.topic, "archive", token)


def lease_key(harness: Harness) -> str:
    return harness.keys.pipeline(harness.assignment.topic, "archive")


def lease_ttl_ms(harness: Harness) -> int:
    return int(harness.do("PTTL", lease_key(harness)))


def test_pipeline_lease_has_one_holder(harness: Harness) -> None:
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness))
    assert harness.state() == {lease_key(harness): b"t1"}
    assert 0 < lease_ttl_ms(harness) <= TTL * 1000
    holder, left = harness.expect("pipeline_lease_acquire", "HELD", acquire(harness, "t2"))
    assert holder == b"t1"
    assert 0 < left <= TTL * 1000
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness, "t2", name="other"))


def test_pipeline_lease_of_a_dead_run_is_free(harness: Harness) -> None:
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness, "t1"))
    call = archives.acquire_lease(
        harness.keys, harness.assignment.topic, "archive", "t2", TTL, "t0"
    )
    harness.expect("pipeline_lease_acquire", "HELD", call)
    call = archives.acquire_lease(
        harness.keys, harness.assignment.topic, "archive", "t2", TTL, "t1"
    )
    harness.expect("pipeline_lease_acquire", "OK", call)
    assert harness.state() == {lease_key(harness): b"t2"}


def test_pipeline_lease_acquire_and_keep_extend_the_lease(harness: Harness) -> None:
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness))
    harness.do("PEXPIRE", lease_key(harness), 1_000)
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness))
    assert lease_ttl_ms(harness) > 1_000
    harness.do("PEXPIRE", lease_key(harness), 1_000)
    harness.expect("pipeline_lease_renew", "OK", renew(harness))
    assert lease_ttl_ms(harness) > 1_000


def test_pipeline_lease_is_lost_after_expiry(harness: Harness) -> None:
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness))
    harness.do("DEL", lease_key(harness))
    harness.expect("pipeline_lease_renew", "LOST", renew(harness))
    harness.expect("pipeline_lease_release", "LOST", release(harness))


def test_pipeline_lease_is_not_released_by_another_run(harness: Harness) -> None:
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness, "t2"))
    harness.expect("pipeline_lease_renew", "LOST", renew(harness))
    harness.expect("pipeline_lease_release", "LOST", release(harness))


def test_pipeline_lease_release_frees_the_lease(harness: Harness) -> None:
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness))
    harness.expect("pipeline_lease_release", "OK", release(harness))
    assert harness.state() == {}
    harness.expect("pipeline_lease_acquire", "OK", acquire(harness, "t2"))
