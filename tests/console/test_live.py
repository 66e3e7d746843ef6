"""Live pages change their figures in place, and hidden pages send no requests."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER, command_rates, commands_sent
from tests.support.daemon import TOPIC
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd.admin import directives  # noqa: E402
from streamqd.admin.published import Fleet  # noqa: E402
from streamqd.console.views import VIEWS  # noqa: E402
from streamqd.store.directives import Scope  # noqa: E402

BILL = "document.getElementById('g-orders-bill')"

PAUSE_SECONDS = 10.0
MORE = 1.35  # highest ratio of commands for fifty pages to one page; viewers share the refresh
# An event may be rendered from the snapshot taken before the change. On a slow host, snapshots are
# less frequent.
EVENTS_MAX = 4
COUNT_EVENTS = """
    const Real = EventSource;
    window.events = 0;
    window.EventSource = class extends Real {
        constructor(...given) {
            super(...given);
            for (const name of ["part", "same", "away"])
                this.addEventListener(name, () => events++);
        }
    };
"""


def wait_for_condition(page, condition: str, timeout: float = 60.0) -> None:
    """Wait for a JavaScript expression. The page's policy forbids playwright's own way."""
    wait_until(lambda: page.evaluate(condition) or page.wait_for_timeout(50), timeout=timeout)


@pytest.fixture
def overview(console, browse):
    """The overview page after its first event. `window.events` counts the events."""
    page = browse(console)
    page.add_init_script(COUNT_EVENTS)
    page.goto(console.url)
    page.wait_for_selector("#pulse[data-state=live]")
    return page


@pytest.fixture
def paused_fleet(fleet, overview):
    """The fleet with its groups paused, so that every sent message stays unread."""
    there = Fleet(fleet.store, "default", 60.0)
    directives.pause(there, Scope(TOPIC), "a test")
    wait_for_condition(overview, f"{BILL}.querySelector('.state').innerText.startsWith('paused')")
    yield fleet
    directives.resume(there, Scope(TOPIC))
    fleet.wait_settled()


def test_figures_update_without_a_reload(paused_fleet, overview):
    page, lag = overview, f"{BILL}.querySelector('td.n').innerText"
    assert page.evaluate(lag) == "0"
    page.evaluate("window.kept = true")
    page.focus("input[type=search]")
    page.keyboard.type("ord")
    page.evaluate("document.querySelector('details.menu').open = true")
    page.evaluate("scrollTo(0, 40); document.getElementById('groups').scrollLeft = 30")
    places = "[scrollY, document.getElementById('groups').scrollLeft]"
    before = page.evaluate(places)

    page.seen.requests.clear()
    paused_fleet.send(["ok"] * 100)
    began, first = time.monotonic(), page.evaluate("events")
    wait_for_condition(page, f"{lag} === '100'")
    took, events = time.monotonic() - began, page.evaluate("events") - first
    print(f"100 unread messages were shown after {took:.1f} s and {events} events")

    assert events <= EVENTS_MAX
    assert page.seen.requests == []
    assert page.evaluate("window.kept") is True
    assert page.evaluate("document.activeElement.name") == "q"
    assert page.input_value("input[type=search]") == "ord"
    assert page.evaluate("document.querySelector('details.menu').open") is True
    assert page.evaluate(places) == before
    assert page.seen.errors == []


def test_live_view_updates_without_a_reload_and_pauses(fleet, console, browse):
    page = browse(console, "vera")
    page.goto(f"{console.url}top?q=bill&sort=lag")
    page.wait_for_selector("#pulse[data-state=live]")
    page.evaluate("window.kept = true")
    arriving = "document.querySelector('#live .figures div:nth-child(2) dd').innerText"
    before = page.evaluate(arriving)

    fleet.send(["ok"] * 200)
    wait_for_condition(page, f"{arriving} !== {before!r}")
    page.click("#pause")
    page.seen.requests.clear()
    page.wait_for_timeout(5_000)

    assert page.evaluate("window.kept") is True
    assert page.locator("#assignments tbody tr").count() == 2, "the filter stays"
    assert page.seen.requests == []
    assert page.seen.errors == []


def test_open_details_in_the_live_part_stay_open(overview):
    page = overview
    part = "<details id='d'><summary>more</summary><p id='n'>{}</p></details>"
    page.evaluate("html => { document.getElementById('live').innerHTML = html }", part.format(1))
    page.evaluate("document.getElementById('d').open = true")

    swap = "html => htmx.swap({text: html, target: document.getElementById('live'),"
    page.evaluate(f"{swap} swap: 'innerMorph'}})", part.format(2))

    wait_for_condition(page, "document.getElementById('n').innerText === '2'")
    assert page.evaluate("document.getElementById('d').open") is True


def assert_sends_nothing(fleet, page) -> None:
    """Fail if the page sends a request within 10 s, or its console sends a command to Redis."""

    def silent() -> bool:
        before = commands_sent(fleet)
        page.wait_for_timeout(3_000)  # longer than the time between two events
        return commands_sent(fleet) == before

    wait_until(silent, timeout=30, what="the streams of earlier pages have ended")
    page.seen.requests.clear()
    before = commands_sent(fleet)

    page.wait_for_timeout(PAUSE_SECONDS * 1000)

    assert page.seen.requests == []
    assert commands_sent(fleet) == before


def test_paused_page_sends_no_request(fleet, overview):
    page = overview
    page.click("#pause")
    assert page.inner_text("#pulse-text") == "paused"

    assert_sends_nothing(fleet, page)

    page.keyboard.press("p")
    page.wait_for_selector("#pulse[data-state=live]")
    assert len(page.seen.requests) == 1


def test_hidden_page_sends_no_request(fleet, overview):
    """A hidden page sends nothing. A script hides it, because chromium has no screen here."""
    page = overview
    tell = (
        "value => { Object.defineProperty(document, 'hidden', {value, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')) }"
    )
    page.evaluate(tell, True)

    assert_sends_nothing(fleet, page)

    page.evaluate(tell, False)
    wait_until(lambda: page.wait_for_timeout(20) or len(page.seen.requests) == 1)


def test_keyboard_shortcuts_open_search_and_pages(overview):
    page = overview
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "q"
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    with page.expect_navigation():
        page.keyboard.press("o")


def test_outage_of_redis_shows_a_banner_until_it_is_over(fleet, new_console, users_file, browse):
    """A banner appears while the whole server is stopped and its clients wait without an answer."""
    console = new_console(fleet, "--users", str(users_file))
    page, other, still = browse(console), browse(console), browse(console)
    page.goto(console.url)
    page.wait_for_selector("#pulse[data-state=live]")
    server = psutil.Process(int(server_info(fleet)["process_id"]))
    before = fleet.pid, fleet.pids(), fleet.pids("ship")

    server.suspend()
    try:
        page.wait_for_selector("#banner:not([hidden])", timeout=30_000)
        shown = page.inner_text("#banner")
        answer = other.goto(console.url)
        text = other.inner_text("body")
        still.goto(f"{console.url}topics")
        still.wait_for_selector("#pulse[data-state=waiting]", timeout=30_000)
        banner = still.inner_text("#banner")
    finally:
        server.resume()

    assert "Redis does not answer" in shown
    assert answer.status == 503
    assert "Redis" in text
    assert "Traceback" not in text
    page.wait_for_selector("#banner", state="hidden", timeout=30_000)
    other.wait_for_selector("#groups", timeout=30_000)
    assert "Redis does not answer" in banner
    still.wait_for_selector("#topics", timeout=30_000)
    fleet.send(["ok"] * 10)
    fleet.wait_settled()
    assert (fleet.pid, fleet.pids(), fleet.pids("ship")) == before, "no process was replaced"
    assert console.process.poll() is None
    assert "Traceback" not in console.log_path.read_text()
    assert page.seen.errors == []


def server_info(daemon) -> dict[str, str]:
    text = daemon.link.execute("INFO").decode()
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


LIVE = [each.example or each.path for each in VIEWS if each.live and "JOB" not in each.example]


@pytest.mark.parametrize("urls", ["one URL", "different URLs"])
def test_fifty_pages_cost_less_than_135_percent_of_one(fleet, console, browse, urls):
    """Viewers of one page, or of all live views, share each refresh.

    The pages of jobs are left out, because the page of a replay reads its dead letters.
    """
    cookies = browse(console).context.cookies()
    cookie = "; ".join(f"{each['name']}={each['value']}" for each in cookies)
    pages = ["/"] * 50
    if urls == "different URLs":
        pages = [f"{LIVE[n % len(LIVE)]}?n={n}" for n in range(50)]

    one, fifty = (command_rates(fleet, console, cookie, each) for each in (["/"], pages))

    rss = psutil.Process(console.process.pid).memory_info().rss / 2**20
    print(f"{one} with 1 page, {fifty} with 50; RSS {rss:.0f} MiB")
    assert fifty.ratio(one) < MORE
    assert rss < 150


def test_page_without_a_session_redirects_to_the_login(console, browse):
    page = browse(console)
    page.goto(console.url)
    page.wait_for_selector("#pulse[data-state=live]")
    page.click("#pause")
    answer = page.context.request.post(
        f"{console.url}logout", headers={"Sec-Fetch-Site": "same-origin"}
    )
    assert answer.ok

    page.click("#pause")

    page.wait_for_selector("input[name=password]", timeout=30_000)
