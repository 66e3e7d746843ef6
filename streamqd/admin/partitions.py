"""The view of `streamqd partitions`: the owner and the backlog of each assignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamqd.admin import named_fields, snapshot
from streamqd.admin.assignments import AssignmentRow, measure_assignments
from streamqd.admin.reading import Unreadable, ViewReader, server_unix_ms
from streamqd.store.store import Store

_FIELDS = (
    "topic partition group state owner epoch since_unix_ms lag pending waiting_retries"
    " oldest_unix_ms oldest_unread_unix_ms"
)


@dataclass(frozen=True, slots=True)
class PartitionsView:
    """The assignments of the selected topics.

    `idle_topics` contains the topics that no group reads. `unreadable` lists invalid values in
    Redis. An invalid number is treated as missing.
    """

    now_unix_ms: int
    assignments: list[AssignmentRow]
    idle_topics: list[str]
    unreadable: list[Unreadable]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        rows = [named_fields(each, _FIELDS, state=each.lease) for each in self.assignments]
        return named_fields(
            self, "now_unix_ms assignments idle_topics unreadable", assignments=rows
        )


def view(
    store: Store,
    topic: str | None = None,
    group: str | None = None,
    partition: int | None = None,
) -> PartitionsView:
    """Return the assignments of a topic, group and partition, each of which is None for all.

    To select a partition, also select a topic. Raises TopicNotFoundError and RequestRefusedError.
    """
    reader, now = ViewReader(store), server_unix_ms(store.connection)
    _, groups, assignments = snapshot.select_assignments(reader, topic, group, partition)
    rows = measure_assignments(reader, assignments, now)
    idle = [name for name, some in groups.items() if not some]
    return PartitionsView(now, rows, idle, reader.rows)
