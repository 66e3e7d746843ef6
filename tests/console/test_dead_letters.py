"""The dead-letter workbench in a real browser: replay, purge, edit and roles."""

from __future__ import annotations

import http.client
import itertools
import json
import re
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support import optional
from tests.support.console import NO_BROWSER
from tests.support.daemon import TOPIC
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette", "playwright"), NO_BROWSER, pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.admin import audit, dead_letters, tail, why  # noqa: E402
from streamqd.admin.messages import MessageFilter  # noqa: E402
from streamqd.admin.published import Fleet  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from streamqd.store import topics  # noqa: E402
from tests.console.conftest import HOSTILE  # noqa: E402
from tests.console.test_access import OWN, logged_in  # noqa: E402

EXACT = '{"n":9007199254740993,"x":1e400,"text":"世界"}'


def letters(fleet, **choice):
    return dead_letters.messages(fleet.store, TOPIC).page(MessageFilter(**choice), limit=500).rows


@pytest.fixture
def dead_letter_messages(fleet):
    """Make messages fail in both groups with a cause of this test. Return bill's dead letters."""
    numbers = itertools.count(1)

    def make(count, payload="dead", **more):
        with Producer(settings=config.load(fleet.config_path)) as producer:
            uids = [
                str(producer.send(TOPIC, payload, **({"key": f"key {next(numbers)}"} | more)))
                for _ in range(count)
            ]

        def found():
            some = [each for each in letters(fleet) if each.uid in uids]
            return some if len(some) == 2 * count else None

        return [each for each in wait_until(found) if each.group == "bill"]

    return make


def confirm(page, text):
    with page.expect_navigation():
        page.get_by_role("button", name=text, exact=True).click()


def wait_finished(page):
    page.wait_for_selector("text=/replayed to|purged/")
    return page.inner_text(".verdict")


def test_replay_matches_its_dry_run(console, tab, fleet, dead_letter_messages):
    found = dead_letter_messages(3)
    page = tab(console, "otto")
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?id={'+'.join(e.id for e in found)}")
    assert "3 dead letters of orders would be replayed" in page.inner_text(".dry")

    page.fill("input[name=canary]", "2")
    confirm(page, "Replay")
    assert "Nothing was changed yet" in page.inner_text("main .done")
    assert "2 dead letters of orders would be replayed" in page.inner_text(".dry")
    page.get_by_role("button", name="Replay", exact=True).dblclick()

    assert "2 dead letters replayed" in wait_finished(page)
    assert "2 of 2" in page.inner_text(".verdict")
    assert page.locator(".done").count() == 0, "the page itself shows that it runs or has finished"
    assert re.search(r"Started by otto .* finished after", page.inner_text("#live"))
    page.wait_for_selector("text=2 replayed messages were dead-lettered again", timeout=30_000)
    rows = [
        e for e in audit.page(fleet.store, TOPIC, limit=50).entries if e.command == "dlq replay"
    ]
    assert (rows[0].who, rows[0].counts["replayed"]) == ("otto (console)", 2)
    assert len(rows) == 1
    assert page.seen.errors == []


def test_replay_stops_between_two_dead_letters(console, tab, dead_letter_messages):
    found = dead_letter_messages(4)
    page = tab(console, "otto")
    ids = "+".join(each.id for each in found)
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?id={ids}&rate=0.1")
    confirm(page, "Replay")

    page.get_by_role("link", name="Stop").click()
    confirm(page, "Stop")

    assert re.search(r"[0-3] dead letters? replayed.*; stopped\.", wait_finished(page))


def test_unsafe_replay_requires_the_topic_name(console, tab, fleet, dead_letter_messages):
    (letter,) = dead_letter_messages(1)
    page = tab(console, "otto")
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?id={letter.id}")
    assert page.locator("input[name=typed-name]").count() == 0

    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?id={letter.id}&to=all")
    assert "Type orders to confirm: every group receives them" in page.inner_text(".confirm")
    page.fill("input[name=typed-name]", "order")
    confirm(page, "Replay")
    assert "Nothing was changed: type orders" in page.inner_text("main .problem")
    assert letter.id in {each.id for each in letters(fleet)}
    page.fill("input[name=typed-name]", TOPIC)
    confirm(page, "Replay")

    assert "1 dead letter replayed to every group" in wait_finished(page)


