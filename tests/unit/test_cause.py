"""The reason why a partition makes no progress: which fact comes first, and the sentence for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from streamqd.admin.assignments import AssignmentRow, RecentFailure, published_rows
from streamqd.admin.instances import InstanceRow
from streamqd.admin.why import WaitFacts, causes
from streamqd.model import Assignment
from streamqd.store.directives import Directive, Directives, Scope, parse_scope

NOW = 1_795_000_000_000
ASSIGNMENT = Assignment("access", 3, "hits")
OFFERS = frozenset({("access", "hits")})
WEST = InstanceRow("west", "working", "h", "1", NOW, NOW, True, True, 4, 0.0, offers=OFFERS)
EAST = replace(WEST, instance="east")
STOP = Directives(stops={Scope("access", None, "hits"): Directive(1000, "alice", "wrong prices")})
PAUSES = {Scope("access"): Directive(1000, "alice", "the disk")}
PAUSE = Directives(pauses=PAUSES)
MEASURED: dict[str, Any] = {
    "lease": "owned",
    "owner": "west",
    "lag": 100,
    "pending": 2,
    "waiting_retries": 0,
    "oldest_unix_ms": NOW - 50_000,
    "oldest_unread_unix_ms": NOW - 50_000,
}


def worker(**more: Any) -> AssignmentRow:
    raw = {"topic": "access", "partition": 3, "group": "hits", "state": "ready", "epoch": 7}
    return published_rows("west", {"assignments": [raw | more]})[0]


def recent_failure(error: str = "builtins.OSError", ago: float = 3.0) -> RecentFailure:
    return RecentFailure(error, 9, ago, "access", 3, "hits", "west")


def facts(
    members: Sequence[InstanceRow] = (WEST, EAST),
    worker: AssignmentRow | None = worker(),  # noqa: B008 (a frozen value)
    control: Directives = Directives(),  # noqa: B008 (not changed)
    other_clients: dict[str, int] | None = None,
    shown_seconds: float | None = None,
    **more: Any,
) -> WaitFacts:
    """Return known facts, with changes to the row of the assignment."""
    row = replace(worker or AssignmentRow(*ASSIGNMENT), **MEASURED | more)
    row = replace(
        row,
        paused=control.find_pause(row.assignment) is not None,
        stopped=control.find_stop(row.assignment) is not None,
    )
    by_name = {each.instance: each for each in members}
    return WaitFacts(row, NOW, control, by_name, other_clients or {}, shown_seconds)


READ: dict[str, Any] = {"lag": 0, "oldest_unread_unix_ms": None}
FREE: dict[str, Any] = {"lease": "free", "owner": "", "worker": None}
QUERY: dict[str, Any] = {**FREE, "lease": "query", "group": "spark:etl"}
MOVING = worker(rates={"acked": 10.0, "failed": 0.0}, lag_per_second=-4.0)

CASES = [
    ("idle", True, facts(**READ, pending=0), "no messages waiting"),
    ("moving", True, facts(worker=MOVING), "10.0 messages/s on west"),
    ("moving", True, facts(worker=MOVING), "caught up in about 25 s"),
    (
        "lag-growing",
        True,
        facts(worker=worker(rates={"acked": 10.0}, lag_per_second=3.0, mean_seconds=0.25)),
        "growing by 3.0/s, while west handles 10.0 messages/s, and a run takes 250ms",
    ),
    (
        "lag-growing",  # because the server cannot count the lag
        True,
        facts(worker=worker(rates={"acked": 10.0}, arriving=12.0), lag=None, lag_at_least=1_500),
        "lags: 1,500 or more unread",
    ),
    (
        "lagging",
        True,
        facts(worker=MOVING, oldest_unread_unix_ms=NOW - 90_000),
        "lags: 100 unread",
    ),
    (
        "lagging",
        True,
        facts(worker=worker(rates={"acked": 10.0}), oldest_unread_unix_ms=NOW - 90_000),
        "while west handles 10.0 messages/s",
    ),
    ("idle", True, facts(**QUERY, **READ, pending=0), "has read all messages"),
    ("moving", True, facts(**QUERY, shown_seconds=4.0), "reported its position 4 s ago"),
    (
        "query-silent",
        False,
        facts(**QUERY, shown_seconds=90.0),
        "not reported its position for 90 s",
    ),
    ("query-silent", False, facts(**QUERY), "for an unknown time"),
    ("paused", False, facts(control=PAUSE), "is paused by alice (the disk)"),
    (
        "paused",
        False,
        facts(control=PAUSE, **READ, pending=0),
        "access/*/*",
    ),
    ("paused", False, facts(members=(replace(WEST, state="paused"),)), "by a signal"),
    ("paused", False, facts(worker=worker(state="paused")), "the worker"),
    ("no-instance", False, facts(**FREE, members=()), "no instance of the fleet is live"),
    ("no-instance", False, facts(**FREE, members=(replace(WEST, state="silent"),)), "no instance"),
    (
        "no-capacity",
        False,
        facts(**FREE, members=(replace(WEST, cap=4, capacity=4, limit="no files left"),)),
        "refuses more processes (west runs 4: no files left)",
    ),
    (
        "no-capacity",
        False,
        facts(
            worker=worker(state="booting"),
            members=(replace(WEST, capacity=4, limit="no files left"),),
        ),
        "will release it soon",
    ),
    (
        "no-consumer",
        False,
        facts(**FREE, members=(replace(WEST, offers=frozenset()),)),
        "none of 1 live instance has a consumer of access/hits",
    ),
    (
        "crash-loop",
        False,
        facts(
            **FREE,
            members=(replace(WEST, broken=frozenset({ASSIGNMENT})),),
            failures=(recent_failure("process x"),),
        ),
        "crashes in a loop on west and is backing off; last: process x, 3 s ago",
    ),
    (
        "crash-loop",
        False,
        facts(worker=worker(state="broken")),
        "crashes in a loop",
    ),
    (
        "drained",
        False,
        facts(
            **FREE,
            control=Directives(drains={"west": Directive(1000, "", "")}),
            members=(WEST, replace(EAST, leaving=True)),
        ),
        "drained or leaving (west, east)",
    ),
    (
        "max-partitions",
        False,
        facts(**FREE, members=(replace(WEST, cap=4), replace(EAST, cap=3, owned=4))),
        "west 4 of 4, east 4 of 3",
    ),
    ("changing-hands", False, facts(**FREE, members=(replace(WEST, cap=5),)), "west can take it"),
    (
        "owner-silent",
        False,
        facts(
            lease="expired",
            members=(replace(WEST, state="silent", heartbeat_unix_ms=NOW - 40_000), EAST),
        ),
        "has been silent for 40 s",
    ),
    (
        "owner-silent",
        False,
        facts(members=(replace(WEST, state="silent", heartbeat_unix_ms=NOW - 40_000), EAST)),
        "has been silent for 40 s",
    ),
    ("no-report", False, facts(worker=None), "has not published its state"),
    ("growing", False, facts(owner="topic-grow", worker=None), "access is growing"),
    (
        "slow-handler",
        False,
        facts(worker=worker(longest_run_seconds=75.0, running="m:5-0")),
        "working on one message (access/3/5-0) for 75 s; 100 unread and 2 pending",
    ),
    (
        "slow-handler",
        False,
        facts(worker=worker(longest_run_seconds=75.0, progress_seconds=3.2)),
        "one message for 75 s (it reported progress 3 s ago); 100 unread",
    ),
    (
        "slow-handler",
        False,
        facts(worker=worker(longest_run_seconds=1013.0), oldest_unix_ms=NOW - 11_100_000),
        "for 16 min 53 s; 100 unread and 2 pending, the oldest 3 h 5 min old",
    ),
    (
        "crashing",
        False,
        facts(
            worker=worker(state="booting"),
            failures=(recent_failure("process terminated with exit code 3"),),
        ),
        "keeps crashing (process terminated with exit code 3, 3 s ago)",
    ),
    (
        "failing",
        False,
        facts(worker=worker(rates={"acked": 1.0, "failed": 3.0}), failures=(recent_failure(),)),
        "75% of the runs of access/3/hits fail; last: builtins.OSError",
    ),
    (
        "failing",
        False,
        facts(
            **READ,
            pending=0,
            worker=worker(rates={"acked": 0.0, "failed": 3.0}, dead_letters=5),
            failures=(recent_failure(),),
        ),
        "fail, and the messages are dead-lettered without another attempt (3.0 runs/s); last:",
    ),
    (
        "blocked",
        False,
        facts(worker=worker(state="blocked", waits_seconds=12.0), failures=(recent_failure(),)),
        "which failed, next attempt in 12 s; last: builtins.OSError, 3 s ago",
    ),
    (
        "circuit-open",
        False,
        facts(worker=worker(state="halted", waits_seconds=3.0)),
        "of access/3/hits is open on west, so no message runs",
    ),
    (
        "running",
        True,
        facts(worker=worker(longest_run_seconds=4.0, running="r:5-0")),
        "has been running one message (r:5-0) on west for 4 s; 100 unread and 2 pending",
    ),
    (
        "stopped",
        False,
        facts(**FREE, control=STOP),
        "is stopped by alice (wrong prices)",
    ),
    (
        "stopped",
        False,
        facts(control=replace(STOP, pauses=PAUSES), **READ, pending=0),
        "is stopped",
    ),
    (
        "circuit-open",
        False,
        facts(worker=worker(state="probing")),
        "is half-open on west: one message runs as a probe",
    ),
    ("flood", False, facts(worker=worker(state="flooded")), "has stopped access/3/hits on west"),
    (
        "keys-held",
        False,
        facts(worker=worker(state="full", held=1000, held_keys=7)),
        "holds 1,000 messages of 7 held keys, the maximum, and fetches no more",
    ),
    (
        "keys-held",
        False,
        facts(
            **READ,
            worker=worker(rates={"acked": 9.0}, held=2, held_keys=1),
        ),
        "holds 2 messages of one held key",
    ),
    (
        "moving",
        True,
        facts(worker=worker(rates={"acked": 9.0}, held=2, held_keys=1)),
        "makes progress",
    ),
    ("quarantine", False, facts(quarantine=True), "in rounds"),
    (
        "recovering",
        True,
        facts(
            quarantine=True,
            worker=worker(state="recovering", suspects_left=37, suspects=128, round_size=16),
        ),
        "is recovering on west: 37 of 128 suspects left, round of 16",
    ),
    (
        "recovering",
        True,
        facts(worker=worker(state="recovering", suspects_left=1, suspects=1280, round_size=0)),
        "1 of 1,280 suspects left",
    ),
    (
        "redis-unavailable",
        False,
        facts(members=(replace(WEST, redis_up=False),)),
        "cannot reach Redis",
    ),
    ("other-client", False, facts(other_clients={"bob": 4}), "'bob' holds 4 messages"),
    (
        "waiting-for-retry",
        False,
        facts(**READ, pending=0, waiting_retries=2, next_due_unix_ms=NOW + 8_000),
        "access/3/hits has 2 messages waiting for a retry, the next in 8 s",
    ),
    ("starting", False, facts(worker=worker(state="booting")), "its worker is booting"),
    ("no-progress", False, facts(), "no message was acknowledged in the last 5 seconds"),
]


@pytest.mark.parametrize(
    ("word", "moves", "known", "part"), CASES, ids=[f"{at}-{c[0]}" for at, c in enumerate(CASES)]
)
def test_cause_and_progress_are_derived_from_the_facts(
    word: str, moves: bool, known: WaitFacts, part: str
) -> None:
    first = causes(known)[0]

    assert (first.word, first.moves) == (word, moves)
    assert part in first.sentence
    assert first.advice or moves


def test_dominant_cause_is_listed_first() -> None:
    known = facts(
        control=PAUSE,
        worker=worker(longest_run_seconds=75.0),
        other_clients={"bob": 1},
        failures=(recent_failure(),),
    )

    words = [each.word for each in causes(known)]

    assert words == ["paused", "slow-handler", "other-client"]


def test_stopped_group_still_lists_other_clients() -> None:
    known = facts(
        **FREE,
        control=replace(STOP, pauses=PAUSES),
        members=(),
        other_clients={"bob": 1, "eve": 2, "": 3},
    )

    found = causes(known)

    assert [each.word for each in found] == ["stopped", "unowned", "other-client"]
    assert "'bob' holds 1 message and 'eve' holds 2 messages" in found[2].sentence


def test_cause_ignores_old_failures() -> None:
    known = facts(
        worker=worker(state="booting"),
        failures=(recent_failure("process terminated with exit code 3", 301.0),),
    )

    assert causes(known)[0].word == "starting"


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({"waiting_retries": 10_000}, "`streamqd retry list access hits`"),
        ({"worker": worker(rates={"failed": 3.0}, dead_letters=2)}, "`streamqd dlq stats"),
        ({}, "fix the handler or its dependency"),
    ],
)
def test_failing_cause_names_the_command_for_its_messages(
    more: dict[str, Any], advice: str
) -> None:
    """Without dead letters, the advice is not `dlq stats`, even if 10,000 messages are waiting."""
    (cause, *_others) = causes(facts(**{"worker": worker(rates={"failed": 3.0})} | more))

    assert cause.word == "failing"
    assert advice in cause.advice
    assert ("dlq stats" in cause.advice) == ("dlq stats" in advice)


def test_open_circuit_names_only_failures_that_open_it() -> None:
    """A Retry is not named, even if it was the last failure, because it never opens the circuit."""
    mixed = (recent_failure("shop.BankDown", 9.0), recent_failure("streamqd.handlers.Retry", 1.0))

    (cause, *_others) = causes(facts(worker=worker(state="halted"), failures=mixed))

    assert "last: shop.BankDown, 9 s ago" in cause.sentence


@pytest.mark.parametrize(
    ("scope", "argument"),
    [
        ("*/*/*", "--all"),
        ("access/*/*", "access"),
        ("access/*/hits", "access/hits"),
        ("access/3/*", "access --partition 3"),
        ("access/3/hits", "access/3/hits"),
    ],
)
def test_cause_of_a_pause_advises_the_resume_command(scope: str, argument: str) -> None:
    (cause, *_others) = causes(
        facts(control=Directives(pauses={parse_scope(scope): PAUSES[Scope("access")]}))
    )
    assert cause.advice == f"`streamqd resume {argument}`"
