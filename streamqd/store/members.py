"""Send the heartbeats of an instance, and read those of the other members of its fleet.

The supervisor uses these functions. Views read the heartbeats too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.errors import InvalidValueError, RedisResponseError
from streamqd.model import Assignment
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import MemberView
from streamqd.store import key_types, scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

INFO = "the members of a fleet"  # label for errors if the caller passes no key
WEIGHT_MAX = 1_000_000
ASSIGNMENTS_MAX = 1_000_000
TTL_MAX = 366 * 86_400  # longest lifetime of a lease that a record may contain, in seconds


def heartbeat(
    keys: Keys,
    fleet: str,
    instance: str,
    nonce: str,
    info: Mapping[str, Any],
    stale: float,
    silent: Sequence[str] = (),
) -> Call:
    """Send a heartbeat, unless another run of the instance is using the same name.

    `nonce` is a random string that identifies this run and is stored with `info`. The call is
    refused if a run with another nonce has sent a heartbeat within the last `stale` seconds.

    `silent` lists members from which this instance has seen no heartbeat for some time. The call
    removes each of them from the fleet if its last heartbeat is more than 20 times `stale` seconds
    old.
    """
    described = json.dumps({**info, "nonce": nonce}, separators=(",", ":"), sort_keys=True)
    return scripts.get("member_heartbeat").call(
        {**_keys(keys, fleet), "control": keys.directives(fleet)},
        id=instance,
        nonce=nonce,
        described=described,
        stale_ms=max(1, round(stale * 1000)),
        silent=list(silent),
    )


def expected_types(keys: Keys, fleet: str) -> dict[str, str]:
    """Return the keys that a heartbeat uses and their types, for `key_types.find_mistyped`."""
    return {
        keys.members(fleet): key_types.SORTED_SET,
        keys.info(fleet): key_types.HASH,
        keys.directives(fleet): key_types.HASH,
    }


def leave(keys: Keys, fleet: str, instance: str, nonce: str) -> Call:
    """Remove an instance from its fleet if its record belongs to the run with this nonce."""
    return scripts.get("member_leave").call(_keys(keys, fleet), id=instance, nonce=nonce)


class Heartbeat(NamedTuple):
    """The last heartbeat of a member, and the record that it published.

    `bad` is the error if the time or the record is invalid. In that case, an invalid time is
    replaced by 0, and an invalid record by an empty one.
    """

    instance: str
    heartbeat_unix_ms: int
    info: dict[str, Any]
    bad: InvalidValueError | None = None


class HeartbeatReply(NamedTuple):
    """The reply to a heartbeat, with all members of the fleet and the operators' directives.

    The caller is one of the members. `directives` is a list of alternating names and values, which
    `directives.read` parses.
    """

    now_unix_ms: int
    members: list[Heartbeat]
    directives: list[bytes]

    @classmethod
    def parse(cls, reply: Reply) -> HeartbeatReply:
        """Parse an OK reply."""
        now, rows, directives = reply.values
        return cls(untrusted.integer(now, "TIME"), [_heartbeat(*row) for row in rows], directives)


def to_member_view(heartbeat: Heartbeat) -> MemberView:
    """Convert a member's record for the rebalancer.

    A member with an invalid record is treated as one that is leaving and has no consumers, so it
    gets no assignments.
    """
    try:
        return parse_member(heartbeat)
    except InvalidValueError:
        return MemberView(
            Member(heartbeat.instance, 1, 0, frozenset()), heartbeat.heartbeat_unix_ms, leaving=True
        )


def parse_member(heartbeat: Heartbeat, key: str = INFO) -> MemberView:
    """Parse a member's record, which is stored in the hash `key`.

    Raises InvalidValueError for the first invalid field.
    """
    name, heartbeat_unix_ms, raw, bad = heartbeat
    if bad is not None:
        raise InvalidValueError(key, bad.field, bad.found, bad.wanted)

    def read_integer(field: str, low: int, high: int = untrusted.INTEGER_MAX) -> int | None:
        value = raw.get(field)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise _bad(key, name, field, value, f"an integer from {low} to {high}")
        return value

    def rows(field: str, *types: type) -> list[Any]:
        value = raw.get(field, [])
        if not isinstance(value, list) or not all(
            isinstance(row, list) and [type(part) for part in row] == [*types] for row in value
        ):
            raise _bad(key, name, field, value, f"a list of {len(types)} parts each")
        return value

    weight = read_integer("weight", 1, WEIGHT_MAX)
    offers = frozenset((topic, group) for topic, group in rows("offers", str, str))
    broken = frozenset(Assignment(*row) for row in rows("broken", str, int, str))
    ttl = raw.get("ttl")
    if ttl is not None and (type(ttl) not in (int, float) or not 0 < ttl <= TTL_MAX):
        raise _bad(key, name, "ttl", ttl, f"a number of seconds to {TTL_MAX}")
    return MemberView(
        Member(
            name,
            1 if weight is None else weight,
            read_integer("cap", 0, ASSIGNMENTS_MAX) or 0,
            offers,
        ),
        heartbeat_unix_ms,
        bool(raw.get("leaving")),
        broken,
        read_integer("reloaded", 0),
        read_integer("owned", 0, ASSIGNMENTS_MAX),
        None if ttl is None else float(ttl),
    )


def _bad(key: str, name: str, field: str, value: object, wanted: str) -> InvalidValueError:
    # For a list or an object, show only the type, because it may be nested too deeply to print.
    found = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return InvalidValueError(key, f"{name}.{field}", found[: untrusted.SHOWN_BYTES], wanted)


def process_fields(heartbeat: Heartbeat) -> dict[str, Any]:
    """Return the host and the PID of a member as log fields. Invalid values are left out."""
    host, pid = heartbeat.info.get("host"), heartbeat.info.get("pid")
    found: dict[str, Any] = {}
    if isinstance(host, str):
        found["other_host"] = host[: untrusted.SHOWN_BYTES]
    if type(pid) is int and 0 < pid <= untrusted.INTEGER_MAX:
        found["other_pid"] = pid
    return found


def parse_duplicate(reply: Reply) -> Heartbeat:
    """Parse a DUPLICATE reply, which describes the other run with the same name."""
    return _heartbeat(b"", *reply.values)


def _heartbeat(instance: bytes, heartbeat_unix_ms: bytes, described: bytes) -> Heartbeat:
    name, bad = untrusted.label(instance), None
    try:
        info = untrusted.json_object(described or None, INFO, name, default={})
    except InvalidValueError as error:
        info, bad = {}, error
    try:
        heartbeat = untrusted.integer(heartbeat_unix_ms, INFO, f"{name}, last beat")
    except InvalidValueError as error:
        heartbeat, bad = 0, error  # treat an invalid time as a very old heartbeat
    return Heartbeat(name, heartbeat, info, bad)


def _keys(keys: Keys, fleet: str) -> dict[str, str]:
    return {"members": keys.members(fleet), "info": keys.info(fleet)}


def heartbeat_commands(keys: Keys, fleet: str) -> list[tuple[Any, ...]]:
    """Return the two commands whose replies `heartbeats` parses.

    They are for clients that are not members of the fleet and therefore send no heartbeats.
    """
    return [
        ("ZRANGE", keys.members(fleet), 0, -1, "WITHSCORES"),
        ("HGETALL", keys.info(fleet)),
    ]


def member(store: Store, fleet: str, instance: str) -> Heartbeat | None:
    """Return the last heartbeat of one instance, or None if it is not a member.

    Raises RedisResponseError if a key has the wrong type.
    """
    found = store.pipeline(
        [
            ("ZSCORE", store.keys.members(fleet), instance),
            ("HGET", store.keys.info(fleet), instance),
        ]
    )
    for reply in found:
        if isinstance(reply, RedisResponseError):
            raise reply
    score, described = found
    return None if score is None else _heartbeat(instance.encode(), score, described or b"")


def heartbeats(scores: Sequence[bytes] | None, infos: Sequence[bytes] | None) -> list[Heartbeat]:
    """Parse the replies to the commands of `heartbeat_commands`."""
    info_of = dict(zip((infos or ())[::2], (infos or ())[1::2], strict=True))
    flat = scores or ()
    return [
        _heartbeat(name, score, info_of.get(name, b""))
        for name, score in zip(flat[::2], flat[1::2], strict=True)
    ]
