"""The settings of consumers, which read topics, including their retry limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from streamqd.config.setting import DOTTED_NAME, NAMED, Bytes, Seconds, Shape, describe, setting
from streamqd.config.values import RATE_PATTERN, parse_rate
from streamqd.model import (
    BATCHED,
    BLOCK,
    DLQ_SUFFIX,
    EACH,
    HOLD_KEY,
    LANES_MAX,
    REQUEUE,
    THREADS_MAX,
    Backoff,
    RetryPolicy,
)

PARTITION, GROUP = "partition", "group"  # scopes of a rate limit

_RATE = Shape(
    re.compile(rf"(?=[0-9.]*[1-9]){RATE_PATTERN}"),
    'write a number per s, m or h, such as "100/s", "5/m" or "0.5/s"',
)
_HANDLER = Shape(
    re.compile(f"{DOTTED_NAME}:{DOTTED_NAME}"),
    'write "module:function", such as "weblog:count_hit"',
)
_CLASS = Shape(re.compile(DOTTED_NAME), "write the names of exception classes")


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker, which stops a partition after failures of a dependency."""

    failures: int = setting(
        0,
        "The number of failures within `window` that open the circuit of a partition. Only the"
        " exceptions in `on` count. With 0, the circuit never opens.",
        min=0,
        max=10_000,
    )
    window: Seconds = setting(
        30.0, "The period in which failures are counted.", min=0.1, max=86_400
    )
    probe_every: Seconds = setting(
        10.0,
        "The interval at which a partition with an open circuit runs one message as a probe.",
        min=0.01,
        max=3_600,
    )
    on: tuple[str, ...] = setting(
        (),
        'The exception classes that mean that a dependency is down, such as "ConnectionError" or'
        ' "requests.ConnectionError", including their subclasses. Empty means all exceptions that'
        " are retried.",
        shape=_CLASS,
    )


@dataclass(frozen=True, slots=True)
class FloodGuard:
    """A flood guard, which pauses a partition after too many dead letters."""

    dead_letters: int = setting(
        0,
        "The number of dead letters within `window` that pauses the partition. 0 means never.",
        min=0,
        max=100_000,
    )
    window: Seconds = setting(
        60.0, "The period in which dead letters are counted.", min=0.1, max=86_400
    )
    share: float = setting(
        0.5,
        "The share that dead letters must reach among the messages handled within `window` before"
        " the partition is paused.",
        min=0,
        max=1,
    )


