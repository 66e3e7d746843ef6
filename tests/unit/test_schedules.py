"""Schedules have valid specifications and due times, and handle missed ticks."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from streamqd import config, handlers
from streamqd.config import Schedule
from streamqd.errors import ConfigError
from streamqd.schedules import record
from streamqd.schedules.ticks import (
    CATCH_UP_MAX,
    SLACK_MS,
    TickStep,
    count_ticks,
    format_tick,
    grace_ms,
    newest_ticks,
    next_tick,
    offset_ms,
    steps,
)

HOUR, DAY = 3_600_000, 86_400_000
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Beirut")


def schedule(**given: Any) -> Schedule:
    return Schedule(**{"name": "nightly", "topic": "reports", **given})


def ms(text: str) -> int:
    found = datetime.fromisoformat(text)
    return round(found.replace(tzinfo=found.tzinfo or UTC).timestamp() * 1000)


def ticks(of: Schedule, after: str, count: int) -> list[str]:
    """Return the next ticks, in the schedule's local time."""
    found, at = [], ms(after)
    for _ in range(count):
        following = next_tick(of, at)
        assert following is not None
        at = following
        found.append(datetime.fromtimestamp(at / 1000, of.zone).isoformat(timespec="minutes"))
    return found


# --- due times ------------------------------------------------------------------------------------


def test_repeated_local_time_fires_once() -> None:
    nightly = schedule(cron="30 2 * * *", timezone="Europe/Berlin")
    assert ticks(nightly, "2026-10-24T12:00", 2) == [
        "2026-10-25T02:30+02:00",
        "2026-10-26T02:30+01:00",
    ]


def test_skipped_local_time_fires_once_after_the_gap() -> None:
    nightly = schedule(cron="30 2 * * *", timezone="Europe/Berlin")
    assert ticks(nightly, "2026-03-28T12:00", 2) == [
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:30+02:00",
    ]


def test_two_skipped_local_times_fire_once() -> None:
    twice = schedule(cron="10,40 2 * * *", timezone="Europe/Berlin")
    assert ticks(twice, "2026-03-29T00:00", 2) == [
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:10+02:00",
    ]


def test_half_hourly_schedule_fires_in_both_clock_hours() -> None:
    often = schedule(cron="*/30 * * * *", timezone="Europe/Berlin")
    assert ticks(often, "2026-10-25T01:45+02:00", 5) == [
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:30+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T02:30+01:00",
        "2026-10-25T03:00+01:00",
    ]


def test_tick_is_not_repeated_within_the_repeated_hour() -> None:
    """In the second of the two equal hours, the tick of the first one is already past."""
    nightly = schedule(cron="30 2 * * *", timezone="Europe/Berlin")
    assert ticks(nightly, "2026-10-25T02:10+01:00", 1) == ["2026-10-26T02:30+01:00"]


@pytest.mark.parametrize("when", [{"every": 3600.0}, {"cron": "0 * * * *"}])
@pytest.mark.parametrize("after", [-(10**15), -1])
def test_first_tick_is_at_the_unix_epoch(when: dict[str, Any], after: int) -> None:
    assert next_tick(Schedule("n", "t", **when), after) == 0


def test_lone_surrogate_payload_is_refused() -> None:
    with pytest.raises(ValueError, match=r"payload: .* cannot be converted to JSON"):
        record.build({"name": "n", "topic": "t", "every": "1h", "payload": "\ud800"})


def test_period_is_counted_from_the_epoch() -> None:
    of = schedule(every=30.0)
    assert next_tick(of, ms("2026-11-25T10:00:10")) == ms("2026-11-25T10:00:30")
    assert next_tick(of, ms("2026-11-25T10:00:30")) == ms("2026-11-25T10:01:00")


def test_schedule_at_an_instant_fires_once() -> None:
    of = schedule(at="2027-01-01T08:00:00+01:00")
    assert next_tick(of, 0) == ms("2027-01-01T07:00:00")
    assert next_tick(of, ms("2027-01-01T07:00:00")) is None


