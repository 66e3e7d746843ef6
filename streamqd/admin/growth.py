"""Grow a topic to more partitions while it is written and read, and keep the order of each key.

The new count is a multiple of the old one, so each key either keeps its partition or moves to a new
one. A group must not read the later messages of a key in a new partition before it has finished the
earlier ones in the old partition. The growth therefore holds the leases of the new partitions for
each group, so that no instance can own them. It releases them when the group has acknowledged the
entries that were in the old partitions at the switch to the new count.

1. start    the meta key records the growth and its token
2. keep     each group is created on each new partition, and its lease is taken
3. switch   the count changes. Producers route again, because each write compares the count
4. mark     the last ID of each old partition is stored as its barrier
5. settle   a group that is past all barriers gets the new partitions: their leases are released
6. finish   when every group has them, the record of the growth is deleted

Any client may repeat every step at any time, so an interrupted growth continues where it stopped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from streamqd import config
from streamqd.admin import backlog, directives, topics
from streamqd.admin.published import Fleet
from streamqd.admin.reading import BATCH, ViewReader, ask, last_id, lease_views, measure, read_id
from streamqd.errors import ContractError, RequestRefusedError
from streamqd.model import TOPIC_GROW, Assignment, Lease
from streamqd.store import growth as growth_calls
from streamqd.store import leases, messages
from streamqd.store.growth import Growth
from streamqd.store.store import Store

OWNER = TOPIC_GROW  # shown in views as the owner of a new partition during the growth
LEASE_SECONDS = 3650 * 86_400.0  # duration of the growth's leases, which are never renewed
PARTITIONS_MAX = 4096
SWITCHED, RELEASED = "switched", "released"


@dataclass(frozen=True, slots=True)
class GroupSettling:
    """The progress of one group during a growth.

    `left` is the number of messages ahead of the barriers that the group still has to finish. If an
    old partition has more than 200,000 unread messages, or at least 10,000 pending ones, `left` is
    a lower bound and `left_exact` is false. `done` is true once the group can read the new
    partitions.
    """

    group: str
    left: int
    left_exact: bool
    done: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a growth from `before` to `partitions` partitions.

    `done` is true once the growth has finished for all groups.
    """

    topic: str
    before: int
    partitions: int
    done: bool
    groups: list[GroupSettling]

    @property
    def left(self) -> str:
        """A clause about the groups that must still acknowledge messages."""
        return ", ".join(
            f"{row.group} has {row.left:,}{'' if row.left_exact else ' or more'} left to"
            " acknowledge"
            for row in self.groups
            if not row.done
        )


def grow(
    store: Store,
    topic: str,
    to: int,
    *,
    notify: Callable[[str], None] = lambda _what: None,
) -> Progress:
    """Start the growth of a topic to `to` partitions, or continue it as far as possible now.

    The call does not wait for groups to finish their messages, so repeat it until the growth is
    done. `notify` is called with SWITCHED when the new partitions exist, even if an earlier call
    created them, and with RELEASED when instances can own some of them. If the topic already has
    `to` partitions, nothing is changed. Raises TopicNotFoundError and RequestRefusedError.
    """
    _refuse_cluster(store, topic)
    count = topics.partition_count(store, topic)
    if count == to and growth_calls.in_progress(store, topic) is None:
        return Progress(topic, count, to, True, [])
    found = _start(store, topic, count, to)
    new = range(found.before, to)
    if found.phase == growth_calls.STARTED:
        _reserve_partitions(store, topic, found, _groups(store, topic, found), new)
        _check_reply(
            store.run(growth_calls.switch(store.keys, topic, found.token, new)).word, topic
        )
        found = found._replace(phase=growth_calls.SWITCHED)
    if found.phase == growth_calls.SWITCHED:
        # This includes groups that were created between the check and the switch.
        _reserve_partitions(store, topic, found, _groups(store, topic, found), new)
        reply = store.run(
            growth_calls.mark(store.keys, topic, found.token, _last_ids(store, topic, found))
        )
        _check_reply(reply.word, topic)
        found = found._replace(phase=growth_calls.MARKED, barriers=reply.values[0].decode().split())
    notify(SWITCHED)
    return _hand_over_partitions(store, topic, found, to, notify)


def progress(store: Store, topic: str, to: int) -> Progress | None:
    """Return the progress of the growth to `to` partitions, or None if it has not started.

    If the topic already has that many partitions, the growth is done. Writes nothing. Raises
    TopicNotFoundError, and RequestRefusedError if the topic cannot grow to this number or is
    already growing to another.
    """
    _refuse_cluster(store, topic)
    count = topics.partition_count(store, topic)
    found = read_progress(store, topic)
    if found is None:
        _check_count(topic, count, to)
        return Progress(topic, count, to, True, []) if count == to else None
    if found.partitions != to:
        raise _other_growth_error(topic, found.partitions)
    return found


