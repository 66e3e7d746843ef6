"""Messages in a real browser: search within a budget, exact bodies, and sending."""

from __future__ import annotations

import hashlib
import json
import re
import time

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.admin import delayed, tail  # noqa: E402
from streamqd.console.views.messages import BUDGET, PIECE  # noqa: E402
from streamqd.outbox.rows import new_uid  # noqa: E402
from streamqd.producer import Outgoing  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from streamqd.store import topics  # noqa: E402
from streamqd.store.messages import promote_delayed  # noqa: E402
from tests.console.conftest import HOSTILE  # noqa: E402

MANY, QUIET, WIDE = "many", "quiet", "wide"  # topics that no group reads
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def messages(fleet):
    """Send a message to topic quiet: `messages(payload, key=…)` returns its uid."""
    for topic in (MANY, QUIET):
        topics.create(fleet.store, topic, config.Topic(partitions=2))
    topics.create(fleet.store, WIDE, config.Topic(partitions=65))
    with Producer(settings=config.load(fleet.config_path)) as producer:
        for _ in range(5):
            producer.send_many(MANY, [Outgoing("{}", partition=n % 2) for n in range(10_000)])
        yield lambda payload, **more: producer.send(QUIET, payload, **more)


def test_empty_search_states_the_number_of_examined_messages(console, tab, messages):
    page = tab(console)
    page.goto(f"{console.url}topics/{MANY}/messages?where=/a+%3D+1")

    looked = [_count_examined(page)]
    while page.locator("a[rel=next]").count():
        page.locator("a[rel=next]").click()
        page.wait_for_load_state()
        looked.append(_count_examined(page))

    assert sum(looked) == 50_000
    # A search examines less than its budget only if 2 s have passed or a partition ends.
    assert max(looked) <= BUDGET
    assert min(looked[:-1]) >= PIECE


def _count_examined(page) -> int:
    """Return the number of examined messages that a page shows when nothing matches."""
    assert "No match in the messages searched" in page.inner_text("main")
    found = re.search(r"Searched ([\d,]+) of 50,000 messages", page.inner_text(".pager"))
    assert found
    return int(found[1].replace(",", ""))


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
def test_message_search_finds_a_field_value(console, tab, messages, where):
    messages('{"customer":{"id":9007199254740992}}')
    uid = messages('{"a/b":null,"customer":{"id":9007199254740993}}', headers={"tenant": "世界"})
    page = tab(console)
    page.goto(f"{console.url}topics/{QUIET}/messages")
    page.fill("input[name=where]", where)
    page.press("input[name=where]", "Enter")
    page.wait_for_load_state()

    assert str(uid).partition("/")[2] in page.inner_text("#messages")


def test_numbers_in_payloads_are_shown_exactly(console, tab, messages):
    uid = messages('{"a":9007199254740993,"b":1e400,"c":[]}')
    page = tab(console)
    page.goto(f"{console.url}topics/{QUIET}/message?uid={uid}")

    assert page.inner_text("pre") == '{\n  "a": 9007199254740993,\n  "b": 1e400,\n  "c": []\n}'


def test_download_has_the_exact_bytes(console, tab, messages):
    payload = bytes(range(256)) * 1_000
    uid = messages(payload)
    page = tab(console)
    page.goto(f"{console.url}topics/{QUIET}/message?uid={uid}")
    assert "Bytes, 256,000 bytes" in page.inner_text("main")

    with page.expect_download() as found:
        page.get_by_role("link", name="Download the exact bytes").click()
    digest = hashlib.sha256(found.value.path().read_bytes())
    assert digest.hexdigest() == hashlib.sha256(payload).hexdigest()


