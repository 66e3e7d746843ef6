"""The control commands write directives, refuse mistakes, and report the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.model import Assignment, Lease
from streamqd.store import directives, leases, members, topics
from streamqd.store.client import Connection
from streamqd.store.directives import Scope
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support.commands import Run, document
from tests.support.servers import free_port
from tests.support.waiting import wait_until

SendHeartbeat = Callable[..., None]

PAIRS = [["orders", "bill"]]


@pytest.fixture(autouse=True)
def orders(link: Connection, store: Store, keys: Keys) -> None:
    """A topic `orders` with three partitions, which the group `bill` reads."""
    topics.create(store, "orders", config.Topic(partitions=3))
    for number in range(3):
        Harness(link, keys, Assignment("orders", number, "bill")).groups()


@pytest.fixture
def heartbeat(link: Connection, keys: Keys) -> SendHeartbeat:
    """A function that writes a heartbeat of an instance."""

    def say(name: str, **info: object) -> None:
        told = {"offers": PAIRS, "weight": 1, "cap": 0, "started": time.time(), **info}
        reply = link.run(members.heartbeat(keys, "default", name, "n1", told, 15.0))
        assert reply.word == "OK"

    return say


@pytest.fixture
def own(link: Connection, keys: Keys) -> Callable[[int, str], None]:
    """A function that makes an instance the owner of a partition."""

    def take(partition: int, owner: str) -> None:
        assignment = Assignment("orders", partition, "bill")
        call = leases.acquire(keys, Lease(assignment, f"t{partition}", 0), 60.0, owner)
        assert link.run(call).word == "OK"

    return take


def read_directives(link: Connection, keys: Keys) -> directives.Directives:
    return directives.read(link.execute("HGETALL", keys.directives("default")))


# --- pauses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "scope"),
    [
        (["orders"], Scope("orders")),
        (["orders/bill"], Scope("orders", None, "bill")),
        (["orders/2/bill"], Scope("orders", 2, "bill")),
        (["orders/*/bill"], Scope("orders", None, "bill")),
        (["orders", "-p", "2"], Scope("orders", 2)),
        (["orders", "-g", "bill", "-p", "2"], Scope("orders", 2, "bill")),
        (["--all"], Scope()),
    ],
)
def test_pause_and_resume_accept_each_scope(
    run: Run, link: Connection, keys: Keys, words: list[str], scope: Scope
) -> None:
    said = document(run("pause", *words, "--reason", "why\x1b[31m", "--json"))
    assert said["directive"] == f"pause:{scope}"
    [(found, order)] = read_directives(link, keys).pauses.items()
    assert found == scope
    assert order.at_unix_ms == said["at_unix_ms"]
    assert "@" in order.by

    first = run("status").stdout.splitlines()[0]
    assert first.startswith(f"PAUSED {scope} for ")
    assert first.endswith(f"by {order.by}: why\\x1b[31m")
    run("resume", *words)
    assert read_directives(link, keys).pauses == {}


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["order"], 8, "did you mean orders?"),
        (["orders/mail"], 8, "its groups are: bill"),
        (["orders/3/bill"], 8, "numbered 0 to 2"),
        (["orders", "-p", "3"], 8, "numbered 0 to 2"),
        (["orders/x/bill"], 2, "'x' is not the number"),
        (["orders/"], 2, "is not a valid scope"),
        (["orders/bill", "-g", "mail"], 2, "another group than"),
        (["orders", "--all"], 2, "--all cannot be used with another argument"),
        ([], 2, "or --all"),
    ],
)
def test_pause_refuses_an_unknown_scope(
    run: Run, link: Connection, keys: Keys, words: list[str], code: int, text: str
) -> None:
    assert text in run("pause", *words, code=code).stderr
    assert link.execute("EXISTS", keys.directives("default")) == 0


def test_resume_respects_overlapping_pauses(run: Run, link: Connection, keys: Keys) -> None:
    run("pause", "orders")
    assert "also paused by orders/*/*" in run("pause", "orders/1/bill").stdout
    run("resume", "orders/1/bill")
    assert "instead" in run("resume", "orders/1/bill", code=8).stderr
    run("pause", "orders/bill")
    assert "orders/*/* is still paused" in run("resume", "orders/bill").stdout
    run("pause", "orders/1/bill")
    run("resume", "orders")
    assert read_directives(link, keys).pauses == {}
    assert "was not paused" in run("resume", "orders").stdout
    run("pause", "orders", "--partition", "1")
    assert "orders/1/* is still paused" in run("resume", "orders/bill").stdout


def test_control_dry_run_writes_nothing(
    run: Run, heartbeat: SendHeartbeat, link: Connection, keys: Keys
) -> None:
    heartbeat("a")
    harness = Harness(link, keys)
    before = harness.dump()
    for words in (
        ("pause", "orders"),
        ("resume", "orders"),
        ("drain", "a"),
        ("drain", "a", "--undo"),
        ("reload",),
        ("rebalance",),
        ("move", "orders/0/bill", "a"),
        ("control", "clear", "--missing"),
        ("group", "adopt", "orders", "bill"),
        ("group", "stop", "orders", "bill"),
        ("group", "start", "orders", "bill"),
    ):
        run(*words, "--dry-run")
        run(*words, "--dry-run", "--json")
    assert harness.dump() == before


def test_pause_wait_names_instances_that_have_not_applied_it(
    run: Run, heartbeat: SendHeartbeat, own: Any, link: Connection, keys: Keys
) -> None:
    heartbeat("a")
    own(0, "a")
    said = document(run("pause", "orders", "-w", "--timeout", "100ms", "--json", code=1))
    assert said["waiting"] == ["a has not reported on orders/0/bill yet"]
    told = {"at_unix_ms": said["at_unix_ms"] + 60_000, "assignments": [
        {"topic": "orders", "partition": 0, "group": "bill", "state": "paused"}
    ]}  # fmt: skip
    link.execute("SET", keys.instance("default", "a"), json.dumps(told))
    run("pause", "orders", "--wait")
    left = run("resume", "orders", "-w", "--timeout", "100ms", code=1).stderr
    assert "orders/0/bill on a is still paused" in left


# --- moves, drains, reloads -----------------------------------------------------------------------


def test_impossible_moves_are_rejected(
    run: Run, heartbeat: SendHeartbeat, own: Any, link: Connection, keys: Keys
) -> None:
    assignment = Assignment("orders", 0, "bill")
    heartbeat("a")
    heartbeat("full", cap=1)
    heartbeat("other", offers=[["hits", "x"]])
    heartbeat("sick", broken=[assignment])
    heartbeat("going", leaving=True)
    heartbeat("asleep")
    heartbeat("dry")
    link.execute("ZADD", keys.members("default"), 1, "asleep")
    own(1, "full")
    run("drain", "dry")
    for to, text in {
        "full": "owns 1 assignment, which is its max_partitions",
        "other": "no consumer for orders/bill",
        "sick": "crashes in a loop on sick",
        "going": "is leaving",
        "asleep": "has been silent for",
        "dry": "is drained",
        "b": "instance b is not in this fleet",
        "ful": "did you mean full?",
    }.items():
        assert text in run("move", str(assignment), to, code=8).stderr
    assert read_directives(link, keys).moves == {}
    assert "numbered 0 to 2" in run("move", "orders/7/bill", "a", code=8).stderr
    run("move", "orders/bill", "a", code=2)

    run("move", "orders/1/bill", "full")  # a full instance may keep its own assignments
    run("move", str(assignment), "a", "-r", "hot")
    assert {u: order.to for u, order in read_directives(link, keys).moves.items()} == {
        assignment: "a",
        Assignment("orders", 1, "bill"): "full",
    }
    assert "orders/0/bill is kept on a for " in run("status").stdout


def test_rebalance_shows_its_plan_and_clears_moves(
    run: Run, heartbeat: SendHeartbeat, own: Any, link: Connection, keys: Keys
) -> None:
    heartbeat("a")
    heartbeat("b")
    for number in range(3):
        own(number, "a")
    run("move", "orders/0/bill", "a")
    planned = document(run("rebalance", "--dry-run", "--json"))
    assert planned["forgotten"] == ["move:orders/0/bill"]
    assert [(each["owner"], each["to"]) for each in planned["moves"]] == [("a", "b")]
    assert "orders/2/bill" in run("rebalance").stdout
    found = read_directives(link, keys)
    assert found.moves == {}
    assert found.rebalance is not None


def test_drain_dry_run_names_waiting_groups(
    run: Run, heartbeat: SendHeartbeat, link: Connection, keys: Keys
) -> None:
    heartbeat("a")
    [note] = document(run("drain", "a", "--dry-run", "--json"))["notes"]
    assert "orders/bill: its partitions will wait" in note
    heartbeat("b")
    assert document(run("drain", "a", "--json"))["notes"] == []
    assert "DRAINED a for " in run("status").stdout
    assert "orders/bill: its partitions will wait" in run("drain", "b").stdout
    link.execute("ZREM", keys.members("default"), "a")
    run("drain", "a", "--undo")  # undoing a drain works even if the instance is absent
    assert list(read_directives(link, keys).drains) == ["b"]
    run("drain", "b", "--undo")
    assert "was not drained" in run("drain", "b", "--undo").stdout
    run("drain", "a", code=8)
    run("drain", "a", "--undo", code=8)


def test_forget_refuses_live_or_invalid_instances(
    run: Run,
    heartbeat: SendHeartbeat,
    own: Any,
    link: Connection,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`forget` refuses a run that has come back, a run with valid leases, and a junk entry."""
    heartbeat("a", ttl=0.2)
    run("drain", "a")
    own(1, "a")
    link.execute("ZADD", keys.members("default"), 1, "a")
    said = run("forget", "a", "--yes", code=8).stderr
    assert "a still owns 1 partition; run the command again in" in said
    link.execute("DEL", keys.lease("orders", 1, "bill"))
    before = Harness(link, keys).dump()
    planned = document(run("forget", "a", "--dry-run", "--json"))
    assert (planned["ownerless"], planned["directives"]) == (1, ["drain:a"])
    assert Harness(link, keys).dump() == before

    leave = members.leave

    def after_its_return(keys: Keys, fleet: str, instance: str, nonce: str) -> Any:
        info = {"nonce": "n2", "offers": PAIRS}
        link.execute("HSET", keys.info(fleet), instance, json.dumps(info))
        return leave(keys, fleet, instance, nonce)

    with monkeypatch.context() as patch:
        patch.setattr(members, "leave", after_its_return)
        assert "instance a is live" in run("forget", "a", "--yes", code=8).stderr
    assert link.execute("ZSCORE", keys.members("default"), "a") is not None
    run("forget", "a", "--yes")
    assert link.execute("ZSCORE", keys.members("default"), "a") is None

    link.execute("ZADD", keys.members("default"), 1, "junk")
    link.execute("HSET", keys.info("default"), "junk", "[1]")
    assert "cannot be read" in run("forget", "junk", "--yes", code=8).stderr


