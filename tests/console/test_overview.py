"""The first page of the console: its lines and their links."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from streamqd.admin.assignments import AssignmentRow, RecentFailure, published_rows
from streamqd.admin.checks import Finding
from streamqd.admin.instances import InstanceRow
from streamqd.admin.published import FleetState
from streamqd.admin.schedules import ScheduleTotals
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.console import overview
from streamqd.console.overview import Issue, SlowFacts
from streamqd.console.view import Visit
from streamqd.store.directives import Directive, Directives, Scope
from tests.support import optional

pytestmark = optional.need("starlette")

from tests.console.test_access import logged_in  # noqa: E402

NOW = 1_795_000_000_000
OFFERS = frozenset({("clicks", "analytics")})
WEST = InstanceRow("west", "working", "h", "1", NOW, NOW, True, True, 1, 0.0, offers=OFFERS)
NO_SCHEDULES = ScheduleTotals(0, 0, 0, 0, 0, 0, None)


@pytest.fixture
def shop(fleet):
    """An outbox whose relay has published 5 rows and stopped."""
    keys, link = fleet.keys, fleet.link
    link.execute("SADD", keys.outboxes(), "shop")
    link.execute("HSET", keys.outbox("shop"), "epoch", 3, "rows", 5, "oldest_ms", 91_000)
    yield
    link.execute("SREM", keys.outboxes(), "shop")
    link.execute("DEL", keys.outbox("shop"))


def test_outbox_without_a_relay_links_to_its_findings(fleet, users_file, new_console, shop):
    console = new_console(fleet, "--users", str(users_file))

    client = logged_in(console, "vera")
    [(target, text)] = re.findall(r'<a href="([^"]*)">(No relay [^<]*)</a>', client.get("/").text)

    assert "owns outbox shop: 5 rows wait" in text
    assert target == "/doctor?area=outboxes"
    assert "outboxes.no-relay" in client.get(target).text


def assignment(acked=0.0, failed=0.0, **more) -> AssignmentRow:
    """Return a partition of clicks/analytics whose worker is ready."""
    raw = {"topic": "clicks", "partition": 0, "group": "analytics", "state": "ready", "epoch": 7}
    raw |= {"rates": {"acked": acked, "failed": failed}}
    (row,) = published_rows("west", {"assignments": [raw]})
    return replace(row, lease="owned", lag=0, pending=0, waiting_retries=0, dead_letters=0, **more)


def issues(*rows: AssignmentRow) -> list[Issue]:
    state = FleetState(NOW, 15.0, (), Directives())
    seen = FleetSnapshot("default", state, instances=[WEST], assignments=rows)
    return list(overview.derive(seen, SlowFacts(0.0, {}, NO_SCHEDULES, []), 0.0).issues)


def lagging_row(**more) -> AssignmentRow:
    """Return a partition that has more unread messages than the server counts."""
    row = assignment(4.0, arriving=5.0, mean_seconds=0.25, oldest_unread_unix_ms=NOW - 1_000)
    return replace(row, lag=None, lag_at_least=1_500, **more)


def test_group_with_an_uncounted_growing_lag_is_behind():
    [found] = issues(lagging_row())

    assert found.text == (
        "clicks/analytics lags: 1,500 or more unread, 5.0/s arrive and 4.0/s are handled,"
        " a run takes 250ms"
    )
    assert found.fix.startswith("make the handler faster")
    assert issues(lagging_row(arriving=4.0)) == [], "it keeps up, and nothing is old"


def test_group_with_an_old_message_is_behind_until_handled():
    [found] = issues(lagging_row(arriving=1.0, oldest_unread_unix_ms=NOW - 90_000))

    assert "1.0/s arrive and 4.0/s are handled" in found.text
    assert found.fix == "wait: at this rate it takes 8 min 20 s to catch up"
    assert found.since_unix_ms == NOW - 90_000


def test_forgotten_pause_is_a_warning():
    def paused(seconds):
        scope, given = Scope("clicks"), Directive(NOW - seconds * 1000, "ann", "")
        state = FleetState(NOW, 15.0, (), Directives(pauses={scope: given}))
        seen = FleetSnapshot("default", state, instances=[WEST], assignments=[assignment()])
        [found] = overview.derive(seen, SlowFacts(0.0, {}, NO_SCHEDULES, []), 0.0).issues
        return found.level, found.fix

    assert paused(3_000) == ("note", "")
    assert paused(4_000) == ("warn", "`streamqd resume clicks`"), "as doctor grades it"


def test_late_schedule_has_the_severity_of_doctor():
    timed = ScheduleTotals(*(0 for _ in range(6)), None)
    late, orphaned = replace(timed, late=1), replace(timed, orphaned=1)
    seen = FleetSnapshot("default", FleetState(NOW, 15.0, (), Directives()), instances=[WEST])

    def level(known):
        return overview.derive(seen, SlowFacts(0.0, {}, known, []), 0.0).issues[0].level

    assert (level(late), level(orphaned)) == ("alarm", "warn")


def test_partition_has_the_severity_of_its_problem():
    slow, free = (
        replace(assignment(longest_run_seconds=75.0), pending=1),
        replace(assignment(), partition=1, lease="free", owner="", worker="", pending=1),
    )
    flooded = replace(assignment(), partition=2, worker="flooded")
    state = FleetState(NOW, 15.0, (), Directives())
    seen = FleetSnapshot("default", state, instances=[WEST], assignments=[slow, free, flooded])

    now = overview.derive(seen, SlowFacts(0.0, {}, NO_SCHEDULES, []), 0.0)

    [found] = [each for each in now.issues if each.partition == 0]
    assert (found.level, now.levels[slow.assignment]) == ("warn", "warn")
    assert now.levels[free.assignment] == "warn", "another instance may take it"
    assert now.groups[0].level == "alarm" == now.levels[flooded.assignment]


def test_group_with_failed_runs_shows_the_time_of_the_last():
    """A group that no longer runs keeps its share of failures, while its rate decreases."""
    failure = RecentFailure("shop.Declined", 9, 200.0, "clicks", 0, "analytics", "west")
    [found] = issues(assignment(failed=1e-6, failures=(failure,)))

    assert found.text == (
        "100% of the last runs of clicks/analytics failed; last: shop.Declined, 3 min 20 s ago"
    )
    assert "dead letters" not in found.fix, "it has none"
    assert issues(assignment(failed=1e-9)) == [], "none within 5 minutes"


def finding(check, severity, about=""):
    area = check.partition(".")[0]
    return Finding(check, area, severity, about, f"{check} is wrong", "fix it", {})


def test_doctor_problems_are_listed_and_warnings_summed_up():
    seen = FleetSnapshot("default", FleetState(NOW, 15.0, (), Directives()), instances=[WEST])
    findings = [
        finding("server.eviction", "problem", "10.0.0.1:6379"),
        finding("server.version", "warning"),
        *(finding("server.slow-commands", "warning", each) for each in "ab"),
        finding("server.memory-unlimited", "note"),
        finding("outboxes.waiting", "warning", "shop"),
    ]

    now = overview.derive(seen, SlowFacts(0.0, {}, NO_SCHEDULES, findings), 0.0)

    assert [(each.level, each.text, each.area) for each in now.issues] == [
        ("alarm", "10.0.0.1:6379: server.eviction is wrong", "server"),
        ("warn", "shop: outboxes.waiting is wrong", "outboxes"),
        ("warn", "`doctor` has 3 more warnings: `server.version`, `server.slow-commands`", ""),
    ]


def test_doctor_findings_link_to_its_page(fleet, users_file, new_console):
    console = new_console(fleet, "--users", str(users_file))
    fleet.link.execute("CONFIG", "SET", "maxmemory", 1 << 30, "maxmemory-policy", "allkeys-lru")
    try:
        page = logged_in(console, "vera").get("/").text
    finally:
        fleet.link.execute("CONFIG", "SET", "maxmemory", 0, "maxmemory-policy", "noeviction")

    [target] = re.findall(r'<a href="([^"]*)">[^<]*allkeys-lru', page)
    assert target == "/doctor?area=server"
    assert "server.persistence" in page


def test_long_list_is_paged_by_position():
    rows = list(range(450))
    visit = Visit(None, None, {}, {"from": "200"})

    page = visit.paginate(rows, 200)
    assert (page.rows, page.following, page.total) == (rows[200:400], 400, 450)
    last = Visit(None, None, {}, {"from": "9" * 18}).paginate(rows, 200)
    assert (last.rows, last.following) == (rows[400:], None)
    assert Visit(None, None, {}, {}).paginate([], 200).following is None


def test_handlers_are_listed_page_by_page(fleet, users_file, new_console):
    client = logged_in(new_console(fleet, "--users", str(users_file)), "vera")

    first = client.get("/handlers?limit=1&q=orders").text
    assert "1 to 1 of 2 handlers" in first
    [following] = re.findall(r'href="([^"]*&amp;from=[^"]*)" rel="next"', first)
    last = client.get(following.replace("&amp;", "&")).text
    assert "2 to 2 of 2 handlers" in last
    assert "&amp;from=" not in last
    groups = [re.findall(r'href="/topics/orders\?group=(\w+)"', each)[0] for each in (first, last)]
    assert sorted(groups) == ["bill", "ship"]
