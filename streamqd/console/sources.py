"""The known sources of topics, which are schedules and outboxes.

Other programs and handlers that send messages are not known, because a message does not contain its
sender.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from streamqd.admin import outboxes
from streamqd.admin.reading import ViewReader
from streamqd.admin.schedules import MISSING, ScheduleRow

PAIRS_MAX = 2_000  # pairs of a topic and an outbox that one read examines at most
SCHEDULE, OUTBOX = "schedule", "outbox"


@dataclass(frozen=True, slots=True)
class TopicSource:
    """A schedule or an outbox that sends to a topic.

    `sent` is the number of messages that a schedule has sent. For an outbox, it is the number of
    rows that its relay has sent to all topics since it started. `state` is the state of the
    schedule, or "relayed" or "waiting" for an outbox. `due_unix_ms` is the schedule's next tick, or
    None if there is none.
    """

    kind: str
    name: str
    topic: str
    sent: int
    state: str
    due_unix_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of each topic. `left_out` is the number of outboxes that were not examined."""

    by_topic: dict[str, list[TopicSource]]
    left_out: int = 0


NO_SOURCES = Sources({})


def read(
    reader: ViewReader,
    topics: Sequence[str],
    schedules: Iterable[ScheduleRow],
    configured: Collection[str],
) -> Sources:
    """Return the sources of the topics.

    `configured` holds the names of the outboxes in the configuration file.
    """
    found: dict[str, list[TopicSource]] = {}
    for row in schedules:
        if row.state != MISSING:
            source = TopicSource(
                *(SCHEDULE, row.name, row.topic, row.fired, row.state, row.due_unix_ms)
            )
            found.setdefault(row.topic, []).append(source)
    views = outboxes.read(reader, configured)
    some = views[: PAIRS_MAX // max(1, len(topics))]
    for topic, known in outboxes.read_senders(reader, some, topics).items():
        for each in known:
            state = "relayed" if each.relayed else "waiting"
            source = TopicSource(OUTBOX, each.name, topic, each.sent, state)
            found.setdefault(topic, []).append(source)
    return Sources(found, len(views) - len(some))
