"""Letting a group go on from another position.

What is handed out and not settled is forgotten: from the new position on it is unread again, before
it it counts as finished. A group that is owned is left alone unless forced; then its owner loses
the partition in the same step, and what its worker still does is refused.
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from streamqd.admin import groups, groups_lag, growth
from streamqd.admin.pages import SEQ_MAX, Id, ask, read_id, server_unix_ms
from streamqd.admin.unreadable import BadValues, lease_views
from streamqd.config.values import parse_duration
from streamqd.errors import Malformed, Refused
from streamqd.model import Unit
from streamqd.store import groups as store
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

EARLIEST, LATEST = "earliest", "latest"
FUTURE_MS_MAX = 60_000  # how far a clock may be ahead; what lies beyond is a slip


@dataclass(frozen=True, slots=True)
class PartitionReset:
    """One partition: ids that the group had, and has, as the last one read.

    `unread` counts what comes behind the new position, `pending` what was handed out and is
    forgotten, `delayed` and `retried` the retries that went, out of the delayed set and out of the
    retry stream (settled ones that were still kept there count too).
    """

    partition: int
    before: str
    after: str
    unread: int
    unread_exact: bool
    pending: int
    delayed: int
    retried: int


@dataclass(frozen=True, slots=True)
class GroupReset:
    """What `group reset` did, or with `dry_run` would do.

    `obstacle` is a sentence: why it would be refused now; '' when it would not be.
    """

    topic: str
    group: str
    to: str
    dry_run: bool
    retries: str  # keep | drop
    partitions: list[PartitionReset]
    obstacle: str = ""


def position(text: str, now_unix_ms: int) -> str:
    """The id after which to read: '' = the last one. `text` is what `--to` takes.

    That is earliest, latest, the id of the first message to read, or a time: RFC 3339, or a
    duration before `now_unix_ms`. Raises Malformed; Refused when it lies in the future.
    """
    if text == EARLIEST:
        return "0-0"
    if text == LATEST:
        return ""
    try:
        first = read_id(text)
    except ValueError:
        try:
            first = Id(_unix_ms(text, now_unix_ms), 0)
        except (ValueError, OverflowError):
            raise Malformed(
                f"--to {text}: write earliest, latest, an id such as 1700000000000-0, a time such"
                " as 2026-11-21T09:00:00Z, or how long ago, such as 2h"
            ) from None
    if first.ms > now_unix_ms + FUTURE_MS_MAX:
        raise Refused(
            f"--to {text} lies in the future; write latest to pass over all that is there now"
        )
    return str(_before(first))


def _unix_ms(text: str, now_unix_ms: int) -> int:
    try:
        return max(0, now_unix_ms - round(parse_duration(text) * 1000))
    except ValueError:
        moment = dt.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time without its zone")
    return max(0, round(moment.timestamp() * 1000))


def _before(entry_id: Id) -> Id:
    """The greatest id before this one: positions are exclusive."""
    if entry_id.seq:
        return Id(entry_id.ms, entry_id.seq - 1)
    return Id(entry_id.ms - 1, SEQ_MAX) if entry_id.ms else Id(0, 0)


def reset(
    link: Connection,
    keys: Keys,
    topic: str,
    group: str,
    to: str,
    *,
    partitions: Sequence[int] = (),
    drop_retries: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> GroupReset:
    """Set the position of a group on some partitions of a topic, or on all.

    Partition by partition, each in one step; nothing is done when one of them is owned and `force`
    does not say to take it, or is kept by a growth. A dry run reads only, so it tells that as
    `obstacle`. Raises TopicMissing, Refused.
    """
    count = groups.known(link, keys, topic, group)
    for number in partitions:
        if number >= count:
            raise Refused(f"the topic {topic} has no partition {number}: the last is {count - 1}")
    after = position(to, server_unix_ms(link))
    chosen = sorted({*partitions}) or range(count)
    units = [Unit(topic, number, group) for number in chosen]
    obstacle = _obstacle(link, keys, units, force=force)
    if obstacle and not dry_run:
        raise Refused(obstacle)
    rows = []
    for unit in units:
        if dry_run:
            rows.append(_foreseen(link, keys, unit, after, drop_retries))
            continue
        done = _reset(link, keys, unit, after, drop_retries=drop_retries, force=force)
        if done is not None:
            rows.append(_row(link, keys, unit, done))
    retries = "drop" if drop_retries else "keep"
    return GroupReset(topic, group, to, dry_run, retries, rows, obstacle)


def _reset(
    link: Connection, keys: Keys, unit: Unit, after: str, *, drop_retries: bool, force: bool
) -> store.ResetResult | None:
    """Reset one partition, in as many calls as what is in hand there takes.

    None: the group is not on the partition, and begins where it is configured. Raises Refused.
    """
    token = secrets.token_hex(16)
    part: store.ResetResult | None = None
    while True:
        reply = link.run(
            store.reset(
                keys,
                unit,
                part.after if part else after,
                drop_retries=drop_retries,
                force=force,
                keeper=growth.OWNER,
                token=token,
            )
        )
        if reply.word == "OWNED":
            raise Refused(_owned_sentence(unit, reply.rest[0].decode()))
        if reply.word == "NOGROUP":
            return None
        found = store.ResetResult.parse(reply)
        part = found.following(part) if part else found
        if reply.word == "OK":
            return part


def _obstacle(link: Connection, keys: Keys, units: Sequence[Unit], *, force: bool) -> str:
    """Why these units cannot be reset now, '' when they can.

    A partition that a growth keeps is not taken by force: its keys would lose their order.
    """
    views = lease_views(link, keys, units, BadValues())
    for unit, view in zip(units, views, strict=True):
        if view.ttl is not None and (view.owner == growth.OWNER or not force):
            return _owned_sentence(unit, view.owner)
    return ""


def _owned_sentence(unit: Unit, owner: str) -> str:
    if owner != growth.OWNER:
        return groups.owned_sentence(unit, owner)
    return (
        f"{unit.topic} grows, and {unit} is not read before that is over: `streamqd topic grow`"
        " goes on with it"
    )


def _row(link: Connection, keys: Keys, unit: Unit, done: store.ResetResult) -> PartitionReset:
    stream = keys.source(*unit)
    unread, exact = groups_lag.count_behind(link, stream, done.after)
    return PartitionReset(
        partition=unit.partition,
        before=done.before,
        after=done.after,
        unread=unread,
        unread_exact=exact,
        pending=done.pending,
        delayed=done.delayed,
        retried=done.retried,
    )


def _foreseen(
    link: Connection, keys: Keys, unit: Unit, after: str, drop_retries: bool
) -> PartitionReset:
    """What the script would answer, found by reading alone."""
    stream, retry = keys.source(*unit), keys.retry_stream(*unit)
    info, pending, delayed, retried = ask(
        link,
        [
            ("XINFO", "STREAM", stream),
            ("XPENDING", stream, unit.group),
            ("ZCARD", keys.retry(*unit)),
            ("XLEN", retry),
        ],
    )
    last = "0-0"
    if info:
        last = dict(zip(info[::2], info[1::2], strict=True))[b"last-generated-id"].decode()
    if not after or read_id(after) > read_id(last):
        after = last
    return _row(
        link,
        keys,
        unit,
        store.ResetResult(
            before=groups_lag.positions(link, [stream], BadValues())[stream].get(unit.group, "0-0"),
            after=after,
            pending=int(pending[0]) if pending else 0,
            delayed=delayed if drop_retries else 0,
            retried=retried if drop_retries else 0,
        ),
    )
