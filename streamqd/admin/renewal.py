"""Moving what is in a partition to a fresh stream, because its last id leaves no room for more.

1. copy     the entries, in their order, with their ids where those are not ahead of the clock
2. group    each group gets its place on the copy; it is kept from owners from here on
3. swap     the copy takes the place of the partition, if nothing has changed since
4. release  owners may take the partition again

Every step may be repeated. Left at any of them, the partition is what it was (or what it becomes),
owners take it again within 15 s, and the same command goes on.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from streamqd.admin import groups, topics
from streamqd.admin.reading import BadValues, ask, pairs
from streamqd.errors import ContractError, RedisUnavailable, Refused
from streamqd.model import Lease, Unit
from streamqd.store import growth, leases
from streamqd.store import renewal as renewal_calls
from streamqd.store.scripts import Reply
from streamqd.store.store import Store

ROUNDS_MAX = 50  # when a client writes, or a group changes, between the steps
RELEASE_TRIES = 2


@dataclass(frozen=True, slots=True)
class Renewed:
    """What `topic renew` did. `pending` were handed out and went along; `lost` had no body left.

    `last_id` is the last id now.
    """

    topic: str
    partition: int
    messages: int
    last_id: str
    groups: list[str]
    pending: int
    lost: int


def check(store: Store, topic: str, partition: int, *, force: bool) -> list[Unit]:
    """The units of a partition that can be renewed. Raises TopicMissing, Refused."""
    count = topics.partition_count(store, topic)
    topics.check_partition(topic, partition, count)
    if growth.under_way(store, topic) is not None:
        raise Refused(
            f"{topic} grows, which counts by ids: finish that first, `streamqd topic grow {topic}`"
        )
    bad = BadValues()
    names = topics.groups(store, topic, [partition], letters=False, bad=bad)
    if bad.rows:
        raise Refused(f"{bad.rows[0]}: `streamqd doctor --only values` says how to put it right")
    units = [Unit(topic, partition, name) for name in names]
    for unit in units if not force else ():
        if (owner := groups.owner_of(store, unit)) is not None:
            raise Refused(groups.owned_sentence(unit, owner))
    return units


def renew(store: Store, topic: str, partition: int, *, force: bool) -> Renewed:
    """Move a partition to a fresh stream. With `force` owners lose it for a moment.

    Raises TopicMissing; Refused when the partition has room, is owned, or changes all the time.
    """
    units = check(store, topic, partition, force=force)
    token = secrets.token_hex(16)
    try:
        return _renewed(store, topic, partition, units, force=force, token=token)
    finally:
        _release(store, units, token)


def _renewed(
    store: Store,
    topic: str,
    partition: int,
    units: list[Unit],
    *,
    force: bool,
    token: str,
) -> Renewed:
    for _ in range(ROUNDS_MAX):
        _copy(store, topic, partition)
        placed = [_place(store, unit, force=force, token=token) for unit in units]
        if None in placed:
            continue
        reply = _swap(store, topic, partition)
        if reply.word == "OK":
            messages, last = reply.rest
            return Renewed(
                topic=topic,
                partition=partition,
                messages=int(messages),
                last_id=last.decode(),
                groups=[unit.group for unit in units],
                pending=sum(each[0] for each in placed if each),
                lost=sum(each[1] for each in placed if each),
            )
        if reply.word == "GONE":
            raise Refused(f"another client has renewed partition {partition} of {topic} meanwhile")
        units[:] = check(store, topic, partition, force=True)
    raise Refused(
        f"partition {partition} of {topic} changes all the time: stop its producers for a moment"
        " and say this again"
    )


def _copy(store: Store, topic: str, partition: int) -> None:
    more = True
    while more:
        reply = store.run(renewal_calls.copy(store.keys, topic, partition))
        match reply.word:
            case "OK":
                more = bool(reply.rest[1])
            case "ROOM":
                raise Refused(
                    f"partition {partition} of {topic} has room: its last id is"
                    f" {reply.rest[0].decode()}"
                )
            case "LARGE":
                raise Refused(
                    f"the entry {reply.rest[0].decode()} of partition {partition} has thousands of"
                    " fields, more than can be copied: delete it with `redis-cli XDEL`"
                )
            case "MISSING":
                raise Refused(f"partition {partition} of {topic} is empty: there is no stream")
            case word:
                raise ContractError(f"renewing {topic}: {word}")


def _place(store: Store, unit: Unit, *, force: bool, token: str) -> tuple[int, int] | None:
    """Give a group its place: what went along, what was lost; None: once more."""
    reply = store.run(renewal_calls.group(store.keys, unit, force=force, token=token))
    match reply.word:
        case "OK":
            return int(reply.rest[0]), int(reply.rest[1])
        case "MORE" | "NOGROUP":
            return None
        case "OWNED":
            raise Refused(groups.owned_sentence(unit, reply.rest[0].decode("utf-8", "replace")))
        case "MANY":
            raise Refused(
                f"{unit} has {int(reply.rest[0]):,} pending messages, and"
                f" {renewal_calls.PENDING_MAX:,} can go along: let its consumer settle them first"
            )
        case "GONE":
            raise Refused(
                f"another client has renewed partition {unit.partition} of {unit.topic} meanwhile"
            )
        case word:
            raise ContractError(f"renewing {unit}: {word}")


def _swap(store: Store, topic: str, partition: int) -> Reply:
    """Take the last step. One that may have been executed is repeated: then GONE means done."""
    call = renewal_calls.swap(store.keys, topic, partition)
    try:
        return store.run(call)
    except RedisUnavailable as error:
        if not error.sent:
            raise
    reply = store.run(call)
    if reply.word != "GONE":
        return reply
    (found,) = ask(store, [("XINFO", "STREAM", store.keys.stream(topic, partition))])
    if found is None:  # nothing was kept, and no group reads it
        return Reply("OK", [0, b"0-0"])
    info = pairs(found)
    return Reply("OK", [info[b"length"], info[b"last-generated-id"]])


def _release(store: Store, units: list[Unit], token: str) -> None:
    """Let owners take the partition again. If that fails, the leases end by themselves."""
    calls = [leases.release(store.keys, Lease(unit, token)) for unit in units]
    for _ in range(RELEASE_TRIES):
        try:
            store.run_many(calls)
        except RedisUnavailable:
            continue
        return
