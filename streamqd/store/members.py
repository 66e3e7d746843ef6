"""The members of a fleet: saying that one lives, and learning who else does.

Called by the supervisor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.model import Unit
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import Seen
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply


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


def leave(keys: Keys, fleet: str, instance: str, nonce: str) -> Call:
    """Take the instance's entry out, if it is of the run with this nonce."""
    return scripts.get("member_leave").call(_keys(keys, fleet), id=instance, nonce=nonce)


class Beat(NamedTuple):
    """One member as it last described itself. `info` is empty when it cannot be read."""

    instance: str
    beat_unix_ms: int
    info: dict[str, Any]


class Present(NamedTuple):
    """All members, the caller too, by the server's clock; and what operators want.

    `orders` are names and values by turns, for `control.read`.
    """

    now_unix_ms: int
    members: list[Beat]
    orders: list[bytes]

    @classmethod
    def parse(cls, reply: Reply) -> Present:
        """Read OK."""
        now, rows, orders = reply.rest
        return cls(int(now), [_beat(*row) for row in rows], orders)


def seen_of(beat: Beat) -> Seen:
    """Turn a member's record into what the rebalancer needs; a strange one offers nothing."""
    name, beat_unix_ms, raw = beat
    try:
        offers = frozenset((str(topic), str(group)) for topic, group in raw.get("offers", ()))
        member = Member(name, int(raw.get("weight", 1)), int(raw.get("cap", 0)), offers)
        broken = frozenset(
            Unit(str(topic), int(partition), str(group))
            for topic, partition, group in raw.get("broken", ())
        )
        reloaded = int(raw["reloaded"]) if "reloaded" in raw else None
        owned = int(raw["owned"]) if "owned" in raw else None
        ttl = float(raw["ttl"]) if "ttl" in raw else None
        return Seen(member, beat_unix_ms, bool(raw.get("leaving")), broken, reloaded, owned, ttl)
    except (ValueError, TypeError, AttributeError, ArithmeticError):
        return Seen(Member(name, 1, 0, frozenset()), beat_unix_ms, leaving=True)


def twin(reply: Reply) -> Beat:
    """Read TWIN: the other run that beats under the same id (named '' here)."""
    return _beat(b"", *reply.rest)


def _beat(instance: bytes, beat_unix_ms: bytes, described: bytes) -> Beat:
    try:
        info = json.loads(described)
    except (ValueError, RecursionError):
        info = {}
    # A score that nobody of us has written counts as a beat of long ago.
    beat = int(beat_unix_ms) if beat_unix_ms.isdigit() else 0
    return Beat(
        instance.decode("utf-8", "replace"),
        beat,
        info if isinstance(info, dict) else {},
    )


def _keys(keys: Keys, fleet: str) -> dict[str, str]:
    return {"members": keys.members(fleet), "info": keys.info(fleet)}


def stored(keys: Keys, fleet: str) -> list[tuple[Any, ...]]:
    """Build the two commands whose replies `beats` takes, for whoever looks from outside."""
    return [
        ("ZRANGE", keys.members(fleet), 0, -1, "WITHSCORES"),
        ("HGETALL", keys.info(fleet)),
    ]


def beats(scores: Sequence[bytes] | None, infos: Sequence[bytes] | None) -> list[Beat]:
    """Read the replies to the commands of `stored`."""
    told = dict(zip((infos or ())[::2], (infos or ())[1::2], strict=True))
    flat = scores or ()
    return [
        _beat(name, score, told.get(name, b""))
        for name, score in zip(flat[::2], flat[1::2], strict=True)
    ]