def test_reload_accepts_some_or_all_instances(
    run: Run, heartbeat: SendHeartbeat, link: Connection, keys: Keys
) -> None:
    assert "is live" in run("reload", code=8).stderr
    heartbeat("b")
    heartbeat("a")
    assert "in this order: a, b" in "".join(document(run("reload", "--dry-run", "--json"))["notes"])
    run("reload", "b")
    assert "a has not reloaded" in run("reload", "-w", "--timeout", "100ms", code=1).stderr
    heartbeat("asleep")
    link.execute("ZADD", keys.members("default"), 1, "asleep")
    assert "asleep is silent" in run("reload").stderr
    link.execute("ZREM", keys.members("default"), "asleep")
    order = read_directives(link, keys).find_reload_unix_ms("b")
    heartbeat("b", reloading={"directive_unix_ms": order, "assignment": ["orders", 0, "bill"]})
    said = run("reload", "b").stderr
    assert "b was already asked to reload 0 s ago, and waits for" in said
    assert "the worker of orders/0/bill; it reloads again after that" in said
    said = run("reload", "b", "-w", "--timeout", "100ms", code=1).stderr
    assert "b has not reloaded and waits for the replacement of the worker of orders/0/bill" in said
    order = read_directives(link, keys).find_reload_unix_ms("a")
    heartbeat("a", reloaded=order)
    heartbeat("b", reloaded=order, reload_problem="handlers: no module named x")
    link.execute("ZREM", keys.members("default"), "b")
    run("reload", "a")  # the directives for removed instances are deleted then
    assert set(read_directives(link, keys).reloads) == {"*", "a"}


