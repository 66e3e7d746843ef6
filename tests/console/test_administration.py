"""Changes of groups, topics and owners, and the pages that show these changes."""

from __future__ import annotations

import functools
import itertools
import re
import signal

import pytest

from streamqd import config
from streamqd.admin import audit, directives, groups, growth, topics, topics_settings
from streamqd.admin.published import Fleet
from streamqd.model import Assignment
from streamqd.store.directives import Scope
from tests.support import optional
from tests.support.console import ConsoleProcess
from tests.support.daemon import TOPIC, Daemon, toml
from tests.support.waiting import wait_until

pytestmark = optional.need("starlette")

from tests.console.test_access import OWN, logged_in  # noqa: E402

NUMBERS = itertools.count(1)
client = functools.cache(logged_in)  # a login takes a tenth of a second


@pytest.fixture
def fleet_view(fleet) -> Fleet:
    return Fleet(fleet.store, "default", 60.0)


def act(console, name: str, path: str, **fields: str):
    """Confirm a form as the given person, and return the answer."""
    form = {key.replace("_", "-"): value for key, value in fields.items()}
    form["request-id"] = str(next(NUMBERS))
    return client(console, name).post(path, form, OWN)


def get_page(console, path: str, name: str = "anna") -> str:
    answer = client(console, name).get(path)
    assert answer.status == 200, answer.text
    return answer.text


def audit_entries(fleet, command: str, topic: str = TOPIC) -> list[audit.AuditEntry]:
    """Return the audit log's entries for a command, the latest first."""
    found = audit.page(fleet.store, topic, limit=50).entries
    return [each for each in found if each.command == command]


@pytest.fixture
def stopped_group(fleet, fleet_view):
    """Stop the group bill, which then has no owner, and start it again after the test."""
    directives.stop(fleet_view, TOPIC, "bill", "a test")
    wait_until(lambda: not directives.not_stopped(fleet_view, TOPIC, "bill"), timeout=30)
    yield
    if "bill" in groups.names(fleet.store, TOPIC):
        directives.start(fleet_view, TOPIC, "bill")
        wait_until(lambda: not directives.not_started(fleet_view, TOPIC, "bill"), timeout=60)


def test_operator_stops_and_starts_a_group(console, fleet, fleet_view):
    assert act(console, "vera", "/groups/orders/bill/stop").status == 403

    assert act(console, "otto", "/groups/orders/bill/stop", why="prices").status == 303
    [row] = directives.view(fleet_view).directives
    wait_until(lambda: not directives.not_stopped(fleet_view, TOPIC, "bill"), timeout=30)
    pages = ("/fleet", "/topics/orders", "/topics/orders/data", "/topics/orders/partitions/0/bill")
    wait_until(
        lambda: all("/groups/orders/bill/start" in get_page(console, each) for each in pages)
    )
    assert act(console, "otto", "/groups/orders/bill/start").status == 303

    assert (row.name, row.by, row.why) == ("stop:orders/*/bill", "otto (console)", "prices")
    assert directives.view(fleet_view).directives == []
    wait_until(lambda: not directives.not_started(fleet_view, TOPIC, "bill"), timeout=60)
    [stop], [start] = audit_entries(fleet, "group stop"), audit_entries(fleet, "group start")
    assert (stop.who, stop.arguments) == (
        "otto (console)",
        {"scope": "orders/*/bill", "reason": "prices"},
    )
    assert start.who == "otto (console)"


def test_pause_with_a_reason_requires_one_dry_run(console, fleet, fleet_view):
    path = "/groups/orders/ship/pause"
    seen = re.search(r'name="dry-run-of" value="(\w+)"', get_page(console, path))[1]
    try:
        part = act(console, "otto", path, dry_run_of=seen, why="a deploy", partition="1")
        assert (part.status, directives.view(fleet_view).directives) == (200, [])

        whole = act(console, "otto", path, dry_run_of=seen, why="a deploy", partition="")

        assert whole.status == 303
        assert [each.why for each in directives.view(fleet_view).directives] == ["a deploy"]
    finally:
        directives.resume(fleet_view, Scope(TOPIC, None, "ship"))


