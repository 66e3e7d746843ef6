"""Trends and charts show the history in Redis, summed over instances and read only once."""

from __future__ import annotations

import json

import pytest

from tests.support import optional

pytestmark = [optional.need("starlette")]

from streamqd.console.history import MINUTE_MS, ConsoleHistory  # noqa: E402
from streamqd.store import history  # noqa: E402
from streamqd.store.history import HistoryRow, Interval  # noqa: E402
from tests.support.console import NO_BROWSER  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

FLEET = "default"
PAIR = ("orders", "bill")


def server_time(store) -> int:
    seconds, micros = store.execute("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def append(
    store, fleet: str, instance: str, until: int, acked: int, lag: int = 0,
    *, measured: int = 1, seconds: float = 60.0, pair=PAIR,
) -> None:  # fmt: skip
    """Append an entry with the ID that it would have been given at its time."""
    counts = dict.fromkeys(history.COUNTS, 0) | {"added": acked, "acked": acked}
    row = HistoryRow(*pair, None, "", counts, lag, 0, {10: acked} if acked else {})
    history.append(
        store,
        "scratch",
        Interval("", instance, until, seconds, [row], measured={pair: measured}),
        86_400,
    )
    scratch = store.keys.history("scratch")
    [[_, fields]] = store.execute("XRANGE", scratch, "-", "+")
    store.execute("DEL", scratch)
    number = "1" if instance == "a" else "2"
    store.execute("XADD", store.keys.history(fleet), f"{until}-{number}", *fields)


