"""Every act has its stated effect exactly once, and the audit log names the person.

The tests use no browser. Each act runs in its own fleet, which has one of everything. The form of
an act is filled in from its URL and sent unchanged. A new act needs a row in `COMMANDS`, which
names the audited command, and one in `AFTER`, which states its effect. If the act needs a certain
state or certain values first, add them to `BEFORE` and `QUERY`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support import optional
from tests.support.console import ConsoleProcess
from tests.support.daemon import TOPIC, Daemon, daemons
from tests.support.waiting import wait_until

pytestmark = [optional.need("starlette"), pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.admin import (  # noqa: E402
    audit,
    dead_letters,
    delayed,
    directives,
    groups,
    retries,
    schedules,
    tail,
    topics,
)
from streamqd.admin.published import Fleet  # noqa: E402
from streamqd.console.access import Role  # noqa: E402
from streamqd.console.view import Act  # noqa: E402
from streamqd.console.views import ACTS, VIEWS  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from streamqd.store.directives import Scope  # noqa: E402
from tests.console.test_access import OWN, Client, logged_in  # noqa: E402

ACTOR = "anna (console)"
HOUR = {"kind": "fixed", "base": "1h", "max": "1h", "jitter": "none"}
every_act = pytest.mark.parametrize("act", ACTS, ids=[each.name for each in ACTS])


@dataclass
class Busy:
    """A fleet where each group has a retry, a dead letter and a delayed send, and its console.

    `failed` is the uid of the message that waits for its retry. `job` is the id of a started job.
    `users` is the users file of the console.
    """

    daemon: Daemon
    console: ConsoleProcess
    failed: str
    users: Path
    job: str = ""

    @property
    def store(self) -> Any:
        return self.daemon.store

    @property
    def there(self) -> Fleet:
        return Fleet(self.store, "default", 60.0)

    def path(self, path: str) -> str:
        """Return a path that names a dead letter, a message and a job of this fleet."""
        letter = next(each for each in letters(self) if each.group == "bill").id
        path = path.replace("DEAD_LETTER", letter).replace("UID", self.failed)
        return path.replace("JOB", self.job)


@pytest.fixture
def busy(new_server, tmp_path: Path, users_file: Path):
    """A fleet for this test."""
    with daemons(tmp_path, new_server(aof=False).url) as make:
        retried = {"backoff": HOUR, "max_attempts": 5}
        daemon = make(partitions=2, groups=("bill", "ship"), consumer=retried)
        tick = {"name": "tick", "topic": TOPIC, "cron": "0 3 1 1 *", "payload": "ok"}
        daemon.write_config(schedules=[tick])
        with daemon:
            [failed] = daemon.send(["fail"], 0)
            daemon.send(["dead", "dead"], 1)
            with Producer(settings=config.load(daemon.config_path)) as producer:
                producer.send(TOPIC, "ok", key="later", delay=3_600)
            with ConsoleProcess(daemon.config_path, "--users", str(users_file)) as console:
                made = Busy(daemon, console, str(failed), users_file)
                wait_until(lambda: len(letters(made)) == 4, timeout=30)
                wait_until(
                    lambda: read_retries(made, "bill") and read_retries(made, "ship"), timeout=30
                )
                yield made
                made.console.close()


def letters(busy: Busy) -> list[Any]:
    return dead_letters.messages(busy.store, TOPIC).page(limit=100).rows


def read_retries(busy: Busy, group: str = "bill") -> list[Any]:
    return retries.messages(busy.store, TOPIC, group).page(limit=100).rows


def read_delayed_sends(busy: Busy) -> list[Any]:
    return delayed.messages(busy.store, TOPIC).page(limit=100).rows


def read_messages(busy: Busy) -> list[Any]:
    return tail.messages(busy.store, TOPIC).page(limit=100).rows


def list_directives(busy: Busy) -> list[tuple[str, str, str]]:
    """Return the kind, target and author of each directive."""
    return [(each.kind, each.target, each.by) for each in directives.view(busy.there).directives]


def drain_instance(busy: Busy) -> None:
    directives.drain(busy.there, "one", "a test")
    wait_until(lambda: not busy.daemon.pids(), timeout=30)


def start_job(busy: Busy) -> None:
    """Log in as otto and start a replay that takes minutes."""
    client = logged_in(busy.console, "otto")
    values = {"rate": "0.01", "group": "bill"}
    busy.job = act_on(busy, client, "/topics/orders/dead-replay", values)[1].rpartition("/")[2]
    wait_until(lambda: "Running" in client.get(f"/jobs/{busy.job}").text)


def schedule_state(busy: Busy) -> str:
    return schedules.show(busy.store, "tick").row.state


def stop_group(busy: Busy) -> None:
    directives.stop(busy.there, TOPIC, "bill", "a test")
    wait_until(lambda: not directives.not_stopped(busy.there, TOPIC, "bill"), timeout=30)


def configure_more_partitions(busy: Busy) -> None:
    """Configure four partitions, and start another console with this configuration."""
    busy.daemon.write_config(topics={TOPIC: {"partitions": 4}})
    busy.console.close()
    busy.console = ConsoleProcess(busy.daemon.config_path, "--users", str(busy.users))


BEFORE: dict[str, Callable[[Busy], object]] = {
    "resume": lambda busy: directives.pause(busy.there, Scope(TOPIC, None, "bill"), "a test"),
    "resume_pause": lambda busy: directives.pause(busy.there, Scope(), "a test"),
    "start": stop_group,
    "reset": stop_group,
    "delete_group": stop_group,
    "grow": configure_more_partitions,
    "delete_topic": lambda busy: busy.daemon.stop(),
    "undrain": drain_instance,
    "schedule_resume": lambda busy: schedules.pause(busy.store, ["tick"]),
    "job_stop": start_job,
}
QUERY = {
    "pause": {"why": "because of a test"},
    "send": {"payload": "ok", "key": "by hand"},
    "replay": {"group": "bill"},
    "stop": {"why": "because of a test"},
    "move": {"why": "because of a test"},
    "reset": {"to": "earliest"},
    "delete_group": {"discard": "yes"},
}
COMMANDS = {
    "pause": "pause",
    "resume": "resume",
    "resume_pause": "resume",
    "stop": "group stop",
    "start": "group start",
    "move": "move",
    "grow": "topic grow",
    "delete_topic": "topic delete",
    "reset": "group reset",
    "delete_group": "group delete",
    "send": "produce",
    "edit": "dlq edit",
    "replay": "dlq replay",
    "purge": "dlq purge",
    "job_stop": "job stop",
    "retry_now": "retry now",
    "retry_cancel": "retry cancel",
    "send_now": "delayed now",
    "send_cancel": "delayed cancel",
    "schedule_pause": "schedule pause",
    "schedule_resume": "schedule resume",
    "schedule_run": "schedule run",
    "drain": "drain",
    "undrain": "drain --undo",
    "rebalance": "rebalance",
    "stack": "stack",
}
AFTER: dict[str, Callable[[Busy], object]] = {
    "pause": lambda busy: list_directives(busy) == [("pause", "orders/*/bill", ACTOR)],
    "resume": lambda busy: list_directives(busy) == [],
    "resume_pause": lambda busy: list_directives(busy) == [],
    "stop": lambda busy: list_directives(busy) == [("stop", "orders/*/bill", ACTOR)],
    "start": lambda busy: list_directives(busy) == [],
    "move": lambda busy: list_directives(busy) == [("move", "orders/0/bill", ACTOR)],
    "grow": lambda busy: topics.partition_count(busy.store, TOPIC) == 4,
    "delete_topic": lambda busy: topics.list_topics(busy.store) == [],
    "reset": lambda busy: (
        groups.describe(busy.store, TOPIC, "bill").lag == len(read_messages(busy))
    ),
    "delete_group": lambda busy: groups.names(busy.store, TOPIC) == ["ship"],
    "send": lambda busy: [each.key for each in read_messages(busy)].count(b"by hand") == 1,
    "edit": lambda busy: (
        [1 for each in read_messages(busy) if "x-edited-from" in (each.headers or {})] == [1]
    ),
    "replay": lambda busy: sorted(each.replays for each in letters(busy)) == [0, 0, 1, 1],
    "purge": lambda busy: letters(busy) == [],
    "job_stop": lambda busy: "; stopped." in page(busy, f"/jobs/{busy.job}"),
    "retry_now": lambda busy: (
        count_runs_of_bill(busy) == 2 and len(read_retries(busy, "ship")) == 1
    ),
    "retry_cancel": lambda busy: (
        [each.reason for each in letters(busy)].count("canceled") == 1
        and read_retries(busy) == []
        and len(read_retries(busy, "ship")) == 1
    ),
    "send_now": lambda busy: [each.key for each in read_messages(busy)].count(b"later") == 1,
    "send_cancel": lambda busy: (
        read_delayed_sends(busy) == []
        and b"later" not in {each.key for each in read_messages(busy)}
    ),
    "schedule_pause": lambda busy: schedule_state(busy) == "paused",
    "schedule_resume": lambda busy: schedule_state(busy) == "active",
    "schedule_run": lambda busy: (
        [1 for each in read_messages(busy) if "x-scheduled-for" in (each.headers or {})] == [1]
    ),
    "drain": lambda busy: (
        list_directives(busy) == [("drain", "one", ACTOR)] and not busy.daemon.pids()
    ),
    "undrain": lambda busy: list_directives(busy) == [] and len(busy.daemon.pids()) == 2,
    "rebalance": lambda busy: list_directives(busy) == [("rebalance", "", ACTOR)],
    "stack": lambda busy: list_directives(busy) == [("stack", "orders/0/bill", ACTOR)],
}


def count_runs_of_bill(busy: Busy) -> int:
    return len(
        [1 for each in busy.daemon.ledger.records_for(busy.failed, "start") if each.group == "bill"]
    )


def page(busy: Busy, path: str) -> str:
    return logged_in(busy.console, "anna").get(path).text


class ActForm(HTMLParser):
    """The values that an act's form shows, and the name that the user must type to confirm it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self.action = ""
        self._inside = False
        self._area = ""
        self._list = ""
        self.feed(text)
        typed = re.search(r"Type <code>(.+?)</code> to confirm", text)
        if typed:
            self.fields["typed-name"] = typed[1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag == "form":
            self._inside = of.get("class") == "act"
            self.action = (of["action"] or "") if self._inside else self.action
        elif self._inside and tag == "input":
            self.fields[of["name"] or ""] = of.get("value") or ""
        elif self._inside and tag == "textarea":
            self._area = of["name"] or ""
            self.fields[self._area] = ""
        elif self._inside and tag == "select":
            self._list = of["name"] or ""
        elif (
            self._inside and tag == "option" and ("selected" in of or self._list not in self.fields)
        ):
            self.fields[self._list] = of["value"] or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            # A browser leaves out the line break after the tag.
            self.fields[self._area] = self.fields[self._area].removeprefix("\n")
            self._area = ""

    def handle_data(self, data: str) -> None:
        if self._area:
            self.fields[self._area] += data


def act_on(
    busy: Busy, client: Client, path: str, values: dict[str, str], submit: str = ""
) -> tuple[int, str]:
    """Open a form and send it twice, as a double click does. Return the status and the target."""
    whole = f"{path}{'&' if '?' in path else '?'}{urlencode(values)}" if values else path
    shown = client.get(whole)
    assert shown.status == 200, shown.text
    assert f"{submit}</button>" in shown.text, shown.text
    form = ActForm(shown.text)
    first = client.post(form.action, form.fields, OWN)
    second = client.post(form.action, form.fields, OWN)
    assert (first.status, first.headers.get("location")) == (303, second.headers.get("location")), (
        first.text
    )
    return first.status, first.headers["location"].partition("?")[0]


@every_act
def test_act_changes_once_and_is_audited(busy: Busy, act: Act):
    BEFORE.get(act.name, lambda _busy: None)(busy)
    client = logged_in(busy.console, "anna")

    act_on(busy, client, busy.path(act.example or act.path), QUERY.get(act.name, {}), act.submit)

    def entries() -> list[Any]:
        log = audit.page(busy.store, TOPIC, limit=100).entries
        return [each for each in log if each.who == ACTOR]

    [entry] = wait_until(entries, timeout=30, what="an entry of the audit log")
    assert entry.command == COMMANDS[act.name]
    wait_until(lambda: AFTER[act.name](busy), timeout=30, what=act.name)
    assert len(entries()) == 1, "a double click acts once"
    shown = client.get("/audit?topic=orders").text
    assert ACTOR in shown
    assert f">{entry.command}<" in shown
    if "why" in QUERY.get(act.name, {}):
        assert entry.arguments["reason"] == QUERY[act.name]["why"]


def test_change_without_effect_is_not_audited(busy: Busy):
    """A form that changes nothing, because a colleague was faster, is not audited."""
    client = logged_in(busy.console, "anna")
    shown = client.get("/groups/orders/bill/resume").text
    form = ActForm(shown)

    assert client.post(form.action, form.fields, OWN).status == 303

    assert [each for each in audit.page(busy.store, TOPIC).entries if each.who == ACTOR] == []


def test_acts_are_offered_only_to_their_roles(busy: Busy):
    """Buttons follow the role in three states of the fleet, because some exclude each other."""
    start_job(busy)
    offered = {name: linked_acts(busy, name) for name in ("anna", "otto", "vera")}
    directives.pause(busy.there, Scope(TOPIC, None, "bill"), "a test")
    directives.stop(busy.there, TOPIC, "ship", "a test")
    schedules.pause(busy.store, ["tick"])
    wait_until(lambda: {"resume", "start"} <= linked_acts(busy, "anna"), timeout=30)
    for name, found in offered.items():
        found |= linked_acts(busy, name)
    drain_instance(busy)
    wait_until(lambda: "undrain" in linked_acts(busy, "anna"), timeout=30)
    for name, found in offered.items():
        found |= linked_acts(busy, name)

    allowed = {each.name for each in ACTS if each.role <= Role.OPERATOR}
    assert offered["anna"] == {each.name for each in ACTS}
    assert offered["otto"] == allowed
    assert offered["vera"] == set()


def linked_acts(busy: Busy, name: str) -> set[str]:
    """Return the acts that a view links to or submits with a form."""
    client = logged_in(busy.console, name)
    found = set()
    for view in VIEWS:
        shown = client.get(busy.path(view.example or view.path))
        assert shown.status == 200, shown.text
        targets = re.findall(r'(?:href|action|formaction)="([^"?#]+)', shown.text)
        for act in ACTS:
            pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(act.path)))
            if any(pattern.fullmatch(each) for each in targets):
                found.add(act.name)
    return found