def test_directives_are_listed_and_cleared(
    run: Run, heartbeat: SendHeartbeat, link: Connection, keys: Keys
) -> None:
    heartbeat("a")
    run("drain", "a", "-r", "disk")
    run("pause", "orders")
    link.execute("HSET", keys.directives("default"), "sing", "la")
    link.execute("ZREM", keys.members("default"), "a")
    seen = document(run("control", "list", "--json"))
    assert [(each["name"], each["instance_missing"]) for each in seen["directives"]] == [
        ("pause:orders/*/*", False),
        ("drain:a", True),
    ]
    assert list(seen["unreadable_directives"]) == ["sing"]
    assert document(run("status", "--json"))["directives"][0]["name"] == "pause:orders/*/*"
    assert "drain:a" in run("control", "list").stdout
    assert "directive x not found" in run("control", "clear", "x", "-y", code=8).stderr
    run("control", "clear", code=2)
    assert "pass --yes" in run("control", "clear", "--missing", code=8).stderr
    run("control", "clear", "--missing", "sing", "-y")
    left = read_directives(link, keys)
    assert (list(left.pauses), left.drains, left.unreadable) == ([Scope("orders")], {}, {})
    run("control", "clear", "--missing", "-y")


def test_group_stop_and_group_start_work(
    run: Run, heartbeat: SendHeartbeat, own: Any, link: Connection, keys: Keys
) -> None:
    """One command stops a group, waits until no partition is owned, and rejects moves."""
    heartbeat("a")
    own(0, "a")
    words = ("group", "stop", "orders", "bill", "-r", "wrong prices")
    said = document(run(*words, "-w", "--timeout", "100ms", "--json", code=1))
    assert said["directive"] == "stop:orders/*/bill"
    assert said["waiting"] == ["a owns orders/0/bill"]
    [(scope, order)] = read_directives(link, keys).stops.items()
    assert (scope, order.why) == (Scope("orders", None, "bill"), "wrong prices")
    shown = run("status").stdout.splitlines()
    assert shown[0].startswith("STOPPED orders/*/bill for ")
    assert shown[0].endswith(": wrong prices")
    assert "is stopped" in run("move", "orders/0/bill", "a", code=8).stderr
    assert document(run("rebalance", "--dry-run", "--json"))["moves"] == []

    link.run(leases.release(keys, Lease(Assignment("orders", 0, "bill"), "t0")))
    run("group", "stop", "orders", "bill", "--wait", "-r", "wrong prices")
    [group] = document(run("status", "--json"))["groups"]
    assert (group["condition"], group["reason"]) == ("stopped", "wrong prices")
    assert document(run("status", "--json"))["problems"] == []

    assert run("group", "start", "orders", "bill").stdout == "orders/bill is started\n"
    assert read_directives(link, keys).stops == {}
    assert "was not stopped" in run("group", "start", "orders", "bill").stdout
    waiting = run("group", "start", "orders", "bill", "-w", "--timeout", "100ms", code=1).stderr
    assert "not yet: no instance owns orders/2/bill" in waiting
    assert "its groups are: bill" in run("group", "stop", "orders", "bil", code=8).stderr
    assert "did you mean orders?" in run("group", "stop", "order", "bill", code=8).stderr


