"""Read the state of outboxes that their relays publish, and return remedies for operators.

This module writes nothing and does not read the databases. The number of rows in an outbox is
therefore the one that its last relay published.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from streamqd.admin.reading import ViewReader
from streamqd.errors import InvalidValueError, RedisResponseError
from streamqd.store import outbox
from streamqd.store.outbox import OutboxView

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
_FALLBACK = f"run `streamqd outbox status {{outbox}}` to see whether it persists; {_TRIES}"


def read(reader: ViewReader, configured: Collection[str] = ()) -> list[OutboxView]:
    """Return the configured outboxes and all others in Redis, sorted by name.

    Outboxes whose published values cannot be read are left out.
    """
    others: list[str] = []
    try:
        known, invalid = outbox.registry(reader.store)
        others = [each for each in known if each not in configured][: outbox.OUTBOXES_MAX]
        for error in invalid:
            reader.add(error)
    except RedisResponseError as refused:
        reader.add_error(refused, reader.keys.outboxes(), "SMEMBERS")
    names, found = sorted([*configured, *others]), []
    for name, each in zip(names, outbox.read_views(reader.store, names), strict=True):
        if isinstance(each, OutboxView):
            found.append(each)
        elif isinstance(each, InvalidValueError):
            reader.add(each)
        else:
            reader.add_error(each, reader.keys.outbox(name), "HMGET")
    return found


def read_for_topic(
    reader: ViewReader, topic: str, configured: Collection[str] = ()
) -> list[OutboxView]:
    """Return the outboxes that sent to a topic, and configured outboxes that never had a relay."""
    views = read(reader, configured)
    found = read_senders(reader, views, [topic])[topic]
    return [each for each in views if each in found or (each.name in configured and not each.epoch)]


def read_senders(
    reader: ViewReader, views: Sequence[OutboxView], topics: Sequence[str]
) -> dict[str, list[OutboxView]]:
    """Return the outboxes that sent to each topic. This takes one pipeline.

    An outbox that has sent to a topic has a record in each of its partitions, so only the first
    partition is examined.
    """
    pairs = [(topic, each) for topic in topics for each in views]
    records = [("EXISTS", reader.keys.outbox_record(topic, 0, each.name)) for topic, each in pairs]
    found: dict[str, list[OutboxView]] = {topic: [] for topic in topics}
    for (topic, each), record in zip(pairs, reader.ask(records), strict=True):
        if record:
            found[topic].append(each)
    return found


def advice(view: OutboxView) -> str:
    """Return the remedy for a blocked relay, as a clause."""
    return _ADVICE.get(view.cause, _FALLBACK).format(outbox=view.name, topic=view.topic)


def start(view: OutboxView, configured: Collection[str]) -> str:
    """Return the remedy for an outbox without a relay, as a clause."""
    if view.name not in configured:
        return "run `streamqd outbox run` with the --database and --table of its last relay"
    return (
        f"start a daemon whose configuration has the outbox, or `streamqd outbox run {view.name}`"
    )


def failing_seconds(view: OutboxView, now_unix_ms: int) -> float:
    """Return the seconds for which a relay has been blocked, or 0 if it is not blocked."""
    if not view.error:
        return 0.0
    return view.failing_seconds + max(0, now_unix_ms - view.at_unix_ms) / 1000


def find_shared_tables(views: Sequence[OutboxView]) -> list[list[OutboxView]]:
    """Return groups of outboxes whose relays use the same table."""
    tables: dict[str, list[OutboxView]] = {}
    for view in views:
        if view.relayed and view.table:
            tables.setdefault(view.table, []).append(view)
    return [some for some in tables.values() if len(some) > 1]
