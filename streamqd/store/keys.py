"""Build the names of all keys in Redis.

All keys of a partition have the hash tag `{topic:p:i}`, so a cluster stores them in the same slot.
The prefixes are configurable in `[keys]`. By default, they are `stream:topic` for the streams and
`streaming:mq` for all other keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.model import Assignment


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds the key names of one installation, which is identified by its two prefixes."""

    control: str = "streaming:mq"
    streams: str = "stream:topic"

    # --- the fleet ---

    def registry(self) -> str:
        """SET: names of all topics. The client that creates a topic adds its name, and every
        producer adds it too.
        """
        return f"{self.control}:topics:registry"

    def members(self, fleet: str) -> str:
        """ZSET: IDs of the instances of a fleet, sorted by the time of their last heartbeat."""
        return f"{self.control}:members:{{{fleet}}}"

    def info(self, fleet: str) -> str:
        """HASH: for each instance, JSON with its host, PID, weight, consumers and assignments."""
        return f"{self.control}:info:{{{fleet}}}"

    def instance(self, fleet: str, instance: str) -> str:
        """STRING, TTL: JSON summary of an instance, which its housekeeper writes."""
        return f"{self.control}:instance:{{{fleet}}}:{instance}"

    def duplicate(self, fleet: str, instance: str) -> str:
        """STRING, TTL: JSON summary of a second daemon that uses the ID of a live instance."""
        return f"{self.control}:instance:{{{fleet}}}:{instance}/duplicate"

    def history(self, fleet: str) -> str:
        """STREAM: statistics of each instance for each minute, kept for `daemon.history`."""
        return f"{self.control}:history:{{{fleet}}}"

    def directives(self, fleet: str) -> str:
        """HASH: directives of a fleet as JSON, by name. Commands write directives, and each
        heartbeat returns them to its instance.
        """
        return f"{self.control}:control:{{{fleet}}}"

    def wake(self, fleet: str) -> str:
        """CHANNEL: messages that wake the supervisors of a fleet, so that a change takes effect
        before their next heartbeat.
        """
        return f"{self.control}:wake:{{{fleet}}}"

    def progress(self, run: str) -> str:
        """HASH: approximate number of entries that a pipeline run fetched, by `topic/partition`."""
        return f"{self.control}:progress:{{{run}}}"

    def sink(self, query: str) -> str:
        """HASH, TTL: state of a Spark sink. Fields: batch, plan, rows, topics, attempts."""
        return f"{self.control}:sink:{{{query}}}"

    def schedule_index(self) -> str:
        """HASH: `fleet origin topic partition` of each schedule, by name. While a schedule moves to
        another partition, its old `topic partition` is appended.
        """
        return f"{self.control}:schedules"

    def schedule_places(self) -> str:
        """SET: the `topic/partition` of every partition that has or had schedules."""
        return f"{self.control}:schedules:places"

    def outboxes(self) -> str:
        """SET: names of all outboxes. A relay adds the name of its outbox when it starts."""
        return f"{self.control}:outboxes"

    def outbox(self, outbox: str) -> str:
        """HASH: the relay that owns an outbox (epoch, token, owner, since), and its statistics."""
        return f"{self.control}:outbox:{{{outbox}}}"

    def outbox_lease(self, outbox: str) -> str:
        """STRING, TTL: token of the relay that owns an outbox."""
        return f"{self.control}:outbox:{{{outbox}}}:lease"

    # --- a topic ---

    def meta(self, topic: str) -> str:
        """HASH: metadata of a topic. Fields: partitionCount, created, settings, and for each group
        `group:<G>`, the partition count when the group was first seen. During a growth, it also has
        the `grow*` fields. During a deletion, `deleting` replaces partitionCount.
        """
        return f"{self.control}:topic:{{{topic}}}:meta"

    def partitions(self, topic: str) -> str:
        """SET: names of the partition streams of a topic."""
        return f"{self.control}:topic:{{{topic}}}:partitions"

    def pipeline(self, topic: str, name: str) -> str:
        """STRING, TTL: lease of a pipeline on a topic, with the token of the run that has it."""
        return f"{self.control}:pipeline:{{{topic}}}:{name}"

    def audit(self, topic: str) -> str:
        """STREAM: audit log of a topic, trimmed to about 10,000 entries."""
        return f"{self.control}:topic:{{{topic}}}:audit"

    # --- a partition ---

    def stream(self, topic: str, partition: int) -> str:
        """STREAM: the messages of a partition. streamqd trims it, but never uses XDEL on it."""
        return f"{self.streams}:{{{topic}:p:{partition}}}"

    def dlq(self, topic: str, partition: int) -> str:
        """STREAM: dead letters of all groups. `NAME@dlq` groups read it. streamqd removes entries
        with XDEL, and never trims the stream.
        """
        return f"{self.streams}:{{{topic}:p:{partition}}}:dlq"

    def moving(self, topic: str, partition: int) -> str:
        """HASH: `unix-ms destination` for each dead letter that is moving to another slot, by ID.
        The time is that of the call that marked the dead letter.
        """
        return f"{self.control}:moving:{{{topic}:p:{partition}}}"

    def delayed_sends(self, topic: str, partition: int) -> str:
        """ZSET: send IDs of delayed sends, sorted by due time."""
        return f"{self.control}:delayed:{{{topic}:p:{partition}}}"

    def delayed_send_items(self, topic: str, partition: int) -> str:
        """HASH: packed fields of each delayed send, by send ID."""
        return f"{self.control}:delayed:item:{{{topic}:p:{partition}}}"

    def schedules(self, topic: str, partition: int) -> str:
        """HASH: the schedules that send to this partition. The field `<name>` contains the
        specification of a schedule. Its other fields are `<name>:hash`, `:origin`, `:since`,
        `:seen` and `:held`.
        """
        return f"{self.control}:schedule:{{{topic}:p:{partition}}}"

    def schedules_due(self, topic: str, partition: int) -> str:
        """ZSET: names of schedules, sorted by due time."""
        return f"{self.control}:schedule:due:{{{topic}:p:{partition}}}"

    def schedules_last(self, topic: str, partition: int) -> str:
        """HASH: last tick and counts of each schedule. Fields: `<name>:tick`, `:id`, `:late`,
        `:fired`, `:skipped`, `:ran`.
        """
        return f"{self.control}:schedule:last:{{{topic}:p:{partition}}}"

    def dedup(self, topic: str, partition: int, dedup_id: str) -> str:
        """STRING, TTL: entry ID or send ID of the message with this deduplication ID."""
        return f"{self.control}:dedup:{{{topic}:p:{partition}}}:{dedup_id}"

    def trim(self, topic: str, partition: int) -> str:
        """HASH: record of trimming. Fields: first (lowest ID kept), removed, size, archived,
        dead_archived, shrunk, `shrink_*`, and for each group `floor:<G>`, `dropped_*:<G>` and
        `holds:<G>`.
        """
        return f"{self.control}:trim:{{{topic}:p:{partition}}}"

    def staged_rows(self, topic: str, partition: int, query: str, attempt: str) -> str:
        """STREAM, TTL: rows that an attempt of a Spark task has staged and not published yet."""
        return f"{self.control}:sink:{{{topic}:p:{partition}}}:{query}:{attempt}"

    def outbox_record(self, topic: str, partition: int, outbox: str) -> str:
        """HASH: epoch of the outbox relay that may write here, and the rows of its last batch."""
        return f"{self.control}:outbox:{{{topic}:p:{partition}}}:{outbox}"

    # --- a group on a partition ---

    def source(self, topic: str, partition: int, group: str) -> str:
        """Return the key of the stream that the group reads.

        It is the stream of the partition or, for a `<name>@dlq` group, that of its dead letters.
        """
        if Assignment(topic, partition, group).reads_dead_letters:
            return self.dlq(topic, partition)
        return self.stream(topic, partition)

    def retry_stream(self, topic: str, partition: int, group: str) -> str:
        """STREAM: retried and replayed messages of a group. streamqd trims it."""
        return f"{self.streams}:{{{topic}:p:{partition}}}:retry:{group}"

    def lease(self, topic: str, partition: int, group: str) -> str:
        """STRING, TTL: lease of an assignment, which contains the token of the owner."""
        return f"{self.control}:lease:{{{topic}:p:{partition}}}:{group}"

    def fence(self, topic: str, partition: int, group: str) -> str:
        """HASH: fence of an assignment, which never expires. The fields token, epoch, owner and
        since describe the owner. The field session identifies the owner's connection. The fields
        quarantine, mark and accused control the recovery after the loss of an owner.
        """
        return f"{self.control}:fence:{{{topic}:p:{partition}}}:{group}"

    def retry(self, topic: str, partition: int, group: str) -> str:
        """ZSET: places of waiting retries, sorted by due time."""
        return f"{self.control}:retry:{{{topic}:p:{partition}}}:{group}"

    def retry_items(self, topic: str, partition: int, group: str) -> str:
        """HASH: packed fields of each waiting retry, by place."""
        return f"{self.control}:retry:item:{{{topic}:p:{partition}}}:{group}"

    def attempts(self, topic: str, partition: int, group: str) -> str:
        """HASH: counters of pending entries. Fields: `<place>:c` (number of crashes) and
        `<place>:last` (description of the last crash). Messages that are retried without leaving
        their stream (`on_error`) also have `<place>:f` (number of failures) and `<place>:due` (time
        of the next run).
        """
        return f"{self.control}:attempts:{{{topic}:p:{partition}}}:{group}"

    def epochs(self, topic: str, partition: int, group: str) -> str:
        """LIST: the last 40 changes of owner, each `unix-ms event epoch owner other`. `other` is
        the reason for a release, or the owner that was lost.
        """
        return f"{self.control}:epochs:{{{topic}:p:{partition}}}:{group}"

    def stack(self, topic: str, partition: int, group: str) -> str:
        """STRING, TTL: JSON with the stack of a worker, written after a request of `streamqd stack`
        or the console.
        """
        return f"{self.control}:stack:{{{topic}:p:{partition}}}:{group}"


