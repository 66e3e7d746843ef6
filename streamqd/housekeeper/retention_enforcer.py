"""Remove entries that were not acknowledged yet from topics whose settings allow this.

The loss is reported in a metric, in the log and in the trimming record of the partition.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Mapping

from streamqd import logs
from streamqd.config import Topic
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.housekeeper.batch import Refusals, run_batched
from streamqd.isolate import Isolate, run_directly
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment, TopicPartition
from streamqd.store import retention
from streamqd.store.retention import Dropped
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

PAGE = 2_000  # largest number of entries that one script removes
MISSING = 256  # largest number of pending entries that one script settles
ROUNDS_MAX = 20  # number of scripts for one partition before the partitions are listed again

Loss = tuple[str, int, str, str]  # topic, partition, group, and `unread` or `pending`


class RetentionEnforcer:
    """Drops the oldest entries of partitions, and then settles those that were pending.

    An entry that was dropped while it was pending would otherwise stay in its group's list of
    pending entries. `groups` maps topics to the groups that this instance consumes.
    """

    def __init__(
        self,
        store: Store,
        view: MetricsView,
        groups: Mapping[str, list[str]],
        isolate: Isolate[TopicPartition | Assignment] = run_directly,
    ) -> None:
        self._store = store
        self._isolate = isolate
        self._view = view
        self._groups = groups
        self._seen: set[TopicPartition] = set()

    def steps(
        self, places: Mapping[TopicPartition, Topic], refusals: Refusals
    ) -> Generator[None, None, bool]:
        """Drop a limited number of entries. Return True if more must be dropped or settled now.

        This generator makes one write per step. `places` maps partitions to the settings of their
        topics. Calls that Redis refuses are recorded in `refusals`.
        """
        losses: Counter[Loss] = Counter()
        try:
            return (yield from self._drop(places, refusals, losses))
        except RedisUnavailableError:
            # The answer to a call may have been lost, so entries may have been dropped that were
            # not settled. Check every partition again.
            self._seen.clear()
            raise
        finally:
            self._report_losses(losses)

    def _drop(
        self, places: Mapping[TopicPartition, Topic], refusals: Refusals, losses: Counter[Loss]
    ) -> Generator[None, None, bool]:
        waiting = [place for place, topic in places.items() if topic.retention.drops]
        affected: set[Assignment] = set()
        left = yield from run_batched(
            self._store,
            waiting,
            lambda place: self._call(place, places[place]),
            lambda place, reply: self._record_reply(place, reply, refusals, losses, affected),
            ROUNDS_MAX,
            self._isolate,
        )
        unsettled = yield from self._settle(affected, refusals, losses)
        return bool(left or unsettled)

    def _call(self, place: TopicPartition, topic: Topic) -> Call:
        bounds = topic.retention
        drop_before = "0-0"
        if bounds.drop_unacked_after is not None:
            age_ms = round(bounds.drop_unacked_after * 1000)
            drop_before = f"{max(0, self._view.now_unix_ms() - age_ms)}-0"
        return retention.drop(
            self._store.keys,
            *place,
            drop_before=drop_before,
            max_length=bounds.drop_unacked_above,
            archive=topic.archive == "required",
            limit=PAGE,
            expected=self._groups.get(place[0], []),
        )

    def _record_reply(
        self,
        place: TopicPartition,
        reply: Reply | RedisResponseError,
        refusals: Refusals,
        losses: Counter[Loss],
        affected: set[Assignment],
    ) -> bool:
        """Record a reply. Return True if there may be more to drop now."""
        if isinstance(reply, RedisResponseError):
            refusals.accept(reply)
            return False
        if reply.word != "OK":
            return False  # the trimmer reports which group is missing
        dropped = Dropped.parse(reply)
        if dropped.removed:
            self._view.count("trimmed", (place[0], str(place[1])), dropped.removed)
        if dropped.removed or place not in self._seen:
            # Also settle at the first check of a partition. An earlier process may have dropped
            # entries and died before it settled them.
            self._seen.add(place)
            affected |= {Assignment(*place, group) for group in dropped.unread}
        for group, lost in dropped.unread.items():
            losses[*place, group, "unread"] += lost
        return dropped.removed > 0

    def _settle(
        self, affected: set[Assignment], refusals: Refusals, losses: Counter[Loss]
    ) -> Generator[None, None, list[Assignment]]:
        """Settle entries that were pending when they were dropped.

        Return the assignments that may have more of them.
        """

        def book(assignment: Assignment, reply: Reply | RedisResponseError) -> bool:
            settled = 0
            if refusals.accept(reply) and isinstance(reply, Reply) and reply.word == "OK":
                settled = int(reply.values[0])
            losses[*assignment, "pending"] += settled
            return settled == MISSING

        left = yield from run_batched(
            self._store,
            sorted(affected),
            lambda assignment: retention.settle_missing(self._store.keys, assignment, MISSING),
            book,
            ROUNDS_MAX,
            self._isolate,
        )
        for assignment in left:
            self._seen.discard((assignment.topic, assignment.partition))
        return left

    def _report_losses(self, losses: Counter[Loss]) -> None:
        for (topic, partition, group, state), lost in sorted(losses.items()):
            if lost:
                self._view.count("dropped", (topic, str(partition), group, state), lost)
                logs.event(
                    "retention.dropped",
                    logging.WARNING,
                    topic=topic,
                    partition=partition,
                    group=group,
                    state=state,
                    entries=lost,
                )