def check_configured(topic: str, to: int, configured: config.Topic | None, source: str) -> None:
    """Raise RequestRefusedError if a configuration sets fewer partitions than the new count.

    A daemon with this configuration could not start any more after the growth. `source` is the name
    of the configuration for the error.
    """
    if configured and "partitions" in configured.explicit and configured.partitions < to:
        raise RequestRefusedError(
            f"{source} sets partitions = {configured.partitions} for {topic}; change it to {to}"
            f" there and in the configuration of every daemon that reads {topic}, or those daemons"
            " will not start again"
        )


def notifier(
    fleet: Fleet, topic: str, to: int, note: Callable[[str], None] = lambda _text: None
) -> Callable[[str], None]:
    """Return a function to pass to `grow` as `notify`, for a single growth.

    It makes the daemons of a fleet reload when the new partitions exist, and wakes them when
    partitions become free. If no daemon can reload, it calls `note` with the reason.
    """
    reloaded = False

    def notify(step: str) -> None:
        # A reload makes the daemons read the new partition count. Later calls only wake them.
        nonlocal reloaded
        if step == RELEASED:
            fleet.store.execute("PUBLISH", fleet.store.keys.wake(fleet.name), OWNER)
        elif not reloaded:
            reloaded = True
            try:
                directives.reload(fleet, None, f"{topic} grows to {to} partitions")
            except RequestRefusedError as refusal:
                note(f"no daemon reloads: {refusal}")

    return notify


def _refuse_cluster(store: Store, topic: str) -> None:
    """Raise RequestRefusedError if the partition count and the partitions are on different nodes.

    In that case, the script that writes a message could not check the partition count in the same
    step.
    """
    if (
        len(store.connection.group_by_node([store.keys.meta(topic), store.keys.stream(topic, 0)]))
        > 1
    ):
        raise RequestRefusedError(
            f"topic {topic} cannot grow on Redis Cluster; create a topic with more partitions and"
            " switch the producers to it"
        )


def read_progress(store: Store, topic: str) -> Progress | None:
    """Return the progress of a growth, or None if the topic is not growing. Writes nothing."""
    found = growth_calls.in_progress(store, topic)
    if found is None:
        return None
    state = Growth(found.token, found.before, growth_calls.MARKED, found.barriers)
    kept = _find_owned(store, topic, state, found.to)
    rows = [_count_unsettled(store, topic, state, name) for name in sorted(kept)]
    return Progress(topic, found.before, found.to, False, rows)


def _start(store: Store, topic: str, count: int, to: int) -> Growth:
    under_way = growth_calls.in_progress(store, topic)
    if under_way is None:
        _check_count(topic, count, to)
    reply = store.run(growth_calls.begin(store.keys, topic, count, to, secrets.token_hex(16)))
    match reply.word:
        case "OK":
            return Growth.parse(reply)
        case "OTHER":
            raise _other_growth_error(topic, int(reply.values[0]))
        case _:
            raise RequestRefusedError(
                f"another client changed topic {topic}; check it with `streamqd topic describe"
                f" {topic}` and try again"
            )


def _other_growth_error(topic: str, partitions: int) -> RequestRefusedError:
    return RequestRefusedError(
        f"topic {topic} is already growing to {partitions} partitions; run"
        f" `streamqd topic grow {topic} {partitions}` to complete that first"
    )