@pytest.mark.parametrize(
    "act", [each for each in ACTS if each.role == Role.ADMIN], ids=lambda each: each.name
)
def test_operator_gets_403_for_an_admin_act(console, act: Act):
    client = logged_in(console, "otto")
    path = (act.example or act.path).replace("DEAD_LETTER", "0:1-1").replace("UID", "orders/0/1-1")

    assert client.get(path).status == 403
    answer = client.post(path.partition("?")[0], {"request-id": "once"}, OWN)

    assert answer.status == 403
    assert "your role is operator" in answer.text


def test_fleet_resume_without_a_scope_is_refused(busy: Busy):
    directives.pause(busy.there, Scope(), "a test")
    directives.pause(busy.there, Scope(TOPIC, None, "bill"), "a test")
    client = logged_in(busy.console, "anna")

    for scope in ({}, {"scope": ""}, {"scope": "orders"}, {"scope": "//"}):
        shown = client.get(f"/fleet/resume?{urlencode(scope)}")
        done = client.post("/fleet/resume", {"request-id": f"{scope}", **scope}, OWN)

        assert (shown.status, done.status) == (200, 409)
        assert "Scope: not of the form TOPIC/PARTITION/GROUP" in shown.text
        assert ">Resume</button>" not in shown.text
        assert "cope: not of the form TOPIC/PARTITION/GROUP" in done.text
    assert len(list_directives(busy)) == 2
