"""The vocabulary: frozen values without behaviour that every layer may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

TopicPartition = tuple[str, int]  # the name of a topic and the number of a partition
RawEntry = list[Any]  # of a stream, as Redis replies: [id, [name, value, …]]

LETTERS = "@dlq"  # ends the names of groups that read dead letters; no configured name has an @

QUERIES = "spark:"  # begins the names of groups that only show how far a Spark query has read

# What commands call themselves where they keep a unit for a moment, as an owner does.
TOPIC_GROW = "topic-grow"
KEEPERS = frozenset({TOPIC_GROW, "group-reset", "group-delete"})

LANES_MAX = 4096  # coroutines that one worker runs at a time
THREADS_MAX = 128  # threads, each with a stack of its own

# Entries that one worker has in flight at most: two streams x 256, and those that run. Every table,
# list and argument that must take all of them is as long as this.
FETCHED_MAX = 2 * 256
ENTRIES_MAX = FETCHED_MAX + LANES_MAX

# What happens to a message that is to be tried again: `on_error`.
REQUEUE, BLOCK, HOLD_KEY = "requeue", "block", "hold-key"
BATCHED, EACH = "batched", "each"  # how messages are acknowledged


class Uid(str):
    """The uid of one message, `topic/partition/id`: a string with the three parts as attributes.

    `id` is the entry ID, or for a delayed send its send ID. `partition` is the number, and not the
    method of a string.
    """

    __slots__ = ()

    @property
    def topic(self) -> str:
        """The topic that the message was sent to."""
        return self.split("/", 1)[0]

    @property
    def partition(self) -> int:  # type: ignore[override]
        """The number of the partition that the message was sent to."""
        return int(self.split("/", 2)[1])

    @property
    def id(self) -> str:
        """The entry ID, such as `1700000000000-0`, or the send ID of a delayed send."""
        return self.split("/", 2)[2]


class Unit(NamedTuple):
    """The unit of ownership: one partition of a topic, or its dead letters, as one group sees it.

    The group of dead letters is the configured name with `@dlq` behind it.
    """

    topic: str
    partition: int
    group: str

    @property
    def reads_letters(self) -> bool:
        """Whether it is the dead letters of the partition that the group reads."""
        return self.group.endswith(LETTERS)

    @property
    def is_of_query(self) -> bool:
        """Whether it is the position of a Spark query: no instance ever owns it."""
        return self.group.startswith(QUERIES)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.group}"


class Lease(NamedTuple):
    """The right to settle a unit's messages: whoever shows `token` has it, while the fence does.

    `epoch` counts the owners of the unit; 0 where nobody has to know it.
    """

    unit: Unit
    token: str  # '' for none
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a failed message waits. Durations in seconds."""

    kind: str = "exponential"  # fixed | linear | exponential
    base: float = 1.0
    max: float = 300.0
    jitter: str = "full"  # full | none


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a message is tried again and when it is dead. Counts are total handler runs.

    `max_attempts` and `max_crashes` 0 mean forever. `max_age` in seconds since the first write:
    what fails when it is older is dead. `retry_on` and `dead_on` are exception classes, or their
    names: what is in neither is tried again when `retry_on` is empty. `on_error` is where a message
    waits for its next run: requeue, block or hold-key.
    """

    max_attempts: int = 5
    max_crashes: int = 3
    backoff: Backoff = Backoff()
    max_age: float | None = None
    retry_on: tuple[str | type[BaseException], ...] = ()
    dead_on: tuple[str | type[BaseException], ...] = ()
    on_error: str = REQUEUE


# --- how a handler run ended -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised, or overran its soft time limit.

    `lineage` holds the qualified and bare names of the exception's class and its bases, most
    derived first, so that policies can name a base class.
    """

    error_class: str
    message: str
    traceback: str
    lineage: tuple[str, ...]
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class RetryAsked:
    """The handler raised `Retry`. `after` in seconds; None = the policy's backoff."""

    after: float | None
    failure: Failed


@dataclass(frozen=True, slots=True)
class DeadAsked:
    """The handler raised `Dead`, or its payload could not be decoded."""

    reason: str  # dead | undecodable
    failure: Failed


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """The handler raised `Release`: it could not handle the message now, whatever the message."""


Outcome = Succeeded | Failed | RetryAsked | DeadAsked | ReleaseAsked


# --- what is done with the message ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ack:
    """The message is done."""


class RetryVerdict(NamedTuple):
    """The message runs again in `delay` seconds.

    `in_place`: it stays pending in its worker, and nothing that its order covers passes it. Else it
    waits in the delayed set, and others pass it.
    """

    delay: float
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class DeadVerdict:
    """The message is moved to the dead-letter stream. `reason` is a stable word."""

    # dead | undecodable | attempts | crashes | too-old | not-retried. A message that is too-large
    # or cancelled needs no verdict: all words are in `dead_letter.REASONS`.
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseVerdict:
    """The message stays pending, and no attempt is spent.

    `in_place` as in `RetryVerdict`. Else the next listing of what is pending brings it back.
    """

    in_place: bool = False


Verdict = Ack | RetryVerdict | DeadVerdict | ReleaseVerdict
