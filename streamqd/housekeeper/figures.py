"""Read the figures for metrics, status and health from Redis."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from streamqd.errors import ContractError, RedisResponseError
from streamqd.housekeeper.batch import Refusals, Steps, Target, prepare_calls, read_all
from streamqd.isolate import Isolate, run_directly
from streamqd.logs import Once
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import now_ns
from streamqd.store import statistics
from streamqd.store.client import Connection
from streamqd.store.replies import check_replies, check_valid
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

DEAD_LETTERS_SECONDS = 0.15  # time limit for counting dead letters in one measurement

Found = TypeVar("Found")


def ask_time(link: Connection, view: MetricsView, key: str) -> None:
    """Read the server's clock into the view, so that times from Redis can be compared with it.

    This also reads `key`. A server that is still loading its data answers TIME, but it refuses to
    read a key, so that it does not count as available.
    """
    time, _ = check_replies(link.pipeline((("TIME",), ("EXISTS", key))))
    view.asked_ns = now_ns()
    view.server_unix_ms = int(time[0]) * 1000 + int(time[1]) // 1000


def measure(
    store: Store,
    view: MetricsView,
    bad: Once | None = None,
    isolate: Isolate[Assignment | tuple[str, int]] = run_directly,
) -> Steps:
    """Read the figures of all owned assignments into the view.

    This generator makes one write per step. `view.measured_ns` is set to the time at which the
    measurement started, because some figures are that old. Invalid values are reported to `bad`.
    """
    began = now_ns()
    assignments = [assignment for _, assignment in view.owned_slots()]
    places = sorted({(assignment.topic, assignment.partition) for assignment in assignments})
    refusals = Refusals()
    partitions = yield from _run_for_each(
        store,
        places,
        lambda place: statistics.measure_partition(store.keys, *place),
        lambda place, reply: statistics.partition_figures(reply, store.keys.trim(*place)),
        refusals,
        isolate,
    )
    if bad is not None:
        bad.report_values(each.bad for each in partitions.values() if each.bad is not None)
    view.assignments = yield from _run_for_each(
        store,
        assignments,
        lambda assignment: statistics.measure_assignment(store.keys, assignment),
        lambda _, reply: statistics.assignment_figures(reply),
        refusals,
        isolate,
    )
    view.dead_letters = yield from _count_dead_letters(store, view, partitions, refusals, isolate)
    view.partitions = partitions
    view.measured_ns = began
    refusals.raise_first()
    return None


def _count_dead_letters(
    store: Store,
    view: MetricsView,
    partitions: Mapping[tuple[str, int], statistics.PartitionFigures],
    refusals: Refusals,
    isolate: Isolate[tuple[str, int]],
) -> Generator[None, None, dict[tuple[str, int], statistics.DeadLetterCount]]:
    """Count the dead letters of each group, one page of each partition at a time.

    The counts of the last measurement are continued, so no dead letter is read twice. After
    DEAD_LETTERS_SECONDS, stop and leave the rest to the next measurement.
    """
    left = [place for place, figures in partitions.items() if figures.dead]
    known = {place: view.dead_letters.get(place, statistics.DeadLetterCount()) for place in left}

    def ask(place: tuple[str, int]) -> Call:
        return statistics.count_dead_letters(store.keys, *place, known[place])

    def read(place: tuple[str, int], reply: Reply) -> statistics.DeadLetterCount:
        return statistics.merge_dead_letter_count(known[place], reply)

    until = now_ns() + int(DEAD_LETTERS_SECONDS * 1e9)
    while left:
        counted = yield from _run_for_each(store, left, ask, read, refusals, isolate)
        for place in left:  # if Redis refuses the call for a partition, its count becomes unknown
            del known[place]
        known |= counted
        # If dead letters were removed in the meantime, the next measurement counts from the start.
        left = [place for place, one in counted.items() if one.after and not one.whole]
        if now_ns() >= until:
            break
    return known


def _run_for_each(
    store: Store,
    subjects: Sequence[Target],
    call: Callable[[Target], Call],
    read: Callable[[Target, Reply], Found | None],
    refusals: Refusals,
    isolate: Isolate[Target],
) -> Generator[None, None, dict[Target, Found]]:
    """Run a script that only reads for each subject, and map each subject to its result.

    `call` builds the script's call, and `read` turns the reply into a result. Subjects without a
    result are left out.
    """

    def measure_subject(subject: Target, reply: Reply | ContractError) -> Found | None:
        return read(subject, check_valid(reply))

    asked, calls = prepare_calls(subjects, call, isolate)
    replies = yield from read_all(store, calls)
    found = {
        subject: isolate(subject, measure_subject, subject, reply)
        for subject, reply in zip(asked, replies, strict=True)
        if refusals.accept(reply) and not isinstance(reply, RedisResponseError)
    }
    return {subject: each for subject, each in found.items() if each is not None}
