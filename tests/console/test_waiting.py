"""Retries and delayed sends in a real browser: by due time, in pages, made due and canceled."""

from __future__ import annotations

import re

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER
from tests.support.daemon import TOPIC
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.admin import audit, dead_letters, delayed, retries  # noqa: E402
from streamqd.admin.messages import MessageFilter  # noqa: E402
from streamqd.producer import Outgoing  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from streamqd.store import topics  # noqa: E402
from tests.console.conftest import running_fleet  # noqa: E402

LATER = "later"  # a topic that no group reads
DAY = 86_400.0


@pytest.fixture(scope="module")
def fleet(request, tmp_path_factory):
    """A running daemon whose failed messages wait for an hour."""
    backoff = {"base": "1h", "max": "1h"}
    with running_fleet(request, tmp_path_factory.mktemp("fleet"), backoff=backoff) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def sends(fleet):
    """Delay 70 sends of topic later by half an hour and 3 by two days. Return their names."""
    topics.create(fleet.store, LATER, config.Topic(partitions=2))
    items = [Outgoing(f"n{each}", delay=1_800.0 + each, key="<b>键</b>") for each in range(70)]
    items += [Outgoing("far", delay=2 * DAY + each) for each in range(3)]
    with Producer(settings=config.load(fleet.config_path)) as producer:
        return [f"{each.partition}:{each.id}" for each in producer.send_many(LATER, items)]


def figures(page) -> dict[str, str]:
    rows = [each.split() for each in page.locator(".due li").all_inner_texts()]
    return {" ".join(words[:-1]): words[-1] for words in rows}


def confirm(page, text):
    with page.expect_navigation():
        page.get_by_role("button", name=text, exact=True).click()


def waiting(fleet) -> set[str]:
    return {each.id for each in delayed.messages(fleet.store, LATER).page(limit=500).rows}


def test_delayed_sends_are_counted_by_due_time_and_paged(console, browse, sends):
    page = browse(console, width=390)
    page.goto(f"{console.url}topics/{LATER}/delayed")

    shown = figures(page)
    assert (shown["within 1 h"], shown["within 7 d"]) == ("70", "3")
    assert {shown[each] for each in ("overdue", "within 10 min", "later")} == {"0"}
    assert "50 of 73 delayed sends" in page.inner_text(".pager")
    page.locator("a[rel=next]").click()
    page.wait_for_load_state()
    assert "23 of 73 delayed sends" in page.inner_text(".pager")
    page.locator(".due a", has_text="3").last.click()
    page.wait_for_load_state()
    assert "3 of 73 delayed sends" in page.inner_text(".pager")
    assert set(page.locator("#delayed th code").all_inner_texts()) == set(sends[-3:])
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.seen.errors == []


def test_delayed_send_shows_its_payload(console, browse, sends):
    page = browse(console)
    page.goto(f"{console.url}topics/{LATER}/delayed")
    page.get_by_role("link", name=sends[1], exact=True).click()
    page.wait_for_load_state()

    assert "Waiting for its due time" in page.inner_text("main")
    assert page.inner_text("pre") == "n1"
    assert "<b>键</b>" in page.inner_text(".facts")
    assert "No group reads" not in page.inner_text("main")
    with page.expect_download() as found:
        page.get_by_role("link", name="Download the exact bytes").click()
    assert found.value.path().read_bytes() == b"n1"
    unknown = f"{console.url}topics/{LATER}/payload?uid={LATER}/0/none"
    assert page.request.get(unknown).status == 404


def test_delayed_send_is_canceled_with_the_topic_name(console, browse, fleet, sends):
    page = browse(console)
    page.goto(f"{console.url}topics/{LATER}/delayed")
    page.locator("#delayed tr", has_text=sends[0]).get_by_text("Cancel…").click()
    page.fill("input[name=typed-name]", LATER)
    confirm(page, "Cancel permanently")

    assert "1 delayed send canceled." in page.inner_text("main")
    assert waiting(fleet) == set(sends[1:])
    [row] = audit.page(fleet.store, LATER, limit=1).entries
    assert (row.who, row.command) == ("anna (console)", "delayed cancel")
    assert row.arguments["sends"] == [sends[0]]
    assert row.counts["canceled"] == 1


def test_retry_runs_now_or_becomes_a_dead_letter(console, browse, fleet):
    fleet.send(["fail"])

    def rows():
        return retries.messages(fleet.store, TOPIC, "bill").page(limit=500).rows

    [retry] = wait_until(rows, timeout=30)
    page = browse(console, "otto")
    page.goto(f"{console.url}topics/{TOPIC}/retries/bill")
    assert sum(map(int, figures(page).values())) == 1

    row = page.locator("#retries tr", has_text=retry.id)
    row.get_by_text("Run now…").click()
    assert "1 retry would run now." in page.inner_text(".dry")
    page.go_back()
    row.get_by_text("Cancel…").click()
    assert "1 retry would be dead-lettered (reason: canceled)." in page.inner_text(".dry")
    confirm(page, "Move to dead letters")

    assert "1 retry canceled." in page.inner_text("main")
    found = dead_letters.messages(fleet.store, TOPIC).page(MessageFilter(reason="canceled"))
    assert [each.uid for each in found.rows] == [retry.uid]
    command = audit.page(fleet.store, TOPIC, limit=1).entries[0]
    assert (command.who, command.command) == ("otto (console)", "retry cancel")
    assert re.search("No waiting retries", page.inner_text("main"))