# The object to which a call applies: an assignment, a partition (topic, number), or a topic.
Place = Assignment | tuple[str, int] | tuple[str]

# These tables map the key names in script headers to the methods that build the keys. There is one
# table each for a topic, for an assignment and for a partition.
_TOPIC_KEYS = {"meta": Keys.meta, "partitions": Keys.partitions}
_GROUP_KEYS = {
    "stream": Keys.source,
    "retry": Keys.retry_stream,
    "delayed": Keys.retry,
    "items": Keys.retry_items,
    "target": Keys.retry_stream,
    "fence": Keys.fence,
    "lease": Keys.lease,
    "attempts": Keys.attempts,
    "epochs": Keys.epochs,
}
_PARTITION_KEYS = {
    "stream": Keys.stream,
    "dlq": Keys.dlq,
    "moving": Keys.moving,
    "trim": Keys.trim,
    "scheduled": Keys.delayed_sends,
    "delayed": Keys.delayed_sends,
    "items": Keys.delayed_send_items,
    "target": Keys.stream,
    "due": Keys.schedules_due,
    "schedules": Keys.schedules,
    "last": Keys.schedules_last,
}


def key_by_name(keys: Keys, name: str, place: Place) -> str:
    """Return the key that is called `name` in script headers.

    The meaning of some names depends on the place. For an assignment, `delayed` and `items` are the
    keys of its waiting retries, and `target` is its retry stream. For a partition, they are the
    keys of its delayed sends and the partition stream. Raises KeyError if `place` has no such key.
    """
    if name in _TOPIC_KEYS:
        return _TOPIC_KEYS[name](keys, place[0])
    if isinstance(place, Assignment) and name in _GROUP_KEYS:
        return _GROUP_KEYS[name](keys, *place)
    return _PARTITION_KEYS[name](keys, *place[:2])
