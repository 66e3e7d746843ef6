"""The data that an instance exports: its scoreboard, and the figures that it measured in Redis.

Both the summary and the metrics are built from this data, and use the functions in this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

from streamqd.idle_reason import Wait, Waiting
from streamqd.model import Assignment
from streamqd.scoreboard import RunningEntry, Scoreboard, WorkerSlot, now_ns
from streamqd.store.outbox import OutboxView
from streamqd.store.statistics import AssignmentFigures, DeadLetterCount, PartitionFigures

Labels = tuple[str, ...]


@dataclass
class MetricsView:
    """The figures that an instance exports.

    The housekeeper updates the view while its HTTP thread reads it. Mappings are therefore always
    replaced as a whole and never changed in place. The tally is protected by a lock instead.
    """

    instance: str
    board: Scoreboard
    consumers: tuple[tuple[str, str], ...] = ()  # all configured pairs of a topic and a group
    partitions: Mapping[tuple[str, int], PartitionFigures] = field(default_factory=dict)
    assignments: Mapping[Assignment, AssignmentFigures] = field(default_factory=dict)
    dead_letters: Mapping[tuple[str, int], DeadLetterCount] = field(default_factory=dict)
    outboxes: tuple[OutboxView, ...] = ()  # configured outboxes, with the state from their relays
    _tally: dict[str, dict[Labels, int]] = field(
        default_factory=dict
    )  # counts of the housekeeper's own work
    _tally_lock: Lock = field(default_factory=Lock)
    # For each partition, the group because of which its oldest entry cannot be trimmed, and the
    # time of that entry.
    held: Mapping[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    server_unix_ms: int = 0  # time of the server's clock when it was last read
    asked_ns: int = 0  # local time when it was last read, 0 if it never was
    measured_ns: int = 0  # local time of the last measurement, 0 if there was none
    redis_up: bool = False

    def owned_slots(self) -> list[tuple[WorkerSlot, Assignment]]:
        """Return the slots whose assignments this instance owns."""
        slots = [slot for slot in self.board.slots() if slot.owned]
        return [(slot, assignment) for slot in slots if (assignment := slot.assignment) is not None]

    def assigned_slots(self) -> Iterator[tuple[WorkerSlot, Assignment]]:
        """Yield the slots of all assignments that this instance owns or has owned."""
        for slot in self.board.slots():
            assignment = slot.assignment
            if assignment is not None:
                yield slot, assignment

    def count(self, name: str, labels: Labels, amount: int = 1) -> None:
        """Add `amount` to a count of the housekeeper's own work."""
        with self._tally_lock:
            counts = self._tally.setdefault(name, {})
            counts[labels] = counts.get(labels, 0) + amount

    def tally(self, name: str) -> dict[Labels, int]:
        """Return a copy of the values of one count of the housekeeper's own work, by labels."""
        with self._tally_lock:
            return dict(self._tally.get(name, {}))

    def age(self, at_unix_ms: int | None) -> float:
        """Return the seconds since a time of the server's clock, or 0 if the time is None."""
        if at_unix_ms is None:
            return 0.0
        return max(0.0, (self.now_unix_ms() - at_unix_ms) / 1000)

    def now_unix_ms(self) -> int:
        """Return an estimate of the server's current time."""
        return self.server_unix_ms + (now_ns() - self.asked_ns) // 1_000_000


def read_wait(slot: WorkerSlot) -> Waiting:
    """Return the reason why a worker starts no run at present.

    If there is no process, the result contains no reason and no held messages, but still the total
    numbers of openings and floods.
    """
    found = slot.waits.read()
    if slot.pid:
        return found
    return found._replace(kind=Wait.NOTHING, until_ns=0, held=0, held_keys=0)


def longest_run(slot: WorkerSlot) -> RunningEntry | None:
    """Return the message of a worker that has been running longest, or None if none is running."""
    started = (each for each in slot.running if each.started_ns)
    return min(started, key=lambda each: each.started_ns, default=None)


def seconds_since(at_ns: int) -> float:
    """Return the seconds since a time of the `now_ns` clock. The result is at least 0."""
    return max(0.0, (now_ns() - at_ns) / 1e9)
