"""What work there is: topics, and the consumers that read them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from streamqd.config.setting import NAME, NAME_HINT, Kind, described
from streamqd.model import LETTERS, Backoff, RetryPolicy

_HANDLER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_CLASS_HINT = "write the names of exception classes"


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays in a partition after every group has acknowledged it."""

    max_age: float | None = field(
        default=None,
        metadata=described(
            "Acknowledged entries older than this are trimmed. none: age trims nothing.",
            Kind.DURATION,
            min=1,
            optional=True,
        ),
    )
    max_length: int | None = field(
        default=None,
        metadata=described(
            "Acknowledged entries beyond this many per partition are trimmed. none: length trims"
            " nothing.",
            Kind.INTEGER,
            min=0,
            optional=True,
        ),
    )
    max_bytes: int | None = field(
        default=None,
        metadata=described(
            "Acknowledged entries are trimmed while a partition takes more memory than this, about."
            " none: size trims nothing.",
            Kind.SIZE,
            min=1,
            optional=True,
        ),
    )
    shrink_every: float | None = field(
        default=None,
        metadata=described(
            "Each time so much has passed, acknowledged entries that were there the time before are"
            " trimmed: an entry stays for once to twice as long. none: nothing is trimmed so.",
            Kind.DURATION,
            min=1,
            optional=True,
        ),
    )
    ack_policy: str = field(
        default="keep",
        metadata=described(
            "delete: an entry is trimmed as soon as every group has acknowledged it. keep: the"
            " other settings decide.",
            choices=("keep", "delete"),
        ),
    )
    without_groups: bool = field(
        default=False,
        metadata=described(
            "Trim also while no group reads the topic: one that is only archived, or read by"
            " position.",
            Kind.BOOLEAN,
        ),
    )
    drop_unacked_after: float | None = field(
        default=None,
        metadata=described(
            "Loses messages: entries older than this go, acknowledged or not, and are counted."
            " none: what is not acknowledged stays.",
            Kind.DURATION,
            min=1,
            optional=True,
        ),
    )
    drop_unacked_above: int | None = field(
        default=None,
        metadata=described(
            "Loses messages: beyond this many entries per partition the oldest go, acknowledged or"
            " not, and are counted. none: what is not acknowledged stays.",
            Kind.INTEGER,
            min=1,
            optional=True,
        ),
    )
    # Which settings somebody wrote: those registered with the topic fill in the others.
    stated: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def bounded(self) -> bool:
        """Whether any setting ever trims something that is acknowledged."""
        bounds = (self.max_age, self.max_length, self.max_bytes, self.shrink_every)
        return self.ack_policy == "delete" or any(each is not None for each in bounds)

    @property
    def drops(self) -> bool:
        """Whether what is not acknowledged may be lost."""
        return self.drop_unacked_after is not None or self.drop_unacked_above is not None


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic, named by its table. Used when the topic is registered first, and to trim it."""

    partitions: int = field(
        default=1,
        metadata=described(
            "Partitions: how many workers of a group may work at once. It can grow, never shrink.",
            Kind.INTEGER,
            min=1,
            max=4_096,
        ),
    )
    retention: Retention = field(
        default=Retention(),
        metadata=described(
            "What stays after every group has acknowledged it.",
            Kind.TABLE,
            table=Retention,
        ),
    )
    archive: str = field(
        default="off",
        metadata=described(
            "required: nothing is trimmed before `streamqd pipeline archive` has stored it.",
            choices=("off", "required"),
        ),
    )
    dlq_retention: float | None = field(
        default=None,
        metadata=described(
            "Dead letters older than this are deleted for good, and counted. none: they stay until"
            " somebody replays or purges them.",
            Kind.DURATION,
            min=1,
            optional=True,
        ),
    )
    # Which settings somebody wrote. A topic that only a consumer names has none: its partition
    # count is then whatever is registered, not the default.
    stated: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


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
            " their subclasses too. Others are dead at once. Empty: every class.",
            Kind.TEXTS,
            pattern=_CLASS,
            pattern_hint=_CLASS_HINT,
        ),
    )
    dead_on: tuple[str, ...] = field(
        default=(),
        metadata=described(
            "Exception classes that are dead at once, also where retry_on names a base of them.",
            Kind.TEXTS,
            pattern=_CLASS,
            pattern_hint=_CLASS_HINT,
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
            "Age at which a worker is replaced. 0: never.",
            Kind.DURATION,
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
        )