def test_operator_moves_a_partition_to_another_instance(console, fleet, fleet_view):
    url = fleet.tables["redis"]["url"]
    assignment = Assignment(TOPIC, 0, "bill")
    path = "/topics/orders/partitions/0/bill"
    with Daemon(fleet.folder, url, partitions=2, groups=("bill", "ship"), name="web-2") as two:
        owner = wait_until(lambda: directives.read_owners(fleet_view, [assignment]).get(assignment))
        to = {"one": "web-2", "web-2": "one"}[owner]
        wait_until(lambda: f'value="{to}" selected' in get_page(console, f"{path}/move"))
        answer = act(console, "otto", f"{path}/move", to=to, why="a <b>test</b>")
        wait_until(lambda: not directives.not_moved(fleet_view, assignment, to), timeout=60)

        assert (answer.status, answer.headers["location"].partition("?")[0]) == (303, path)
        [row] = audit_entries(fleet, "move")
        assert row.who == "otto (console)"
        assert (row.arguments["from"], row.arguments["to"]) == (owner, to)
        sentence = {"one": "One", "web-2": "web-2"}[to]
        wait_until(
            lambda: f"{assignment} would stay on {to}" in get_page(console, f"{path}/move?to={to}")
        )
        assert f"<p>{sentence} already owns it and will keep it.</p>" in get_page(
            console, f"{path}/move?to={to}"
        )
        first, second = (get_page(console, f"/fleet?limit=1&from={at}") for at in (0, 1))
        assert "1 to 1 of 2 instances" in first
        assert ('id="i-web-2"' in first, 'id="i-web-2"' in second) == (False, True)
        text = get_page(console, path, "vera")
        assert "Recent moves (console only)" in text
        assert "a &lt;b&gt;test&lt;/b&gt;" in text
        assert "must be the name of a live instance" in act(console, "otto", f"{path}/move").text
        refused = client(console, "otto").get(f"{path}/move?to=nowhere").text
        assert "Instance nowhere is not in this fleet" in refused
        directives.clear(fleet_view, [f"move:{assignment}"])
        assert two.stop() == 0


def test_fleet_page_lists_reloads_of_all_instances(console, fleet, fleet_view):
    url = fleet.tables["redis"]["url"]
    with Daemon(fleet.folder, url, partitions=2, groups=("bill", "ship"), name="web-3") as two:
        wait_until(lambda: 'id="i-web-3"' in get_page(console, "/fleet"))
        two.signal(signal.SIGSTOP)  # its heartbeat stays fresh for seconds
        try:
            directives.reload(fleet_view, "web-3", "prices")
            wait_until(lambda: 'id="r-web-3"' in get_page(console, "/fleet?limit=1&from=1"))
            text = get_page(console, "/fleet?limit=1")
        finally:
            two.signal(signal.SIGCONT)
        assert two.stop() == 0

    assert 'id="i-web-3"' not in text
    assert 'id="r-web-3"' in text, "the list is not paged"


def test_pages_show_memory_and_process_of_workers(console, fleet):
    path = "/topics/orders/partitions/0/ship"
    wait_until(lambda: re.search(r"pid \d+, [\d.]+ MiB", get_page(console, path)), timeout=60)
    wait_until(lambda: re.search(r'data-label="Memory">[\d.]+ MiB', get_page(console, "/fleet")))


def test_reset_requires_a_stopped_group_and_its_name(console, fleet, fleet_view):
    path = "/groups/orders/bill/reset"
    assert act(console, "otto", path, to="earliest").status == 403
    assert "Stop the group first" in get_page(console, path), "before a position is entered"
    text = get_page(console, f"{path}?to=earliest")
    assert "Stop the group first" in text
    assert act(console, "anna", path, to="earliest", typed_name="bill").status == 409
    assert audit_entries(fleet, "group reset") == []


def test_admin_resets_a_stopped_group(console, fleet, stopped_group):
    path = "/groups/orders/bill/reset"
    number = sum(each.messages for each in topics.describe(fleet.store, TOPIC).partitions)
    text = get_page(console, f"{path}?to=earliest")
    assert f"bill would read {number} messages of orders next." in text
    assert "Yesterday is not a position" in get_page(console, f"{path}?to=yesterday")

    refused = act(console, "anna", path, to="earliest", typed_name="orders")
    done = act(console, "anna", path, to="earliest", typed_name="bill")

    assert "type bill to confirm" in refused.text
    assert done.status == 303
    [row] = audit_entries(fleet, "group reset")
    assert (row.who, row.arguments["to"]) == ("anna (console)", "earliest")
    assert groups.describe(fleet.store, TOPIC, "bill").lag == number


def test_topic_page_names_the_group_that_holds_the_floor(console, fleet, fleet_view):
    directives.pause(fleet_view, Scope(TOPIC, None, "ship"), "a test")
    try:
        wait_until(lambda: not directives.not_paused(fleet_view, Scope(TOPIC, None, "ship"), 0))
        fleet.send(["ok"] * 8)
        holder = r'partitions/\d/ship">ship</a><span class="sub"><code class="id">\d+-\d+</code>'
        wait_until(lambda: re.search(holder, get_page(console, "/topics/orders/data")))
    finally:
        directives.resume(fleet_view, Scope(TOPIC, None, "ship"))


