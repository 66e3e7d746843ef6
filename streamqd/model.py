"""Immutable values without behavior, which every layer may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

TopicPartition = tuple[str, int]  # topic name and partition number
RawEntry = list[Any]  # a stream entry as Redis returns it: [id, [name, value, …]]

DLQ_SUFFIX = "@dlq"  # suffix of groups that read dead letters; configured names never contain an @

QUERY_PREFIX = "spark:"  # prefix of groups that only record a Spark query's position

# Commands that own an assignment for a short time use these names as its owner.
TOPIC_GROW = "topic-grow"
KEEPERS = frozenset({TOPIC_GROW, "group-reset", "group-delete"})

LANES_MAX = 4096  # maximum number of coroutines that one worker runs at a time
THREADS_MAX = 128  # maximum number of threads in one worker, each of which has its own stack

# Maximum number of entries that one worker has in flight: 256 from each of its two streams, and the
# running ones. Every table, list and argument for entries in flight has room for this number.
FETCHED_MAX = 2 * 256
ENTRIES_MAX = FETCHED_MAX + LANES_MAX

# The values of `on_error`, which determine where a failed message waits for its retry.
REQUEUE, BLOCK, HOLD_KEY = "requeue", "block", "hold-key"
BATCHED, EACH = "batched", "each"  # how messages are acknowledged


class Uid(str):
    """The uid of a message, the string `topic/partition/id`, with its three parts as attributes.

    The attribute `partition` is the number of the partition, so the string method with the same
    name is not available.
    """

    __slots__ = ()

    @property
    def topic(self) -> str:
        """The topic of the message."""
        return self.split("/", 1)[0]

    @property
    def partition(self) -> int:  # type: ignore[override]
        """The number of the partition to which the message was sent, starting at 0."""
        return int(self.split("/", 2)[1])

    @property
    def id(self) -> str:
        """The entry ID, such as `1700000000000-0`, or the send ID of a delayed send."""
        return self.split("/", 2)[2]

    @property
    def is_duplicate(self) -> bool:
        """True if nothing was written, because a message with the same `dedup_id` already exists.

        The uid is then that of the existing message. This same send may have written that message,
        if the reply was lost and the producer repeated the send.
        """
        return isinstance(self, _DuplicateUid)


class _DuplicateUid(Uid):
    """The uid of a duplicate.

    This is a class of its own, because an attribute would cost memory and time for every uid.
    """

    __slots__ = ()


def duplicate_uid(uid: str) -> Uid:
    """Return the uid of an earlier message, for a send that did not write anything."""
    return _DuplicateUid(uid)


class Assignment(NamedTuple):
    """The smallest piece of work that an instance can own, which is one partition for one group.

    The group reads either the partition's messages or its dead letters. For dead letters, `group`
    is the configured name followed by `@dlq`.
    """

    topic: str
    partition: int
    group: str

    @property
    def reads_dead_letters(self) -> bool:
        """True if the group reads the dead letters of the partition."""
        return self.group.endswith(DLQ_SUFFIX)

    @property
    def is_of_query(self) -> bool:
        """True if the assignment is the position of a Spark query, which no instance ever owns."""
        return self.group.startswith(QUERY_PREFIX)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.group}"


class Lease(NamedTuple):
    """The right to settle an assignment's messages, valid while the fence contains `token`.

    The fence is a Redis key of the assignment, which is checked with every write of an owner.
    `epoch` increases with each change of owner. It is 0 where it is not needed.
    """

    assignment: Assignment
    token: str  # '' if there is no owner
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a failed message is retried.

    The fields have the same meaning as in the setting `consumers.backoff`. `base` and `max` are in
    seconds.
    """

    kind: str = "exponential"  # fixed | linear | exponential
    base: float = 1.0
    max: float = 300.0
    jitter: str = "full"  # full | none


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The rules by which failed messages are retried or dead-lettered.

    The fields have the same meaning as a consumer's settings with the same names. `max_age` is
    `retry_max_age` in seconds. For `max_attempts` and `max_crashes`, 0 means that there is no
    limit. `retry_on` and `dead_on` contain exception classes or their names. If an exception is in
    neither, the message is retried if `retry_on` is empty, and dead-lettered otherwise.
    """

    max_attempts: int = 5
    max_crashes: int = 3
    backoff: Backoff = Backoff()
    max_age: float | None = None
    retry_on: tuple[str | type[BaseException], ...] = ()
    dead_on: tuple[str | type[BaseException], ...] = ()
    on_error: str = REQUEUE


# --- the outcome of a failed run -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failed:
    """An outcome: the handler raised an exception, or exceeded its soft time limit.

    `lineage` contains the names of the exception's class and of its bases, most derived first, both
    with and without their modules. Policies can therefore name a base class.
    """

    error_class: str
    message: str
    traceback: str
    lineage: tuple[str, ...]
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class RetryAsked:
    """An outcome: the handler raised `Retry`.

    `after` is the delay in seconds. None means the backoff of the policy.
    """

    after: float | None
    failure: Failed


@dataclass(frozen=True, slots=True)
class DeadAsked:
    """An outcome: the handler raised `Dead`, or the payload could not be decoded."""

    reason: str  # dead | undecodable
    failure: Failed


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """An outcome: the handler raised `Release`, because it cannot handle any message now."""


Outcome = Failed | RetryAsked | DeadAsked | ReleaseAsked


# --- the verdict on the message -------------------------------------------------------------------


class RetryVerdict(NamedTuple):
    """A verdict that runs the message again in `delay` seconds.

    If `in_place` is True, the message stays pending in its worker, and messages that must keep the
    order wait for it. Otherwise it becomes a waiting retry, which other messages can overtake.
    """

    delay: float
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class DeadVerdict:
    """A verdict that moves the message to the dead-letter stream, for one of the reasons below."""

    # dead | undecodable | attempts | crashes | too-old | not-retried. Messages that are too-large
    # or canceled are dead-lettered without a verdict. `dead_letter.REASONS` lists all words.
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseVerdict:
    """A verdict that leaves the message pending and counts no attempt.

    `in_place` means the same as in `RetryVerdict`. If it is False, the message runs again when the
    worker lists its pending entries the next time.
    """

    in_place: bool = False


Verdict = RetryVerdict | DeadVerdict | ReleaseVerdict