def test_applied_reload_is_no_longer_listed(
    run: Run, heartbeat: SendHeartbeat, link: Connection, keys: Keys
) -> None:
    """A finished reload is no longer listed as an active directive."""
    heartbeat("a")
    heartbeat("b")
    at = document(run("reload", "--json"))["at_unix_ms"]
    named = document(run("reload", "b", "--json"))["at_unix_ms"]
    heartbeat("a", reloaded=at)
    heartbeat("b", reloaded=at)
    assert "reload:*" not in run("control", "list").stdout
    assert "reload:b" in run("control", "list").stdout, "b has not obeyed it yet"
    heartbeat("b", reloaded=named)
    assert "--all shows" in run("control", "list").stdout
    assert "done" in run("control", "list", "--all").stdout
    listed = document(run("control", "list", "--json"))["directives"]
    assert [(each["name"], each["done"]) for each in listed] == [
        ("reload:*", True),
        ("reload:b", True),
    ]
    run("rebalance")

    def obeyed() -> bool:
        heartbeat("a", reloaded=named)
        heartbeat("b", reloaded=named)
        return "rebalance" not in run("control", "list").stdout

    wait_until(obeyed, what="a beat in a later millisecond")


@pytest.mark.parametrize("name", ["stop:orders/1/bill", "stop:orders/*/*", "stop:orders", "stop:"])
def test_invalid_stop_directive_is_ignored(link: Connection, keys: Keys, name: str) -> None:
    """A stop directive is ignored if it does not cover all partitions of exactly one group."""
    told = json.dumps({"version": 1, "at_unix_ms": 5, "by": "x", "why": ""})
    link.execute("HSET", keys.directives("default"), name, told)
    found = read_directives(link, keys)
    assert (found.stops, set(found.unreadable)) == ({}, {name})


