"""The settings of topics and their retention."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamqd.config.setting import Bytes, Seconds, setting


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits on the acknowledged entries that a partition keeps."""

    max_age: Seconds | None = setting(
        None, 'The age at which acknowledged entries are trimmed. "none" means no limit.', min=1
    )
    max_length: int | None = setting(
        None,
        'The number of entries per partition above which acknowledged entries are trimmed. "none"'
        " means no limit.",
        min=0,
    )
    max_bytes: Bytes | None = setting(
        None,
        'The approximate memory use above which a partition is trimmed. "none" means no limit.',
        min=1,
    )
    shrink_every: Seconds | None = setting(
        None,
        "The interval between trims that ignore the times in IDs. Each of these trims removes the"
        " acknowledged entries that already existed at the previous one, so an entry is kept for"
        ' one to two intervals. "none" disables these trims.',
        min=1,
    )
    ack_policy: str = setting(
        "keep",
        "The time at which acknowledged entries are trimmed. keep: at the limits of the other"
        " settings. delete: once every group has acknowledged them.",
        choices=("keep", "delete"),
    )
    without_groups: bool = setting(
        False,
        "If true, the topic is trimmed even if it has no group. Use this for a topic that is only"
        " archived, or that is read without a group.",
    )
    drop_unacked_after: Seconds | None = setting(
        None,
        'The age beyond which unacknowledged entries are lost (removed and counted). "none" keeps'
        " them.",
        min=1,
    )
    drop_unacked_above: int | None = setting(
        None,
        "The number of entries per partition beyond which unacknowledged entries are lost (removed"
        ' and counted). "none" keeps them.',
        min=1,
    )
    # The names of the settings that are set explicitly. Settings that are registered with the topic
    # fill in the others.
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def bounded(self) -> bool:
        """True if any setting trims acknowledged entries."""
        bounds = (self.max_age, self.max_length, self.max_bytes, self.shrink_every)
        return self.ack_policy == "delete" or any(each is not None for each in bounds)

    @property
    def drops(self) -> bool:
        """True if unacknowledged entries may be dropped."""
        return self.drop_unacked_after is not None or self.drop_unacked_above is not None


@dataclass(frozen=True, slots=True)
class Topic:
    """The settings of one topic. They apply when the topic is created and when it is trimmed."""

    partitions: int = setting(
        1,
        "The number of partitions, each with one worker per group. It can grow, but not shrink.",
        min=1,
        max=4_096,
    )
    retention: Retention = setting(
        Retention(),
        "The limits up to which a partition keeps entries. Except for drop_unacked_after and"
        " drop_unacked_above, they remove only entries that all groups have acknowledged.",
    )
    archive: str = setting(
        "off",
        "Determines whether entries must be archived before they are removed. off: entries are"
        " trimmed whether or not they are archived. required: no entry is trimmed, and no dead"
        " letter is deleted, before `streamqd pipeline archive` has stored it.",
        choices=("off", "required"),
    )
    dlq_retention: Seconds | None = setting(
        None,
        'The age at which dead letters are deleted and counted. With "none", dead letters are kept'
        ' until they are replayed or purged. With `archive = "required"`, a dead letter is never'
        " deleted before it is archived.",
        min=1,
    )
    # The names of the settings that are set explicitly. There are none for a topic that is named
    # only by a consumer, so its partition count is the registered one, not the default.
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
