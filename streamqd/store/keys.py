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
        """SET: names of all topics. The client that creates a topic adds its name, and each
        producer adds the name of its topic again when it starts.
        """
        return f"{self.control}:topics:registry"

    def members(self, fleet: str) -> str:
        """ZSET: IDs of the instances in a fleet, sorted by the time of the last heartbeat."""
        return f"{self.control}:members:{{{fleet}}}"

    def info(self, fleet: str) -> str:
        """HASH: JSON description of each instance, by instance ID. It contains the instance's host,
        PID, weight, consumers and assignments.
        """
        return f"{self.control}:info:{{{fleet}}}"

    def instance(self, fleet: str, instance: str) -> str:
        """STRING, TTL: JSON summary of an instance, written by its housekeeper."""
        return f"{self.control}:instance:{{{fleet}}}:{instance}"

    def duplicate(self, fleet: str, instance: str) -> str:
        """STRING, TTL: JSON summary of a second daemon that was started with the ID of a live
        instance.
        """
        return f"{self.control}:instance:{{{fleet}}}:{instance}/duplicate"

    def history(self, fleet: str) -> str:
        """STREAM: statistics that each instance adds once a minute. Entries are kept for
        `daemon.history`.
        """
        return f"{self.control}:history:{{{fleet}}}"

    def directives(self, fleet: str) -> str:
        """HASH: JSON text of each directive for a fleet, by directive name. Commands write the
        directives, and an instance receives them in the reply to its heartbeat.
        """
        return f"{self.control}:control:{{{fleet}}}"

    def wake(self, fleet: str) -> str:
        """CHANNEL: Pub/Sub channel that wakes the supervisors of a fleet, so that a change takes
        effect before their next heartbeat.
        """
        return f"{self.control}:wake:{{{fleet}}}"

    def progress(self, run: str) -> str:
        """HASH, TTL: approximate number of entries that a pipeline run has fetched, by
        `topic/partition`.
        """
        return f"{self.control}:progress:{{{run}}}"

    def sink(self, query: str) -> str:
        """HASH, TTL: last batch of a Spark sink, and the task attempts that staged its rows. Its
        fields are: `batch`: number of the last batch for which the attempts to publish were
        decided. `plan`: these attempts and their partitions, as JSON. The field is deleted when the
        batch is published. `rows`: number of rows in the batch. `topics`: names of the topics to
        which the rows go. `attempt:<attempt>:<topic>`: number of the batch for which this attempt
        staged rows for this topic.
        """
        return f"{self.control}:sink:{{{query}}}"

    def schedule_index(self) -> str:
        """HASH: the place of each schedule, written as `fleet origin topic partition`, by schedule
        name. While a schedule moves to another partition, its previous topic and partition are
        appended.
        """
        return f"{self.control}:schedules"

    def schedule_places(self) -> str:
        """SET: every partition that has or had schedules, written as `topic/partition`."""
        return f"{self.control}:schedules:places"

    def outboxes(self) -> str:
        """SET: names of all outboxes. A relay adds the name of its outbox when it starts."""
        return f"{self.control}:outboxes"

    def outbox(self, outbox: str) -> str:
        """HASH: the relay that owns an outbox, and the statistics that the relay publishes. The
        fields `token`, `epoch`, `owner` and `since` describe the relay, and the other fields are
        its statistics.
        """
        return f"{self.control}:outbox:{{{outbox}}}"

    def outbox_lease(self, outbox: str) -> str:
        """STRING, TTL: lease of an outbox, which contains the token of the relay that owns the
        outbox.
        """
        return f"{self.control}:outbox:{{{outbox}}}:lease"

    # --- a topic ---

    def meta(self, topic: str) -> str:
        """HASH: metadata of a topic. Its fields are: `partitionCount`: number of partitions.
        `created`: time at which the topic was created. `settings`: registered settings of the
        topic, as JSON. `group:<G>`: partition count of the topic when group `<G>` was first seen.
        `grow*`: state of a growth. These fields exist only while the topic grows to more
        partitions. `deleting`: partition count of a topic that is being deleted. This field
        replaces `partitionCount`, so clients no longer find any partitions.
        """
        return f"{self.control}:topic:{{{topic}}}:meta"

    def partitions(self, topic: str) -> str:
        """SET: names of a topic's partition streams."""
        return f"{self.control}:topic:{{{topic}}}:partitions"

    def pipeline(self, topic: str, name: str) -> str:
        """STRING, TTL: lease of a pipeline on a topic, which contains the token of the run that
        holds it.
        """
        return f"{self.control}:pipeline:{{{topic}}}:{name}"

    def audit(self, topic: str) -> str:
        """STREAM: audit log of a topic, trimmed to approximately 10,000 entries."""
        return f"{self.control}:topic:{{{topic}}}:audit"

    # --- a partition ---

    def stream(self, topic: str, partition: int) -> str:
        """STREAM: messages of a partition. streamqd trims this stream, but never removes entries
        from it with XDEL.
        """
        return f"{self.streams}:{{{topic}:p:{partition}}}"

    def dlq(self, topic: str, partition: int) -> str:
        """STREAM: dead letters of all groups, which `NAME@dlq` groups read. streamqd deletes dead
        letters one by one with XDEL and never trims this stream, because some servers cannot load a
        snapshot of a stream that both XDEL and XTRIM have changed.
        """
        return f"{self.streams}:{{{topic}:p:{partition}}}:dlq"

    def moving(self, topic: str, partition: int) -> str:
        """HASH: destination of each dead letter that is moving to another slot, written as `unix-ms
        destination`, by entry ID. `unix-ms` is the time at which the dead letter was marked for
        this move.
        """
        return f"{self.control}:moving:{{{topic}:p:{partition}}}"

    def delayed_sends(self, topic: str, partition: int) -> str:
        """ZSET: send IDs of delayed sends, sorted by due time."""
        return f"{self.control}:delayed:{{{topic}:p:{partition}}}"

    def delayed_send_items(self, topic: str, partition: int) -> str:
        """HASH: message of each delayed send as packed fields, by send ID."""
        return f"{self.control}:delayed:item:{{{topic}:p:{partition}}}"

    def schedules(self, topic: str, partition: int) -> str:
        """HASH: the schedules that send to this partition. Each schedule has these fields:
        `<name>`: its specification, as JSON. `<name>:hash`: hash of the specification.
        `<name>:origin`: `file` or `operator`, depending on where the schedule was declared.
        `<name>:since`: time at which the file was read, or an operator edited the schedule.
        `<name>:seen`: time at which an instance last declared the schedule from its file.
        `<name>:held`: reason why the schedule is held, and its due time. The field exists only
        while the schedule is held.
        """
        return f"{self.control}:schedule:{{{topic}:p:{partition}}}"

    def schedules_due(self, topic: str, partition: int) -> str:
        """ZSET: names of schedules, sorted by due time."""
        return f"{self.control}:schedule:due:{{{topic}:p:{partition}}}"

    def schedules_last(self, topic: str, partition: int) -> str:
        """HASH: the last message and the counters of each schedule. Each schedule has these fields:
        `<name>:tick`: the last tick for which a message was sent. `<name>:id`: entry ID of the last
        message. `<name>:late`: milliseconds from the due time of that tick until its message was
        sent. `<name>:fired`: number of ticks for which a message was sent. `<name>:skipped`: number
        of ticks that were skipped. `<name>:ran`: time of the last message that an operator sent
        with `streamqd schedule run`.
        """
        return f"{self.control}:schedule:last:{{{topic}:p:{partition}}}"

    def dedup(self, topic: str, partition: int, dedup_id: str) -> str:
        """STRING, TTL: entry ID of the message that was sent with this deduplication ID, or the
        send ID of a delayed send.
        """
        return f"{self.control}:dedup:{{{topic}:p:{partition}}}:{dedup_id}"

    def trim(self, topic: str, partition: int) -> str:
        """HASH: how far a partition has been trimmed and archived, with the position of each group.
        Its fields are: `first`: lowest entry ID that trimming kept. `removed`: number of entries
        that trimming has removed. `size`: number of entries left after the last trim. `archived`:
        ID of the last archived entry. `dead_archived`: ID of the last archived dead letter.
        `shrunk`: time at which the current interval of `shrink_every` started. `shrink_from`:
        entries before this ID may be removed in the current interval. `shrink_next`: value of
        `shrink_from` in the next interval. `floor:<G>`: first entry that group `<G>` had not
        finished when the partition was last trimmed. `dropped_unread:<G>`: number of entries that
        were dropped before group `<G>` read them. `dropped_pending:<G>`: number of entries that
        were dropped while they were pending for group `<G>`. `holds:<G>`: `1` if entries stay in
        the partition until the Spark query that `<G>` represents has read them.
        """
        return f"{self.control}:trim:{{{topic}:p:{partition}}}"

    def staged_rows(self, topic: str, partition: int, query: str, attempt: str) -> str:
        """STREAM, TTL: rows that an attempt of a Spark task has staged but not yet published."""
        return f"{self.control}:sink:{{{topic}:p:{partition}}}:{query}:{attempt}"

    def outbox_record(self, topic: str, partition: int, outbox: str) -> str:
        """HASH: epoch of the outbox relay that may write to this partition, and the rows of the
        last batch that was written.
        """
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
        """STREAM: retried and replayed messages of a group. streamqd trims this stream."""
        return f"{self.streams}:{{{topic}:p:{partition}}}:retry:{group}"

    def lease(self, topic: str, partition: int, group: str) -> str:
        """STRING, TTL: lease of an assignment, which contains the token of the owner."""
        return f"{self.control}:lease:{{{topic}:p:{partition}}}:{group}"

    def fence(self, topic: str, partition: int, group: str) -> str:
        """HASH: fence of an assignment, which determines who may write. A fence never expires. Its
        fields are: `token`: token of the owner. The field is missing after the owner has released
        the assignment. `epoch`: number that increases whenever the assignment gets another owner.
        `owner`: instance ID of the owner. `since`: time at which the owner acquired the assignment.
        `session`: session of the owner's current connection. `quarantine`: `1` while the owner runs
        entries that it inherited from a lost owner. `mark`: places of the entries that are about to
        run in quarantine. `accused`: places of entries that may have caused the loss of an owner.
        Each of them runs alone, so that another loss shows which entry is the cause.
        """
        return f"{self.control}:fence:{{{topic}:p:{partition}}}:{group}"

    def retry(self, topic: str, partition: int, group: str) -> str:
        """ZSET: places of waiting retries, sorted by due time."""
        return f"{self.control}:retry:{{{topic}:p:{partition}}}:{group}"

    def retry_items(self, topic: str, partition: int, group: str) -> str:
        """HASH: message of each waiting retry as packed fields, by place."""
        return f"{self.control}:retry:item:{{{topic}:p:{partition}}}:{group}"

    def attempts(self, topic: str, partition: int, group: str) -> str:
        """HASH: counters of pending entries. An entry that crashed a worker or failed has some of
        these fields: `<place>:c`: number of crashes. `<place>:last`: description of the last crash.
        `<place>:f`: number of failures, if failed messages are retried without leaving their stream
        (`on_error`). `<place>:due`: time at which such a message runs again.
        """
        return f"{self.control}:attempts:{{{topic}:p:{partition}}}:{group}"

    def epochs(self, topic: str, partition: int, group: str) -> str:
        """LIST: the last 40 changes of owner, each written as `unix-ms event epoch owner other`.
        `event` is one of `acquired`, `inherited`, `released` and `reset`. An assignment is
        inherited if its previous owner was lost, in which case `other` names that owner. For a
        release, `other` contains the reason.
        """
        return f"{self.control}:epochs:{{{topic}:p:{partition}}}:{group}"

    def stack(self, topic: str, partition: int, group: str) -> str:
        """STRING, TTL: JSON with the stack of a worker, which an operator requested with `streamqd
        stack` or in the console.
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