def setting_cells(text: str, name: str) -> str:
    """Return the cells in a setting's row, without markup."""
    [row] = re.findall(rf'<tr><th scope="row">{re.escape(name)}</th>(.*?)</tr>', text, re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", row).split())


def test_every_setting_has_its_origin(fleet, users_file):
    stored = ["retention.max_age=48h", "retention.max_length=1000"]
    topics_settings.change(fleet.store, TOPIC, stored, None)
    path = fleet.folder / "origins.toml"
    retention = {"max_age": "24h"}
    table = {"partitions": 2, "retention": retention}
    path.write_text(toml(fleet.tables | {"topics": {TOPIC: table}}))
    with ConsoleProcess(path, "--users", str(users_file)) as console:
        text = get_page(console, "/topics/orders/data")

    assert setting_cells(text, "retention.max_age") == "&#34;1d&#34; file registered: &#34;2d&#34;"
    assert setting_cells(text, "retention.max_length") == "1000 registered"
    assert setting_cells(text, "retention.without_groups") == "false default"


def test_topic_in_use_cannot_be_deleted(console, fleet):
    assert act(console, "otto", "/topics/orders/delete", typed_name=TOPIC).status == 403
    assert "would create the topic again" in get_page(console, "/topics/orders/delete")
    assert act(console, "anna", "/topics/orders/delete", typed_name=TOPIC).status == 409
    assert topics.partition_count(fleet.store, TOPIC) == 2


def test_admin_deletes_a_topic_by_its_name(console, fleet):
    topics.create(fleet.store, "spare", config.Topic(partitions=3))
    text = get_page(console, "/topics/spare/delete")
    assert "spare with 3 partitions would be deleted permanently." in text
    assert "It has 0 messages, 0 dead letters and no group." in text

    assert act(console, "anna", "/topics/spare/delete").status == 409
    answer = act(console, "anna", "/topics/spare/delete", typed_name="spare")
    wait_until(lambda: "spare was deleted: " in get_page(console, answer.headers["location"]))

    assert "spare" not in [each.topic for each in topics.list_topics(fleet.store)]
    [row] = audit_entries(fleet, "topic delete", "spare")
    assert (row.who, row.arguments["partitions"]) == ("anna (console)", 3)


def test_flow_shows_schedules_and_outboxes_as_sources(console, fleet):
    keys, link = fleet.keys, fleet.link
    link.execute("SADD", keys.outboxes(), "shop")
    link.execute("HSET", keys.outbox("shop"), "epoch", 3, "sent", 5)
    link.execute("HSET", keys.outbox_record(TOPIC, 0, "shop"), "epoch", 3)
    try:
        wait_until(lambda: ">shop<" in get_page(console, "/flow"), timeout=30)
        text = get_page(console, "/flow")
    finally:
        link.execute("SREM", keys.outboxes(), "shop")
        link.execute("DEL", keys.outbox("shop"), keys.outbox_record(TOPIC, 0, "shop"))

    assert text.count('class="fed"/>') >= 4, "two sources in two layouts"
    assert 'href="/schedules/tick"' in text
    assert "Known sources" in text
    assert "No topics, groups or sources match." in get_page(console, "/flow?q=nothing")
    assert 'id="f-orders-bill"' in get_page(console, "/flow?q=tick")


def test_live_view_sorts_filters_and_pages(console, fleet):
    text = get_page(console, "/top?sort=name&limit=3")
    names = re.findall(r'id="a-([^"]*)"', text)
    assert names == ["orders/0/bill", "orders/1/bill", "orders/0/ship"]
    assert "1 to 3 of 4 assignments" in text
    assert re.findall(r'id="a-([^"]*)"', get_page(console, "/top?sort=name&limit=3&from=3")) == [
        "orders/1/ship"
    ]
    assert re.findall(r'id="a-([^"]*)"', get_page(console, "/top?sort=name&reverse=1&q=1/")) == [
        "orders/1/ship", "orders/1/bill",
    ]  # fmt: skip
    assert "No assignments match." in get_page(console, "/top?q=nothing")
    assert client(console, "vera").get("/top?sort=bogus").status == 400


def search_parameters(text: str) -> dict[str, str]:
    """Return the parameters that a page's search form sends along with its text."""
    [form] = re.findall(r'<form class="search".*?</form>', text, re.DOTALL)
    return dict(re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', form))


def test_search_keeps_the_order_and_the_page_size(console):
    text = get_page(console, "/top?sort=name&reverse=1&limit=3")
    assert search_parameters(text) == {"sort": "name", "reverse": "1", "limit": "3"}
    assert search_parameters(get_page(console, "/top?limit=3")) == {"limit": "3"}
    assert search_parameters(get_page(console, "/topics?limit=3")) == {"limit": "3"}
    assert search_parameters(get_page(console, "/handlers?limit=3")) == {"limit": "3"}


def test_admin_grows_a_topic(console, fleet, users_file, new_console):
    path = "/topics/orders/grow"
    assert act(console, "otto", path, partitions="4").status == 403
    assert "sets partitions = 2 for orders" in get_page(console, f"{path}?partitions=4")
    assert "is not a multiple" in get_page(console, f"{path}?partitions=5")
    fleet.write_config(topics={TOPIC: {"partitions": 4}})
    changed = new_console(fleet, "--users", str(users_file))
    assert "orders would have 4 partitions instead of 2." in get_page(changed, path)

    answer = act(changed, "anna", path, partitions="4")
    done = "orders has 4 partitions, and every group reads them."
    wait_until(lambda: done in get_page(changed, answer.headers["location"]), timeout=60)

    assert topics.partition_count(fleet.store, TOPIC) == 4
    [row] = audit_entries(fleet, "topic grow")
    assert (row.who, row.arguments) == ("anna (console)", {"partitions": 4})
    assert "already has 4 partitions" in get_page(changed, f"{path}?partitions=4")
    again = act(changed, "anna", path, partitions="4")
    assert (again.status, "already has 4 partitions" in again.text) == (409, True)
    assert len(audit_entries(fleet, "topic grow")) == 1


def test_growth_continues_only_to_its_own_count(console, fleet):
    store, path = fleet.store, "/topics/slow/grow"
    topics.create(store, "slow", config.Topic(partitions=1))
    stream = store.keys.stream("slow", 0)
    fleet.link.execute("XADD", stream, "1-1", "payload", "x")
    fleet.link.execute("XGROUP", "CREATE", stream, "late", "0")
    assert not growth.grow(store, "slow", 2).done

    text = get_page(console, f"{path}?partitions=4")
    refused = act(console, "anna", path, partitions="4")
    assert "is already growing to 2 partitions" in text
    assert "would continue" not in text
    assert (refused.status, "is already growing to 2" in refused.text) == (409, True)
    assert "The growth of slow to 2 partitions would continue." in get_page(
        console, f"{path}?partitions=2"
    )

    answer = act(console, "anna", path, partitions="2")
    left = "late has 1 left to acknowledge"
    wait_until(lambda: left in get_page(console, answer.headers["location"]), timeout=30)
    fleet.link.execute("XGROUP", "SETID", stream, "late", "$")
    done = "slow has 2 partitions, and every group reads them."
    wait_until(lambda: done in get_page(console, answer.headers["location"]), timeout=30)
    assert audit_entries(fleet, "topic grow", "slow") == [], "only the start is audited"


def test_admin_deletes_a_group_by_its_name(console, fleet):
    """An admin deletes a group that no configuration names. A daemon recreates the others."""
    count = topics.partition_count(fleet.store, TOPIC)
    for number in range(count):
        stream = fleet.store.keys.stream(TOPIC, number)
        fleet.link.execute("XGROUP", "CREATE", stream, "old", "0")
    path = "/groups/orders/old/delete"
    assert act(console, "otto", path, typed_name="old").status == 403
    assert act(console, "anna", path, typed_name="orders").status == 409
    assert "unread messages" in get_page(console, path)

    assert act(console, "anna", path, typed_name="old").status == 303

    assert groups.names(fleet.store, TOPIC) == ["bill", "ship"]
    [row] = audit_entries(fleet, "group delete")
    assert (row.who, row.counts) == ("anna (console)", {"partitions": count})


def test_unread_retry_is_discarded_only_on_request(console, fleet):
    """A due retry waits in its group's stream until a worker reads it, and blocks a delete."""
    keys, link = fleet.store.keys, fleet.link
    link.execute("XGROUP", "CREATE", keys.stream(TOPIC, 0), "old", "$")
    retries = keys.retry_stream(TOPIC, 0, "old")
    link.execute("XGROUP", "CREATE", retries, "old", "0", "MKSTREAM")
    link.execute("XADD", retries, "*", "f", "v")
    path = "/groups/orders/old/delete"

    refusal = "has 0 pending messages and 1 waiting retry; choose discard to delete them"
    assert refusal in get_page(console, path)
    assert act(console, "anna", path, typed_name="old").status == 409
    text = get_page(console, f"{path}?discard=yes")
    assert "It has 0 unread messages, 0 pending messages and 1 waiting retry." in text
    assert act(console, "anna", path, typed_name="old", discard="yes").status == 303

    assert "old" not in groups.names(fleet.store, TOPIC)
