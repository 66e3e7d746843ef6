"""Check the promises of every view in a real browser. New views are covered automatically."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.console.conftest import PASSWORD
from tests.support import optional
from tests.support.console import NO_BROWSER, ConsoleProcess
from tests.support.daemon import ROOT, TOPIC, toml
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER]

from streamqd.admin import dead_letters, directives, tail  # noqa: E402
from streamqd.admin.published import Fleet  # noqa: E402
from streamqd.console.view import Act, ConsoleView  # noqa: E402
from streamqd.console.views import ACTS, VIEWS  # noqa: E402
from streamqd.store.directives import Scope  # noqa: E402
from tests.console.test_access import OWN, logged_in  # noqa: E402

# In an SVG image, a link's `href` is an object.
LINKS = (
    "a => a.map(e => e.action || (e.href.baseVal ?? e.href)).map(u => new URL(u, location).href)"
)
AXE = ROOT / "tests" / "support" / "vendored" / "axe.min.js"
DARK = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
ENTRIES = [*VIEWS, *ACTS]
ACT_PATHS = [each.example or each.path for each in ACTS]
PATHS = [each.example or each.path for each in ENTRIES]
every_act = pytest.mark.parametrize("act", ACTS, ids=[each.name for each in ACTS])
# `make test` opens each view once. The forms and the other checks of the views are slow.
every_path = pytest.mark.parametrize(
    "path",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in ACT_PATHS)) for each in PATHS],
)


@pytest.fixture(scope="module")
def fill_path(fleet):
    """Return a path without its first slash that names a letter, a message and a job."""
    letter = dead_letters.messages(fleet.store, TOPIC).page(limit=1).rows[0].id
    message = tail.messages(fleet.store, TOPIC).page(limit=1).rows[0]
    uid = f"{TOPIC}/{message.partition}/{message.id}"
    jobs: dict[str, str] = {}

    def make(console: ConsoleProcess, path: str) -> str:
        if "JOB" in path and console.url not in jobs:
            others = dead_letters.messages(fleet.store, TOPIC).page(limit=100).rows
            other = next(each.id for each in others if each.id != letter)
            jobs[console.url] = replay_letter(console, other)
        for name, value in (
            ("DEAD_LETTER", letter),
            ("UID", uid),
            ("JOB", jobs.get(console.url, "")),
        ):
            path = path.replace(name, value)
        return path.lstrip("/")

    return make


def replay_letter(console: ConsoleProcess, letter: str) -> str:
    """Replay a dead letter. Return the id of the job once the job has finished."""
    client, root = logged_in(console, "otto"), urlsplit(console.url).path
    form = {"request-id": letter, "id": letter, "typed-name": TOPIC}
    answer = client.post(f"{root}topics/{TOPIC}/dead-replay", form, OWN)
    target = answer.headers["location"].partition("?")[0]
    wait_until(lambda: "finished after" in client.get(target).text, timeout=30)
    return target.rpartition("/")[2]


def example_path(entry: ConsoleView | Act) -> str:
    return entry.example or entry.path


def test_every_entry_has_an_openable_path():
    assert [path for path in PATHS if "{" in path] == []


@pytest.fixture
def visit(tab):
    """Open a path, and return the page and the response: `visit(console, path, "vera")`."""

    def make(console, path, name="anna", *, javascript=True):
        page = tab(console, name, javascript=javascript, width=360, height=800)
        page.emulate_media(color_scheme="light")
        answer = page.goto(console.url + path)
        page.wait_for_load_state()
        return page, answer

    return make


@every_path
def test_views_load_locally_and_fit_360_px(console, visit, path, fill_path):
    page, answer = visit(console, fill_path(console, path))

    assert answer.status == 200, page.inner_text("main")
    assert page.inner_text("h1, h2")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.seen.errors == []  # violations of the policy are among the errors
    assert page.seen.dialogs == []
    hosts = {urlsplit(each).netloc for each in page.seen.requests}
    assert hosts == {f"127.0.0.1:{console.port}"}


@pytest.mark.slow
@every_path
def test_every_view_passes_axe_in_both_color_schemes(console, visit, path, fill_path):
    page, _ = visit(console, fill_path(console, path))
    assert_accessible(page)


def assert_accessible(page) -> None:
    """Fail if axe finds a serious problem. The dark scheme differs only in its colors."""
    page.evaluate(AXE.read_text())  # the policy of the page forbids a script element
    for scheme, options in (("light", {}), ("dark", DARK)):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("options => axe.run(options).then(r => r.violations)", options)
        grave = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(scheme, each["id"], each["nodes"][0]["html"]) for each in grave] == []


@pytest.fixture(scope="module")
def console_without_redis(tmp_path_factory, users_file):
    """A console that cannot reach its Redis."""
    path = tmp_path_factory.mktemp("away") / "away.toml"
    path.write_text(toml({"redis": {"url": "redis://127.0.0.1:1/0"}}))
    with ConsoleProcess(path, "--users", str(users_file)) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "no-javascript"])
@pytest.mark.parametrize(
    ("place", "path", "name", "status", "title"),
    [
        ("console", "login", "", 200, "Log in"),
        ("console", "nothing", "anna", 404, "404 Not Found"),
        ("console", "nothing", "", 404, "You are not logged in"),
        ("console", "topics/nothing", "anna", 404, "404 Not Found"),
        ("console", "topics?limit=x", "anna", 400, "400 Bad Request"),
        ("console", "topics/orders/dead-purge", "vera", 403, "403 Forbidden"),
        ("link_console", "", "", 401, "You are not logged in"),
        ("console_without_redis", "topics", "anna", 503, "Redis is unavailable"),
    ],
)
def test_pages_without_a_view_are_accessible(
    request, visit, place, path, name, status, title, javascript
):
    console = request.getfixturevalue(place)

    page, answer = visit(console, path, name, javascript=javascript)

    assert (answer.status, page.inner_text("h1")) == (status, title)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.seen.dialogs == []
    # Chromium logs a page's status to its console, although this is not an error of the page.
    assert [each for each in page.seen.errors if f"status of {status}" not in each] == []
    if javascript:
        assert_accessible(page)


@pytest.fixture(scope="module")
def link_console(fleet):
    """A console whose users log in through a link."""
    with ConsoleProcess(fleet.config_path) as started:
        yield started


@pytest.mark.slow
@every_path
def test_views_work_without_javascript_read_only_for_viewers(console, visit, path, fill_path):
    page, answer = visit(console, fill_path(console, path), javascript=False)
    assert answer.status == 200
    assert page.inner_text("h1, h2")
    assert page.locator("button.copy:visible, #pause:visible").count() == 0

    page, answer = visit(console, fill_path(console, path), "vera", javascript=False)
    assert answer.status == (403 if path in ACT_PATHS else 200)
    assert page.locator("main form[method=post]").count() == 0
    assert page.locator("main a.button").count() == 0


@every_act
def test_viewer_gets_403_for_every_post(console, act, fill_path):
    client = logged_in(console, "vera")

    answer = client.post(f"/{fill_path(console, example_path(act))}", {"request-id": "once"}, OWN)

    assert answer.status == 403
    assert "your role is viewer" in answer.text


@pytest.fixture(scope="module")
def prefixed_console(fleet, users_file):
    """A console that is served below /q/."""
    with ConsoleProcess(
        fleet.config_path, "--users", str(users_file), "--prefix", "/q/"
    ) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_views_work_below_a_path_prefix(prefixed_console, visit, path, fill_path):
    assert urlsplit(prefixed_console.url).path == "/q/"

    page, answer = visit(prefixed_console, fill_path(prefixed_console, path))

    assert answer.status == 200
    assert page.seen.errors == []
    paths = {urlsplit(each).path for each in page.seen.requests}
    assert [each for each in paths if not each.startswith("/q/")] == []
    links = page.eval_on_selector_all("a[href], form", LINKS)
    assert [each for each in links if not urlsplit(each).path.startswith("/q/")] == []


@pytest.mark.slow
def test_login_and_live_stream_work_below_a_prefix(prefixed_console, browse, fleet):
    """Below a prefix, a visitor is sent to the login form, pauses a group and logs out."""
    page = browse(prefixed_console, "")
    page.goto(f"{prefixed_console.url}topics/{TOPIC}?group=bill")
    assert urlsplit(page.url).path == "/q/login"
    page.fill("input[name=name]", "otto")
    page.fill("input[name=password]", PASSWORD)
    with page.expect_request(lambda each: urlsplit(each.url).path == "/q/live"):
        page.get_by_role("button", name="Log in").click()
    page.wait_for_selector("#pulse[data-state=live]")
    assert page.url == f"{prefixed_console.url}topics/{TOPIC}?group=bill"

    page.locator("tr#g-bill").get_by_role("link", name="Pause").click()
    page.fill("input[name=why]", "a prefix")
    page.get_by_role("button", name="Update the dry run").click()
    assert urlsplit(page.url).path == f"/q/groups/{TOPIC}/bill/pause"
    there = Fleet(fleet.store, "default", 60.0)
    try:
        with page.expect_navigation():
            page.get_by_role("button", name="Pause", exact=True).click()
        assert page.inner_text(".done") == f"All partitions of {TOPIC}/bill: paused."
        assert urlsplit(page.url).path == f"/q/topics/{TOPIC}"
        assert [each.why for each in directives.view(there).directives] == ["a prefix"]
    finally:
        directives.resume(there, Scope(TOPIC))

    page.locator("details.menu summary").click()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_selector("input[name=password]")
    assert urlsplit(page.url).path == "/q/login"
    assert page.goto(f"{prefixed_console.url}fleet").url.startswith(f"{prefixed_console.url}login?")
    paths = {urlsplit(each).path for each in page.seen.requests}
    assert [each for each in paths if not each.startswith("/q/")] == []
    assert page.seen.errors == []


def test_vendored_files_have_the_stated_hashes():
    static = ROOT / "streamqd" / "console" / "static"
    rows = re.findall(
        r"^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$",
        (static.parent / "VENDORED.md").read_text(),
        re.MULTILINE,
    )

    assert {name for name, _ in rows} == {"htmx.min.js", "uplot.min.js", "uplot.css"}
    for name, digest in rows:
        assert hashlib.sha256(Path(static / name).read_bytes()).hexdigest() == digest
