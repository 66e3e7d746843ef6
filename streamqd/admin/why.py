"""Gathering what is known of a partition, and asking `cause` why it does not move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from streamqd.admin import live, partitions, topics
from streamqd.admin.cause import Cause, Facts, MemberFacts, causes
from streamqd.admin.live import LiveUnit, LiveView
from streamqd.admin.pages import ask
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import control, leases, members
from streamqd.store.client import Link
from streamqd.store.fetch import CONSUMER
from streamqd.store.keys import Keys
from streamqd.store.statistics import measure_unit, unit_figures


@dataclass(frozen=True, slots=True)
class Answer:
    """Why one unit does not move: `causes[0]` is the likeliest. `moves`: nothing holds it.

    `lag`, `pending`, `delayed` and `oldest_unix_ms` as in `partitions`; `lag_per_second` is how
    fast the lag grows, null when its owner has not told.
    """

    topic: str
    partition: int
    group: str
    owner: str
    moves: bool
    causes: list[Cause]
    lag: int | None
    pending: int
    delayed: int
    oldest_unix_ms: int | None
    lag_per_second: float | None


def answer(
    link: Link,
    keys: Keys,
    fleet: str,
    topic: str,
    partition: int,
    group: str | None,
    *,
    stale: float,
) -> list[Answer]:
    """Say it of one group, or of each group of the topic. Raises TopicMissing, Refused."""
    count = topics.partition_count(link, keys, topic)
    if not 0 <= partition < count:
        raise Refused(
            f"{topic} has no partition {partition}: partitions are numbered 0 to {count - 1}"
        )
    known = topics.groups(link, keys, topic, range(count))
    if group is not None and group not in known:
        raise Refused(f"no group {group} reads the topic {topic}")
    if not known:
        raise Refused(f"no group reads the topic {topic}, so nothing of it can move")
    view = live.look(link, keys, fleet, stale=stale)
    units = [Unit(topic, partition, each) for each in sorted(known) if group in (None, each)]
    orders = _Orders.read(link, keys, fleet)
    return [_one(link, keys, view, orders, unit) for unit in units]


class _Orders(NamedTuple):
    """What operators want, and how every member describes itself."""

    control: control.Control
    infos: dict[str, dict[str, object]]

    @classmethod
    def read(cls, link: Link, keys: Keys, fleet: str) -> _Orders:
        flat, infos = ask(link, [("HGETALL", keys.orders(fleet)), ("HGETALL", keys.info(fleet))])
        named = zip(infos[::2], infos[1::2], strict=True)
        return cls(
            control.read(flat),
            {name.decode("utf-8", "replace"): live.document(raw) for name, raw in named},
        )


def _one(link: Link, keys: Keys, view: LiveView, orders: _Orders, unit: Unit) -> Answer:
    (row,) = partitions.rows(link, keys, [unit])
    fence, ttl = ask(link, leases.view(keys, unit))
    figures = unit_figures(link.run(measure_unit(keys, unit)))
    due = figures.next_due_unix_ms if figures else None
    told = _told(view, unit, row.owner)
    failures = [
        each for each in view.failures if Unit(each.topic, each.partition, each.group) == unit
    ]
    now = view.now_unix_ms
    pause = orders.control.pause_of(unit)
    facts = Facts(
        unit=unit,
        lease=row.state,
        owner=row.owner,
        lag=row.lag,
        unread=row.oldest_unread_unix_ms is not None,
        pending=row.pending,
        delayed=row.delayed,
        next_due_seconds=None if due is None else (due - now) / 1000,
        oldest_seconds=None if row.oldest_unix_ms is None else (now - row.oldest_unix_ms) / 1000,
        foreign=_foreign(link, keys, unit),
        told=told,
        failures=tuple(failures),
        pause=None if pause is None else live.order_of("pause", str(pause[0]), pause[1]),
        drained=tuple(orders.control.drains),
        members=_members(view, orders, unit),
        solo=leases.LeaseView.parse(fence, ttl).solo,
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
        seen = members.seen_of(members.Beat(each.instance, each.beat_unix_ms, info))
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
    told = info.get("capacity")
    return told if isinstance(told, int) else None


def _foreign(link: Link, keys: Keys, unit: Unit) -> dict[str, int]:
    """The clients other than streamqd itself that hold entries, with how many."""
    replies = ask(
        link,
        [
            ("XPENDING", keys.source(*unit), unit.group),
            ("XPENDING", keys.retry_stream(*unit), unit.group),
        ],
    )
    found: dict[str, int] = {}
    for reply in replies:
        for name, count in (reply[3] or ()) if reply else ():
            if name != CONSUMER.encode():
                text = name.decode("utf-8", "replace")
                found[text] = found.get(text, 0) + int(count)
    return found
