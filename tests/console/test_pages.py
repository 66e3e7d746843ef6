"""The content of individual pages: flow, fleet, settings and times."""

from __future__ import annotations

import re

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER
from tests.support.daemon import TOPIC
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER]

from streamqd.admin import directives  # noqa: E402
from streamqd.admin.published import Fleet  # noqa: E402
from streamqd.store.directives import Scope  # noqa: E402


@pytest.mark.parametrize(("width", "shown"), [(1280, "wide"), (390, "narrow")])
def test_flow_fits_the_window_and_has_a_legend(console, browse, width, shown):
    page = browse(console, "vera", width=width)
    page.goto(f"{console.url}flow")
    page.wait_for_selector(f".scroll.{shown} svg")

    assert page.locator(".scroll:visible svg.flow").count() == 1
    overflow = f"(e => e.scrollWidth - e.clientWidth)(document.querySelector('.scroll.{shown}'))"
    assert page.evaluate(overflow) <= 0
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    legend = page.inner_text(".legend")
    for text in ("few messages", "many", "no messages", "problem", "warning", "paused or stopped"):
        assert text in legend
    links = page.locator(f".scroll.{shown} a").evaluate_all("a => a.map(e => e.href.baseVal)")
    assert f"/topics/{TOPIC}?group=bill" in links


@pytest.mark.parametrize("scope", [Scope(TOPIC, None, "ship"), Scope(TOPIC, 1, "ship"), Scope()])
def test_pause_is_set_and_removed_from_the_fleet_view(console, browse, fleet, scope):
    there = Fleet(fleet.store, "default", 60.0)
    directives.pause(there, scope, "a test")
    page = browse(console, "otto")
    page.goto(f"{console.url}fleet")
    row = page.locator("#directives tr", has_text="a test")
    if scope.group:
        target = row.get_by_role("link", name=str(scope)).get_attribute("href")
        assert target.startswith(f"/topics/{TOPIC}")
        assert page.request.get(console.url + target.lstrip("/")).status == 200

    row.get_by_role("link", name="Resume").click()
    assert f"The assignments of {scope} would fetch messages again." in page.inner_text(".dry")
    with page.expect_navigation():
        page.get_by_role("button", name="Resume").click()

    assert page.inner_text(".done") == f"{scope}: resumed."
    assert directives.view(there).directives == []
    page.reload()
    assert page.locator(".done").count() == 0, "the result is shown once"
    assert page.seen.errors == []


def test_partition_of_a_paused_topic_offers_to_resume_it(console, browse, fleet):
    there = Fleet(fleet.store, "default", 60.0)
    directives.pause(there, Scope(TOPIC), "a test")
    page = browse(console, "otto")
    try:
        for path in (f"topics/{TOPIC}", f"topics/{TOPIC}/partitions/0/bill"):
            wait_until(lambda path=path: resume_scope(page, console, path) == f"{TOPIC}/*/*")
    finally:
        directives.resume(there, Scope(TOPIC))


def resume_scope(page, console, path):
    """Return the scope that the first Resume button of a page resumes."""
    page.goto(console.url + path)
    found = page.get_by_role("link", name="Resume")
    if not found.count():
        return None
    page.goto(console.url + found.first.get_attribute("href").lstrip("/"))
    scope = page.locator("input[name=scope]")  # there is none while a worker is about to resume
    return scope.input_value() if scope.count() else None


def test_settings_are_shown_as_in_the_config_file(console, browse):
    page = browse(console)
    page.goto(f"{console.url}topics/{TOPIC}/data")

    rows = page.inner_text("#settings")
    assert re.search(r"retention.without_groups\s+false\b", rows)


def test_title_of_a_time_has_utc_and_local_time(console, browse, browser):
    state = browse(console).context.storage_state()
    context = browser.new_context(storage_state=state, timezone_id="Asia/Shanghai")
    page = context.new_page()
    page.goto(f"{console.url}fleet")
    uptime = page.locator("#instances time").first
    assert re.fullmatch(r"\S+ \S+ UTC", uptime.get_attribute("title"))

    uptime.hover()

    assert re.fullmatch(r"\S+ \S+ UTC\n.* Asia/Shanghai", uptime.get_attribute("title"))
    context.close()