def test_control_commands_without_redis_exit_4(tmp_path: Path) -> None:
    path = tmp_path / "streamq.toml"
    path.write_text(f'[redis]\nurl = "redis://127.0.0.1:{free_port()}"\n')
    for words in (["pause", "orders"], ["reload"], ["rebalance"], ["control", "list"]):
        result = CliRunner().invoke(cli, ["--config", str(path), *words])
        assert result.exit_code == 4, result.output


# --- adopting -------------------------------------------------------------------------------------


def test_group_adopt_requires_an_unowned_group(
    run: Run, own: Any, link: Connection, keys: Keys
) -> None:
    harnesses = [Harness(link, keys, Assignment("orders", number, "bill")) for number in range(3)]
    for number, harness in enumerate(harnesses):
        for entry in range(1, 301):
            harness.add(f"{entry}-0")
        harness.fetch(300, f"celery-{number}")
    link.execute("XGROUP", "CREATE", harnesses[0].retry, "other", "0", "MKSTREAM")
    link.execute("XGROUP", "CREATE", harnesses[1].stream, b"\xff\xfe", "0")  # not one of our names
    seen = document(run("group", "adopt", "orders", "bill", "--dry-run", "--json"))
    assert (seen["entries"], seen["dry_run"]) == (900, True)
    assert {each["consumer"] for each in seen["consumers"]} == {f"celery-{n}" for n in range(3)}
    assert "pass --yes" in run("group", "adopt", "orders", "bill", code=8).stderr
    own(2, "west-1")
    refused = run("group", "adopt", "orders", "bill", "-y", code=8).stderr
    assert "west-1 owns orders/2/bill" in refused
    link.run(leases.release(keys, Lease(harnesses[2].assignment, "t2")))
    assert "900 messages taken over" in run("group", "adopt", "orders", "bill", "-y").stdout
    for harness in harnesses:
        assert harness.do("XPENDING", harness.stream, "bill")[3] == [[b"w", b"300"]]
    assert "no messages taken over" in run("group", "adopt", "orders", "bill", "-y").stdout
    run("group", "adopt", "orders", "mail", code=8)
    run("group", "adopt", "hits", "bill", code=8)


def test_group_adopt_names_an_unreadable_key_once(run: Run, link: Connection, keys: Keys) -> None:
    harness = Harness(link, keys, Assignment("orders", 0, "bill"))
    harness.add("1-0")
    harness.fetch(1, "celery-0")
    fence = keys.fence(*harness.assignment)
    link.execute("HSET", fence, "epoch", "abc")
    link.execute("XGROUP", "CREATE", harness.stream, b"\xff\xfe", "0")
    would = run("group", "adopt", "orders", "bill", "--dry-run").stderr
    assert would.count(f"epoch of {fence} cannot be read") == 1
    done = run("group", "adopt", "orders", "bill", "-y")
    assert "1 message taken over" in done.stdout
    assert done.stderr.count(f"epoch of {fence} cannot be read") == 1
    assert done.stderr.count(f"group of {harness.stream} cannot be read") == 1
