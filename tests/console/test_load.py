"""The console of a fleet with many messages: `make soak NAME=console` on a smaller scale."""

from __future__ import annotations

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from tests.support import full_fleet  # noqa: E402

MESSAGES, LETTERS = 20_000, 30_000


@pytest.mark.timeout(300)
def test_full_fleet_views_stay_within_limits(new_server, tmp_path, browser):
    with full_fleet.full_daemon(tmp_path, new_server(aof=False).url) as daemon:
        daemon.send(["dead"])
        wait_until(daemon.letters, timeout=30, what="the model of all letters is there")
        daemon.pause()
        full_fleet.fill(daemon, MESSAGES, LETTERS, seed=1)
        full_fleet.watch_slow(daemon)

        found = full_fleet.measure(daemon, browser)

    print(f"slow commands: {found['slow_commands']}")
    views, events = found["views"], found["commands_per_event"]
    assert {name: each for name, each in views.items() if each["status"] != 200} == {}
    assert events["50 pages"] < events["1 page"] * 1.5
    assert found["rss_mib"] < 150