def test_hostile_messages_are_shown_as_text(console, tab, messages):
    uid = messages(json.dumps({HOSTILE: HOSTILE}), key=HOSTILE, headers={HOSTILE: HOSTILE})
    page = tab(console, width=390)
    for path in (f"messages?where={HOSTILE}+exists", "messages", f"message?uid={uid}"):
        page.goto(f"{console.url}topics/{QUIET}/{path}")
        assert page.seen.dialogs == []
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_live_tail_shows_new_messages_unless_paused(console, tab, messages):
    page, other = tab(console), tab(console, "vera", width=390)
    page.goto(f"{console.url}topics/{QUIET}/tail")
    page.wait_for_selector("#pulse[data-state=live]")
    page.evaluate("window.kept = true")
    messages(f"first {HOSTILE}")
    page.wait_for_selector("#messages tbody tr:first-child >> text=first <img")
    page.click("#pause")
    page.seen.requests.clear()

    uid = messages("second")

    other.goto(f"{console.url}topics/{QUIET}/tail?partition={uid.partition}")
    other.wait_for_selector("text=second")
    other.wait_for_selector("#pulse[data-state=live]")
    messages("third", partition=uid.partition)
    other.wait_for_selector("#messages tbody tr:first-child >> text=third")
    messages("elsewhere", partition=1 - uid.partition)
    messages("fourth", partition=uid.partition)
    other.wait_for_selector("#messages tbody tr:first-child >> text=fourth")
    assert "elsewhere" not in other.inner_text("#messages")
    assert other.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.seen.requests == []
    assert "second" not in page.inner_text("#messages")
    page.click("#pause")
    page.wait_for_selector("#messages >> text=fourth")
    assert page.evaluate("window.kept") is True
    assert page.seen.dialogs == page.seen.errors == other.seen.errors == []


def test_live_tail_is_bounded(console, tab, messages):
    page = tab(console)
    page.goto(f"{console.url}topics/{MANY}/tail")
    assert page.locator("#messages tbody tr").count() == 50
    answer = page.goto(f"{console.url}topics/{MANY}/tail?partition=2")
    assert answer.status == 404
    page.goto(f"{console.url}topics/{WIDE}/tail")
    assert "follows at most 64 together. Enter a partition." in page.inner_text("#live")
    page.fill("input[name=partition]", "64")
    page.get_by_role("button", name="Follow").click()
    page.wait_for_load_state()
    assert "No messages yet" in page.inner_text("#live")


def facts(page, section: str) -> dict[str, str]:
    rows = page.locator("section", has=page.get_by_role("heading", name=section, exact=True))
    pairs = [row.inner_text().split("\t") for row in rows.locator("tr").all()]
    return {name.strip(): value.strip() for name, value in pairs}


def test_message_page_names_the_origin(console, tab, fleet, messages):
    first = messages("first")
    scheduled = messages("s", headers={"x-schedule": "tick", "x-scheduled-for": "2026-11-26"})
    edited = messages("e", headers={"x-edited-from": str(first)})
    replayed = messages("r", headers={"x-replay-of": f"{QUIET}:dlq/1/5-0"})
    later = messages("d", delay=3_600)
    page = tab(console)

    def origin(uid):
        page.goto(f"{console.url}topics/{QUIET}/message?uid={uid}")
        return facts(page, "Origin")

    assert origin(scheduled) == {"Sent by schedule": "tick, tick 2026-11-26"}
    page.get_by_role("link", name="tick", exact=True).click()
    page.wait_for_url("**/schedules/tick")
    assert origin(edited) == {"Edited copy of": str(first)}
    page.get_by_role("link", name=str(first), exact=True).click()
    page.wait_for_url(f"**/message?uid={str(first).replace('/', '%2F')}")
    assert page.get_by_role("heading", name="Origin").count() == 0
    assert origin(replayed) == {"Replayed by a pipeline from": f"{QUIET}:dlq/1/5-0"}
    assert page.locator(f"a[href='/topics/{QUIET}/dead/1%3A5-0']").count() == 1
    page.goto(f"{console.url}topics/{QUIET}/message?uid={later}")
    assert "Waiting for its due time" in page.inner_text("main")
    delayed.make_due(fleet.store, QUIET, [str(later)])
    fleet.store.run(promote_delayed(fleet.keys, QUIET, later.partition, 1))
    send_id = str(later).rpartition("/")[2]
    assert origin(later) == {"Send ID": f"{send_id}, from a delayed send or an outbox"}


