"""The console of a fleet with many messages: `make soak NAME=console` on a smaller scale.

This test only prints times and slow commands. The soak asserts them on a quiet host. Next to other
tests, the server may be interrupted in the middle of a command: one that takes 5 ms was logged with
195 ms.
"""

from __future__ import annotations

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from tests.support import full_fleet  # noqa: E402
from tests.support.full_fleet import COMMANDS_MAX, PAINT_MS  # noqa: E402

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

    views, slow = found["views"], found["slow_commands"]
    print(f"slow commands: {slow}")
    late = {name: each for name, each in views.items() if each["first_paint_ms"] >= PAINT_MS}
    print(f"painted after a second: {late}")
    assert {name: each for name, each in views.items() if each["status"] != 200} == {}
    assert {name: each for name, each in views.items() if each["commands"] > COMMANDS_MAX} == {}
    assert found["cost_of_50_pages"] < 1.35
    assert found["rss_mib"] < 150
