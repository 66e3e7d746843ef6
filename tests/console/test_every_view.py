"""What every view of the console promises, in a real browser. A new view is tested by its entry.

The numbers of the tests are those of the acceptance points of the console.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.console.conftest import log_in
from tests.support import optional
from tests.support.console import NO_BROWSER, ConsoleProcess, Seen
from tests.support.daemon import ROOT, TOPIC

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER]

from streamqd.admin import dead_letters, tail  # noqa: E402
from streamqd.console.view import Act, ConsoleView  # noqa: E402
from streamqd.console.views import ACTS, VIEWS  # noqa: E402

# In a picture, `href` of a link is an object.
LINKS = (
    "a => a.map(e => e.action || (e.href.baseVal ?? e.href)).map(u => new URL(u, location).href)"
)
AXE = ROOT / "tests" / "support" / "vendored" / "axe.min.js"
# Jobs exist only after a replay: test_dead_letters.py opens them.
ENTRIES = [each for each in (*VIEWS, *ACTS) if "JOB" not in each.example]
ACT_PATHS = [each.example or each.path for each in ACTS]
PATHS = [each.example or each.path for each in ENTRIES]
every_act = pytest.mark.parametrize("act", ACTS, ids=[each.name for each in ACTS])
# `make test` opens the views once. The forms and the other looks at the views are slow.
every_path = pytest.mark.parametrize(
    "path",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in ACT_PATHS)) for each in PATHS],
)


@pytest.fixture(scope="module")
def filled(fleet):
    """Return a path without its first slash, with a letter and a message of the fleet."""
    letter = dead_letters.messages(fleet.store, TOPIC).page(limit=1).rows[0].id
    message = tail.messages(fleet.store, TOPIC).page(limit=1).rows[0]
    uid = f"{TOPIC}/{message.partition}/{message.id}"
    return lambda path: path.lstrip("/").replace("LETTER", letter).replace("UID", uid)


def path_of(entry: ConsoleView | Act) -> str:
    return entry.example or entry.path


def test_every_entry_has_an_openable_path():
    assert [path for path in PATHS if "{" in path] == []


@pytest.fixture(scope="module")
def logged_in(browser):
    """Return a context of the browser in which a person is logged in, one for each of its kind."""
    known = {}

    def make(console, name="anna", *, javascript=True):
        key = console.url, name, javascript
        if key not in known:
            known[key] = browser.new_context(
                java_script_enabled=javascript, viewport={"width": 360, "height": 800}
            )
            log_in(known[key], console, name)
        return known[key]

    yield make
    for each in known.values():
        each.close()


@pytest.fixture
def visit(logged_in):
    """Open a path, and return the page and the answer: `visit(console, path, "vera")`."""
    pages = []

    def make(console, path, name="anna", *, javascript=True):
        page = logged_in(console, name, javascript=javascript).new_page()
        pages.append(page)
        page.seen = Seen(page)
        answer = page.goto(console.url + path)
        page.wait_for_load_state()
        return page, answer

    yield make
    for each in pages:
        each.close()


@every_path
def test_views_have_no_foreign_request_no_error_and_fit_360_px(console, visit, path, filled):
    page, answer = visit(console, filled(path))

    assert answer.status == 200, page.inner_text("main")
    assert page.inner_text("h1, h2")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.seen.errors == []  # violations of the policy are among them
    assert page.seen.dialogs == []
    hosts = {urlsplit(each).netloc for each in page.seen.requests}
    assert hosts == {f"127.0.0.1:{console.port}"}


@pytest.mark.slow
@every_path
def test_axe_finds_no_fault_in_both_color_schemes(console, visit, path, filled):
    page, _ = visit(console, filled(path))
    page.evaluate(AXE.read_text())  # the policy of the page forbids a script element
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("axe.run().then(r => r.violations)")
        grave = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(scheme, each["id"], each["nodes"][0]["html"]) for each in grave] == []


@pytest.mark.slow
@every_path
def test_views_work_without_javascript_and_viewers_see_no_button(console, visit, path, filled):
    page, answer = visit(console, filled(path), javascript=False)
    assert answer.status == 200
    assert page.inner_text("h1, h2")
    assert page.locator("button.copy:visible, #pause:visible").count() == 0

    page, answer = visit(console, filled(path), "vera", javascript=False)
    assert answer.status == (403 if path in ACT_PATHS else 200)
    assert page.locator("main form[method=post]").count() == 0
    assert page.locator("main a.button").count() == 0


@every_act
def test_every_post_of_a_viewer_is_403(console, logged_in, act, filled):
    answer = logged_in(console, "vera", javascript=False).request.post(
        console.url + filled(path_of(act)),
        form={"request-id": "once"},
        headers={"Sec-Fetch-Site": "same-origin"},
    )

    assert answer.status == 403
    assert "you are viewer" in answer.text()


@pytest.fixture(scope="module")
def prefixed(fleet, users_file):
    """A console below /q/."""
    with ConsoleProcess(
        fleet.config_path, "--users", str(users_file), "--prefix", "/q/"
    ) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("path", [each for each in PATHS if each not in ACT_PATHS])
def test_views_work_below_a_path_prefix(prefixed, visit, path, filled):
    assert urlsplit(prefixed.url).path == "/q/"

    page, answer = visit(prefixed, filled(path))

    assert answer.status == 200
    assert page.seen.errors == []
    paths = {urlsplit(each).path for each in page.seen.requests}
    assert [each for each in paths if not each.startswith("/q/")] == []
    links = page.eval_on_selector_all("a[href], form", LINKS)
    assert [each for each in links if not urlsplit(each).path.startswith("/q/")] == []


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
