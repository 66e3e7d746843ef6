"""Messages in a real browser: search within a budget, a body exactly, and sending one."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.admin import tail  # noqa: E402
from streamqd.producer import Outgoing  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from streamqd.store import topics  # noqa: E402
from tests.console.conftest import HOSTILE  # noqa: E402

MANY, QUIET = "many", "quiet"  # topics that no group reads


@pytest.fixture(scope="module")
def messages(fleet):
    """Send to topic quiet: `messages(payload, key=…)` returns the uid."""
    for topic in (MANY, QUIET):
        topics.create(fleet.store, topic, config.Topic(partitions=2))
    with Producer(settings=config.load(fleet.config_path)) as producer:
        for _ in range(5):
            producer.send_many(MANY, [Outgoing("{}", partition=n % 2) for n in range(10_000)])
        yield lambda payload, **more: producer.send(QUIET, payload, **more)


def test_empty_search_states_the_number_of_examined_messages(console, browse, messages):
    page = browse(console)
    page.goto(f"{console.url}topics/{MANY}/messages?where=/a+%3D+1")

    assert "No message among those that were looked at matches" in page.inner_text("main")
    assert "of 50,000 messages" in page.inner_text(".pager")
    looked = 0
    for _ in range(100):
        following = page.locator("a[rel=next]")
        if not following.count():
            break
        words = page.inner_text(".pager").split()
        looked += int(words[words.index("of") - 1].replace(",", ""))
        following.click()
        page.wait_for_load_state()
    words = page.inner_text(".pager").split()
    assert looked + int(words[words.index("of") - 1].replace(",", "")) == 50_000


@pytest.mark.parametrize(
    "where",
    [
        "/customer/id = 9007199254740993",
        "/customer/id ~ 740993",
        "/a~1b exists",
        "header:tenant = 世界",
        "payload ~ CUSTOMER",
    ],
)
def test_search(console, browse, messages, where):
    messages('{"customer":{"id":9007199254740992}}')
    uid = messages('{"a/b":null,"customer":{"id":9007199254740993}}', headers={"tenant": "世界"})
    page = browse(console)
    page.goto(f"{console.url}topics/{QUIET}/messages")
    page.fill("input[name=where]", where)
    page.press("input[name=where]", "Enter")
    page.wait_for_load_state()

    assert str(uid).partition("/")[2] in page.inner_text("#messages")


def test_numbers_in_payloads_are_exact(console, browse, messages):
    uid = messages('{"a":9007199254740993,"b":1e400,"c":[]}')
    page = browse(console)
    page.goto(f"{console.url}topics/{QUIET}/message?uid={uid}")

    assert page.inner_text("pre") == '{\n  "a": 9007199254740993,\n  "b": 1e400,\n  "c": []\n}'


def test_a_download_has_the_exact_bytes(console, browse, messages):
    payload = bytes(range(256)) * 1_000
    uid = messages(payload)
    page = browse(console)
    page.goto(f"{console.url}topics/{QUIET}/message?uid={uid}")
    assert "Bytes, 256,000 bytes" in page.inner_text("main")

    with page.expect_download() as found:
        page.get_by_role("link", name="Download the exact bytes").click()
    digest = hashlib.sha256(found.value.path().read_bytes())
    assert digest.hexdigest() == hashlib.sha256(payload).hexdigest()


def test_hostile_messages_are_shown_as_text(console, browse, messages):
    uid = messages(json.dumps({HOSTILE: HOSTILE}), key=HOSTILE, headers={HOSTILE: HOSTILE})
    page = browse(console, width=390)
    for path in (f"messages?where={HOSTILE}+exists", "messages", f"message?uid={uid}"):
        page.goto(f"{console.url}topics/{QUIET}/{path}")
        assert page.seen.dialogs == []
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_message_is_sent_once_with_its_dry_run_first(console, browse, fleet, messages):
    page = browse(console, "otto")
    page.goto(f"{console.url}topics/{QUIET}/send")
    page.fill("textarea", '{"n":9007199254740993}')
    page.fill("input[name=headers]", "{")
    page.get_by_role("button", name="Update the dry run").click()
    assert "The headers are not JSON" in page.inner_text(".dry")
    page.fill("input[name=headers]", '{"tenant":"世界"}')
    page.get_by_role("button", name="Update the dry run").click()
    assert "A message of 22 bytes would be sent" in page.inner_text(".dry")
    before = tail.messages(fleet.store, QUIET).page().total

    page.get_by_role("button", name="Send", exact=True).dblclick()
    page.wait_for_url("**/message?*")

    found = tail.messages(fleet.store, QUIET).page()
    assert found.total == before + 1
    assert found.rows[0].payload == b'{"n":9007199254740993}'
    assert found.rows[0].headers == {"tenant": "世界"}


@pytest.mark.parametrize("delay", ["-1", "nan", "inf", "1e300", "soon"])
def test_a_delay_that_cannot_be_is_refused(console, browse, messages, delay):
    page = browse(console, "otto")
    answer = page.request.post(
        f"{console.url}topics/{QUIET}/send",
        form={"request-id": f"delay {delay}", "payload": "ok", "delay": delay},
        headers={"Sec-Fetch-Site": "same-origin"},
    )

    assert answer.status == 409
    assert "delay" in answer.text()
