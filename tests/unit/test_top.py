"""`streamqd top` shows the right content on screens of all sizes, and obeys its keys."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from streamqd import words
from streamqd.admin.assignments import AssignmentRow, RecentFailure, published_rows
from streamqd.admin.instances import InstanceRow
from streamqd.admin.published import FleetState
from streamqd.admin.ranking import ORDERS
from streamqd.admin.reading import Unreadable
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.cli.screen import input as keyboard
from streamqd.cli.screen.columns import Cell, number
from streamqd.cli.screen.frame import Line, ScreenOptions, count_table_rows, frame, select_visible
from streamqd.store.directives import Directive, Directives, Scope

NOW = 1_795_000_000_000


def assignment(partition: int = 0, owner: str = "west-1", **more: Any) -> AssignmentRow:
    raw = {"topic": "access", "partition": partition, "group": "hits", "state": "ready"}
    raw |= {"epoch": 7, "since_unix_ms": NOW - 60_000, "lag": 0}
    return published_rows(owner, {"assignments": [raw | more]})[0]


def free_assignment(partition: int, **more: Any) -> AssignmentRow:
    return replace(assignment(partition, "", state="", **more), lease="free")


def view(
    assignments: Sequence[AssignmentRow] = (), control: Directives | None = None, **more: Any
) -> FleetSnapshot:
    west = InstanceRow("west-1", "working", "h", "1", NOW, NOW, True, True, len(assignments), 1.0)
    state = FleetState(NOW, 15.0, (), control or Directives())
    seen = FleetSnapshot("default", state, instances=[west], assignments=assignments)
    return replace(seen, **more)


def text(lines: Sequence[Line]) -> str:
    return "\n".join("".join(cell.text for cell in line).rstrip() for line in lines)


def count_columns(line: Line) -> int:
    shown = "".join(cell.text for cell in line)
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in shown)


# --- the frame ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [10, 40, 80, 110, 132, 160, 200, 320])
@pytest.mark.parametrize("height", [4, 10, 16, 24, 43, 80])
@pytest.mark.parametrize(
    "chosen",
    [ScreenOptions(), ScreenOptions(help=True), ScreenOptions(filter="9", typing=True)],
    ids=str,
)
def test_frame_fills_the_screen_exactly(width: int, height: int, chosen: ScreenOptions) -> None:
    failures = [RecentFailure("json.JSONDecodeError", 3, 2.0, "access", 1, "hits", "west-1")]
    many = [assignment(n, "owner-of-a-long-name-" * 3, lag=10**n % 10**13) for n in range(40)]
    orders = Directives(pauses={Scope("access"): Directive(NOW - 5000, "alice", "why " * 60)})
    seen = view([*many, assignment(99, topic="ä日本" * 20)], orders, failures=failures)

    lines = frame(seen, chosen, width, height, error="no reply " * 20, old=7.0)

    assert len(lines) == height
    assert {count_columns(line) for line in lines} == {width}


def test_head_shows_the_fleet_and_its_totals() -> None:
    busy = assignment(lag=7, pending=2, waiting_retries=1, arriving=1.5, rates={"acked": 1200.0})
    shown = text(frame(view([busy]), ScreenOptions(), 80, 24))

    assert "streamqd fleet default  11:06:40Z  instances: 1 working" in shown
    assert "in 1.5/s  out 1,200/s" in shown
    assert "lag 7  pending 2  retries 1  dlq 0" in shown
    assert "lag 7+  pending 2" in text(
        frame(view([busy, assignment(1, lag=None)]), ScreenOptions(), 80, 24)
    )


def test_age_of_the_data_is_shown_while_redis_is_unavailable() -> None:
    shown = text(
        frame(view([assignment()]), ScreenOptions(), 80, 24, error="no reply from h:1", old=83.0)
    )

    assert "REDIS UNAVAILABLE, data 1m23s old" in shown
    assert "! no reply from h:1" in shown
    assert "access/0/hits" in shown


def test_only_the_problem_is_shown_before_the_first_reply() -> None:
    assert "cannot connect" in text(
        frame(None, ScreenOptions(), 80, 24, error="cannot connect to h:1")
    )


def test_pauses_are_shown_first_in_text_and_rows() -> None:
    paused = replace(assignment(7), paused=True)
    assignments = [assignment(1, lag=10_000, oldest_seconds=900.0), paused, free_assignment(2)]
    orders = Directives(
        drains={"east-1": Directive(NOW - 90_000, "bob", "")},
        pauses={Scope("access", 7): Directive(NOW - 60_000, "alice", "the disk")},
    )
    lines = text(frame(view(assignments, orders), ScreenOptions(), 80, 24)).splitlines()

    assert lines[2] == "! pause of access/7/* for 1m by alice: the disk"
    assert lines[3] == "! drain of east-1 for 1m30s by bob"
    assert lines[4] == "! no owner: access/2/hits"
    rows = [line for line in lines if line.startswith("access/")]
    assert [row.split()[0] for row in rows] == ["access/7/hits", "access/2/hits", "access/1/hits"]
    assert "PAUSED" in rows[0]
    assert "FREE" in rows[1]


def test_top_names_a_hung_handler() -> None:
    shown = text(
        frame(
            view([assignment(3, longest_run_seconds=95.0), assignment(4)]), ScreenOptions(), 80, 24
        )
    )

    assert "! access/3/hits has been running one message for 1m35s" in shown
    assert " RUN 1m35s " in shown, "it runs, and for how long"


def test_open_circuit_is_shown_once_per_group() -> None:
    """An open circuit breaker takes one line per group, not one per partition."""
    assignments = [assignment(n, state="halted") for n in range(7)] + [
        assignment(8, state="probing"),
        assignment(9),
    ]
    lines = text(frame(view(assignments), ScreenOptions(), 100, 40)).splitlines()

    assert [line for line in lines if line.startswith("!")] == [
        "! circuit open: access/hits in partitions 0-6",
        "! circuit half-open: access/8/hits",
    ]
    rows = {line.split()[0]: line for line in lines if line.startswith("access/")}
    assert " CIRCUIT " in rows["access/0/hits"]
    assert " HALF-OPEN " in rows["access/8/hits"]


def test_top_shows_the_dead_letters_of_each_group() -> None:
    """Each group has its own dead letters, instead of the total of the partition."""
    mine = assignment(0, partition_dead_letters=7, dead_letters=2)
    other = assignment(0, group="agents", partition_dead_letters=7, dead_letters=5)
    old = assignment(1, partition_dead_letters=3)

    assert [each.dead_letters for each in (mine, other, old)] == [2, 5, None]
    assert [each.partition_dead_letters for each in (mine, other, old)] == [7, 7, 3]
    lines = text(frame(view([mine, other, old]), ScreenOptions(), 132, 24)).splitlines()
    assert {line.split()[0]: line.split()[-1] for line in lines if line.startswith("access/")} == {
        "access/0/hits": "2",
        "access/0/agents": "5",
        "access/1/hits": "-",
    }


def test_totals_include_partitions_without_an_owner() -> None:
    """If an assignment has no owner, the dead letters of its partition are still in the totals."""
    told = assignment(0, partition_dead_letters=7, arriving=2.0)
    stray = free_assignment(0, group="zoo")
    other = assignment(0, group="agents", partition_dead_letters=7, arriving=2.0)
    sums = view([told, other, stray]).totals
    assert (sums.dead_letters, sums.arriving) == (7, 2.0)


def test_top_shows_a_running_message_as_the_state() -> None:
    """The state of an assignment with a long run is the duration of that run, not `ready`."""
    shown = text(
        frame(
            view([assignment(3, longest_run_seconds=4.2), assignment(4)]), ScreenOptions(), 80, 24
        )
    )
    assert " run 4.2s " in shown
    stopped = replace(free_assignment(5), stopped=True)
    shown = text(frame(view([stopped]), ScreenOptions(), 80, 24))
    assert " STOPPED " in shown
    assert "no owner" not in shown


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("blocked", "blocked: access/3/hits"),
        ("broken", "crash loop: access/3/hits"),
        ("expired", "lease expired: access/3/hits"),
        ("flooded", "flood guard: access/3/hits"),
        ("full", "keys held: access/3/hits"),
        ("gone", "worker gone: access/3/hits"),
    ],
)
def test_uppercase_conditions_are_explained_above_the_table(state: str, told: str) -> None:
    """`status` and `top` use the same name for the same condition."""
    lines = text(frame(view([assignment(3, state=state)]), ScreenOptions(), 80, 24)).splitlines()
    assert lines[2] == f"! {told}"
    (row,) = [line for line in lines if line.startswith("access/3/hits")]
    assert re.search(r" [A-Z]{2,}", row)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"state": "paused"}, "instance west-1 is paused"),
        ({"state": "drained"}, "instance west-1 is drained"),
        ({"redis_up": False}, "the housekeeper of west-1 cannot reach Redis, so retries wait"),
        (
            {"at_unix_ms": None},
            "west-1 sends heartbeats, but its housekeeper has not reported recently",
        ),
        ({"at_unix_ms": NOW - 90_000}, "its housekeeper has not reported for 90 seconds"),
        ({"capacity": 3, "limit": "no files"}, "west-1 can run no more than 3 partitions: the"),
        ({"at_unix_ms": None, "started_unix_ms": NOW - 5_000}, ""),
    ],
)
def test_top_names_problems_of_an_instance(more: dict[str, Any], told: str) -> None:
    west = replace(view().instances[0], **more)
    lines = text(
        frame(view([assignment()], instances=[west]), ScreenOptions(), 120, 24)
    ).splitlines()
    assert [told in line for line in lines if line.startswith("!")] == ([True] if told else [])


def test_problems_leave_room_for_the_partitions() -> None:
    west = view().instances[0]
    silent = [replace(west, instance=f"s{n}", state="silent") for n in range(30)]
    lines = text(
        frame(view([assignment()], instances=silent), ScreenOptions(), 80, 24)
    ).splitlines()

    assert sum(line.startswith("!") for line in lines) == 3
    assert lines[2].startswith("! no instance of the fleet default is live")
    assert "and 29 more" in lines[4]
    assert any(line.startswith("access/0/hits") for line in lines)


def test_slow_handlers_and_failures_are_summed_over_partitions() -> None:
    assignments = [assignment(n, p99_seconds=0.01 * (n + 1)) for n in range(3)]
    failures = [
        RecentFailure("streamqd.handlers.Dead", 2, 400.0, "access", 0, "hits", "west-1"),
        RecentFailure("app.TooOld", 2, 3000.0, "access", 0, "hits", "west-1"),
        *(
            RecentFailure("builtins.OSError", 5, 3.0 + n, "access", n, "hits", "w")
            for n in range(2)
        ),
        RecentFailure(
            "process terminated with signal SIGSEGV", 1, 9.0, "access", 0, "hits", "west-1"
        ),
    ]
    shown = text(frame(view(assignments, failures=failures), ScreenOptions(), 120, 43))

    assert "access/hits  p99 30ms" in shown
    assert "OSError x10 access/hits 3.0s ago" in shown
    assert "process terminated with signal SIGSEGV x1" in shown
    assert "Dead x2 access/hits 6m40s ago" in shown
    assert "TooOld" not in shown


def test_wider_screen_shows_more_columns() -> None:
    seen = view([assignment(lag_per_second=4.0, epoch=123456)])
    narrow, wide, widest = (text(frame(seen, ScreenOptions(), w, 24)) for w in (80, 132, 200))

    assert "OWNER" in narrow
    assert "P99" in narrow
    assert "LAG/S" not in narrow
    assert "LAG/S" in wide
    assert "+4" in wide
    assert "SINCE" in wide
    assert "EPOCH" not in wide
    assert "EPOCH" in widest
    assert "123456" in widest


def test_values_from_redis_cannot_control_the_terminal() -> None:
    evil = assignment(owner="a\x1b[2Jb", topic="t\x07")
    failures = [RecentFailure("x\x1b]0;y\x07 z", 1, 1.0, "t", 0, "g", "w")]
    shown = text(frame(view([evil], fleet="f\x1b", failures=failures), ScreenOptions(), 80, 24))

    assert not any(unicodedata.category(one) == "Cc" for one in shown.replace("\n", ""))


def test_scrolling_reaches_all_256_assignments() -> None:
    seen = view([assignment(number) for number in range(256)])
    room = count_table_rows(seen, 80, 24)
    chosen, reached = ScreenOptions(order="name"), set()
    for _ in range(256 // room + 1):
        lines = text(frame(seen, chosen, 80, 24)).splitlines()
        reached |= {line.split()[0] for line in lines if line.startswith("access/")} - {
            "access/hits"
        }
        after = keyboard.handle_key(chosen, "p", rows=256, room=room)
        assert after is not None
        chosen = after

    assert len({name for name in reached if name.count("/") == 2}) == 256
    assert chosen.top == 0  # the first page comes after the last one


def test_frame_without_a_height_shows_everything() -> None:
    shown = text(
        frame(view([assignment(number) for number in range(300)]), ScreenOptions(), 132, None)
    )

    assert shown.count("west-1") == 300


# --- order and filter -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_sorts_all_assignments(order: str) -> None:
    assignments = [assignment(n, f"o{n % 3}", lag=n * 7 % 5, acked=n, epoch=n) for n in range(9)]
    seen = view(assignments)

    there = select_visible(seen, ScreenOptions(order=order))
    back = select_visible(seen, ScreenOptions(order=order, reverse=True))

    assert there == back[::-1]
    assert {each.partition for each in there} == set(range(9))


def test_numbers_sort_descending_and_names_ascending() -> None:
    seen = view(
        [assignment(0, "b", lag=5), assignment(1, "a", lag=50), assignment(2, "c", lag=None)]
    )

    assert [u.partition for u in select_visible(seen, ScreenOptions(order="lag"))] == [1, 0, 2]
    assert [u.partition for u in select_visible(seen, ScreenOptions(order="owner"))] == [1, 0, 2]


def test_filter_matches_partition_owner_and_state() -> None:
    seen = view(
        [assignment(0, "west-1"), assignment(1, "east-1"), assignment(2, "west-1", state="broken")]
    )

    assert [u.partition for u in select_visible(seen, ScreenOptions(filter="EAST"))] == [1]
    assert [u.partition for u in select_visible(seen, ScreenOptions(filter="broken"))] == [2]
    assert len(select_visible(seen, ScreenOptions(filter="access/"))) == 3
    assert "nothing matches zzz" in text(frame(seen, ScreenOptions(filter="zzz"), 80, 24))


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "found", "rest"),
    [
        (b"qs", ["q", "s"], b""),
        (b"\x1b[A\x1b[6~\x1bOB", ["up", "page-down", "down"], b""),
        (b"\x1b", [], b"\x1b"),
        (b"\x1b[", [], b"\x1b["),
        (b"\x1b[1;5A", [], b""),
        (b"\x1bq", ["esc", "q"], b""),
        ("é".encode()[:1], [], "é".encode()[:1]),
        ("é".encode(), ["é"], b""),
        (b"\x1b[" + b"1" * 20, ["esc", "[", *"1" * 20], b""),
    ],
)
def test_keys_are_read_from_bytes(raw: bytes, found: list[str], rest: bytes) -> None:
    assert keyboard.keys(raw) == (found, rest)


def test_single_escape_byte_is_the_esc_key() -> None:
    assert keyboard.flush(b"\x1b") == ["esc"]
    assert keyboard.flush(b"") == []


def press(
    chosen: ScreenOptions, keys: str, rows: int = 100, room: int = 10
) -> ScreenOptions | None:
    for key in keys:
        after = keyboard.handle_key(chosen, key, rows=rows, room=room)
        if after is None:
            return None
        chosen = after
    return chosen


def test_keys_change_the_view() -> None:
    assert press(ScreenOptions(), "q") is None
    assert press(ScreenOptions(), "s") == ScreenOptions(order="name")
    assert press(ScreenOptions(), "sS") == ScreenOptions()
    assert press(ScreenOptions(), "r") == ScreenOptions(reverse=True)
    assert press(ScreenOptions(), " ") == ScreenOptions(frozen=True)
    assert press(ScreenOptions(), "  ") == ScreenOptions()
    assert press(ScreenOptions(), "?x") == ScreenOptions()
    assert press(ScreenOptions(), "?q") is None
    assert press(ScreenOptions(), "/ab\x7fq\r") == ScreenOptions(filter="aq")
    assert press(ScreenOptions(), "jjk") == ScreenOptions(top=1)
    assert press(ScreenOptions(), "G") == ScreenOptions(top=90)
    assert press(ScreenOptions(top=85), "p") == ScreenOptions(top=90)
    assert press(ScreenOptions(top=90), "p") == ScreenOptions()
    assert press(ScreenOptions(), "k") == ScreenOptions()
    assert press(ScreenOptions(), "Z") == ScreenOptions()
    assert keyboard.handle_key(ScreenOptions(filter="a"), "esc", rows=1, room=1) == ScreenOptions()


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0, "0"), (0.25, "0.2"), (12.6, "13"), (1204, "1,204"), (999_999, "999,999"),
     (1_234_567, "1.2M"), (123_456_789_012, "123.5G"), (2e15, "2000.0T")],
)  # fmt: skip
def test_numbers_are_abbreviated(value: float | None, shown: str) -> None:
    assert number(value) == shown
    assert len(shown) <= 7


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0000321, "32us"),
        (0.0123, "12ms"),
        (0.75, "750ms"),
        (0.9999, "1.0s"),
        (61, "1m1s"),
    ],
)
def test_durations_are_abbreviated(value: float | None, shown: str) -> None:
    assert words.short_duration(value) == shown


def test_styles_carry_no_information_without_words() -> None:
    """Without color, the screen has the same words, so no information depends on a style."""
    lines = frame(view([replace(assignment(), paused=True)]), ScreenOptions(), 80, 24)
    styled = [cell for line in lines for cell in line if cell.style in ("warn", "bad")]

    assert Cell("PAUSED   ", "warn") in styled
    assert all(cell.text.strip() for cell in styled)


def test_unreadable_values_are_listed_above_the_table() -> None:
    """The line names one value and counts the others, so that other problems fit as well."""
    rows = [Unreadable(f"key-{n}", "epoch", "'abc'", "an integer") for n in range(5)]
    shown = text(frame(view(unreadable=rows), ScreenOptions(), 200, None))
    assert "! epoch of key-0 cannot be read: it is 'abc' and not an integer" in shown
    assert "key-1" not in shown
    assert "and 4 more values that cannot be read" in shown
