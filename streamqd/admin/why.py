"""Gathering what is known of a partition, and asking `cause` why it does not move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from streamqd.admin import groups_lag, live, partitions, published, topics
from streamqd.admin.cause import MemberFacts, WaitCause, WaitFacts, causes
from streamqd.admin.live import LiveUnit, LiveView
from streamqd.admin.unreadable import BadValues, Unreadable, ask_each, lease_views, measure_each
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import directives, leases, members
from streamqd.store.client import Connection
from streamqd.store.fetch import CONSUMER
from streamqd.store.keys import Keys
from streamqd.store.statistics import UnitFigures, measure_unit


@dataclass(frozen=True, slots=True)
class Answer:
    """Why one unit does not move: `causes[0]` is the likeliest. `moves`: nothing holds it.

    `lag`, `pending`, `delayed` and `oldest_unix_ms` as in `partitions`; `lag_per_second` is how
    fast the lag grows, null when its owner has not told. `unreadable` are values in Redis that
    cannot be read, of this unit and of the fleet: they count as missing.
    """

    topic: str
    partition: int
    group: str
    owner: str
    moves: bool
    causes: list[WaitCause]
    lag: int | None
    pending: int
    delayed: int
    oldest_unix_ms: int | None
    lag_per_second: float | None
    unreadable: list[Unreadable]


def answer(
    link: Connection,
    keys: Keys,
    fleet: str,
    topic: str,
    partition: int | None = None,
    group: str | None = None,
    *,
    stale: float,
) -> list[Answer]:
    """Say it of one partition or all of a topic, of one group or each. Group by group.

    Raises TopicMissing, Refused.
    """
    count = topics.partition_count(link, keys, topic)
    if partition is not None and not 0 <= partition < count:
        raise Refused(
            f"{topic} has no partition {partition}: partitions are numbered 0 to {count - 1}"
        )
    bad = BadValues()
    known = topics.groups(link, keys, topic, range(count), bad=bad)
    if group is not None and group not in known:
        raise Refused(f"no group {group} reads the topic {topic}")
    if not known:
        raise Refused(f"no group reads the topic {topic}, so nothing of it can move")
    numbers = range(count) if partition is None else (partition,)
    units = [
        Unit(topic, number, each)
        for each in sorted(known)
        if group in (None, each)
        for number in numbers
    ]
    view = live.look(link, keys, fleet, stale=stale)
    orders = _Orders.read(link, keys, fleet, bad)
    for row in view.unreadable:
        bad.keep(row)
    replies = measure_each(link, [measure_unit(keys, unit) for unit in units], bad)
    figures = [
        groups_lag.unit_figures(unit, reply, keys, bad)
        for unit, reply in zip(units, replies, strict=True)
    ]
    held = lease_views(link, keys, units, bad)
    rows, foreign = partitions.rows(link, keys, units, bad), _foreign(link, keys, units, bad)
    answers = [
        _one(view, orders, Measured(*each))
        for each in zip(units, rows, figures, held, foreign, strict=True)
    ]
    return [replace(each, unreadable=bad.rows) for each in answers]


class Measured(NamedTuple):
    """What Redis holds of one unit."""

    unit: Unit
    row: partitions.UnitRow
    figures: UnitFigures | None
    lease: leases.LeaseView
    foreign: dict[str, int]


class _Orders(NamedTuple):
    """What operators want, and how every member describes itself."""

    control: directives.Directives
    infos: dict[str, dict[str, object]]

    @classmethod
    def read(cls, link: Connection, keys: Keys, fleet: str, bad: BadValues) -> _Orders:
        asked = [("HGETALL", keys.orders(fleet)), *members.stored(keys, fleet)]
        flat, scores, infos = ask_each(link, asked, bad)
        beats = published.beats(keys, fleet, scores, infos, bad)
        return cls(directives.read(flat or ()), {beat.instance: beat.info for beat in beats})


def _one(view: LiveView, orders: _Orders, measured: Measured) -> Answer:
    unit, row = measured.unit, measured.row
    due = measured.figures.next_due_unix_ms if measured.figures else None
    told = _told(view, unit, row.owner)
    failures = [
        each for each in view.failures if Unit(each.topic, each.partition, each.group) == unit
    ]
    now = view.now_unix_ms
    pause, stop = orders.control.pause_of(unit), orders.control.stop_of(unit)
    facts = WaitFacts(
        unit=unit,
        lease=row.state,
        owner=row.owner,
        lag=row.lag,
        unread=row.oldest_unread_unix_ms is not None,
        pending=row.pending,
        delayed=row.delayed,
        next_due_seconds=None if due is None else (due - now) / 1000,
        oldest_seconds=None if row.oldest_unix_ms is None else (now - row.oldest_unix_ms) / 1000,
        foreign=measured.foreign,
        told=told,
        failures=tuple(failures),
        pause=None if pause is None else live.order_of("pause", str(pause[0]), pause[1]),
        drained=tuple(orders.control.drains),
        members=_members(view, orders, unit),
        solo=measured.lease.solo,
        stop=None if stop is None else live.order_of("stop", f"{unit.topic}/{unit.group}", stop),
    )
    found = causes(facts)
    return Answer(
        topic=unit.topic,
        partition=unit.partition,
        group=unit.group,
        owner=row.owner,
        moves=found[0].moves,
        causes=found,
        lag=row.lag,
        pending=row.pending,
        delayed=row.delayed,
        oldest_unix_ms=row.oldest_unix_ms,
        lag_per_second=told.lag_per_second if told else None,
        unreadable=[],
    )


def _told(view: LiveView, unit: Unit, owner: str) -> LiveUnit | None:
    """What its owner says of it. A worker that crashes in a loop is told by its last owner."""
    for each in view.units:
        if live.unit_key(each) == unit and each.state not in ("free", "expired", "unknown"):
            return each if owner in ("", each.owner) else None
    return None


def _members(view: LiveView, orders: _Orders, unit: Unit) -> tuple[MemberFacts, ...]:
    found = []
    for each in view.instances:
        info = orders.infos.get(each.instance, {})
        seen = members.seen_of(members.Heartbeat(each.instance, each.beat_unix_ms, info))
        found.append(
            MemberFacts(
                instance=each.instance,
                state=each.state,
                offers=(unit.topic, unit.group) in seen.member.offers,
                broken=unit in seen.broken,
                leaving=seen.leaving,
                cap=seen.member.cap,
                owned=each.owned,
                redis_up=each.redis_up,
                capacity=_capacity(info),
                limit=str(info.get("capacity_problem", ""))[:200],
                silent_seconds=max(0, view.now_unix_ms - each.beat_unix_ms) / 1000,
            )
        )
    return tuple(found)


def _capacity(info: dict[str, object]) -> int | None:
    return published.whole(info.get("capacity"))


def _foreign(
    link: Connection, keys: Keys, units: list[Unit], bad: BadValues
) -> list[dict[str, int]]:
    """Of each unit the clients other than streamqd that hold entries, with how many.

    '' is nobody at all.
    """
    replies = ask_each(
        link,
        [
            ("XPENDING", stream, unit.group)
            for unit in units
            for stream in (keys.source(*unit), keys.retry_stream(*unit))
        ],
        bad,
    )
    held = []
    for at in range(0, len(replies), 2):
        found: dict[str, int] = {}
        for reply in replies[at : at + 2]:
            owned = 0
            for name, count in (reply[3] or ()) if reply else ():
                owned += int(count) if name else 0
                if name not in (CONSUMER.encode(), b""):
                    text = name.decode("utf-8", "replace")
                    found[text] = found.get(text, 0) + int(count)
            if reply and int(reply[0]) > owned:
                found[""] = found.get("", 0) + int(reply[0]) - owned
        held.append(found)
    return held
