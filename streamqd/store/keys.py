"""Build the names of all keys. Those of one partition have the hash tag `{topic:p:i}`.

The two prefixes are configurable (`[keys]`). The defaults are `streaming:mq` for bookkeeping and
`stream:topic` for the streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.model import Assignment


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds key names. Cheap to build, equal when its prefixes are equal."""

    control: str = "streaming:mq"
    streams: str = "stream:topic"

    # --- the fleet ---

    def registry(self) -> str:
        """SET of topic names. Written by the client that creates the topic."""
        return f"{self.control}:topics:registry"

    def members(self, fleet: str) -> str:
        """ZSET instance id -> last heartbeat, unix ms by the server's clock."""
        return f"{self.control}:members:{{{fleet}}}"

    def info(self, fleet: str) -> str:
        """HASH instance id -> JSON: boot id, host, pid, nonce, weight, cap, offers, owned …"""
        return f"{self.control}:info:{{{fleet}}}"

    def instance(self, fleet: str, instance: str) -> str:
        """STRING + PX: JSON summary of one instance, published by its housekeeper."""
        return f"{self.control}:instance:{{{fleet}}}:{instance}"

    def duplicate(self, fleet: str, instance: str) -> str:
        """STRING + PX: JSON summary of a second run under the name of a live instance."""
        return f"{self.control}:instance:{{{fleet}}}:{instance}/duplicate"

    def history(self, fleet: str) -> str:
        """STREAM, one entry for each instance and minute, trimmed to `daemon.history`."""
        return f"{self.control}:history:{{{fleet}}}"

    def orders(self, fleet: str) -> str:
        """HASH directive -> JSON. Written by operators' commands, read by heartbeats."""
        return f"{self.control}:control:{{{fleet}}}"

    def wake(self, fleet: str) -> str:
        """Pub/sub channel: a change that supervisors should examine now."""
        return f"{self.control}:wake:{{{fleet}}}"

    def progress(self, run: str) -> str:
        """HASH `topic/partition` -> entries fetched, approximately, by one run of a pipeline."""
        return f"{self.control}:progress:{{{run}}}"

    def sink(self, query: str) -> str:
        """HASH + PX of a Spark query that writes: batch, plan, rows, topics, attempts."""
        return f"{self.control}:sink:{{{query}}}"

    def schedule_index(self) -> str:
        """HASH name of a schedule -> `fleet origin topic partition`, and during a move also the old
        `topic partition`.
        """
        return f"{self.control}:schedules"

    def schedule_places(self) -> str:
        """SET of `topic/partition` that have schedules, or had them."""
        return f"{self.control}:schedules:places"

    def outboxes(self) -> str:
        """SET of the names of outboxes. Written by their relays, read by views and deletions."""
        return f"{self.control}:outboxes"

    def outbox(self, outbox: str) -> str:
        """HASH of an outbox: epoch, token, owner and since of its relay, and its figures."""
        return f"{self.control}:outbox:{{{outbox}}}"

    def outbox_lease(self, outbox: str) -> str:
        """STRING + PX: token of the relay of an outbox."""
        return f"{self.control}:outbox:{{{outbox}}}:lease"

    # --- a topic ---

    def meta(self, topic: str) -> str:
        """HASH partitionCount, created, settings, `group:<G>` = partition count when first seen."""
        return f"{self.control}:topic:{{{topic}}}:meta"

    def partitions(self, topic: str) -> str:
        """SET of the topic's partition stream keys."""
        return f"{self.control}:topic:{{{topic}}}:partitions"

    def pipeline(self, topic: str, name: str) -> str:
        """STRING + PX: token of the run of a pipeline that may write to the topic."""
        return f"{self.control}:pipeline:{{{topic}}}:{name}"

    def audit(self, topic: str) -> str:
        """STREAM, at most about 10,000 entries: operators' actions, the oldest trimmed first."""
        return f"{self.control}:topic:{{{topic}}}:audit"

    # --- a partition ---

    def stream(self, topic: str, partition: int) -> str:
        """STREAM: the partition. Trimmed, but never changed by XDEL."""
        return f"{self.streams}:{{{topic}:p:{partition}}}"

    def dlq(self, topic: str, partition: int) -> str:
        """STREAM: dead letters of all groups. `X@dlq` groups read it. XDEL, but no XTRIM."""
        return f"{self.streams}:{{{topic}:p:{partition}}}:dlq"

    def moving(self, topic: str, partition: int) -> str:
        """HASH dead-letter ID -> `unix-ms destination`, during a move to another slot."""
        return f"{self.control}:moving:{{{topic}:p:{partition}}}"

    def scheduled(self, topic: str, partition: int) -> str:
        """ZSET due unix ms -> send ID of delayed sends."""
        return f"{self.control}:delayed:{{{topic}:p:{partition}}}"

    def scheduled_items(self, topic: str, partition: int) -> str:
        """HASH send ID -> packed fields of delayed sends."""
        return f"{self.control}:delayed:item:{{{topic}:p:{partition}}}"

    def schedules(self, topic: str, partition: int) -> str:
        """HASH of each schedule: `<name>` its specification, `<name>:hash`, `:origin`, `:since`,
        `:seen`, `:held`.
        """
        return f"{self.control}:schedule:{{{topic}:p:{partition}}}"

    def schedules_due(self, topic: str, partition: int) -> str:
        """ZSET due unix ms -> name of a schedule."""
        return f"{self.control}:schedule:due:{{{topic}:p:{partition}}}"

    def schedules_last(self, topic: str, partition: int) -> str:
        """HASH of each schedule `<name>:tick`, `:id`, `:late`, `:fired`, `:skipped`, `:ran`."""
        return f"{self.control}:schedule:last:{{{topic}:p:{partition}}}"

    def dedup(self, topic: str, partition: int, dedup_id: str) -> str:
        """STRING + PX: id of the entry first written under this dedup id."""
        return f"{self.control}:dedup:{{{topic}:p:{partition}}}:{dedup_id}"

    def trim(self, topic: str, partition: int) -> str:
        """HASH first (id kept), removed, size, archived, dead_archived, shrink_*, and for groups
        `floor:<G>`, `dropped_*:<G>`, `holds:<G>`.
        """
        return f"{self.control}:trim:{{{topic}:p:{partition}}}"

    def staged(self, topic: str, partition: int, query: str, attempt: str) -> str:
        """STREAM + PX: rows of one attempt of a Spark task, until its batch is published."""
        return f"{self.control}:sink:{{{topic}:p:{partition}}}:{query}:{attempt}"

    def outbox_record(self, topic: str, partition: int, outbox: str) -> str:
        """HASH of an outbox: epoch of the relay that may write here, rows of its last batch."""
        return f"{self.control}:outbox:{{{topic}:p:{partition}}}:{outbox}"

    # --- a group on a partition ---

    def source(self, topic: str, partition: int, group: str) -> str:
        """STREAM that the group reads: the partition, or for `<name>@dlq` its dead letters."""
        if Assignment(topic, partition, group).reads_dead_letters:
            return self.dlq(topic, partition)
        return self.stream(topic, partition)

    def retry_stream(self, topic: str, partition: int, group: str) -> str:
        """STREAM: retried and replayed messages of one group. Trimmed only."""
        return f"{self.streams}:{{{topic}:p:{partition}}}:retry:{group}"

    def lease(self, topic: str, partition: int, group: str) -> str:
        """STRING + PX: token of the owner. Read by lease scripts and views only."""
        return f"{self.control}:lease:{{{topic}:p:{partition}}}:{group}"

    def fence(self, topic: str, partition: int, group: str) -> str:
        """HASH without TTL: token, epoch, owner, since, session, quarantine, mark, accused."""
        return f"{self.control}:fence:{{{topic}:p:{partition}}}:{group}"

    def retry(self, topic: str, partition: int, group: str) -> str:
        """ZSET due unix ms -> place of waiting retries."""
        return f"{self.control}:retry:{{{topic}:p:{partition}}}:{group}"

    def retry_items(self, topic: str, partition: int, group: str) -> str:
        """HASH place -> packed fields of waiting retries."""
        return f"{self.control}:retry:item:{{{topic}:p:{partition}}}:{group}"

    def attempts(self, topic: str, partition: int, group: str) -> str:
        """HASH `<place>:c` crashes, `:f` failures in place, `:due` (unix ms), `:last` crash."""
        return f"{self.control}:attempts:{{{topic}:p:{partition}}}:{group}"

    def epochs(self, topic: str, partition: int, group: str) -> str:
        """LIST, the last 40 changes of owner: `unix-ms event epoch owner reason`."""
        return f"{self.control}:epochs:{{{topic}:p:{partition}}}:{group}"

    def stack(self, topic: str, partition: int, group: str) -> str:
        """STRING + PX: JSON, the worker's stack, after a person requested it."""
        return f"{self.control}:stack:{{{topic}:p:{partition}}}:{group}"


# An assignment, topic and partition, or a topic.
Place = Assignment | tuple[str, int] | tuple[str]

# Keys by their names in script headers: for a topic, for a group, and for a partition.
_OF_TOPIC = {"meta": Keys.meta, "partitions": Keys.partitions}
_OF_GROUP = {
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
_OF_PARTITION = {
    "stream": Keys.stream,
    "dlq": Keys.dlq,
    "moving": Keys.moving,
    "trim": Keys.trim,
    "scheduled": Keys.scheduled,
    "delayed": Keys.scheduled,
    "items": Keys.scheduled_items,
    "target": Keys.stream,
    "due": Keys.schedules_due,
    "schedules": Keys.schedules,
    "last": Keys.schedules_last,
}


def key_of(keys: Keys, name: str, place: Place) -> str:
    """Return the key that script headers call `name`.

    `delayed`, `items` and `target` are the keys of delayed sends, unless `place` is an assignment.
    Raises KeyError if a place has no such key.
    """
    if name in _OF_TOPIC:
        return _OF_TOPIC[name](keys, place[0])
    if isinstance(place, Assignment) and name in _OF_GROUP:
        return _OF_GROUP[name](keys, *place)
    return _OF_PARTITION[name](keys, *place[:2])