@pytest.fixture
def past_entries(fleet):
    """Entries of two instances at the start of each of the last 120 minutes but the last."""
    store, now = fleet.store, server_time(fleet.store)
    name = "past"
    store.execute("DEL", store.keys.history(name))
    for minute in range(now // MINUTE_MS - 120, now // MINUTE_MS):
        for instance in ("a", "b"):
            append(store, name, instance, minute * MINUTE_MS + 200, acked=60, lag=5)
    return store, name, now


def test_sparklines_sum_the_instances_of_a_minute(past_entries):
    store, name, now = past_entries

    [values] = ConsoleHistory().sparks(store, name, now).values()

    assert values == [120.0] * 60  # the last minute is not written yet


@pytest.mark.parametrize("seconds", [18, 45])
def test_housekeeper_stopped_within_a_minute_adds_no_lag(past_entries, seconds):
    """Instance `a` stops and starts again, and writes a separate entry after `seconds`."""
    store, name, now = past_entries
    begun = (now // MINUTE_MS - 1) * MINUTE_MS
    store.execute("DEL", store.keys.history(name))
    for until, covered in ((0, 60), (seconds, seconds), (60, 60 - seconds)):
        append(
            *(store, name, "a", begun + until * 1000 + 200),
            *(covered * 2, 5),
            seconds=covered,
        )

    points = ConsoleHistory().points(store, name, now, PAIR, 5, 1, 1)

    known = [each for each in points if each.acked is not None]
    assert [each.lag for each in known] == [5, 5]
    assert [each.acked for each in known] == [2.0, 2.0], "the minute has both parts"
    assert [each.arriving for each in known] == [2.0, 2.0]


def test_history_entry_of_several_minutes_is_averaged(past_entries):
    """An entry covers several minutes if Redis was unavailable or the housekeeper was delayed."""
    store, name, now = past_entries
    store.execute("DEL", store.keys.history(name))
    append(store, name, "a", now // MINUTE_MS * MINUTE_MS + 200, acked=900, lag=5, seconds=180.2)

    points = ConsoleHistory().points(store, name, now, PAIR, 5, 1, 1)

    assert [each.acked for each in points] == [None, None, 5.0, 5.0, 5.0]
    assert [each.lag for each in points] == [None, None, None, None, 5]
    assert sum(each.p95 is not None for each in points) == 3


def test_group_without_an_owner_has_no_lag(past_entries):
    """A group that lost its owner has no lag in minutes that another group's owner covers."""
    store, name, now = past_entries
    store.execute("DEL", store.keys.history(name))
    first = now // MINUTE_MS - 4
    for minute, measured in enumerate((2, 2, 1, 0), first):
        until = (minute + 1) * MINUTE_MS + 200
        append(store, name, "a", until, acked=60, pair=("orders", "ship"))
        if measured:
            append(store, name, "b", until, acked=60, lag=5, measured=measured)

    points = ConsoleHistory().points(store, name, now, PAIR, 4, 1, 2)

    assert [each.lag for each in points] == [5, 5, None, None]
    assert [each.acked for each in points] == [1.0, 1.0, 1.0, 0.0]
    assert [each.arriving for each in points] == [1.0, 1.0, 1.0, None]
    # The partition has two reports for one minute, because its owner changed.
    points = ConsoleHistory().points(store, name, now, PAIR, 4, 1, 1)
    assert [each.lag for each in points] == [5, 5, 5, None]


def test_longer_history_range_reads_earlier_entries_once(past_entries):
    store, name, now = past_entries
    seen = ConsoleHistory()
    seen.sparks(store, name, now)

    for _ in range(2):
        points = seen.points(store, name, now, PAIR, 360, 5, 2)
        known = [each for each in points if each.acked is not None]

        assert len(points) == 72
        assert {each.acked for each in known} == {2.0}
        assert {each.lag for each in known} == {10}
        assert {each.arriving for each in known} == {2.0}
        assert 23 <= len(known) <= 25
        assert all(each.p95 for each in known)


def test_history_reads_only_new_entries(past_entries):
    store, name, now = past_entries
    seen = ConsoleHistory()
    seen.sparks(store, name, now)
    store.execute("DEL", store.keys.history(name))
    append(store, name, "a", now // MINUTE_MS * MINUTE_MS + 100, acked=7)
    seen._fresh_until = 0.0

    [values] = seen.sparks(store, name, now).values()

    assert values == [120.0] * 59 + [7.0]


@NO_BROWSER
@optional.need("playwright")
def test_charts_survive_a_restart(fleet, new_console, users_file, browse):
    store, now = fleet.store, server_time(fleet.store)
    store.execute("DEL", store.keys.history(FLEET))
    for minute in range(now // MINUTE_MS - 70, now // MINUTE_MS + 1):
        append(store, FLEET, "a", minute * MINUTE_MS + 200, acked=60)

    first = new_console(fleet, "--users", str(users_file))
    before = chart_and_table_rates(browse(first), first)
    first.stop()
    second = new_console(fleet, "--users", str(users_file))
    after = chart_and_table_rates(browse(second), second)

    assert sum(each == 1.0 for each in before) >= 58
    assert before[-50:-5] == after[-50:-5]


@NO_BROWSER
@optional.need("playwright")
def test_charts_get_new_points_without_a_reload(fleet, console, browse):
    store, now = fleet.store, server_time(fleet.store)
    store.execute("DEL", store.keys.history(FLEET))
    for minute in range(now // MINUTE_MS - 70, now // MINUTE_MS + 1):
        append(store, FLEET, "a", minute * MINUTE_MS + 200, acked=60)
    page = browse(console)
    chart_and_table_rates(page, console)
    page.evaluate("document.querySelector('#history-figures').open = true")
    drawn = page.evaluate(DRAWN)
    loads = len([each for each in page.seen.requests if "/topics/" in each])

    # The daemon may have written an entry in the meantime.
    [[newest, _]] = store.execute("XREVRANGE", store.keys.history(FLEET), "+", "-", "COUNT", 1)
    append(store, FLEET, "b", int(newest.partition(b"-")[0]), acked=60_000)

    def peak():
        page.wait_for_timeout(50)
        shown = json.loads(page.get_attribute("#charts", "data-points"))["acked"]
        return max(each or 0 for each in shown)

    wait_until(lambda: peak() >= 1_000, timeout=60)
    wait_until(lambda: page.wait_for_timeout(50) or page.evaluate(DRAWN) != drawn)
    assert page.locator("#chart-rates canvas").count() == 1
    assert page.evaluate("document.querySelector('#history-figures').open")
    assert len([each for each in page.seen.requests if "/topics/" in each]) == loads
    assert page.seen.errors == []


DRAWN = "document.querySelector('#chart-rates canvas').toDataURL()"


def chart_and_table_rates(page, console) -> list[float | None]:
    """Return the rates of a topic's chart, after checking that chart and table are shown."""
    page.goto(f"{console.url}topics/orders?group=bill&range=1h")
    page.wait_for_selector("#chart-rates canvas")
    page.wait_for_selector("#chart-lag canvas")
    page.wait_for_selector("#chart-p95 canvas")
    assert page.seen.errors == []
    assert page.locator("#history-table tbody tr").count() >= 58
    return json.loads(page.get_attribute("#charts", "data-points"))["acked"]
