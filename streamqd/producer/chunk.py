"""Messages that are written together, the result of each, and which of them wait for room."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.errors import BacklogFull, RedisUnavailable
from streamqd.model import Uid
from streamqd.producer.encoding import Envelope
from streamqd.store.publishing import Transaction
from streamqd.store.scripts import Call

BACKLOG_PAUSES = (0.02, 0.05, 0.1, 0.25)  # seconds between looks for room; the last one repeats

Result = Uid | Exception  # of one message: its uid, or why there is none
NOT_YET = BacklogFull("not tried yet")  # no caller sees it: the message waits behind others


@dataclass(slots=True, eq=False)
class Ahead:
    """The chunks of one topic that wait for room ahead of another one."""

    counts: set[int] = field(default_factory=set)  # the partition counts by which they are routed
    partitions: set[int] = field(default_factory=set)  # for which their messages wait

    def add(self, chunk: Chunk) -> None:
        """Note a chunk that waits."""
        self.counts.add(chunk.count)
        self.partitions |= chunk.full_partitions()


@dataclass(slots=True, eq=False)
class Chunk:
    """Messages of one kind to one topic, in one transaction, routed by one partition count.

    They come in batches; each batch gets the results of its own messages. While messages wait for
    room, the next look is due at `look_at`, and the last one at `deadline` (monotonic times).
    """

    topic: str
    count: int = 0  # the partition count by which they are routed
    envelopes: list[Envelope] = field(default_factory=list)
    partitions: list[int] = field(default_factory=list)  # where each goes
    # Of each batch its begin and end, and the error of the message that ended it.
    batches: list[tuple[int, int, Exception | None]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of scripts, that write them
    numbers: list[Sequence[int]] = field(default_factory=list)  # of each call: its messages
    commands: list[Any] = field(default_factory=list)  # the calls as the writer takes them
    transaction: Transaction | None = None  # one that was sent ahead
    results: list[Result] = field(default_factory=list)
    waiting: Sequence[int] = ()  # numbers of messages
    since: float = field(default_factory=time.monotonic)  # when its time limit started
    deadline: float | None = None  # set at the first attempt
    looks: int = 0
    look_at: float = 0.0
    behind: bool = False  # all that waits here waits for messages ahead

    def part(self, numbers: Sequence[int]) -> Chunk:
        """Some of the messages, to be written by themselves."""
        if len(numbers) == len(self.envelopes):
            return self
        envelopes = [self.envelopes[at] for at in numbers]
        partitions = [self.partitions[at] for at in numbers]
        return Chunk(self.topic, self.count, envelopes, partitions, since=self.since)

    def begin(self) -> None:
        """All messages wait for their first attempt."""
        self.results = [NOT_YET] * len(self.envelopes)
        self.waiting = range(len(self.envelopes))

    def settle(self, numbers: Sequence[int], found: list[Result]) -> None:
        """Note the results of an attempt. Later on a message also waits for Redis to be there."""
        if not self.looks and len(found) == len(self.results):
            self.results = found
            return
        for at, result in zip(numbers, found, strict=True):
            unsent = isinstance(result, RedisUnavailable) and not result.sent
            if not (unsent and self.looks):
                self.results[at] = result

    def plan(self) -> None:
        """After an attempt: note what still waits, and when the next one is due.

        If all of it waits for messages ahead, that is when those have found room, or the deadline.
        """
        full = [at for at in self.waiting if isinstance(self.results[at], BacklogFull)]
        self.waiting = full
        if not full:
            return
        now, deadline = time.monotonic(), self.deadline or 0.0
        if now < deadline and self.behind:
            self.look_at, self.looks = deadline, max(1, self.looks)
            return
        if now < deadline:
            pause = BACKLOG_PAUSES[min(self.looks, len(BACKLOG_PAUSES) - 1)]
            self.look_at = min(deadline, now + pause)
            self.looks += 1
            return
        self.waiting = ()
        for at in full:
            if self.results[at] is NOT_YET:
                self.results[at] = BacklogFull(
                    f"messages of this producer wait for room in {self.topic}/"
                    f"{self.partitions[at]}; one behind them was not sent"
                )

    def give_up(self) -> None:
        """Wait no more: the result of what found no room is BacklogFull."""
        self.deadline = 0.0
        self.plan()

    def fail(self, error: Exception) -> None:
        """Wait no more: an error is the result of what waits."""
        for at in self.waiting:
            self.results[at] = error
        self.waiting = ()

    def full_partitions(self) -> set[int]:
        """The partitions for which messages wait."""
        return {self.partitions[at] for at in self.waiting}

    def waits(self, number: int) -> bool:
        """Whether a message of a batch waits for room."""
        begin, end, _ = self.batches[number]
        at = bisect_left(self.waiting, begin)
        return at < len(self.waiting) and self.waiting[at] < end

    def answer(self, number: int) -> list[Result]:
        """The results of a batch. An error behind them is about the message that ended it."""
        begin, end, failure = self.batches[number]
        return self.results[begin:end] + ([] if failure is None else [failure])
