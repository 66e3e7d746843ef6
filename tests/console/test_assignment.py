"""The page of an assignment shows its worker's stack on demand, and its most recent owners."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER, ConsoleProcess
from tests.support.daemon import TOPIC, Daemon
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd.admin import audit, stacks  # noqa: E402
from streamqd.admin.published import Fleet  # noqa: E402
from streamqd.model import Assignment  # noqa: E402
from streamqd.store.stacks import PublishedStack, publish  # noqa: E402
from tests.console.conftest import HOSTILE, Browse  # noqa: E402
from tests.console.test_access import logged_in  # noqa: E402

ASSIGNMENT = Assignment(TOPIC, 0, "bill")
PAGE = f"topics/{TOPIC}/partitions/0/bill"


@pytest.fixture
def no_stack(fleet: Daemon) -> Iterator[None]:
    """Remove the stacks and the stack requests of this test."""
    yield
    fleet.link.execute("DEL", fleet.keys.stack(*ASSIGNMENT), fleet.keys.directives("default"))


@pytest.mark.parametrize("javascript", [True, False])
def test_operator_sees_the_stack_of_a_running_worker(
    console: ConsoleProcess, browse: Browse, fleet: Daemon, no_stack: None, javascript: bool
) -> None:
    gate = f"gate-{javascript}"
    uids = fleet.send([f"await {gate}"], 0)
    fleet.wait_run(uids[0])
    page = browse(console, "otto", javascript=javascript)
    page.goto(console.url + PAGE)

    page.click("#stack >> text=Request stack trace")
    assert "worker keeps running" in page.inner_text("main")
    page.click("main button >> text=Request stack trace")

    if javascript:  # the answer arrives over the stream
        page.wait_for_selector("#stack pre >> text=in _await", timeout=60_000)
    else:
        wait_until(lambda: page.reload() and "in _await" in page.inner_text("#stack"), timeout=60)
    text = page.inner_text("#stack")
    assert f"Process {fleet.pids()[0]} of one" in text
    assert "outdated" not in text
    box = "e => [getComputedStyle(e).overflowY, e.clientHeight]"
    overflow, height = page.eval_on_selector("#stack pre", box)
    assert (overflow, height <= 500) == ("auto", True)
    [entry] = [
        each for each in audit.page(fleet.store, TOPIC, limit=5).entries if each.command == "stack"
    ][:1]
    assert entry.who == "otto (console)"
    assert entry.arguments == {"scope": str(ASSIGNMENT)}
    (fleet.folder / gate).touch()
    fleet.wait_settled()


def test_viewer_reads_but_cannot_request_a_stack(
    console: ConsoleProcess, browse: Browse, fleet: Daemon, no_stack: None
) -> None:
    found = PublishedStack(1, 1, "one", 1, 4711, "line of a stack")
    fleet.link.execute(*publish(fleet.keys, ASSIGNMENT, found))
    page = browse(console, "vera")
    page.goto(console.url + PAGE)
    text = page.inner_text("#stack")
    assert "line of a stack" in text
    assert "outdated" in text  # the stack belongs to another epoch
    assert "The epoch is now" in text
    assert page.locator("text=Request stack trace").count() == 0
    assert f"streamqd why {ASSIGNMENT}" in page.inner_text("main")


def test_hostile_stack_is_shown_as_text(
    console: ConsoleProcess, browse: Browse, fleet: Daemon, no_stack: None
) -> None:
    found = PublishedStack(1, 1, HOSTILE, 1, 4711, HOSTILE * 3, problem=HOSTILE)
    fleet.link.execute(*publish(fleet.keys, ASSIGNMENT, found))
    page = browse(console, "otto")
    page.goto(console.url + PAGE)
    page.wait_for_selector("#pulse[data-state=live]")
    assert page.inner_text("#stack pre") == HOSTILE * 3
    assert page.locator("main img, main script").count() == 0
    assert (page.seen.dialogs, page.seen.errors) == ([], [])
    for raw in ("no json", json.dumps({"stack": [HOSTILE]})):
        fleet.link.execute("SET", fleet.keys.stack(*ASSIGNMENT), raw)
        page.goto(console.url + PAGE)
        assert "streaming:mq:stack:" in page.inner_text("#stack .problem")
        assert page.locator("#stack pre").count() == 0


def test_unanswered_stack_request_is_reported(
    console: ConsoleProcess, fleet: Daemon, no_stack: None
) -> None:
    client = logged_in(console, "otto")
    supervisor = psutil.Process(fleet.pid)
    supervisor.send_signal(signal.SIGSTOP)  # like an older version, it never answers
    try:
        request = stacks.request(Fleet(fleet.store, "default", 600.0), ASSIGNMENT)
        wait_until(lambda: "The owner answers within 20 s" in client.get(f"/{PAGE}").text)
        past = (request.at_unix_ms or 0) - 21_000
        body = {"version": 1, "at_unix_ms": past, "by": "otto", "why": ""}
        fleet.link.execute(
            "HSET", fleet.keys.directives("default"), f"stack:{ASSIGNMENT}", json.dumps(body)
        )
        wait_until(lambda: "No stack was received within 20 s" in client.get(f"/{PAGE}").text)
    finally:
        supervisor.send_signal(signal.SIGCONT)


def test_assignment_page_lists_the_last_owners(console: ConsoleProcess, fleet: Daemon) -> None:
    key: Any = fleet.keys.epochs(*ASSIGNMENT)
    [acquired] = fleet.link.execute("LRANGE", key, 0, -1)
    at = int(acquired.split(b" ")[0])
    fleet.link.execute("LPUSH", key, f"{at - 5_000} released {at - 9_000} <i>old</i> shed")
    try:
        text = logged_in(console, "vera").get(f"/{PAGE}").text
    finally:
        fleet.link.execute("LPOP", key)
    table = text.partition('id="owners"')[2].partition("</table>")[0]
    assert table.count("<tr>") == 3  # the head and two owners
    assert table.index(">one<") < table.index("&lt;i&gt;old&lt;/i&gt;")
    assert "owns it now" in table
    assert "handed over" in table
