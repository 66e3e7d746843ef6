"""A page of another origin tries to act in the real browser of a person who is logged in."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER
from tests.support.daemon import TOPIC

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd.admin import directives  # noqa: E402
from streamqd.admin.published import Fleet  # noqa: E402

PAGE = """<!doctype html><title>evil</title>
<form method="post" action="{console}groups/orders/bill/pause">
<input name="request-id" value="forged"><button>Win</button></form>
<iframe src="{console}"></iframe>"""


@pytest.fixture
def other_site(console):
    """Serve a page that contains a forged form, and return its port."""

    class Forged(BaseHTTPRequestHandler):
        def do_GET(self):
            body = PAGE.format(console=console.url).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Forged)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def pauses(fleet):
    return directives.view(Fleet(fleet.store, "default", 60.0)).directives


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["same-site", "cross-site"])
def test_form_of_another_origin_gets_403(console, fleet, browse, other_site, host):
    """A forged form gets 403, although the browser sends the cookie to another port of the site."""
    page = browse(console, "otto")
    asked = []
    page.on("request", lambda each: asked.append(each))
    page.goto(f"http://{host}:{other_site}/")

    with page.expect_navigation() as found:
        page.get_by_role("button", name="Win").click()

    [forged] = [each for each in asked if each.method == "POST"]
    assert forged.all_headers()["sec-fetch-site"] == (
        "same-site" if host == "127.0.0.1" else "cross-site"
    )
    assert ("cookie" in forged.all_headers()) == (host == "127.0.0.1")
    assert found.value.status == 403
    assert "does not come from a page of the console" in page.inner_text("body")
    assert pauses(fleet) == []


def test_script_of_another_origin_reads_and_changes_nothing(console, fleet, browse, other_site):
    page = browse(console, "otto")
    page.goto(f"http://127.0.0.1:{other_site}/")
    target = f"{console.url}groups/orders/bill/pause"
    send = f"fetch('{target}', {{method: 'POST', credentials: 'include', mode: 'no-cors',"
    page.evaluate(f"{send} body: new URLSearchParams({{'request-id': 'f'}})}}).then(a => a.type)")
    assert pauses(fleet) == []
    read = f"fetch('{console.url}topics', {{credentials: 'include'}}).then(a => a.text())"
    assert page.evaluate(f"{read}.catch(() => 'refused')") == "refused"


def test_console_cannot_be_framed(console, browse, other_site):
    from playwright.sync_api import Error

    page = browse(console, "otto")
    page.goto(f"http://127.0.0.1:{other_site}/")

    page.wait_for_load_state()

    [frame] = page.main_frame.child_frames
    try:
        shown = frame.locator("body").inner_text(timeout=2_000)
    except Error:  # an error page's document cannot be read
        shown = ""
    assert TOPIC not in shown
    assert any("frame-ancestors" in each for each in page.seen.errors)