def test_replay_to_another_topic_respects_the_header_filter(
    console, tab, fleet, dead_letter_messages
):
    topics.create(fleet.store, "elsewhere", config.Topic(partitions=2))
    (letter,) = dead_letter_messages(1, headers={"tenant": "acme"})
    dead_letter_messages(1, headers={"tenant": "other"})
    page = tab(console, "otto")
    page.goto(f"{console.url}topics/{TOPIC}/dead")
    page.fill("input[name=header]", "tenant = acme")
    page.fill("input[name=group]", "bill")
    page.press("input[name=header]", "Enter")
    page.wait_for_load_state()
    assert page.locator("#letters th").all_inner_texts()[8:] == [letter.id]
    for wrong in ("tenant", "=acme"):
        answer = page.request.get(f"{console.url}topics/{TOPIC}/dead?header={wrong}")
        assert (answer.status, "must be NAME=VALUE" in answer.text()) == (400, True)
    page.get_by_role("link", name="Replay these…").click()
    page.select_option("select[name=to]", "all")
    page.fill("input[name=to_topic]", "elsewhere")
    page.get_by_role("button", name="Update the dry run").click()
    assert "already sends to all groups of that topic" in page.inner_text(".dry")
    page.select_option("select[name=to]", "")
    page.fill("input[name=to_partition]", "1")
    page.get_by_role("button", name="Update the dry run").click()
    where = "topic elsewhere, on partition 1"
    assert f"1 dead letter of orders would be replayed to {where}" in page.inner_text(".dry")
    assert "every group receives them" in page.inner_text(".confirm")
    page.fill("input[name=typed-name]", TOPIC)
    confirm(page, "Replay")

    assert f"1 dead letter replayed to {where}." in wait_finished(page)
    [row] = tail.messages(fleet.store, "elsewhere").page().rows
    assert (row.partition, row.headers["tenant"]) == (1, "acme")


@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "no-javascript"])
def test_typed_name_is_asked_only_after_the_dry_run(console, tab, dead_letter_messages, javascript):
    (letter,) = dead_letter_messages(1)
    page = tab(console, "otto", javascript=javascript)
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?id={letter.id}&to=all")
    assert page.locator("input[name=typed-name]").is_visible()

    page.select_option("select[name=to]", "")
    if javascript:
        assert not page.locator("input[name=typed-name]").is_visible()
        assert "first shows the dry run of the new values" in page.inner_text(".confirm")
    confirm(page, "Replay")

    assert "Nothing was changed yet" in page.inner_text("main .done")
    assert page.locator("input[name=typed-name]").count() == 0
    confirm(page, "Replay")
    if not javascript:
        while page.get_by_role("link", name="Refresh").count():
            page.get_by_role("link", name="Refresh").click()
    assert "1 dead letter replayed to the original group" in wait_finished(page)


def test_large_replay_requires_the_topic_name(console, tab, fleet):
    with Producer(settings=config.load(fleet.config_path)) as producer:
        for _ in range(501):  # dead-lettered in both groups
            producer.send(TOPIC, "dead", key="many")
    many = MessageFilter(key=b"many")
    wait_until(lambda: dead_letters.count(fleet.store, TOPIC, many) == 1_002, timeout=30)
    page = tab(console, "otto")
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?key=many&canary=1000")
    assert page.locator("input[name=typed-name]").count() == 0
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?key=many")

    assert "more than 1,000 dead letters match" in page.inner_text(".confirm")
    page.eval_on_selector("input[name=typed-name]", "each => each.remove()")
    confirm(page, "Replay")

    assert "Nothing was changed: type orders" in page.inner_text("main .problem")
    assert dead_letters.count(fleet.store, TOPIC, many) == 1_002


def test_replay_includes_only_dead_letters_of_its_dry_run(
    console, tab, fleet, dead_letter_messages
):
    first = dead_letter_messages(3, key="bound")
    page = tab(console, "otto")
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?group=bill&key=bound")
    assert "3 dead letters of orders would be replayed" in page.inner_text(".dry")
    dead_letters.purge(fleet.store, TOPIC, MessageFilter((first[0].id,)))
    [later] = dead_letter_messages(1, key="bound")

    confirm(page, "Replay")

    assert re.search(r"2 dead letters replayed to .*; the dry run counted 3\.", wait_finished(page))
    assert later.id in {each.id for each in letters(fleet, group="bill")}


