"""A chunk of messages that are written together, their results, and their wait for room."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.errors import BacklogFullError, RedisUnavailableError
from streamqd.model import Uid
from streamqd.producer.encoding import Envelope
from streamqd.store.publishing import Transaction
from streamqd.store.scripts import Call

BACKLOG_PAUSES = (0.02, 0.05, 0.1, 0.25)  # seconds between checks for room, the last one repeats

Result = Uid | Exception  # the result of one message: its uid or its error
NOT_YET = BacklogFullError("not tried yet")  # internal: the message must wait for earlier ones


@dataclass(slots=True, eq=False)
class EarlierChunks:
    """The chunks of one topic that have waited for room longer than a given chunk."""

    counts: set[int] = field(default_factory=set)  # partition counts with which they were routed
    partitions: set[int] = field(default_factory=set)  # the partitions with waiting messages

    def add(self, chunk: Chunk) -> None:
        """Add a chunk that is waiting for room."""
        self.counts.add(chunk.count)
        self.partitions |= chunk.full_partitions()


@dataclass(slots=True, eq=False)
class Chunk:
    """Messages of one kind for one topic, in one transaction, routed with one partition count.

    A chunk consists of batches, each of which gets the results of its own messages. While messages
    wait for room, `check_at` is the time of the next check, and `deadline` that of the last one
    (seconds, monotonic).
    """

    topic: str
    count: int = 0  # partition count with which they were routed
    envelopes: list[Envelope] = field(default_factory=list)
    partitions: list[int] = field(default_factory=list)  # the partition of each message
    # For each batch: its start, its end, and the error of the message at which it stopped, or None.
    batches: list[tuple[int, int, Exception | None]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # the script calls that write the messages
    numbers: list[Sequence[int]] = field(default_factory=list)  # the message numbers of each call
    commands: list[Any] = field(default_factory=list)  # the calls in the writer's format
    transaction: Transaction | None = None  # the transaction, if it has already been sent
    results: list[Result] = field(default_factory=list)
    waiting: Sequence[int] = ()  # numbers of the messages that are waiting
    since: float = field(default_factory=time.monotonic)  # start of the time limit
    deadline: float | None = None  # set at the first attempt
    checks: int = 0
    check_at: float = 0.0
    is_blocked: bool = False  # True if all waiting messages must wait for earlier chunks

    def subset(self, numbers: Sequence[int]) -> Chunk:
        """Return a chunk with only these messages, given by their numbers in this chunk."""
        if len(numbers) == len(self.envelopes):
            return self
        envelopes = [self.envelopes[at] for at in numbers]
        partitions = [self.partitions[at] for at in numbers]
        return Chunk(self.topic, self.count, envelopes, partitions, since=self.since)

    def begin(self) -> None:
        """Reset the results, so that all messages are waiting for their first attempt."""
        self.results = [NOT_YET] * len(self.envelopes)
        self.waiting = range(len(self.envelopes))

    def settle(self, numbers: Sequence[int], found: list[Result]) -> None:
        """Store the results of an attempt.

        After the first attempt, a message keeps waiting for room even if Redis is unavailable.
        """
        if not self.checks and len(found) == len(self.results):
            self.results = found
            return
        for at, result in zip(numbers, found, strict=True):
            unsent = isinstance(result, RedisUnavailableError) and not result.sent
            if not (unsent and self.checks):
                self.results[at] = result

    def plan(self) -> None:
        """Determine which messages are still waiting, and when to try again.

        Call this after an attempt.

        If all of them wait for earlier chunks, the next attempt is made when those have found room,
        or at the deadline.
        """
        full = [at for at in self.waiting if isinstance(self.results[at], BacklogFullError)]
        self.waiting = full
        if not full:
            return
        now, deadline = time.monotonic(), self.deadline or 0.0
        if now < deadline and self.is_blocked:
            self.check_at, self.checks = deadline, max(1, self.checks)
            return
        if now < deadline:
            pause = BACKLOG_PAUSES[min(self.checks, len(BACKLOG_PAUSES) - 1)]
            self.check_at = min(deadline, now + pause)
            self.checks += 1
            return
        self.waiting = ()
        for at in full:
            if self.results[at] is NOT_YET:
                self.results[at] = BacklogFullError(
                    "messages of this producer wait for room in"
                    f" {self.topic}/{self.partitions[at]}, so a later message was not sent; send it"
                    " again later"
                )

    def give_up(self) -> None:
        """Stop waiting. The result of messages that found no room becomes BacklogFullError."""
        self.deadline = 0.0
        self.plan()

    def fail(self, error: Exception) -> None:
        """Stop waiting. The result of all messages that are still waiting becomes `error`."""
        for at in self.waiting:
            self.results[at] = error
        self.waiting = ()

    def full_partitions(self) -> set[int]:
        """Return the partitions that have waiting messages."""
        return {self.partitions[at] for at in self.waiting}

    def waits(self, number: int) -> bool:
        """Return True if a message of this batch is waiting for room."""
        begin, end, _ = self.batches[number]
        at = bisect_left(self.waiting, begin)
        return at < len(self.waiting) and self.waiting[at] < end

    def answer(self, number: int) -> list[Result]:
        """Return a batch's results, including the error of the message at which it stopped."""
        begin, end, failure = self.batches[number]
        return self.results[begin:end] + ([] if failure is None else [failure])
