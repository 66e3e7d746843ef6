"""Messages on their way: those of one transaction, and which of them wait for room."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from streamqd.errors import BacklogFull
from streamqd.producer.carrier import Chunk

BACKLOG_PAUSES = (0.02, 0.05, 0.1, 0.25)  # seconds between looks for room; the last one repeats

Result = str | Exception  # of one message: its id, or why there is none
NOT_YET = BacklogFull("not tried yet")  # nobody is told so: it waits behind others


@dataclass(eq=False)
class PendingSend:
    """Messages that are written together, of which some may wait for room until `deadline`.

    It is `open` while some do; the next look for room is due at `look_at`. Times are monotonic;
    the deadline is set when it is first tried.
    """

    chunk: Chunk
    spans: list[tuple[int, int, Exception | None]]  # of the batches
    results: list[Result]
    deadline: float = 0.0
    looks: int = 0
    look_at: float = 0.0
    open: bool = True
    waiting: list[int] = field(default_factory=list)  # numbers of messages
    partitions: frozenset[int] = frozenset()  # of those that wait
    unsettled: frozenset[int] = frozenset()  # numbers of their batches

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.results)))

    def plan(self) -> None:
        """After an attempt: note what waits still, and when the next one is due."""
        full = [at for at in self.waiting if isinstance(self.results[at], BacklogFull)]
        now = time.monotonic()
        self.open = bool(full) and now < self.deadline
        self.waiting = full if self.open else []
        if not full:
            return
        partitions = self.chunk.partitions
        if not self.open:
            for at in full:
                if self.results[at] is NOT_YET:
                    self.results[at] = _no_room(self.chunk.topic, partitions[at])
        waiting = set(self.waiting)
        self.partitions = frozenset(partitions[at] for at in waiting)
        self.unsettled = frozenset(
            number
            for number, (begin, end, _) in enumerate(self.spans)
            if not waiting.isdisjoint(range(begin, end))
        )
        pause = BACKLOG_PAUSES[min(self.looks, len(BACKLOG_PAUSES) - 1)]
        self.look_at = min(self.deadline, now + pause)
        self.looks += 1

    def give_up(self) -> None:
        """Wait no more: what has found no room has BacklogFull as its result."""
        self.deadline = 0.0
        self.plan()

    def fail(self, error: Exception) -> None:
        """Wait no more: an error is the result of what waits."""
        for at in self.waiting:
            self.results[at] = error
        self.plan()

    def answer(self, number: int) -> list[Result]:
        """The results of a batch."""
        begin, end, failure = self.spans[number]
        return self.results[begin:end] + ([] if failure is None else [failure])


class Ahead:
    """Postings one behind the other, of which the next can be made before it is asked for."""

    def __init__(self, postings: Iterator[PendingSend]) -> None:
        self._postings = postings
        self._made: PendingSend | Exception | None = None

    def __iter__(self) -> Iterator[PendingSend]:
        return self

    def __next__(self) -> PendingSend:
        self.fetch()
        made, self._made = self._made, None
        if isinstance(made, PendingSend):
            return made
        assert made is not None
        raise made

    def fetch(self) -> None:
        """Make the next one now. What goes wrong is raised where it is asked for."""
        if self._made is None:
            try:
                self._made = next(self._postings)
            except Exception as error:  # noqa: BLE001 - it may come from the items
                self._made = error


def _no_room(topic: str, partition: int) -> BacklogFull:
    return BacklogFull(
        f"messages of this producer wait for room in {topic}/{partition}; one behind them was not"
        " sent"
    )