def test_replay_of_a_few_links_to_the_replay_of_the_rest(console, dead_letter_messages):
    dead_letter_messages(3, key="canary")
    otto, anna = logged_in(console, "otto"), logged_in(console, "anna")
    form = {"group": "bill", "key": "canary", "canary": "1", "rate": "50", "request-id": "few"}
    started = otto.post(f"/topics/{TOPIC}/dead-replay", form, OWN)
    job = urlsplit(started.headers["location"]).path
    wait_until(lambda: "1 dead letter replayed" in otto.get(job).text, timeout=60)

    [link] = re.findall(r'href="([^"]+)">Replay the rest…', otto.get(job).text)

    rest = parse_qs(urlsplit(unescape(link)).query)
    assert rest == {"group": ["bill"], "key": ["canary"], "rate": ["50"]}
    assert "Replay the rest…" not in anna.get(job).text, "the link contains the key that otto chose"


def test_dry_run_states_how_much_it_examined(console, tab, fleet, dead_letter_messages):
    dead_letter_messages(3, key="budget")
    page = tab(console)
    total = dead_letters.total(fleet.store, TOPIC)

    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?key=budget&examine=1")
    assert "None of the examined dead letters would be replayed." in page.inner_text(".dry")
    page.goto(f"{console.url}topics/{TOPIC}/dead-replay?examine=1")
    assert "At least 1 dead letter of orders would be replayed" in page.inner_text(".dry")
    assert "the dry run did not examine all of them" in page.inner_text(".confirm")
    assert f"The dry run examined 1 of {total:,} dead letters." in page.inner_text(".dry")
    page.goto(f"{console.url}topics/{TOPIC}/dead-purge?key=budget&examine=1")
    assert f"The dry run examined 1 of {total:,} dead letters." in page.inner_text(".dry")
    page.fill("input[name=typed-name]", TOPIC)
    confirm(page, "Delete permanently")
    assert "6 dead letters purged." in wait_finished(page)

    page.goto(f"{console.url}topics/{TOPIC}/dead?examine=1")
    assert f"Searched the newest 1 of {total - 6:,} dead letters" in page.inner_text("main")
    page.get_by_role("link", name="search 100,000").click()
    page.wait_for_selector(f"text=All {total - 6:,} dead letters are counted.")
    assert page.seen.errors == []


def test_export_is_complete_and_stops_with_its_download(console, tab, fleet):
    topics.create(fleet.store, "exports", config.Topic(partitions=1))
    stream, count = fleet.keys.dlq("exports", 0), 20_000
    fields = ("payload", "x" * 1_000, "group", "bill", "errorClass", "A")
    fleet.link.pipeline([("XADD", stream, "*", *fields) for _ in range(count)])
    page = tab(console, "otto")
    address = f"{console.url}topics/exports/dead-export"

    whole = page.request.get(address).text().splitlines()
    none = page.request.get(f"{address}?error=Never")
    assert len({json.loads(line)["id"] for line in whole}) == len(whole) == count
    assert (none.status, none.text()) == (200, "")
    cookie = "; ".join(f"{each['name']}={each['value']}" for each in page.context.cookies())
    link = http.client.HTTPConnection("127.0.0.1", console.port, timeout=30)
    link.request("GET", "/topics/exports/dead-export", headers={"Cookie": cookie})
    assert link.getresponse().read(1_000)
    link.close()

    def interrupted():
        rows = audit.page(fleet.store, "exports", limit=10).entries
        return [each for each in rows if each.note.startswith("console: interrupted")]

    [row] = wait_until(interrupted, timeout=30)
    assert (row.who, row.command) == ("otto (console)", "dlq export")
    assert 0 < row.counts["exported"] < count


def test_group_page_names_the_cause_if_all_messages_die(console, tab, fleet):
    """The group's page names the cause even if all messages die and leave no lag or retry."""
    page = tab(console)
    page.goto(console.url)
    text = "of the runs of orders/0/bill fail, and the messages are dead-lettered"

    def shown():
        fleet.send(["dead"] * 5)
        return text in page.inner_text("#live")

    wait_until(shown, timeout=60, every=0.5)
    part = page.locator("#live li", has_text=text)
    assert "streamqd dlq replay orders --group bill --dry-run" in part.inner_text()
    [answer] = why.answer(Fleet(fleet.store, "default", 60.0), TOPIC, 0, "bill")
    assert [each.word for each in answer.causes] == ["failing"]
    assert text in answer.causes[0].sentence
    assert not answer.moves


def test_purge_requires_the_topic_name(console, tab, fleet, dead_letter_messages):
    (letter,) = dead_letter_messages(1)
    page = tab(console)
    page.goto(f"{console.url}topics/{TOPIC}/dead-purge?id={letter.id}")

    page.fill("input[name=typed-name]", "order")
    confirm(page, "Delete permanently")
    assert "Nothing was changed: type orders" in page.inner_text("main .problem")
    page.fill("input[name=typed-name]", TOPIC)
    confirm(page, "Delete permanently")

    assert "1 dead letter purged" in wait_finished(page)
    assert letter.id not in {each.id for each in letters(fleet)}


