"""Measure the backlog of groups: figures of assignments, positions, and the number of entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from streamqd.admin.reading import ViewReader, group_names
from streamqd.model import Assignment
from streamqd.store import spark, statistics
from streamqd.store.fetch import CONSUMER
from streamqd.store.scripts import Reply
from streamqd.store.store import Store

COUNT_MAX = 200_000  # unread entries of one stream that are counted one by one
PENDING_MAX = 10_000  # pending entries of one stream that are counted one by one


def measure(
    reader: ViewReader, assignments: Sequence[Assignment]
) -> list[statistics.AssignmentFigures | None]:
    """Return the figures of each assignment, or None where `parse_figures` returns None."""
    calls = [statistics.measure_assignment(reader.keys, assignment) for assignment in assignments]
    replies = reader.measure(calls)
    return [
        parse_figures(reader, assignment, reply)
        for assignment, reply in zip(assignments, replies, strict=True)
    ]


def parse_figures(
    reader: ViewReader, assignment: Assignment, reply: Reply | None
) -> statistics.AssignmentFigures | None:
    """Parse a reply to `statistics.measure_assignment`.

    Return None if the group does not exist, or if the reply cannot be read.
    """
    return reader.figures(statistics.assignment_figures, reply, reader.keys.retry(*assignment))


def read_positions(reader: ViewReader, streams: Sequence[str]) -> dict[str, dict[str, str]]:
    """Map each stream to its groups, and each group to the ID that was last delivered to it."""
    replies = reader.ask([("XINFO", "GROUPS", stream) for stream in streams])
    return {
        stream: {
            each["name"]: each["last-delivered-id"].decode()
            for each in group_names(reader, reply, stream)
        }
        for stream, reply in zip(streams, replies, strict=True)
    }


def count_behind(store: Store, stream: str, position: str) -> tuple[int, bool]:
    """Count the entries after a position, without fetching them.

    If the second value is False, there may be more entries. Entries that are written during the
    count are left out.
    """
    newest = store.execute("XREVRANGE", stream, "+", "-", "COUNT", 1)
    if not newest:
        return 0, True
    return count_between(store, stream, position, newest[0][0].decode())


def count_between(
    store: Store, stream: str, position: str, upto: str, most: int | None = None
) -> tuple[int, bool]:
    """Count the entries after a position, up to and including `upto`.

    Counting stops at `most` entries (COUNT_MAX by default) or a few more. If the second value is
    False, there may be more entries.
    """
    most, total = most or COUNT_MAX, 0
    while total < most:
        call = spark.step(stream, position, upto, spark.STEP_MAX)
        step = spark.StreamStep.parse(store.run(call))
        total += step.passed
        position = step.last
        if not step.more:
            return total, True
    return total, position == upto


def count_other_clients(
    reader: ViewReader, assignments: Sequence[Assignment]
) -> list[dict[str, int]]:
    """Map each assignment to the other clients that hold its pending entries, with their numbers.

    Entries that no consumer holds are counted under ''.
    """
    asked = [
        ("XPENDING", stream, assignment.group)
        for assignment in assignments
        for stream in (reader.keys.source(*assignment), reader.keys.retry_stream(*assignment))
    ]
    replies = reader.ask(asked)
    return [parse_other_clients(replies[at : at + 2]) for at in range(0, len(replies), 2)]


def parse_other_clients(replies: Sequence[Any]) -> dict[str, int]:
    """Return the result of `count_other_clients` for one assignment.

    `replies` contains the XPENDING summaries of the partition's stream and of the retry stream.
    """
    found: Counter[str] = Counter()
    for reply in replies:
        clients = [(name, int(count)) for name, count in (reply[3] or ())] if reply else []
        for name, count in clients:
            if name not in (CONSUMER.encode(), b""):
                found[name.decode("utf-8", "replace")] += count
        unowned = int(reply[0]) - sum(count for name, count in clients if name) if reply else 0
        if unowned > 0:
            found[""] += unowned
    return dict(found)
