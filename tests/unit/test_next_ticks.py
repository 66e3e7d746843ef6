"""`streamqd.testing.next_ticks` returns the ticks of a schedule without a server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from streamqd import Message, handler, handlers, schedule
from streamqd.errors import ConfigError
from streamqd.testing import next_ticks

BERLIN = ZoneInfo("Europe/Berlin")
START = datetime(2026, 10, 25, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    before, timed = [*handlers.declared], dict(handlers.scheduled)
    yield
    handlers.declared[:] = before
    handlers.scheduled.clear()
    handlers.scheduled.update(timed)


def test_next_ticks_cover_both_hours_of_the_clock_change() -> None:
    found = next_ticks(start=START, count=4, cron="30 * * * *", timezone="Europe/Berlin")
    assert [each.isoformat() for each in found] == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-25T02:30:00+01:00",
        "2026-10-25T03:30:00+01:00",
        "2026-10-25T04:30:00+01:00",
    ]


def test_next_ticks_include_the_start() -> None:
    assert next_ticks(start=START, every=timedelta(hours=1)) == [START]


def test_next_ticks_of_an_instant_is_that_instant() -> None:
    at = datetime(2027, 1, 1, tzinfo=BERLIN)
    assert next_ticks(start=START, count=5, at=at) == [at]


def test_next_ticks_accepts_a_scheduled_handler() -> None:
    @schedule(cron="0 3 * * *", timezone="Europe/Berlin")
    @handler(topic="reports", group="build")
    def nightly(msg: Message) -> None: ...

    [found] = next_ticks(nightly, start=START)
    assert found == datetime(2026, 10, 25, 3, tzinfo=BERLIN)
    [changed] = next_ticks(nightly, start=START, timezone="UTC")
    assert changed == datetime(2026, 10, 25, 3, tzinfo=UTC)


def test_next_ticks_selects_a_schedule_by_name() -> None:
    @schedule(name="a", every="1h")
    @schedule(name="b", every="1m")
    @handler(topic="reports", group="build")
    def build(msg: Message) -> None: ...

    with pytest.raises(ConfigError, match="has 2 schedules; pass its name"):
        next_ticks(build, start=START)
    assert next_ticks(build, name="b", start=START, count=2)[1].minute == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "exactly one"),
        ({"cron": "x"}, "five"),
        ({"cron": "0 3 * * *", "timezone": "Berlin"}, "Europe/Berlin"),
    ],
)
def test_next_ticks_refuses_an_invalid_schedule(options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        next_ticks(start=START, **options)  # type: ignore[arg-type]


def test_next_ticks_refuses_a_start_without_a_time_zone() -> None:
    with pytest.raises(ValueError, match="pass tzinfo=UTC"):
        next_ticks(start=datetime(2026, 10, 25), every="1h")  # noqa: DTZ001


def test_next_ticks_refuses_a_function_without_schedules() -> None:
    with pytest.raises(ConfigError, match="put @schedule above it"):
        next_ticks(test_next_ticks_of_an_instant_is_that_instant, start=START)
