"""Groups: who reads a topic, how far they are, and removing one."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from streamqd.admin import groups_lag, topics
from streamqd.admin.pages import server_unix_ms
from streamqd.admin.unreadable import BadValues, Unreadable, lease_views
from streamqd.errors import Refused
from streamqd.model import KEEPERS, Unit
from streamqd.store import groups as store
from streamqd.store import leases
from streamqd.store import topics as registry
from streamqd.store.client import Connection
from streamqd.store.keys import Keys


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of `group list`: sums over the partitions of its topic.

    `owned` counts the partitions that an instance holds, `owners` names those instances. The other
    fields are those of `group describe`. `unreadable` are values of its topic that cannot be read;
    a topic of which they hide all groups has a row without a `group`.
    """

    topic: str
    group: str
    partitions: int
    owned: int
    owners: list[str]
    lag: int
    lag_exact: bool
    pending: int
    delayed: int
    oldest_unix_ms: int | None
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """A group on one partition.

    `state` is owned, expired (not renewed in time) or free. `position` is the id last handed out,
    `lag` counts what comes behind it and what waits in the retry stream (`retry_unread`); it is
    exact unless `lag_exact` is false: then there are at least so many. `pending` are handed out and
    not settled, `delayed` wait for their next attempt. The times are those of writing of the oldest
    unread and pending message.
    """

    partition: int
    state: str
    owner: str
    epoch: int
    since_unix_ms: int | None
    position: str
    lag: int
    lag_exact: bool
    pending: int
    retry_unread: int
    delayed: int
    oldest_unread_unix_ms: int | None
    oldest_pending_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class GroupDetail:
    """A group on a topic. `missing` are the partitions on which it has not been made.

    `unreadable` are values in Redis that cannot be read: a number among them counts as none.
    """

    topic: str
    group: str
    now_unix_ms: int
    lag: int
    lag_exact: bool
    pending: int
    delayed: int
    oldest_unix_ms: int | None
    missing: list[int]
    partitions: list[GroupPartition]
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class GroupDeleted:
    """What `group delete` did."""

    topic: str
    group: str
    partitions: int


def listed(link: Connection, keys: Keys, topic: str | None = None) -> list[GroupRow]:
    """The groups of one topic or all. Raises TopicMissing."""
    bad = BadValues()
    if topic is not None:
        counts = {topic: topics.partition_count(link, keys, topic)}
    else:
        counts = topics.known_counts(link, keys, bad)
    rows = [_row("", "", [], bad)] if bad.rows else []
    for name, count in counts.items():
        bad, before = BadValues(), len(rows)
        for group in topics.groups(link, keys, name, range(count), bad=bad):
            units = [Unit(name, each, group) for each in range(count)]
            rows.append(_row(name, group, _partitions(link, keys, units, bad), bad))
        if bad.rows and len(rows) == before:
            rows.append(_row(name, "", [], bad))
    return rows


def describe(link: Connection, keys: Keys, topic: str, group: str) -> GroupDetail:
    """One group, partition by partition. Raises TopicMissing, Refused."""
    count, bad = known(link, keys, topic, group), BadValues()
    topics.groups(link, keys, topic, range(count), bad=bad)
    parts = _partitions(link, keys, [Unit(topic, each, group) for each in range(count)], bad)
    row = _row(topic, group, parts, bad)
    present = {each.partition for each in parts}
    return GroupDetail(
        topic=topic,
        group=group,
        now_unix_ms=server_unix_ms(link),
        lag=row.lag,
        lag_exact=row.lag_exact,
        pending=row.pending,
        delayed=row.delayed,
        oldest_unix_ms=row.oldest_unix_ms,
        missing=[number for number in range(count) if number not in present],
        partitions=parts,
        unreadable=row.unreadable,
    )