def test_impossible_date_never_fires() -> None:
    assert next_tick(schedule(cron="0 0 30 2 1"), 0) is not None  # it also matches Mondays
    assert next_tick(schedule(every=1.0), 10**18) is None


@settings(max_examples=150, deadline=None)
@given(
    cron=st.sampled_from(
        ["30 2 * * *", "*/30 * * * *", "0 */2 * * *", "15 0 * * *", "0,30 1-3 * * SUN", "7 * 1 * *"]
    ),
    zone=st.sampled_from(ZONES),
    start=st.integers(ms("2025-01-01"), ms("2028-01-01")),
)
def test_ticks_increase_from_any_start(cron: str, zone: str, start: int) -> None:
    """From any start, the ticks increase.

    They do not depend on where the search starts, so they need no state and no leader.
    """
    of = schedule(cron=cron, timezone=zone)
    found = [start]
    for _ in range(6):
        following = next_tick(of, found[-1])
        assert following is not None
        found.append(following)
    assert all(before < after for before, after in itertools.pairwise(found))
    for before, after in itertools.pairwise(found):
        assert next_tick(of, (before + after) // 2) == after
        assert next_tick(of, after - 1) == after
    assert newest_ticks(of, start, found[-1], 3) == found[-3:]
    assert count_ticks(of, start, found[-1]) == 6


@given(period=st.integers(1_000, 10**9), after=st.integers(0, 10**13), ticks_=st.integers(0, 50))
def test_newest_ticks_equal_counted_ticks(period: int, after: int, ticks_: int) -> None:
    of = schedule(every=period / 1000)
    first = next_tick(of, after)
    assert first is not None
    until = first + period * ticks_
    assert count_ticks(of, after, until) == ticks_ + 1
    assert newest_ticks(of, after, until, 2) == [until - period, until][-(ticks_ + 1) :]


def test_jitter_is_the_same_for_all_ticks() -> None:
    of = schedule(cron="0 3 * * *", jitter=600.0)
    assert 0 <= offset_ms(of) < 600_000
    assert offset_ms(of) == offset_ms(dataclasses.replace(of))
    assert offset_ms(dataclasses.replace(of, name="other")) != offset_ms(of)
    assert offset_ms(schedule(cron="0 3 * * *")) == 0


def test_tick_is_formatted_as_utc() -> None:
    assert format_tick(ms("2027-01-01T08:00:00+01:00")) == "2027-01-01T07:00:00Z"
    assert format_tick(1_500) == "1970-01-01T00:00:01.500Z"


# --- misfires -------------------------------------------------------------------------------------


def test_tick_on_time_is_sent() -> None:
    of = schedule(every=60.0)
    assert steps(of, 60_000, 59_999) == []
    assert steps(of, 60_000, 60_200) == [TickStep(60_000, 120_000)]


def test_slightly_late_ticks_are_all_sent() -> None:
    """Ticks that are slightly late are all sent.

    A pause of three seconds loses none, even of a schedule with one tick per second.
    """
    of = schedule(every=1.0, misfire="skip")
    found = steps(of, 10_000, 13_100)
    assert [each.tick for each in found] == [10_000, 11_000, 12_000, 13_000]
    assert found[-1].following == 14_000


@pytest.mark.parametrize(
    ("misfire", "sent", "skipped"), [("once", [30_000], 20), ("skip", [], 21), ("all", 21, 0)]
)
def test_missed_ticks_follow_the_misfire_policy(misfire: str, sent: Any, skipped: int) -> None:
    of = schedule(every=1.0, misfire=misfire)
    found = steps(of, 10_000, 30_400)
    told = [each.tick for each in found if each.tick is not None]
    assert told == sent or len(told) == sent
    assert sum(each.skipped for each in found) == skipped
    assert found[-1].following == 31_000


def test_misfire_all_sends_the_newest_hundred_ticks() -> None:
    found = steps(schedule(every=1.0, misfire="all"), 1_000, 1_000_500)
    assert len(found) == CATCH_UP_MAX
    assert [found[0].tick, found[-1].tick] == [901_000, 1_000_000]
    assert found[0].skipped == 900
    assert found[-1].following == 1_001_000


def test_nightly_tick_fires_within_its_grace() -> None:
    of = schedule(cron="0 3 * * *", misfire="skip", misfire_grace=3_600.0)
    tick = ms("2026-11-25T03:00")
    assert grace_ms(of, tick) == HOUR
    assert [each.tick for each in steps(of, tick, tick + HOUR)] == [tick]
    assert steps(of, tick, tick + HOUR + 1) == [TickStep(None, tick + DAY, 1)]


def test_grace_of_a_fast_schedule_is_limited_by_its_next_tick() -> None:
    assert grace_ms(schedule(every=60.0), 60_000) == 60_000
    assert grace_ms(schedule(every=1.0), 60_000) == SLACK_MS
    assert grace_ms(schedule(every=1.0, misfire_grace=2.0), 60_000) == 2_000


def test_missed_instant_is_sent_once_or_skipped() -> None:
    of = schedule(at="2027-01-01T07:00:00+00:00")
    tick = ms("2027-01-01T07:00:00")
    assert steps(of, tick, tick + DAY) == [TickStep(tick, None)]
    assert steps(dataclasses.replace(of, misfire="skip"), tick, tick + DAY) == [
        TickStep(None, None, 1)
    ]
    assert steps(dataclasses.replace(of, misfire="all"), tick, tick + DAY) == [TickStep(tick, None)]


@settings(max_examples=150, deadline=None)
@given(
    misfire=st.sampled_from(["once", "skip", "all"]),
    cron=st.sampled_from([None, "*/5 * * * *", "30 2 * * *"]),
    tick=st.integers(-(1 << 53), ms("2027-01-01")),
    late=st.integers(0, 40 * DAY),
)
def test_steps_are_bounded_and_end_after_now(
    misfire: str, cron: str | None, tick: int, late: int
) -> None:
    """Whatever due time is in Redis, the steps are bounded and distinct, and end after now."""
    of = schedule(cron=cron, every=None if cron else 7.0, misfire=misfire, timezone="Europe/Berlin")
    now = max(tick, 0) + late
    found = steps(of, tick, now)
    assert 1 <= len(found) <= CATCH_UP_MAX
    assert found[-1].following is not None
    assert found[-1].following > now
    told = [each.tick for each in found if each.tick is not None]
    assert told == sorted(set(told))
    assert all(each <= now for each in told)


# --- the record -----------------------------------------------------------------------------------


@given(
    payload=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each),
        max_leaves=6,
    ),
    every=st.integers(1_000, 10**9),
    key=st.none() | st.just("customer ü"),
)
def test_schedule_record_round_trips(payload: Any, every: int, key: str | None) -> None:
    table = {"name": "a", "topic": "t", "every": every / 1000, "payload": payload}
    [of] = declare_schedules([table | ({"key": key} if key else {})])
    assert record.read(record.serialize(of)) == of
    assert record.serialize(record.read(record.serialize(of))) == record.serialize(of)


