"""stream_step: the ID of the entry that is reached after a number of entries."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import spark
from tests.contract.harness import Harness

LAST = "18446744073709551615-18446744073709551615"


def step(harness: Harness, after: str, upto: str, count: int) -> tuple[int, str]:
    before = harness.dump()
    rest = harness.expect("stream_step", "OK", spark.step(harness.stream, after, upto, count))
    assert harness.dump() == before
    return rest[0], rest[1].decode()


def test_stream_step_advances_by_count(harness: Harness) -> None:
    for each in ("1-0", "1-5", "2-0", "9-0"):
        harness.add(each)
    assert step(harness, "0-0", LAST, 3) == (3, "2-0")
    assert step(harness, "1-0", LAST, 1) == (1, "1-5")
    assert step(harness, "1-3", LAST, 9) == (3, "9-0")


def test_stream_step_stops_at_its_bound(harness: Harness) -> None:
    for each in ("1-0", "2-0", "3-0"):
        harness.add(each)
    assert step(harness, "0-0", "2-0", 9) == (2, "2-0")
    assert step(harness, "0-0", "2-5", 9) == (2, "2-0")


def test_stream_step_stays_without_entries(harness: Harness) -> None:
    assert step(harness, "5-0", LAST, 9) == (0, "5-0")
    harness.add("5-0")
    assert step(harness, "5-0", LAST, 9) == (0, "5-0")
    assert step(harness, "4-0", "3-0", 9) == (0, "4-0")


def test_stream_step_rejects_an_invalid_count() -> None:
    for count in (0, 1001):
        with pytest.raises(ContractError):
            spark.step("stream", "0-0", LAST, count)
