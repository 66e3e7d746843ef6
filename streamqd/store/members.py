"""The members of a fleet: saying that one lives, and learning who else does.

Called by the supervisor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.errors import BadValue, RedisRefused
from streamqd.model import Unit
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import MemberView
from streamqd.store import key_types, scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

INFO = "the members of a fleet"  # where nobody has said which fleet it is
WEIGHT_MAX = 1_000_000
UNITS_MAX = 1_000_000
TTL_MAX = 366 * 86_400


def beat(
    keys: Keys,
    fleet: str,
    instance: str,
    nonce: str,
    info: Mapping[str, Any],
    stale: float,
    silent: Sequence[str] = (),
) -> Call:
    """Say that the instance lives. `stale`: seconds after which a beat of another run is void.

    `nonce` is random, one for each run of the instance; it becomes part of the info. `silent` are
    members that have not beaten while this one watched: they are forgotten when that is long ago.
    """
    described = json.dumps({**info, "nonce": nonce}, separators=(",", ":"), sort_keys=True)
    return scripts.get("member_beat").call(
        {**_keys(keys, fleet), "control": keys.orders(fleet)},
        id=instance,
        nonce=nonce,
        described=described,
        stale_ms=max(1, round(stale * 1000)),
        silent=list(silent),
    )


def types(keys: Keys, fleet: str) -> dict[str, str]:
    """Return the keys of a heartbeat and the types that they must have, for `mistyped`."""
    return {
        keys.members(fleet): key_types.SORTED_SET,
        keys.info(fleet): key_types.HASH,
        keys.orders(fleet): key_types.HASH,
    }


def leave(keys: Keys, fleet: str, instance: str, nonce: str) -> Call:
    """Take the instance's entry out, if it is of the run with this nonce."""
    return scripts.get("member_leave").call(_keys(keys, fleet), id=instance, nonce=nonce)


class Heartbeat(NamedTuple):
    """One member as it last described itself. `info` is empty when it cannot be read.

    `bad` says what of it cannot be read, if anything.
    """

    instance: str
    beat_unix_ms: int
    info: dict[str, Any]
    bad: BadValue | None = None


class Present(NamedTuple):
    """All members, the caller too, by the server's clock; and what operators want.

    `orders` are names and values by turns, for `control.read`.
    """

    now_unix_ms: int
    members: list[Heartbeat]
    orders: list[bytes]

    @classmethod
    def parse(cls, reply: Reply) -> Present:
        """Read OK."""
        now, rows, orders = reply.rest
        return cls(untrusted.integer(now, "TIME"), [_beat(*row) for row in rows], orders)


def seen_of(beat: Heartbeat) -> MemberView:
    """Turn a member's record into what the rebalancer needs; a strange one offers nothing."""
    try:
        return described(beat)
    except BadValue:
        return MemberView(Member(beat.instance, 1, 0, frozenset()), beat.beat_unix_ms, leaving=True)


def described(beat: Heartbeat, key: str = INFO) -> MemberView:
    """Read a member's record. Raises BadValue, of the hash `key`: the first that cannot be read."""
    name, beat_unix_ms, raw, bad = beat
    if bad is not None:
        raise BadValue(key, bad.field, bad.found, bad.wanted)

    def whole(field: str, low: int, high: int = untrusted.INTEGER_MAX) -> int | None:
        value = raw.get(field)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise _bad(key, name, field, value, f"a whole number from {low} to {high}")
        return value

    def rows(field: str, *types: type) -> list[Any]:
        value = raw.get(field, [])
        if not isinstance(value, list) or not all(
            isinstance(row, list) and [type(part) for part in row] == [*types] for row in value
        ):
            raise _bad(key, name, field, value, f"a list of {len(types)} parts each")
        return value

    weight = whole("weight", 1, WEIGHT_MAX)
    offers = frozenset((topic, group) for topic, group in rows("offers", str, str))
    broken = frozenset(Unit(*row) for row in rows("broken", str, int, str))
    ttl = raw.get("ttl")
    if ttl is not None and (type(ttl) not in (int, float) or not 0 < ttl <= TTL_MAX):
        raise _bad(key, name, "ttl", ttl, f"a number of seconds to {TTL_MAX}")
    return MemberView(
        Member(name, 1 if weight is None else weight, whole("cap", 0, UNITS_MAX) or 0, offers),
        beat_unix_ms,
        bool(raw.get("leaving")),
        broken,
        whole("reloaded", 0),
        whole("owned", 0, UNITS_MAX),
        None if ttl is None else float(ttl),
    )


def _bad(key: str, name: str, field: str, value: object, wanted: str) -> BadValue:
    # What JSON can hold may be nested so deep that nothing can print it.
    found = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return BadValue(key, f"{name}.{field}", found[: untrusted.SHOWN_BYTES], wanted)


def process_of(beat: Heartbeat) -> dict[str, Any]:
    """Return host and pid of a member as log fields; what cannot be read is left out."""
    host, pid = beat.info.get("host"), beat.info.get("pid")
    found: dict[str, Any] = {}
    if isinstance(host, str):
        found["other_host"] = host[: untrusted.SHOWN_BYTES]
    if type(pid) is int and 0 < pid <= untrusted.INTEGER_MAX:
        found["other_pid"] = pid
    return found


def twin(reply: Reply) -> Heartbeat:
    """Read TWIN: the other run that beats under the same id (named '' here)."""
    return _beat(b"", *reply.rest)


def _beat(instance: bytes, beat_unix_ms: bytes, described: bytes) -> Heartbeat:
    name, bad = untrusted.label(instance), None
    try:
        info = untrusted.json_object(described or None, INFO, name, default={})
    except BadValue as error:
        info, bad = {}, error
    try:
        beat = untrusted.integer(beat_unix_ms, INFO, f"{name}, last beat")
    except BadValue as error:
        beat, bad = 0, error  # a score that is none of ours counts as a beat of long ago
    return Heartbeat(name, beat, info, bad)


def _keys(keys: Keys, fleet: str) -> dict[str, str]:
    return {"members": keys.members(fleet), "info": keys.info(fleet)}


def stored(keys: Keys, fleet: str) -> list[tuple[Any, ...]]:
    """Build the two commands whose replies `beats` takes, for whoever looks from outside."""
    return [
        ("ZRANGE", keys.members(fleet), 0, -1, "WITHSCORES"),
        ("HGETALL", keys.info(fleet)),
    ]


def member(store: Store, fleet: str, instance: str) -> Heartbeat | None:
    """Return one member as it last described itself, None if there is none.

    Raises RedisRefused when a key holds another type.
    """
    found = store.pipeline(
        [
            ("ZSCORE", store.keys.members(fleet), instance),
            ("HGET", store.keys.info(fleet), instance),
        ]
    )
    for reply in found:
        if isinstance(reply, RedisRefused):
            raise reply
    score, described = found
    return None if score is None else _beat(instance.encode(), score, described or b"")


def beats(scores: Sequence[bytes] | None, infos: Sequence[bytes] | None) -> list[Heartbeat]:
    """Read the replies to the commands of `stored`."""
    info_of = dict(zip((infos or ())[::2], (infos or ())[1::2], strict=True))
    flat = scores or ()
    return [
        _beat(name, score, info_of.get(name, b""))
        for name, score in zip(flat[::2], flat[1::2], strict=True)
    ]
