"""What is known when the checks judge: plain values, gathered once, by whatever was asked for.

What was not gathered, or not allowed to be read, is empty or None, so that no check finds anything
in it; `DiagnosisFacts.unseen` says so to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from streamqd.admin.permissions import MissingPermission
from streamqd.config import Settings, Topic
from streamqd.model import Unit
from streamqd.store.directives import Directives
from streamqd.store.leases import LeaseView
from streamqd.store.members import Heartbeat
from streamqd.store.statistics import PartitionFigures, UnitFigures


@dataclass(frozen=True, slots=True)
class SlowCommand:
    """An entry of the server's slow log that names a key of ours."""

    at_unix: int
    milliseconds: float
    command: str
    key: str


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """What the server says of itself. `config` is empty when the user may not ask for it."""

    info: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    round_trip_ms: float | None = None  # the middle one of some
    skew_seconds: float | None = None  # the server's clock less this host's
    slow: Sequence[SlowCommand] = ()
    certificates: Mapping[str, float] = field(default_factory=dict)  # whose -> end, unix seconds

    def number(self, name: str) -> int:
        """A figure of INFO; 0 when it is not told."""
        text = self.info.get(name, "0")
        return int(text) if text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """The members, what they publish, and what operators want.

    `changed` are instances whose run was another one at the end of the look than at its begin.
    """

    beats: Sequence[Heartbeat] = ()
    summaries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    orders: Directives = field(default_factory=Directives)
    changed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic of the registry or of the configuration.

    `partitions` is None when no such topic is stored, `deleting` tells that a deletion was begun.
    `members` is the set of its partition streams, `groups` what daemons have ever made on it.
    `unreadable` says what is wrong with what is stored, '' for nothing.
    """

    name: str
    registered: bool
    partitions: int | None
    deleting: bool
    members: frozenset[str]
    groups: frozenset[str]
    holds: Topic
    unreadable: str = ""


@dataclass(frozen=True, slots=True)
class StandingDirective:
    """A group's place by the trimmer's eyes: the entry that it needs, and when it was last seen.

    `needs_unix_ms` None: nothing. `idle_seconds` None: nobody ever read for it.
    """

    needs_unix_ms: int | None
    idle_seconds: float | None


@dataclass(frozen=True, slots=True)
class Delays:
    """Delayed messages, a due time in one key and the message in another.

    `lost` are due times without a message, `stuck` messages without a due time; `more` tells that
    there are too many to compare one by one, and `lost` and `stuck` are counted instead.
    """

    count: int = 0
    next_due_unix_ms: int | None = None
    lost: Sequence[str] = ()
    stuck: Sequence[str] = ()
    more: int = 0  # by how much the two keys differ when they are too long to compare


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One partition, whoever reads it.

    `wrong_types` are keys that hold something else than they should, with what. `missing` says
    whether there is no stream at all. `oldest_letter_unix_ms` is asked for only when dead letters
    have a retention. `large_bytes` is the payload of the larger of its first and last entry.
    """

    topic: str
    partition: int
    exists: bool
    wrong_types: Mapping[str, str]
    groups: frozenset[str]
    figures: PartitionFigures | None
    scheduled: Delays
    archived_unix_ms: int | None
    unarchived_unix_ms: int | None
    oldest_letter_unix_ms: int | None
    large_bytes: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """Fence and lease as one look found them. `lease_matches` is None when there is no lease."""

    fence: LeaseView
    lease_matches: bool | None


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """One group on one partition. `looks` are two when the first was strange, else one."""

    unit: Unit
    wrong_types: Mapping[str, str]
    figures: UnitFigures | None
    foreign: Mapping[str, int]  # consumer names that are not ours -> pending entries
    unowned: int  # pending entries that no consumer has
    looks: Sequence[Look]
    delays: Delays
    standing: StandingDirective | None

    @property
    def view(self) -> LeaseView | None:
        """Fence and lease as they were seen last."""
        return self.looks[-1].fence if self.looks else None

    @property
    def pending(self) -> int:
        """Entries that were handed out and not settled."""
        return self.figures.pending if self.figures else 0


@dataclass(frozen=True, slots=True)
class Value:
    """A value that cannot be read: where it stands, what it does, and what puts it right.

    `about` is the instance, topic, partition or unit that it belongs to.
    """

    key: str
    field: str
    found: str
    wanted: str
    about: str
    harm: str
    cure: str


@dataclass(frozen=True, slots=True)
class Host:
    """This host, as a daemon of the configuration would find it. None: not known."""

    state_dir: Path
    state_dir_problem: str = ""
    strange_owners: Mapping[str, int] = field(default_factory=dict)  # file -> user id
    free_bytes: int | None = None
    embedded_bytes: int | None = None  # files of the embedded server
    unit_source: str = ""  # where the service manager's time limit is from, '' for nowhere
    stop_seconds: float | None = None
    descriptors: int | None = None
    descriptors_of: str = ""
    descriptors_of_system: int | None = None
    units: int = 0  # of the consumers of the configuration
    oom_group: str = ""  # the control group that the kernel kills as a whole, '' for none


@dataclass(frozen=True)
class DiagnosisFacts:
    """Everything that the checks look at. `unseen` says in sentences what was not looked at.

    `servers` has every master of a cluster by its address; it is empty where there is only one.
    """

    settings: Settings
    now_unix_ms: int
    server: ServerHealth = field(default_factory=ServerHealth)
    servers: Mapping[str, ServerHealth] = field(default_factory=dict)
    lacking: Sequence[MissingPermission] = ()
    fleet: FleetHealth = field(default_factory=FleetHealth)
    topics: Sequence[TopicFacts] = ()
    partitions: Sequence[PartitionFacts] = ()
    units: Sequence[UnitFacts] = ()
    values: Sequence[Value] = ()
    host: Host | None = None
    unseen: Sequence[str] = ()

    @property
    def stale_ms(self) -> float:
        """How long after its last beat an instance counts as gone."""
        return self.settings.daemon.lease_ttl * 1000

    def alive(self, instance: str) -> bool:
        """Whether an instance beats."""
        return any(beat.instance == instance for beat in self.living)

    @cached_property
    def living(self) -> Sequence[Heartbeat]:
        """The members that beat."""
        since = self.now_unix_ms - self.stale_ms
        return [beat for beat in self.fleet.beats if beat.beat_unix_ms >= since]

    @cached_property
    def offered(self) -> frozenset[tuple[str, str]]:
        """Topic and group of all consumers that some living instance runs."""
        return frozenset(
            (str(pair[0]), str(pair[1]))
            for beat in self.living
            for pair in _pairs(beat.info.get("offers"))
        )

    @cached_property
    def configured(self) -> frozenset[tuple[str, str]]:
        """Topic and group of the consumers of this configuration file."""
        return frozenset((each.topic, each.unit_group) for each in self.settings.consumers)


def _pairs(raw: Any) -> list[Any]:
    listed = raw if isinstance(raw, list | tuple) else []
    return [each for each in listed if isinstance(each, list | tuple) and len(each) == 2]
