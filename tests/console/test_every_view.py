"""What every view of the console promises, in a real browser. A new view is tested by its entry.

The numbers of the tests are those of the acceptance points of the console.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER, ConsoleProcess
from tests.support.daemon import ROOT, TOPIC

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER]

from streamqd.admin import dead_letters, tail  # noqa: E402
from streamqd.console.view import Act, ConsoleView  # noqa: E402
from streamqd.console.views import ACTS, VIEWS  # noqa: E402

AXE = ROOT / "tests" / "support" / "vendored" / "axe.min.js"
# Jobs exist only after a replay: test_dead_letters.py opens them.
ENTRIES = [each for each in (*VIEWS, *ACTS) if "JOB" not in each.example]
PATHS = [each.example or each.path for each in ENTRIES]
every_view = pytest.mark.parametrize("view", VIEWS, ids=[each.name for each in VIEWS])
every_act = pytest.mark.parametrize("act", ACTS, ids=[each.name for each in ACTS])
every_path = pytest.mark.parametrize("path", PATHS)


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


@every_path
def test_points_1_2_no_foreign_request_no_error(console, browse, path, filled):
    page = browse(console)

    answer = page.goto(console.url + filled(path))
    page.wait_for_load_state()

    assert answer.status == 200, page.inner_text("main")
    assert page.inner_text("h1, h2")
    assert page.seen.errors == []  # violations of the policy are among them
    assert page.seen.dialogs == []
    hosts = {urlsplit(each).netloc for each in page.seen.requests}
    assert hosts == {f"127.0.0.1:{console.port}"}


@every_path
def test_point_8_a_viewer_sees_no_button(console, browse, path, filled):
    page = browse(console, "vera")
    is_act = path in [each.example or each.path for each in ACTS]

    answer = page.goto(console.url + filled(path))

    assert answer.status == (403 if is_act else 200)
    assert page.locator("main form[method=post]").count() == 0
    assert page.locator("main a.button").count() == 0


@every_act
def test_point_8_every_post_of_a_viewer_is_403(console, browse, act, filled):
    answer = browse(console, "vera").request.post(
        console.url + filled(path_of(act)),
        form={"request-id": "once"},
        headers={"Sec-Fetch-Site": "same-origin"},
    )

    assert answer.status == 403
    assert "you are viewer" in answer.text()


@every_path
def test_point_10_readable_without_javascript(console, browse, path, filled):
    page = browse(console, javascript=False)

    answer = page.goto(console.url + filled(path))

    assert answer.status == 200
    assert page.inner_text("h1, h2")
    assert page.locator("button.copy:visible, #pause:visible").count() == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@every_path
def test_point_14_axe_is_clean_and_360_px_are_enough(console, browse, path, dark, filled):
    page = browse(console, width=360, dark=dark)
    page.goto(console.url + filled(path))
    page.wait_for_load_state()

    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    page.evaluate(AXE.read_text())  # the policy of the page forbids a script element
    found = page.evaluate("axe.run().then(r => r.violations)")

    assert overflow <= 0
    grave = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in grave] == []


@pytest.fixture(scope="module")
def prefixed(fleet, users_file):
    """A console below /q/."""
    with ConsoleProcess(
        fleet.config_path, "--users", str(users_file), "--prefix", "/q/"
    ) as started:
        yield started


@every_path
def test_point_15_behind_a_prefix(prefixed, browse, path, filled):
    page = browse(prefixed)
    assert urlsplit(prefixed.url).path == "/q/"

    answer = page.goto(prefixed.url + filled(path))
    page.wait_for_load_state()

    assert answer.status == 200
    assert page.seen.errors == []
    paths = {urlsplit(each).path for each in page.seen.requests}
    assert [each for each in paths if not each.startswith("/q/")] == []
    links = page.eval_on_selector_all("a[href], form", "a => a.map(e => e.href || e.action)")
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