@dataclass(frozen=True, slots=True)
class Consumer:
    """One handler that reads one topic as one group. These settings override those of @handler."""

    topic: str = field(metadata=describe("The topic to read.", shape=NAMED))
    group: str = field(
        metadata=describe(
            "The name of the group. Each group receives every message of the topic.", shape=NAMED
        )
    )
    handler: str = setting(
        "",
        'The function that handles the messages, as "module:function". If this setting is empty,'
        " it is the function whose @handler declares the same topic and group.",
        empty_is_default=True,
        shape=_HANDLER,
    )
    source: str = setting(
        "topic",
        "The kind of messages that the consumer reads. topic: the messages of the topic. dlq: the"
        " dead letters of all groups of the topic, as the group `NAME@dlq`.",
        choices=("topic", "dlq"),
    )
    start: str = setting(
        "earliest",
        "The position from which a new group reads. earliest: the oldest message in the topic."
        " latest: the first message that is sent after the group was created.",
        choices=("earliest", "latest"),
    )
    prefetch_max: int = setting(
        256,
        "The maximum number of entries that a worker fetches at a time. It may fetch fewer.",
        min=1,
        max=256,
    )
    prefetch_bytes: Bytes = setting(
        4 << 20,
        "The approximate maximum size of the payloads that a worker fetches at a time.",
        min=1,
        max=1 << 30,
    )
    batch: int | None = setting(
        None,
        "The maximum number of messages that a batch handler (`list[Message]`) receives per call."
        ' A worker does not wait until a batch is full. "none" means 100.',
        min=1,
        max=256,
    )
    codec: str = setting(
        "json",
        "The encoding of payloads that a handler takes as a typed value.",
        choices=("json", "msgpack"),
    )
    concurrency: int = setting(
        1,
        "The number of messages of one partition that can run at the same time, in coroutines or"
        f" threads of its worker. With threads, at most {THREADS_MAX}.",
        min=1,
        max=LANES_MAX,
    )
    order: str = setting(
        "key",
        "The order of messages if concurrency is above 1. key: messages with the same key stay in"
        " order. partition: all messages stay in order, so one runs at a time. none: messages can"
        " run in any order.",
        choices=("key", "none", "partition"),
    )
    ack: str = setting(
        BATCHED,
        "When finished messages are acknowledged. batched: messages whose runs are shorter than 20"
        " ms are acknowledged together, within 20 ms. If the host is lost before that, these"
        " messages run again. each: each message is acknowledged before the next one starts, with"
        " one round trip per message.",
        choices=(BATCHED, EACH),
    )
    rate: str | None = setting(
        None,
        'The maximum rate at which runs start, including retries, such as "100/s", "5/m" or'
        ' "0.5/s". Empty means no limit.',
        shape=_RATE,
    )
    rate_per: str = setting(
        PARTITION,
        "The scope of the rate. partition: the rate applies to each partition of the group. group:"
        " the rate applies to all partitions of the group together, on all instances. Each"
        " partition gets an equal share, so the total stays the same when the topic grows.",
        choices=(GROUP, PARTITION),
    )
    rate_burst: int | None = setting(
        None,
        "The maximum number of runs that start back to back after an idle period. It also limits"
        ' the size of a batch. "none" means the number of runs that the rate allows in 20 ms (at'
        " least 1), or the batch size for a batch handler.",
        min=1,
        max=1_000_000,
    )
    max_attempts: int = setting(
        5,
        "The number of failed runs after which a message is dead-lettered. For example, 5 allows 4"
        " retries. 0 means no limit.",
        min=0,
    )
    max_crashes: int = setting(
        3, "The number of crashes after which a message is dead-lettered. 0 means no limit.", min=0
    )
    backoff: Backoff = setting(Backoff(), "The delay before a failed message is retried.")
    retry_max_age: Seconds | None = setting(
        None,
        'The age after which a message that fails is dead-lettered instead of retried. "none"'
        " means no limit.",
        min=0.001,
    )
    retry_on: tuple[str, ...] = setting(
        (),
        'The exception classes after which a message is retried, such as "OSError" or'
        ' "requests.HTTPError", including their subclasses. After any other exception, the message'
        " is dead-lettered immediately. Empty means every class that is not in dead_on.",
        shape=_CLASS,
    )
    dead_on: tuple[str, ...] = setting(
        (),
        "The exception classes after which a message is dead-lettered immediately, including their"
        " subclasses. If an exception matches both retry_on and dead_on, the most specific class"
        " applies.",
        shape=_CLASS,
    )
    on_error: str = setting(
        REQUEUE,
        "The messages that have to wait until a failed message is retried. requeue: no other"
        " message waits. block: the whole partition waits, so all messages stay in order."
        " hold-key: messages with the same key wait, and others continue.",
        choices=(REQUEUE, BLOCK, HOLD_KEY),
    )
    held_max: int = setting(
        1_000,
        "The maximum number of messages that a worker holds in memory because an earlier message"
        " with the same key waits for its retry (`hold-key`). Their total size is limited to about"
        " prefetch_bytes. At either limit, the worker stops reading.",
        min=2,
        max=100_000,
    )
    breaker: Breaker = setting(
        Breaker(),
        "A circuit breaker, which stops a partition while a dependency of its handler is down.",
    )
    flood_guard: FloodGuard = setting(
        FloodGuard(), "A guard that pauses a partition after too many dead letters."
    )
    timeout: Seconds | None = setting(
        None,
        "The soft time limit of one run. When a run exceeds it, SoftTimeout is raised in the"
        ' handler. "none" means no limit.',
        min=0.001,
    )
    hard_timeout: Seconds | None = setting(
        None,
        "The hard time limit of one run. When a run exceeds it, the worker is killed, and a crash"
        ' is counted against the message. It must be longer than `timeout`. "none" means no limit.',
        min=0.001,
    )
    max_messages: int = setting(
        0, "The number of messages after which a worker is replaced. 0 means never.", min=0
    )
    max_rss: Bytes = setting(
        0,
        "The memory growth after which a worker is replaced, counted from when it became ready. 0"
        " means never.",
        min=0,
    )
    max_age: Seconds = setting(
        0.0, "The age at which a worker is replaced, at least 1s. 0 means never."
    )
    handover: str = setting(
        "warm",
        "How a worker is replaced. warm: the next worker boots, including `on_start`, before the"
        " current one stops. cold: the current worker stops first. Use `cold` if only one process"
        " of the handler may exist at a time.",
        choices=("warm", "cold"),
    )
    reclaim_idle: Seconds = setting(
        60.0,
        "The time after which streamqd takes over an entry that another client fetched in this"
        " group and has not acknowledged.",
        min=1,
    )
    dlq_error: str = setting(
        "traceback",
        "How much of the exception is stored in a dead letter. Each value includes the previous"
        " ones.",
        choices=("none", "class", "message", "traceback"),
    )
    dlq_body: str = setting(
        "full",
        "How much of the payload is stored in a dead letter. Only a dead letter with the full"
        " payload can be replayed. full: the whole payload. hash: its size and SHA-256 hash. none:"
        " its size.",
        choices=("full", "hash", "none"),
    )
    # The names of the settings that are set explicitly. Declarations of @handler fill in the
    # others.
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    # The place of the consumer's table as FILE:LINE, or '' if only @handler declares the consumer.
    place: str = field(default="", compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name `topic/group`, or `topic/group@dlq` for a consumer of dead letters.

        The option `--only` accepts it.
        """
        return f"{self.topic}/{self.assignment_group}"

    @property
    def place_named(self) -> str:
        """The name and the place of the consumer, so that its table can be found among many.

        The form is `topic/group, FILE:LINE`.
        """
        return f"{self.topic}/{self.group}, {self.place}" if self.group else self.place

    @property
    def reads_dead_letters(self) -> bool:
        """True if the consumer reads the dead letters of its topic."""
        return self.source == "dlq"

    @property
    def assignment_group(self) -> str:
        """The name of the group in assignments, keys and views.

        For a consumer of dead letters, the name is `group@dlq`.
        """
        return self.group + DLQ_SUFFIX if self.reads_dead_letters else self.group

    def rate_per_second(self, partitions: int) -> float:
        """Return the number of runs that may start per second in one partition, or 0 for no limit.

        `partitions` is the number of partitions of the topic. If it is unknown, pass 0, which is
        treated like 1.
        """
        rate = parse_rate(self.rate) if self.rate else 0.0
        return rate / max(1, partitions) if self.rate_per == GROUP else rate

    @property
    def lanes(self) -> int:
        """The number of messages that one worker may handle at the same time."""
        return 1 if self.order == "partition" else self.concurrency

    @property
    def policy(self) -> RetryPolicy:
        """The settings that control retries and dead-lettering."""
        return RetryPolicy(
            max_attempts=self.max_attempts,
            max_crashes=self.max_crashes,
            backoff=self.backoff,
            max_age=self.retry_max_age,
            retry_on=self.retry_on,
            dead_on=self.dead_on,
            on_error=self.on_error,
        )
