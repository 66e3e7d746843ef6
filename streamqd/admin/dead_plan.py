"""What a replay would do: how many, of what, to whom, and whether that is wise. Writes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from streamqd.admin import partitions, topics
from streamqd.admin.dead_causes import FailureCause, FailureTally
from streamqd.admin.dead_choice import DeadLetterFilter, pages
from streamqd.admin.dead_replay import GROUP_GONE, MAX_REPLAYS, refusal
from streamqd.admin.dead_target import HOME, Route, Target
from streamqd.admin.pages import server_unix_ms
from streamqd.admin.unreadable import BadValues
from streamqd.model import Unit
from streamqd.store import directives
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

Place = tuple[str, int]  # group, partition


@dataclass(frozen=True, slots=True)
class Receiver:
    """A group that would get letters, and how it stands on the partitions that they go to.

    `owned` and `paused` count those partitions; `owners` are the instances. `same_worker` counts
    partitions whose worker is the one that ran when the newest of the letters there died: neither
    a restart, nor a reload, nor another owner has come in between, so what failed would run again.
    """

    group: str
    letters: int
    partitions: int
    owned: int
    paused: int
    same_worker: int
    owners: list[str]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a replay would do now.

    `letters` would be replayed, those in `refused` would stay, by reason. `replayed_before` of them
    were replayed before. `causes` are as in `dlq stats`, of what would be replayed. `receivers` are
    the groups that would get them. `notes` are sentences about what to think of first.
    `until_unix_ms` bounds the same replay to the letters counted here.
    """

    topic: str
    target: str
    letters: int
    refused: dict[str, int]
    replayed_before: int
    causes: list[FailureCause]
    receivers: list[Receiver]
    notes: list[str]
    until_unix_ms: int


def plan(
    link: Connection,
    keys: Keys,
    topic: str,
    choice: DeadLetterFilter,
    *,
    fleet: str,
    target: Target = HOME,
    max_replays: int = MAX_REPLAYS,
    limit: int | None = None,
) -> ReplayPlan:
    """Count what `dead_replay.replay` would do. Raises TopicMissing, Refused."""
    route = Route(link, keys, topic, target)
    receiving = target.topic or topic
    groups = topics.groups(link, keys, receiving, range(route.count), letters=False)
    refused: Counter[str] = Counter()
    tally = FailureTally()
    newest: dict[Place, int] = {}
    counts: Counter[str] = Counter()
    found = pages(link, keys, topic, choice)
    until = server_unix_ms(link) + 1
    for page in found:
        for entry in page:
            if limit is not None and tally.count >= limit:
                break
            why = refusal(route, entry, max_replays)
            to = route.of(entry)
            if to is not None and not why and to.group is not None and to.group not in groups:
                why = GROUP_GONE
            if why or to is None:
                refused[why] += 1
                continue
            tally.add(entry)
            for group in groups if to.group is None else (to.group,):
                counts[group] += 1
                place = (group, to.partition)
                newest[place] = max(newest.get(place, 0), entry.id.ms)
    causes = tally.causes()
    receivers = _receivers(link, keys, fleet, receiving, newest, counts)
    return ReplayPlan(
        topic=topic,
        target=str(target),
        letters=tally.count,
        refused=dict(refused),
        replayed_before=sum(each.replayed for each in causes),
        causes=causes,
        receivers=receivers,
        notes=_notes(tally.count, target, causes, receivers),
        until_unix_ms=until,
    )


def _receivers(
    link: Connection,
    keys: Keys,
    fleet: str,
    topic: str,
    newest: dict[Place, int],
    counts: Counter[str],
) -> list[Receiver]:
    places = sorted(newest)
    units = [Unit(topic, number, group) for group, number in places]
    rows = partitions.rows(link, keys, units, BadValues())
    orders = directives.read(link.execute("HGETALL", keys.orders(fleet)))
    paused = [orders.pause_of(Unit(topic, number, group)) is not None for group, number in places]
    receivers = []
    for group, letters in counts.most_common():
        mine = [at for at, place in enumerate(places) if place[0] == group]
        owned = [rows[at] for at in mine if rows[at].state == "owned"]
        receivers.append(
            Receiver(
                group=group,
                letters=letters,
                partitions=len(mine),
                owned=len(owned),
                paused=sum(paused[at] for at in mine),
                same_worker=sum(
                    row.since_unix_ms is not None
                    and row.since_unix_ms <= newest[group, row.partition]
                    for row in owned
                ),
                owners=sorted({row.owner for row in owned}),
            )
        )
    return receivers


def _notes(
    letters: int, target: Target, causes: list[FailureCause], receivers: list[Receiver]
) -> list[str]:
    """What to think of before a replay, the most important first."""
    if not letters:
        return []
    notes = []
    for each in receivers:
        who, of = f"the group {each.group}", f"of {each.partitions}"
        if each.same_worker and target.topic is None:
            notes.append(
                f"{who}: the worker that failed still runs on {each.same_worker} {of} partitions;"
                " the same code would run again"
            )
        elif each.owned and target.topic is None:
            notes.append(
                f"{who}: its workers were started, reloaded or moved since these died; see that"
                " they run the mended code"
            )
        if each.owned < each.partitions:
            notes.append(
                f"{who}: nobody owns {each.partitions - each.owned} {of} partitions; letters wait"
                " there until somebody does"
            )
        if each.paused:
            notes.append(f"{who}: {each.paused} {of} partitions are paused; letters wait there")
    if not receivers:
        notes.append("no group reads where they go: they stay there unread")
    if any(each.reason == "crashes" for each in causes):
        notes.append("some took their process down: replay one of them alone first")
    if target.everyone or target.topic is not None:
        notes.append("every group gets them, also one that has handled them before")
    notes.append("they come after newer messages of the same key: no order is kept")
    return notes