def _check_count(topic: str, count: int, to: int) -> None:
    if to < count:
        raise RequestRefusedError(
            f"topic {topic} already has {count} partitions, and a topic cannot shrink; choose"
            f" a multiple of {count}"
        )
    if to % count:
        near = [each for each in (to // count * count, (to // count + 1) * count) if each > count]
        raise RequestRefusedError(
            f"{to} is not a multiple of the {count} partitions of {topic}: keys would move"
            f" between old partitions and lose their order; choose {' or '.join(map(str, near))}"
        )
    if to > PARTITIONS_MAX:
        raise RequestRefusedError(f"a topic can have at most {PARTITIONS_MAX} partitions")


def _groups(store: Store, topic: str, found: Growth) -> list[str]:
    # Leave out groups that read dead letters, because they need not keep the order of each key.
    return topics.groups(store, topic, range(found.before), only_messages=True)


def _reserve_partitions(
    store: Store,
    topic: str,
    found: Growth,
    names: Iterable[str],
    new: Iterable[int],
) -> None:
    """Create each group at the start of each new partition, and acquire its lease.

    Raises RequestRefusedError if a lease from an older topic with the same name still exists.
    """
    assignments = [Assignment(topic, number, name) for name in names for number in new]
    measure(
        store, [messages.ensure_group(store.keys, assignment, "0") for assignment in assignments]
    )
    views = lease_views(ViewReader(store), assignments)
    calls = [
        leases.acquire(store.keys, Lease(assignment, found.token, view.epoch), LEASE_SECONDS, OWNER)
        for assignment, view in zip(assignments, views, strict=True)
    ]
    for assignment, reply in zip(assignments, measure(store, calls), strict=True):
        # After the switch, a daemon may already own partitions of a group that is new. This does no
        # harm, because a new group has no earlier messages whose order must be kept.
        if reply.word not in ("OK", "MINE") and found.phase == growth_calls.STARTED:
            raise RequestRefusedError(
                f"{assignment} is already owned, although the topic has only {found.before}"
                f" partitions; delete the remains of an older topic {topic} first"
            )


def _last_ids(store: Store, topic: str, found: Growth) -> list[str]:
    streams = [store.keys.stream(topic, number) for number in range(found.before)]
    replies = ask(store, [("XINFO", "STREAM", stream) for stream in streams])
    return [last_id(info) for info in replies]


def _hand_over_partitions(
    store: Store, topic: str, found: Growth, to: int, notify: Callable[[str], None]
) -> Progress:
    """Release the new partitions of each group that has handled all messages ahead of the barriers.

    Once this is done for all groups, finish the growth.
    """
    kept = _find_owned(store, topic, found, to)
    rows = []
    for name in sorted(kept):
        row = _count_unsettled(store, topic, found, name)
        if row.done:
            measure(
                store,
                [
                    leases.release(store.keys, Lease(assignment, found.token))
                    for assignment in kept[name]
                ],
            )
            notify(RELEASED)
        rows.append(row)
    done = all(row.done for row in rows)
    if done:
        store.run(growth_calls.end(store.keys, topic, found.token))
    return Progress(topic, found.before, to, done, rows)


def _find_owned(store: Store, topic: str, found: Growth, to: int) -> dict[str, list[Assignment]]:
    """Return the new assignments that the growth still owns, by group."""
    new = range(found.before, to)
    names = topics.groups(store, topic, new, only_messages=True)
    assignments = [Assignment(topic, number, name) for name in names for number in new]
    replies = ask(
        store, [("HGET", store.keys.fence(*assignment), "token") for assignment in assignments]
    )
    kept: dict[str, list[Assignment]] = {}
    for assignment, token in zip(assignments, replies, strict=True):
        if token == found.token.encode():
            kept.setdefault(assignment.group, []).append(assignment)
    return kept


def _count_unsettled(store: Store, topic: str, found: Growth, name: str) -> GroupSettling:
    """Count the messages ahead of the barriers that a group has not acknowledged."""
    left, exact = 0, True
    for start in range(0, len(found.barriers), BATCH):
        numbers = range(start, min(start + BATCH, len(found.barriers)))
        for stream, barrier, position in _positions(store, topic, found, name, numbers):
            if position is None:
                continue  # the group was deleted on this partition
            # Unread entries are counted first. An entry that the group reads between the two calls
            # is then counted twice, as unread and as pending, but never left out.
            unread = 0
            if read_id(position) < read_id(barrier):
                unread, whole = backlog.count_between(store, stream, position, barrier)
                exact = exact and whole
            waiting = store.execute("XPENDING", stream, name, "-", barrier, backlog.PENDING_MAX)
            exact = exact and len(waiting) < backlog.PENDING_MAX
            left += unread + len(waiting)
    return GroupSettling(name, left, exact, done=left == 0 and bool(found.barriers))


def _positions(
    store: Store, topic: str, found: Growth, name: str, numbers: Sequence[int]
) -> list[tuple[str, str, str | None]]:
    streams = [store.keys.stream(topic, number) for number in numbers]
    known = backlog.read_positions(ViewReader(store), streams)
    return [
        (stream, found.barriers[number], known[stream].get(name))
        for number, stream in zip(numbers, streams, strict=True)
    ]


def _check_reply(word: str, topic: str) -> None:
    if word == "GONE":
        raise RequestRefusedError(
            f"another client finished this growth of {topic}; check it and try again"
        )
    if word != "OK":
        raise ContractError(f"growing {topic}: {word}")
