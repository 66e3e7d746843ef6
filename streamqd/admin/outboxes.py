"""The outboxes of this Redis, as their relays published them, and what an operator can do.

Writes nothing and asks no database. The number of rows is that of the last relay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from streamqd.admin.reading import ViewReader
from streamqd.store import outbox, untrusted
from streamqd.store.outbox import OutboxView

OUTBOXES_MAX = 1_000  # outboxes that one look reads

_TRIES = "the relay tries again automatically"
_ADVICE = {
    "database": f"start the database, or correct the URL until `streamqd outbox check {{outbox}}`"
    f" succeeds; {_TRIES}",
    "refused": f"run `streamqd outbox check {{outbox}}` with the user of the relay; {_TRIES}",
    "redis": f"run `streamqd doctor --only server` on the host of the relay; {_TRIES}",
    "shared": "remove one of the two outboxes; `streamqd config show` on each host lists them",
    "topic": f"run `streamqd doctor --only values`; {_TRIES}",
    "partition": f"run `streamqd doctor --only server`; {_TRIES}",
    "backlog": "run `streamqd why {topic}`; the relay continues when its messages are handled",
}
_OTHERWISE = f"`streamqd outbox status {{outbox}}` shows if it lasts; {_TRIES}"


def read(reader: ViewReader, configured: Collection[str] = ()) -> list[OutboxView]:
    """Return the configured outboxes and all others, by name. An unreadable one is left out."""
    key = reader.keys.outboxes()
    (raws,) = reader.ask([("SMEMBERS", key)])
    known = {reader.read(untrusted.name, raw, key) for raw in raws or ()} - {None}
    others = sorted(str(each) for each in known if each not in configured)[:OUTBOXES_MAX]
    names = sorted([*configured, *others])
    replies = reader.ask([each for name in names for each in outbox.view(reader.keys, name)])
    found = [
        reader.read(OutboxView.parse, name, fields, ttl_ms, reader.keys.outbox(name))
        for name, fields, ttl_ms in zip(names, replies[::2], replies[1::2], strict=True)
        if fields is not None and ttl_ms is not None
    ]
    return [each for each in found if each is not None]


def feeding(reader: ViewReader, topic: str, configured: Collection[str] = ()) -> list[OutboxView]:
    """Return the outboxes that sent to a topic, and configured ones that no relay ever held.

    An outbox that sent to a topic has a record in each of its partitions.
    """
    views = read(reader, configured)
    records = [("EXISTS", reader.keys.outbox_record(topic, 0, each.name)) for each in views]
    there = reader.ask(records)
    return [
        each
        for each, found in zip(views, there, strict=True)
        if found or (each.name in configured and not each.epoch)
    ]


def advice(view: OutboxView) -> str:
    """Return the remedy for a blocked relay, as a clause."""
    return _ADVICE.get(view.cause, _OTHERWISE).format(outbox=view.name, topic=view.topic)


def start(view: OutboxView, configured: Collection[str]) -> str:
    """Return what to do about an outbox without a relay, as a clause."""
    if view.name not in configured:
        return "run `streamqd outbox run` with the --database and --table of its last relay"
    return (
        f"start a daemon whose configuration has the outbox, or `streamqd outbox run {view.name}`"
    )


def failing_seconds(view: OutboxView, now_unix_ms: int) -> float:
    """Return how long a relay has been blocked in seconds, 0 if it is not."""
    if not view.error:
        return 0.0
    return view.failing_seconds + max(0, now_unix_ms - view.at_unix_ms) / 1000


def shared(views: Sequence[OutboxView]) -> list[list[OutboxView]]:
    """Return the groups of outboxes whose relays hold one table."""
    tables: dict[str, list[OutboxView]] = {}
    for each in views:
        if each.relayed and each.table:
            tables.setdefault(each.table, []).append(each)
    return [some for some in tables.values() if len(some) > 1]
