"""What work there is: the consumers that read topics, and when they give up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from streamqd.config.guards import CLASS, CLASS_HINT, Breaker, FloodGuard
from streamqd.config.setting import NAME, NAME_HINT, Kind, described
from streamqd.config.values import RATE_PATTERN, parse_rate
from streamqd.model import (
    BATCHED,
    BLOCK,
    EACH,
    HOLD_KEY,
    LETTERS,
    REQUEUE,
    Backoff,
    RetryPolicy,
)

_RATE = re.compile(rf"(?=[0-9.]*[1-9]){RATE_PATTERN}")
_RATE_HINT = 'write a number per s, m or h, such as "100/s", "5/m" or "0.5/s"'
_HANDLER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Consumer:
    """One handler reading one topic as one group. Overrides what @handler declares."""

    topic: str = field(
        metadata=described("Topic to read.", pattern=NAME, pattern_hint=NAME_HINT, required=True)
    )
    group: str = field(
        metadata=described(
            "Name of the group; each group of a topic sees every message.",
            pattern=NAME,
            pattern_hint=NAME_HINT,
            required=True,
        )
    )
    handler: str = field(
        default="",
        metadata=described(
            'The function, as "module:function". Empty: the one that @handler declares.',
            empty_is_default=True,
            pattern=_HANDLER,
            pattern_hint='write "module:function", such as "weblog:count_hit"',
        ),
    )
    source: str = field(
        default="topic",
        metadata=described(
            "What it reads: the messages of the topic, or with dlq the dead letters of all its"
            " groups, as the group NAME@dlq.",
            choices=("topic", "dlq"),
        ),
    )
    start: str = field(
        default="earliest",
        metadata=described(
            "Where a new group begins to read.",
            choices=("earliest", "latest"),
        ),
    )
    prefetch_max: int = field(
        default=256,
        metadata=described(
            "Entries fetched at once at most; adapts below it.",
            Kind.INTEGER,
            min=1,
            max=256,
        ),
    )
    prefetch_bytes: int = field(
        default=4 << 20,
        metadata=described(
            "Payload bytes fetched at once, about.",
            Kind.SIZE,
            min=1,
            max=1 << 30,
        ),
    )
    batch: int | None = field(
        default=None,
        metadata=described(
            "Messages that a handler of list[Message] is given at once, at most: fewer when fewer"
            " are there. none: 100.",
            Kind.INTEGER,
            min=1,
            max=256,
            optional=True,
        ),
    )
    codec: str = field(
        default="json",
        metadata=described(
            "How payloads are written that a handler takes as a typed value.",
            choices=("json", "msgpack"),
        ),
    )
    concurrency: int = field(
        default=1,
        metadata=described(
            "Messages of one partition that are handled at once, in coroutines or threads of its"
            " worker.",
            Kind.INTEGER,
            min=1,
            max=128,
        ),
    )
    order: str = field(
        default="key",
        metadata=described(
            "What keeps its order when concurrency is more than 1. key: messages of one key."
            " partition: all of them, so that one is handled at a time. none: nothing.",
            choices=("key", "none", "partition"),
        ),
    )
    ack: str = field(
        default=BATCHED,
        metadata=described(
            "When Redis is told that a message is done. batched: with others that took less than"
            " 20 ms, within 20 ms; they run again when the host is lost before. each: before the"
            " next run begins, which costs a round trip for every message.",
            choices=(BATCHED, EACH),
        ),
    )
    rate: str | None = field(
        default=None,
        metadata=described(
            'Runs that may begin in each partition of the group, such as "100/s", "5/m" or "0.5/s";'
            " retries count too. Empty: no limit.",
            pattern=_RATE,
            pattern_hint=_RATE_HINT,
            optional=True,
        ),
    )
    rate_burst: int | None = field(
        default=None,
        metadata=described(
            "Runs that may begin at once after a rest; batches are no larger. none: what comes in"
            " 20 ms, at least 1; of a handler of batches the size of a batch.",
            Kind.INTEGER,
            min=1,
            max=1_000_000,
            optional=True,
        ),
    )
    max_attempts: int = field(
        default=5,
        metadata=described(
            "Failed runs after which a message is dead: with 5, the fifth failure is the last."
            " 0: tried for ever.",
            Kind.INTEGER,
            min=0,
        ),
    )
    max_crashes: int = field(
        default=3,
        metadata=described(
            "Runs that killed their process after which a message is dead. 0: run for ever.",
            Kind.INTEGER,
            min=0,
        ),
    )
    backoff: Backoff = field(
        default=Backoff(),
        metadata=described(
            "How long a failed message waits for its next attempt.",
            Kind.TABLE,
            table=Backoff,
        ),
    )
    retry_max_age: float | None = field(
        default=None,
        metadata=described(
            "A message that fails when it is older than this is dead. none: age kills nothing.",
            Kind.DURATION,
            min=0.001,
            optional=True,
        ),
    )
    retry_on: tuple[str, ...] = field(
        default=(),
        metadata=described(
            'Exception classes that are tried again, such as "OSError" or "requests.HTTPError";'
            " their subclasses too. Others are dead at once. Empty: every class that dead_on does"
            " not name.",
            Kind.TEXTS,
            pattern=CLASS,
            pattern_hint=CLASS_HINT,
        ),
    )
    dead_on: tuple[str, ...] = field(
        default=(),
        metadata=described(
            "Exception classes that are dead at once, their subclasses too. Of several classes in"
            " both lists the one that is nearest to the exception decides.",
            Kind.TEXTS,
            pattern=CLASS,
            pattern_hint=CLASS_HINT,
        ),
    )
    on_error: str = field(
        default=REQUEUE,
        metadata=described(
            "What happens to a message that is to be tried again. requeue: it is set aside, others"
            " go on. block: the partition waits for it, which keeps its order. hold-key: the"
            " messages of its key wait behind it, others go on.",
            choices=(REQUEUE, BLOCK, HOLD_KEY),
        ),
    )
    held_max: int = field(
        default=1_000,
        metadata=described(
            "Messages of held keys that a worker keeps at most, and no more than about"
            " prefetch_bytes of them; then it reads no more. For hold-key.",
            Kind.INTEGER,
            min=2,
            max=100_000,
        ),
    )
    breaker: Breaker = field(
        default=Breaker(),
        metadata=described(
            "Stops a partition while what its handler depends on is down.",
            Kind.TABLE,
            table=Breaker,
        ),
    )
    flood_guard: FloodGuard = field(
        default=FloodGuard(),
        metadata=described(
            "Pauses a partition whose messages die in numbers.",
            Kind.TABLE,
            table=FloodGuard,
        ),
    )
    timeout: float | None = field(
        default=None,
        metadata=described(
            "Soft limit of one run: an exception is raised in the handler. none: no limit.",
            Kind.DURATION,
            min=0.001,
            optional=True,
        ),
    )
    hard_timeout: float | None = field(
        default=None,
        metadata=described(
            "Hard limit of one run: the process is killed, the message charged. Longer than"
            " timeout. none: no limit.",
            Kind.DURATION,
            min=0.001,
            optional=True,
        ),
    )
    max_messages: int = field(
        default=0,
        metadata=described(
            "Messages after which a worker is replaced by a fresh process. 0: never.",
            Kind.INTEGER,
            min=0,
        ),
    )
    max_rss: int = field(
        default=0,
        metadata=described(
            "Memory over what a worker had after its fork at which it is replaced. 0: never.",
            Kind.SIZE,
            min=0,
        ),
    )
    max_age: float = field(
        default=0.0,
        metadata=described(
            "Age at which a worker is replaced, at least 1s. 0: never.",
            Kind.DURATION,
        ),
    )
    handover: str = field(
        default="warm",
        metadata=described(
            "How a worker is replaced. warm: the next one has booted, `on_start` included, before"
            " the present one lets go. cold: one after the other, for what there is only one of.",
            choices=("warm", "cold"),
        ),
    )
    reclaim_idle: float = field(
        default=60.0,
        metadata=described(
            "How long an entry that a foreign client fetched in this group may stay unacknowledged"
            " before it is taken over.",
            Kind.DURATION,
            min=1,
        ),
    )
    dlq_error: str = field(
        default="traceback",
        metadata=described(
            "How much of an exception goes into a dead letter; each includes those before it.",
            choices=("none", "class", "message", "traceback"),
        ),
    )
    dlq_body: str = field(
        default="full",
        metadata=described(
            "What of a payload goes into a dead letter. hash: its size and SHA-256; none: its size."
            " Only a whole one can be replayed.",
            choices=("full", "hash", "none"),
        ),
    )
    # Which settings somebody wrote: what @handler declares fills in the others.
    stated: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """`topic/group`, as `--only` takes it; of dead letters `topic/group@dlq`."""
        return f"{self.topic}/{self.unit_group}"

    @property
    def reads_letters(self) -> bool:
        """Whether it reads the dead letters of its topic."""
        return self.source == "dlq"

    @property
    def unit_group(self) -> str:
        """The group as units, keys and views name it: `group`, of dead letters `group@dlq`."""
        return self.group + LETTERS if self.reads_letters else self.group

    @property
    def rate_per_second(self) -> float:
        """Runs per second that may begin in a partition, 0 when there is no limit."""
        return parse_rate(self.rate) if self.rate else 0.0

    @property
    def lanes(self) -> int:
        """How many messages a worker of it handles at once."""
        return 1 if self.order == "partition" else self.concurrency

    @property
    def policy(self) -> RetryPolicy:
        """When its messages are tried again and when they are dead."""
        return RetryPolicy(
            max_attempts=self.max_attempts,
            max_crashes=self.max_crashes,
            backoff=self.backoff,
            max_age=self.retry_max_age,
            retry_on=self.retry_on,
            dead_on=self.dead_on,
            on_error=self.on_error,
        )