@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "no-javascript"])
def test_edited_dead_letter_is_sent_with_only_its_changes(
    console, tab, fleet, dead_letter_messages, javascript
):
    (letter,) = dead_letter_messages(1, "dead\nof two lines")
    page = tab(console, "otto", javascript=javascript)
    page.goto(f"{console.url}topics/{TOPIC}/dead/{letter.id}/edit")
    assert page.input_value("textarea") == "dead\nof two lines"

    page.fill("textarea", f"dead {EXACT}\n{HOSTILE}")
    confirm(page, "Send")
    assert "Nothing was changed yet" in page.inner_text("main .done")
    confirm(page, "Send")

    assert "Sent as " in page.inner_text("main")
    sent = tail.messages(fleet.store, TOPIC).page(limit=1).rows[0]
    assert sent.payload.decode() == f"dead {EXACT}\n{HOSTILE}"
    assert sent.key == letter.key
    assert sent.headers["x-edited-from"] == letter.uid


def test_unchanged_edit_sends_the_same_payload(console, tab, fleet, dead_letter_messages):
    (letter,) = dead_letter_messages(1, "dead\r\nas on Windows")
    page = tab(console, "otto")
    page.goto(f"{console.url}topics/{TOPIC}/dead/{letter.id}/edit")
    confirm(page, "Send")

    assert "Sent as " in page.inner_text("main")
    sent = tail.messages(fleet.store, TOPIC).page(limit=1).rows[0]
    assert (sent.payload, sent.key) == (b"dead\r\nas on Windows", letter.key)


def test_hostile_dead_letter_is_shown_as_text(console, tab, dead_letter_messages):
    (letter,) = dead_letter_messages(1, f"dead {HOSTILE}", key=HOSTILE, headers={HOSTILE: HOSTILE})
    page = tab(console)
    for path in (
        f"dead?error={HOSTILE}&key={HOSTILE}",
        f"dead/{letter.id}",
        f"dead/{letter.id}/edit",
        f"dead-replay?id={letter.id}&error={HOSTILE}",
        f"message?uid={letter.uid}",
    ):
        page.goto(f"{console.url}topics/{TOPIC}/{path}")
        assert page.seen.dialogs == []
        assert page.locator("main img").count() == 0
    assert page.locator("pre", has_text=HOSTILE).count() == 1


@pytest.mark.parametrize("bodies", ["masked", "hidden"])
def test_hidden_body_cannot_be_reached_indirectly(
    new_console, browse, fleet, users_file, dead_letter_messages, bodies
):
    secret = "s3cr3t"
    (letter,) = dead_letter_messages(1, f"dead {secret}", key=secret, headers={"token": secret})
    fleet.write_config(console={"operator_bodies": bodies, "masks": ["header:Token"]})
    try:
        quiet = new_console(fleet, "--users", str(users_file))
    finally:
        fleet.tables.pop("console")
        fleet.write_config()
    page = browse(quiet, "otto")

    shown = f"topics/{TOPIC}/dead/{letter.id}", f"topics/{TOPIC}/message?uid={letter.uid}"
    lists = f"topics/{TOPIC}/dead", f"topics/{TOPIC}/messages", "audit", "handlers"
    lists += (f"topics/{TOPIC}/tail", f"topics/{TOPIC}/retries/bill", f"topics/{TOPIC}/delayed")
    edit = f"topics/{TOPIC}/dead/{letter.id}/edit"
    for path in (*shown, *lists, edit):
        answer = page.request.get(quiet.url + path)
        assert answer.status == 200, path
        assert secret not in answer.text(), path
    for path in (
        f"topics/{TOPIC}/dead-export",
        f"topics/{TOPIC}/dead/{letter.id}/payload",
        f"topics/{TOPIC}/payload?uid={letter.uid}",
        f"topics/{TOPIC}/messages?where=payload+~+s3",
        f"topics/{TOPIC}/messages?key={secret}",
        f"topics/{TOPIC}/dead?key={secret}",
        f"topics/{TOPIC}/dead?header=token={secret}",
    ):
        answer = page.request.get(quiet.url + path)
        assert answer.status == 404, path
        assert "hidden from your role" in answer.text(), path
    answer = page.request.get(f"{quiet.url}topics/{TOPIC}/dead-replay?key={secret}")
    assert "so you cannot filter by key" in answer.text()