def test_message_of_an_outbox_is_found_by_its_row_id(console, tab, fleet, messages):
    row = new_uid(time.time_ns() // 1_000_000)
    entry = fleet.link.execute(
        *("XADD", fleet.keys.stream(QUIET, 1), "*", "payload", "of a row", "sendId", row)
    ).decode()
    page = tab(console)
    page.goto(f"{console.url}topics/{QUIET}/messages")
    page.fill("input[name=uid]", f"{QUIET}/outbox/{row}")
    page.press("input[name=uid]", "Enter")
    page.wait_for_load_state()

    assert page.inner_text("h1") == f"{QUIET}/1/{entry}"
    assert page.inner_text("pre") == "of a row"
    assert facts(page, "Origin")["Outbox ID"] == f"{QUIET}/outbox/{row}"


def test_message_page_shows_replays_and_archive_position(
    console, new_console, users_file, browse, fleet, messages, tmp_path
):
    uid = messages("archived")
    copy = fleet.link.execute(
        *("XADD", fleet.keys.stream(QUIET, uid.partition), "*"),
        *("payload", "archived", "originalId", uid.id),
    ).decode()
    fleet.link.execute("HSET", fleet.keys.trim(QUIET, uid.partition), "archived", uid.id)
    page = browse(console)
    page.goto(f"{console.url}topics/{QUIET}/message?uid={uid}")

    assert f"Replayed to every group as {QUIET}/{uid.partition}/{copy}" in page.inner_text("main")
    assert "streamqd trace --archive DIR finds the file" in page.inner_text("main")
    page.get_by_role("link", name=copy).click()
    page.wait_for_load_state()
    assert facts(page, "Origin") == {"Replayed from": str(uid)}
    other = new_console(fleet, "--users", str(users_file), "--archive", str(tmp_path))
    page = browse(other)
    page.goto(f"{other.url}topics/{QUIET}/message?uid={uid}")
    page.get_by_role("link", name="find the file").click()
    page.wait_for_load_state()
    assert f"{tmp_path} is not an archive" in page.inner_text("main")


def test_trace_links_to_the_configured_tracing_backend(
    console, new_console, users_file, browse, fleet, messages
):
    parent = f"00-{TRACE_ID}-b7ad6b7169203331-01"
    uid = messages("traced", headers={"traceparent": parent})
    forged = messages("forged", headers={"traceparent": "javascript:alert(1)"})
    page = browse(console)
    page.goto(f"{console.url}topics/{QUIET}/message?uid={uid}")
    assert facts(page, "Origin") == {"Producer trace": TRACE_ID}
    assert page.locator(f"main a[href*='{TRACE_ID}']").count() == 0

    url = "https://tempo.example/trace/{trace_id}?from=now"
    other = new_console(fleet, "--users", str(users_file), "--trace-url", url)
    page = browse(other)
    page.goto(f"{other.url}topics/{QUIET}/message?uid={uid}")
    link = page.get_by_role("link", name=TRACE_ID)
    assert link.get_attribute("href") == f"https://tempo.example/trace/{TRACE_ID}?from=now"
    assert link.get_attribute("rel") == "noreferrer noopener"
    page.goto(f"{other.url}topics/{QUIET}/message?uid={forged}")
    assert page.locator("main a[href*='tempo']").count() == 0
    assert [each for each in page.seen.requests if not each.startswith(other.url)] == []


def test_message_is_sent_once_after_its_dry_run(console, tab, fleet, messages):
    page = tab(console, "otto")
    page.goto(f"{console.url}topics/{QUIET}/send")
    page.fill("textarea", '{"n":9007199254740993}')
    page.fill("input[name=headers]", "{")
    page.get_by_role("button", name="Update the dry run").click()
    assert '"Headers" must be a JSON object' in page.inner_text(".dry")
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
def test_invalid_delay_is_refused(console, tab, messages, delay):
    page = tab(console, "otto")
    answer = page.request.post(
        f"{console.url}topics/{QUIET}/send",
        form={"request-id": f"delay {delay}", "payload": "ok", "delay": delay},
        headers={"Sec-Fetch-Site": "same-origin"},
    )

    assert answer.status == 409
    assert "delay" in answer.text()
