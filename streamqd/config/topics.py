"""What topics there are, and what stays in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamqd.config.setting import Kind, described


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