def test_equal_cron_expressions_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal expressions are parsed once. Otherwise, 10,000 schedules would take 2.3 s of CPU."""
    made = []

    class Counting(CronSim):
        def __init__(self, *args: Any) -> None:
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr("streamqd.config.schedules.CronSim", Counting)
    monkeypatch.setattr("streamqd.schedules.ticks.CronSim", Counting)
    begin, due = 1_790_000_000_000, None
    for number in range(100):
        stated = schedule(name=f"s{number}", cron="*/7 1-22 * * *", timezone="Asia/Tokyo")
        found = record.read(record.serialize(stated))
        assert found == stated
        due = due or next_tick(found, begin)
        assert due is not None
        assert [each.tick for each in steps(found, due, due + 5)] == [due]
    assert len(made) <= 4


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("", "not JSON"),
        ("[" * 9_000, "not JSON"),
        ("[]", "not a table"),
        ("{}", "lacks its name"),
        ('{"name":"a","topic":"t"}', "has no time"),
        ('{"name":"../a","topic":"t","every":1}', "is not valid"),
        ('{"name":"a","topic":"t","cron":"* * * *"}', "4 fields"),
        ('{"name":"a","topic":"t","every":NaN}', "out of range for a duration"),
        ('{"name":"a","topic":"t","every":1,"fast":1}', "unknown setting"),
    ],
)
def test_invalid_schedule_record_is_refused(text: str, clause: str) -> None:
    with pytest.raises(ValueError, match=clause):
        record.read(text)


def test_message_has_the_key_and_due_time_of_its_schedule() -> None:
    of = dataclasses.replace(schedule(every=60.0), payload='{"kind":"full"}')
    assert record.message_fields(of, 60_000) == [
        *("payload", b'{"kind":"full"}', "key", b"nightly"),
        *("headers", '{"x-schedule":"nightly","x-scheduled-for":"1970-01-01T00:01:00Z"}'),
    ]
    to = dataclasses.replace(of, partition=3, payload='"plain text"')
    assert record.message_fields(to, 60_000)[:3] == ["payload", b"plain text", "headers"]
    assert record.choose_partition(to, 8) == 3


# --- the configuration ----------------------------------------------------------------------------


def declare_schedules(tables: list[dict[str, Any]]) -> tuple[Schedule, ...]:
    """Declare schedules in the same way as a user's code."""
    handler = {"topic": "reports", "group": "g", "handler": "work:run", "schedules": tables}
    return config.declare_consumers(config.Settings(), [handler]).schedules


