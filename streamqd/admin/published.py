"""What instances say of themselves: beats, records and summaries, with bounds on every number.

It may be of another version, or written by somebody else: every field may be missing or strange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.admin.unreadable import BadValues, ask_each
from streamqd.errors import BadValue
from streamqd.store import directives, members, untrusted
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.members import Heartbeat

NUMBER_MAX = float(untrusted.INTEGER_MAX)
_WHOLE = ("at_unix_ms", "started_unix_ms", "pid")


def beats(
    keys: Keys,
    fleet: str,
    scores: Sequence[bytes] | None,
    infos: Sequence[bytes] | None,
    bad: BadValues,
) -> list[Heartbeat]:
    """The members by the replies to `members.stored`; what cannot be read is kept in `bad`."""
    flat, told = scores or (), infos or ()
    for name, score in zip(flat[::2], flat[1::2], strict=True):
        key, member = keys.members(fleet), untrusted.label(name)
        bad.read(untrusted.name, name, key, member)
        bad.read(untrusted.integer, score, key, member)
    found = members.beats(scores, infos)
    raw = dict(zip(told[::2], told[1::2], strict=True))
    for name, text in raw.items():
        key, field = keys.info(fleet), untrusted.label(name)
        info = bad.read(untrusted.json_object, text, key, field)
        if info is not None:
            bad.read(members.described, Heartbeat(field, 0, info), key)
    return found


def summaries(
    link: Connection, keys: Keys, fleet: str, names: Sequence[str], bad: BadValues
) -> list[dict[str, Any]]:
    """What each instance has published; {} for nothing, and for what cannot be read."""
    stored = [keys.instance(fleet, name) for name in names]
    replies = ask_each(link, [("GET", key) for key in stored], bad)
    return [summary(raw, key, bad) for raw, key in zip(replies, stored, strict=True)]


def summary(raw: bytes | None, key: str, bad: BadValues) -> dict[str, Any]:
    """One summary. A number in it that cannot be read counts as missing."""
    found = bad.read(untrusted.json_object, raw, key, default={}) or {}
    for name in _WHOLE:
        if found.get(name) is not None and whole(found[name]) is None:
            bad.add(_odd(key, name, found[name], "a whole number"))
            found[name] = None
    units = found.get("units")
    if units is not None and not (
        isinstance(units, list) and all(isinstance(unit, dict) for unit in units)
    ):
        bad.add(_odd(key, "units", units, "a list of JSON objects"))
    for unit in units if isinstance(units, list) else ():
        for name, value in unit.items() if isinstance(unit, dict) else ():
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and real(value) is None
            ):
                bad.add(_odd(key, f"units.{name}", value, "a number"))
                unit[name] = None
    return found


def bad_orders(keys: Keys, fleet: str, flat: Sequence[bytes] | None, bad: BadValues) -> None:
    """Keep the latest time of all orders, when it is none. Strange orders are `Control.strange`."""
    told = dict(zip((flat or ())[::2], (flat or ())[1::2], strict=True))
    last, key = told.get(directives.LAST.encode()), keys.orders(fleet)
    bad.read(untrusted.integer, last, key, directives.LAST, default=0)


def real(value: Any) -> float | None:
    """A number of JSON within bounds; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer of JSON may be too large for any float.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return float(value) if -NUMBER_MAX <= value <= NUMBER_MAX else None


def whole(value: Any) -> int | None:
    """A whole number of JSON within bounds; None for anything else."""
    found = real(value)
    return None if found is None else int(found)


def document(raw: Mapping[str, Any] | bytes | None) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        return untrusted.json_object(raw if isinstance(raw, bytes) else None, "", default={})
    except BadValue:
        return {}


def _odd(key: str, field: str, value: Any, wanted: str) -> BadValue:
    # Deeply nested values have no text, and numbers of thousands of digits are refused one.
    plain = isinstance(value, str | bool | float) or value is None
    found = repr(value) if plain else f"a {type(value).__name__}"
    return BadValue(key, field, found[: untrusted.SHOWN_BYTES], wanted)
