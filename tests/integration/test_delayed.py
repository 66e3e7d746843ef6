"""`streamqd delayed` on a real server: list, show, send and cancel delayed messages."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.admin import delayed, due
from streamqd.errors import InvalidValueError
from streamqd.producer import Outgoing, Producer
from streamqd.store import messages, scheduled
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.commands import HarnessAt, Run, document
from tests.support.servers import Server
from tests.support.waiting import wait_until

HOUR = 3600.0


@pytest.fixture
def run_delayed(run: Run) -> Run:
    """Run a command of `delayed` and assert its exit code `code`."""
    return functools.partial(run, "delayed")


@pytest.fixture
def send(server: Server, harness_at: HarnessAt) -> Callable[..., list[str]]:
    """A function that sends delayed messages to the topic access and returns their names."""

    def call(*items: Outgoing) -> list[str]:
        with Producer(server.url) as producer:
            ids = producer.send_many("access", items)
        return [f"{each.partition}:{each.id}" for each in ids]

    return call


def delayed_message(text: str, delay: float = HOUR, **more: object) -> Outgoing:
    return Outgoing(text, delay=delay, **{"partition": 0, **more})


def promote(link: Connection, keys: Keys, partition: int = 0, count: int = 200) -> int:
    return int(link.run(messages.promote_delayed(keys, "access", partition, count)).values[0])


def test_delayed_list_is_sorted_by_due_time(
    run_delayed: Run, send: Callable[..., list[str]]
) -> None:
    """`delayed list` pages through the sends of all partitions and shows due time, size and key."""
    names = send(
        delayed_message("later", 3 * HOUR, partition=2),
        delayed_message("soon", 60, partition=1, key="k"),
        delayed_message("in between", HOUR, partition=0),
    )
    by_due = [names[1], names[2], names[0]]

    shown = run_delayed("list", "access")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["ID", *by_due]
    assert shown.stderr == "3 delayed sends in access\n"
    told = document(run_delayed("list", "access", "--json"))
    assert [row["id"] for row in told["rows"]] == by_due
    first = told["rows"][0]
    assert (first["key"], first["payload_bytes"]) == ("k", 4)
    assert 50_000 < first["due_unix_ms"] - first["sent_unix_ms"] <= 60_000

    found: list[str] = []
    cursor: tuple[str, ...] = ()
    for _ in range(3):
        page = document(run_delayed("list", "access", "-n", "1", *cursor, "--json"))
        found += [row["id"] for row in page["rows"]]
        cursor = ("--cursor", page["cursor"])
    assert found == by_due
    assert page["cursor"] == ""


def test_delayed_list_pages_within_one_millisecond(
    run_delayed: Run, link: Connection, keys: Keys, harness_at: HarnessAt
) -> None:
    """If many sends are due in the same millisecond, each of them is listed once."""
    wanted = set()
    for partition in range(3):
        for number in range(5):
            link.execute(
                "ZADD", keys.delayed_sends("access", partition), 9_000_000_000_000, f"s{number}"
            )
            wanted.add(f"{partition}:s{number}")
    found: list[str] = []
    cursor: tuple[str, ...] = ()
    while True:
        page = document(run_delayed("list", "access", "-n", "4", *cursor, "--json"))
        found += [row["id"] for row in page["rows"]]
        if not page["cursor"]:
            break
        cursor = ("--cursor", page["cursor"])
    assert len(found) == 15
    assert set(found) == wanted
    assert all(row["payload_bytes"] is None for row in page["rows"])  # the items are missing


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (("--due-within", "5m"), [1]),
        (("-p", "0"), [2]),
        (("-k", "k"), [1]),
        (("-k", "k", "-p", "2"), []),
    ],
)
def test_delayed_filters_select_matching_messages(
    run_delayed: Run, send: Callable[..., list[str]], words: tuple[str, ...], chosen: list[int]
) -> None:
    """`delayed list` can be filtered by partition, key and due time."""
    names = send(
        delayed_message("a", 3 * HOUR, partition=2),
        delayed_message("b", 60, partition=1, key="k"),
        delayed_message("c"),
    )
    rows = document(run_delayed("list", "access", *words, "--json"))["rows"]
    assert [row["id"] for row in rows] == [names[each] for each in chosen]
    if not chosen:
        assert run_delayed("list", "access", *words).stdout == "nothing matches\n"


def test_delayed_show_prints_the_whole_message(
    run_delayed: Run, send: Callable[..., list[str]]
) -> None:
    """`delayed show` prints key, headers and payload."""
    [name] = send(delayed_message("long " * 5000, key="k\x1b", headers={"a": "b"}))
    told = document(run_delayed("show", "access", name, "--json"))
    assert told["payload"] == "long " * 5000
    assert (told["key"], told["headers"], told["other"]) == ("k\x1b", {"a": "b"}, {})
    shown = run_delayed("show", "access", name).stdout
    assert "header a:" in shown
    assert "payload, 25,000 bytes:" in shown
    assert "\x1b" not in shown


def test_due_time_counts_equal_a_direct_count(
    store: Store, send: Callable[..., list[str]], link: Connection, keys: Keys
) -> None:
    """Each bucket includes its end, and its start is the cursor of the page."""
    delays = (30.0, 60.0, 500.0, 601.0, 7_000.0, 90_000.0, 30 * 86_400.0)
    send(
        *(delayed_message("x", delay, partition=number % 3) for number, delay in enumerate(delays))
    )
    found = delayed.messages(store, "access")
    dues = [row.due_unix_ms for row in found.page().rows]
    now = dues[2] - 600_000  # so that the third one is on the end of a bucket

    counted = due.histogram(store, "access", "", 3, now)

    lower = float("-inf")
    for each in counted.buckets:
        upper = float("inf") if each.until_unix_ms is None else each.until_unix_ms
        inside = [one for one in dues if lower < one <= upper]
        assert each.messages == len(inside)
        if inside:
            first = delayed.messages(store, "access").page(limit=1, cursor=each.cursor).rows[0]
            assert first.due_unix_ms == inside[0]
        lower = upper
        after = None if each.label == due.LATER else now + due.BUCKETS[each.label] * 1000
        assert each.until_unix_ms == after
    assert counted.messages == len(delays)
    assert counted.counted == counted.partitions == 3
    link.execute("SET", keys.delayed_sends("access", 1), "of another type")
    assert due.histogram(store, "access", "", 3, now).messages < len(delays)
    assert due.histogram(store, "access", "", 10_000, now).counted == 512


def test_delayed_cancel_reports_each_outcome(
    run_delayed: Run, send: Callable[..., list[str]], link: Connection, keys: Keys
) -> None:
    """The exit code shows if a delayed send was canceled, was already sent, or is unknown."""
    keep, drop, sent = send(
        delayed_message("keep"), delayed_message("drop"), delayed_message("sent", 0)
    )
    assert promote(link, keys) == 1
    [(entry, _)] = link.execute("XRANGE", keys.stream("access", 0), "-", "+")

    assert run_delayed("cancel", "access", drop).stdout == "1 delayed send canceled\n"
    again = run_delayed("cancel", "access", drop, sent, "0:nobody", "--json", code=8)
    assert json.loads(again.stdout) == {
        "topic": "access",
        "canceled": 0,
        "sent": [{"id": sent, "uid": f"access/0/{entry.decode()}"}],
        "unknown": [drop, "0:nobody"],
    }
    told = run_delayed("cancel", "access", sent, code=8)
    assert told.stderr == f"{sent} was already sent, as access/0/{entry.decode()}\n"
    assert "was already sent, as" in run_delayed("show", "access", sent, code=8).stderr
    assert "never existed" in run_delayed("show", "access", drop, code=8).stderr
    assert [row["id"] for row in document(run_delayed("list", "access", "--json"))["rows"]] == [
        keep
    ]
    assert link.execute("HLEN", keys.delayed_send_items("access", 0)) == 1


def test_producer_cancel_removes_a_delayed_send(
    server: Server, harness_at: HarnessAt, link: Connection, keys: Keys, run_delayed: Run
) -> None:
    """A producer can cancel a send with the value that `send` returned.

    If the message was already sent, cancel reports that.
    """
    harness_at(0)
    with Producer(server.url) as producer:
        drop, sent = producer.send_many(
            "access", [delayed_message("drop"), delayed_message("sent", 0)]
        )
        plain = producer.send("access", "plain", partition=0)
        assert promote(link, keys) == 1
        assert run_delayed("show", "access", sent, code=8).stderr.count(
            f"was already sent, as {plain.topic}"
        )
        assert producer.cancel(drop)
        assert not producer.cancel(drop)
        assert not producer.cancel(sent)
        assert not producer.cancel(plain)
        assert not producer.cancel("access/99/never")
        for wrong in (drop.id, f"{drop.partition}:{drop.id}", "a b/0/x", "access/x/1-0", 7):
            with pytest.raises(ValueError, match=r"not the uid of a delayed send; pass what send"):
                producer.cancel(wrong)  # type: ignore[arg-type]
    assert link.execute("ZCARD", keys.delayed_sends("access", 0)) == 0
    assert link.execute("HLEN", keys.delayed_send_items("access", 0)) == 0
    assert link.execute("XLEN", keys.stream("access", 0)) == 2


def test_commands_accept_the_uid_of_a_delayed_send(
    server: Server, harness_at: HarnessAt, run: Run, run_delayed: Run
) -> None:
    """`trace` and `delayed show`, `now` and `cancel` accept the uid that `send` returned."""
    harness_at(0)
    with Producer(server.url) as producer:
        first = producer.send("access", "first", delay=HOUR, key="k")
        second = producer.send("access", "second", delay=HOUR, dedup_id="d")
        assert producer.send("access", "again", delay=HOUR, dedup_id="d") == second
        written = producer.send("access", "written")
    assert document(run("trace", first, "--json"))["where"] == "delayed"
    assert document(run("trace", written, "--json"))["where"] == "present"
    assert document(run_delayed("show", "access", first, "--json"))["payload"] == "first"
    assert run_delayed("now", "access", first).stdout == "1 delayed send due now\n"
    assert run_delayed("cancel", "access", second).stdout == "1 delayed send canceled\n"


def test_delayed_cancel_all_asks_for_confirmation(
    run_delayed: Run, send: Callable[..., list[str]], run: Run
) -> None:
    """`delayed cancel --all` asks first, because it is irreversible.

    The command has a dry run, and is in the audit log.
    """
    send(*(delayed_message(f"m{n}", key=f"k{n % 2}", partition=n % 3) for n in range(200)))
    assert run_delayed("cancel", "access", "--all", "--dry-run").stdout == (
        "200 delayed sends would be canceled\n"
    )
    assert "pass --yes" in run_delayed("cancel", "access", "--all", code=8).stderr
    done = run_delayed("cancel", "access", "--all", "--key", "k0", "--yes").stdout
    assert done == "100 delayed sends canceled\n"
    assert document(run_delayed("list", "access", "--json"))["total"] == 100
    assert (
        run_delayed("cancel", "access", "--all", "-k", "k0", "--yes").stdout == "nothing matches\n"
    )
    assert "delayed cancel" in run("dlq", "audit", "access").stdout


def test_delayed_now_sends_immediately(
    run_delayed: Run, send: Callable[..., list[str]], link: Connection, keys: Keys
) -> None:
    """`delayed now` makes sends due. The promoter then sends them, and their uids are shown."""
    first, second, third = send(delayed_message("1"), delayed_message("2"), delayed_message("3"))
    assert run_delayed("now", "access", first).stdout == "1 delayed send due now\n"
    assert promote(link, keys) == 1
    assert "was already sent, as access/0/" in run_delayed("now", "access", first, code=8).stderr
    assert (
        run_delayed("now", "access", "--all", "--dry-run").stdout
        == "2 delayed sends would be due now\n"
    )
    # The command accepts `--yes`.
    assert document(run_delayed("now", "access", "--all", "--yes", "--json"))["due"] == 2
    wait_until(lambda: promote(link, keys) or link.execute("XLEN", keys.stream("access", 0)) == 3)
    assert run_delayed("list", "access").stdout == "no delayed sends in access\n"
    assert (
        run_delayed("now", "access", second, third, code=8).stdout == "no delayed sends due now\n"
    )


def test_cancel_and_promoter_never_both_win(
    send: Callable[..., list[str]],
    new_link: Callable[..., Connection],
    link: Connection,
    store: Store,
    keys: Keys,
) -> None:
    """While a promoter works, each send is either canceled or sent, exactly as the answer says."""
    names = send(*(delayed_message(f"m{n}", 0) for n in range(600)))
    theirs = new_link(name="promoter")
    stop = threading.Event()

    def promoter() -> None:
        while not stop.is_set() and promote(theirs, keys, count=5):
            pass

    thread = threading.Thread(target=promoter)
    thread.start()
    done = [delayed.cancel(store, "access", [name]) for name in reversed(names)]
    stop.set()
    thread.join(30)

    canceled = {n for n, each in zip(reversed(names), done, strict=True) if each.changed}
    told = {each.id: each.uid for answer in done for each in answer.sent}
    entries = link.execute("XRANGE", keys.stream("access", 0), "-", "+")
    written = {}
    for entry, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        written[f"0:{fields[b'sendId'].decode()}"] = f"access/0/{entry.decode()}"
    assert not [name for each in done for name in each.unknown]
    assert canceled
    assert told
    assert told == written
    assert canceled | set(written) == set(names)
    assert not canceled & set(written)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("cancel", "access"), 2, "--all"),
        (("cancel", "access", "0:x", "--all"), 2, "cannot be used with --all"),
        (("now", "access", "nope"), 2, "PARTITION:SEND-ID"),
        (("show", "access", "x:y"), 2, "PARTITION:SEND-ID"),
        (("list", "access", "--cursor", "x"), 2, "cursor"),
        (("list", "access", "-p", "3"), 8, "partition 3 of topic access not found"),
        (("cancel", "access", "3:x"), 8, "partition 3 of topic access not found"),
        (("list", "acces"), 8, "did you mean access?"),
    ],
)
def test_delayed_reports_invalid_arguments(
    run_delayed: Run, harness_at: HarnessAt, words: tuple[str, ...], code: int, said: str
) -> None:
    """Malformed arguments are usage errors, and missing items are refused."""
    harness_at(0)
    assert said in run_delayed(*words, code=code).stderr


def test_delayed_list_isolates_an_unreadable_item(
    run_delayed: Run, send: Callable[..., list[str]], link: Connection, store: Store, keys: Keys
) -> None:
    """An item that cannot be read is listed without a size, and can be canceled."""
    [name] = send(delayed_message("fine"))
    link.execute("ZADD", keys.delayed_sends("access", 0), 5, "bad")
    link.execute("HSET", keys.delayed_send_items("access", 0), "bad", b"\x92\xa1")
    rows = document(run_delayed("list", "access", "--json"))["rows"]
    assert [(row["id"], row["payload_bytes"]) for row in rows] == [("0:bad", None), (name, 4)]
    with pytest.raises(
        InvalidValueError, match=r"bad of streaming:mq:delayed:item.*not the packed fields"
    ):
        delayed.show(store, "access", "0:bad")
    assert run_delayed("cancel", "access", "0:bad").stdout == "1 delayed send canceled\n"


@given(raw=st.binary(max_size=40))
def test_delayed_items_are_parsed_or_rejected(raw: bytes) -> None:
    """Any item is either parsed, or rejected with an error that names its key and field."""
    try:
        fields = scheduled.unpack_fields(raw, "items", "s")
    except InvalidValueError:
        return
    assert fields
    assert all(isinstance(each, bytes) for pair in fields.items() for each in pair)