def load(tmp_path: Path, text: str) -> config.Settings:
    file = tmp_path / "streamq.toml"
    file.write_text(text)
    return config.load(file, {}, {})


def problem(tmp_path: Path, text: str) -> str:
    head = '[[schedules]]\nname = "nightly"\ntopic = "reports"\n'
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, head + text)
    [found] = caught.value.problems
    return found


def test_schedule_table_is_parsed(tmp_path: Path) -> None:
    text = """
    [[schedules]]
    name = "nightly"
    cron = "0 3 * * *"
    timezone = "Europe/Berlin"
    topic = "reports"
    payload = { kind = "full" }
    misfire_grace = "30m"
    overlap = "skip:billing"
    [[schedules]]
    name = "new-year"
    at = 2027-01-01T08:00:00+01:00
    topic = "reports"
    """
    nightly, new_year = load(tmp_path, text).schedules
    assert nightly.payload == '{"kind":"full"}'
    assert (nightly.misfire_grace, nightly.overlap_group) == (1_800.0, "billing")
    assert new_year.at_unix_ms == ms("2027-01-01T07:00:00")


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("", "schedules[0]: has no time, but needs exactly one of cron, every and at"),
        (
            'cron = "0 3 * * *"\nevery = "5m"',
            "schedules[0]: sets cron and every, but needs exactly one",
        ),
        (
            'cron = "0 3 * *"',
            'schedules[0].cron: "0 3 * *" has 4 fields, but needs five (minute, hour',
        ),
        ('cron = "0 0 3 * * *"', 'schedules[0].cron: "0 0 3 * * *" has 6 fields'),
        (
            'cron = "0 25 * * *"',
            "expression: bad hour (write a cron expression",
        ),
        ('cron = "0 0 31 2 *"', "bad day-of-month"),
        (f'cron = "{"1," * 200}1 * * * *"', "is longer than 256 characters"),
        ('every = "500ms"', 'schedules[0].every: "500ms" is too small (minimum: "1s")'),
        ('every = "1.0005s"', "schedules[0].every: must be a multiple of 1ms"),
        ('every = "5m"\ntimezone = "Europe/Berlin"', "timezone: applies only to cron"),
        ('cron = "0 3 * * *"\ntimezone = "Europe/Berlni"', 'did you mean "Europe/Berlin"?'),
        ('cron = "0 3 * * *"\ntimezone = "../passwd"', "is not a time zone"),
        ('cron = "0 3 * * *"\ntimezone = "Europe"', "is not a time zone"),
        ('at = "2027-01-01T08:00:00"', "has no offset from UTC (write it with its offset"),
        ('at = "tomorrow"', '"tomorrow" is not a valid time (write it with its offset'),
        ("at = 2027-01-01T08:00:00", "has no offset from UTC"),
        ('every = "5m"\nkey = "a"\npartition = 1', "key: cannot be used with partition"),
        ('every = "5m"\nmisfire = "onec"', 'did you mean "once"?'),
        ('every = "5m"\noverlap = "skip"', 'write "allow", or "skip:GROUP"'),
        ('every = "5m"\njitter = "5m"', "jitter: must be shorter than every"),
        ('every = "5m"\npayload = 2027-01-01', "cannot be converted to JSON"),
        ('every = "5m"\npayload = nan', "cannot be converted to JSON"),
        (f'every = "5m"\npayload = "{"x" * 65_536}"', "has 65,538 bytes (maximum: 65,536)"),
        ('every = "5m"\ncorn = "x"', "unknown setting; did you mean schedules[0].cron?"),
        (
            'every = "5m"\n[[schedules]]\nname="nightly"\ntopic="x"\nevery=1',
            "is already the name of schedu",
        ),
    ],
)
def test_schedule_problem_is_one_sentence(tmp_path: Path, text: str, clause: str) -> None:
    assert clause in problem(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "[schedules]\nx = 1",
            ["schedules: must be written as [[schedules]], with two brackets"],
        ),
        (
            '[[schedules]]\nname = "Nightly"\ntopic = "t"\nevery = 1',
            ['schedules[0].name: "Nightly"'],
        ),
        ('[[schedules]]\nname = "a"\nevery = 1', ["schedules[0].topic: is missing"]),
    ],
)
def test_invalid_schedule_table_is_refused(tmp_path: Path, text: str, found: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for problem_, begin in zip(caught.value.problems, found, strict=True):
        assert problem_.startswith(begin)


def test_topic_accepts_ten_thousand_schedules() -> None:
    tables = [{"name": f"s{at}", "topic": "t", "every": 60} for at in range(10_001)]
    with pytest.raises(ConfigError, match=r"10,001 schedules send to topic t \(maximum: 10,000\)"):
        declare_schedules(tables)


def test_config_file_overrides_declared_schedules() -> None:
    of = schedule(every=60.0)
    handler = {"topic": "reports", "group": "g", "handler": "work:run"}
    table = {"name": "nightly", "topic": "reports", "every": 5}
    whole = config.declare_consumers(
        config.Settings(schedules=(of,)), [{**handler, "schedules": [table]}]
    )
    assert whole.schedules == (of,)


def test_handler_may_declare_its_schedules(tmp_path: Path) -> None:
    (tmp_path / "timed.py").write_text(
        "from datetime import timedelta\n"
        "from streamqd import handler, schedule\n"
        "@schedule(every=timedelta(minutes=5), payload={'a': 1})\n"
        "@handler(topic='reports', group='g')\n"
        "@schedule(cron='0 3 * * *', name='nightly', timezone='Europe/Berlin')\n"
        "def Report(message): ...\n"
    )
    found = handlers.probe(["timed"], [], tmp_path, 30.0)
    assert found.problems == []
    settings_ = config.declare_consumers(config.Settings(), found.declared)
    assert [(each.name, each.topic) for each in settings_.schedules] == [
        ("nightly", "reports"),
        ("report", "reports"),
    ]
    assert settings_.schedules[1].payload == '{"a":1}'


def test_schedule_without_a_handler_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(
        "from streamqd import schedule\n@schedule(every='5m')\ndef report(message): ...\n"
    )
    [sentence] = handlers.probe(["alone"], [], tmp_path, 30.0).problems
    assert sentence.startswith("alone:report has a @schedule but is not a handler; put @handler(")