def known(link: Connection, keys: Keys, topic: str, group: str) -> int:
    """The number of partitions of a topic that a group reads. Raises TopicMissing, Refused."""
    count = topics.partition_count(link, keys, topic)
    found = topics.groups(link, keys, topic, range(count))
    if group not in found:
        near = difflib.get_close_matches(group, found, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Refused(f"no group {group} reads the topic {topic}{hint}")
    return count


def names(link: Connection, keys: Keys, topic: str) -> list[str]:
    """The groups of a topic, also those of which only a trace is left. Raises TopicMissing."""
    count = topics.partition_count(link, keys, topic)
    found = {*topics.groups(link, keys, topic, range(count))}
    return sorted(found | {*registry.groups_seen(link, keys, topic)})


def delete(link: Connection, keys: Keys, topic: str, group: str, *, force: bool) -> GroupDeleted:
    """Remove a group with its position, its retries and its counters; dead letters stay.

    A deletion that was interrupted goes on when it is asked for again. Raises TopicMissing;
    Refused when there is no such group, and unless `force` says to do it, while it is owned or has
    messages that are not settled. All partitions are looked at before the first is touched.
    """
    count = topics.partition_count(link, keys, topic)
    if group not in names(link, keys, topic):
        known(link, keys, topic, group)  # says that there is none
    units = [Unit(topic, number, group) for number in range(count)]
    if not force:
        _refuse_busy(link, keys, units)
    for unit in units:
        call = store.delete(keys, unit, force=force, token=secrets.token_hex(16))
        while (reply := link.run(call)).word == "MORE":
            pass
        if reply.word == "OWNED":
            raise Refused(owned_sentence(unit, reply.rest[0].decode()))
        if reply.word == "UNSETTLED":
            raise Refused(f"{unit} got messages meanwhile; say --force to give them up")
    # Last: what remembers the group makes an interrupted deletion possible to repeat.
    link.execute("HDEL", keys.meta(topic), f"group:{group}")
    return GroupDeleted(topic, group, count)


def owner_of(link: Connection, keys: Keys, unit: Unit) -> str | None:
    """Who holds a unit by a lease that lives; None for nobody."""
    (view,) = lease_views(link, keys, [unit], BadValues())
    return view.owner if view.ttl is not None else None


def owned_sentence(unit: Unit, owner: str) -> str:
    """Why something is refused while an instance, or another verb, holds the unit."""
    if owner in KEEPERS:
        return (
            f"a {owner.replace('-', ' ')} works at {unit}, or was interrupted there: say this again"
            " once it is done, or in 15 s"
        )
    return (
        f"{unit} is owned by {owner}: stop the group first with `streamqd group stop {unit.topic}"
        f" {unit.group} --wait`, or say --force to take the partition away from its owner"
    )


def _refuse_busy(link: Connection, keys: Keys, units: Sequence[Unit]) -> None:
    found = _by_partition(link, keys, units, BadValues())
    for unit, part in zip(units, found, strict=True):
        if part is None:
            continue
        if part.state == "owned":
            raise Refused(owned_sentence(unit, part.owner))
        waiting = part.pending + part.delayed + part.retry_unread
        if waiting:
            raise Refused(
                f"{unit} has {waiting} messages that were handed out or wait for their next"
                " attempt; say --force to give them up"
            )


def _partitions(
    link: Connection, keys: Keys, units: Sequence[Unit], bad: BadValues
) -> list[GroupPartition]:
    return [each for each in _by_partition(link, keys, units, bad) if each is not None]


def _by_partition(
    link: Connection, keys: Keys, units: Sequence[Unit], bad: BadValues
) -> list[GroupPartition | None]:
    views = lease_views(link, keys, units, bad)
    found = groups_lag.backlogs(link, keys, units, bad)
    return [
        _partition(unit, view, found[unit]) if unit in found else None
        for unit, view in zip(units, views, strict=True)
    ]


def _partition(
    unit: Unit, view: leases.LeaseView, backlog: groups_lag.UnitBacklog
) -> GroupPartition:
    held = bool(view.token)
    return GroupPartition(
        partition=unit.partition,
        state=("expired" if view.ttl is None else "owned") if held else "free",
        owner=view.owner if held else "",
        epoch=view.epoch,
        since_unix_ms=view.since_unix_ms if held else None,
        position=backlog.position,
        lag=backlog.lag,
        lag_exact=backlog.lag_exact,
        pending=backlog.pending,
        retry_unread=backlog.retry_unread,
        delayed=backlog.delayed,
        oldest_unread_unix_ms=backlog.oldest_unread_unix_ms,
        oldest_pending_unix_ms=backlog.oldest_pending_unix_ms,
    )


def _row(topic: str, group: str, parts: Sequence[GroupPartition], bad: BadValues) -> GroupRow:
    times = [
        each
        for part in parts
        for each in (part.oldest_unread_unix_ms, part.oldest_pending_unix_ms)
        if each is not None
    ]
    return GroupRow(
        topic=topic,
        group=group,
        partitions=len(parts),
        owned=sum(part.state == "owned" for part in parts),
        owners=sorted({part.owner for part in parts if part.owner}),
        lag=sum(part.lag for part in parts),
        lag_exact=all(part.lag_exact for part in parts),
        pending=sum(part.pending for part in parts),
        delayed=sum(part.delayed for part in parts),
        oldest_unix_ms=min(times, default=None),
        unreadable=bad.rows,
    )
