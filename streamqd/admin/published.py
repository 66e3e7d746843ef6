"""Read the published state of a fleet: members, directives and summaries.

These values may have been written by another version of streamqd or by another client. Any field
can therefore be missing or invalid, and every number is checked against bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from streamqd.admin.reading import ViewReader, ask, pairs
from streamqd.errors import InvalidValueError
from streamqd.policy.rebalance import MemberView
from streamqd.store import directives, members, untrusted
from streamqd.store.directives import Directives
from streamqd.store.members import Heartbeat
from streamqd.store.store import Store

NUMBER_MAX = float(untrusted.INTEGER_MAX)
_WHOLE = ("at_unix_ms", "started_unix_ms", "pid")


class Fleet(NamedTuple):
    """A fleet, identified by its name in a store.

    An instance counts as lost if it sends no heartbeat for `stale` seconds.
    """

    store: Store
    name: str
    stale: float


@dataclass(frozen=True)
class FleetState:
    """A fleet as stored in Redis: its members, and the directives that operators have written.

    An instance counts as lost if it sends no heartbeat for `stale` seconds.
    """

    now_unix_ms: int
    stale: float
    heartbeats: Sequence[Heartbeat]
    control: Directives

    @cached_property
    def silent(self) -> dict[str, int]:
        """The instances that count as lost, with the milliseconds since their last heartbeats."""
        ages = {
            heartbeat.instance: self.now_unix_ms - heartbeat.heartbeat_unix_ms
            for heartbeat in self.heartbeats
        }
        return {name: age for name, age in ages.items() if age > self.stale * 1000}

    @cached_property
    def live(self) -> dict[str, MemberView]:
        """The instances whose last heartbeat is at most `stale` seconds old."""
        return {
            heartbeat.instance: members.to_member_view(heartbeat)
            for heartbeat in self.heartbeats
            if heartbeat.instance not in self.silent
        }

    @cached_property
    def infos(self) -> dict[str, dict[str, Any]]:
        """The published information of each instance, by its name."""
        return {heartbeat.instance: heartbeat.info for heartbeat in self.heartbeats}

    def eligible_members(self) -> list[MemberView]:
        """Return the live members that may own assignments: neither leaving nor drained."""
        return [
            seen
            for name, seen in self.live.items()
            if not seen.leaving and name not in self.control.drains
        ]


def fleet_state(fleet: Fleet, reader: ViewReader | None = None) -> FleetState:
    """Read the members and the directives of a fleet.

    With a reader, invalid values are recorded and skipped. Without one, a key of the wrong type
    raises InvalidValueError.
    """
    key = fleet.store.keys.directives(fleet.name)
    commands = [
        ("TIME",),
        *members.heartbeat_commands(fleet.store.keys, fleet.name),
        ("HGETALL", key),
    ]
    replies = reader.ask(commands) if reader else ask(fleet.store, commands)
    time, scores, infos, flat = replies
    if reader is not None:
        _keep_unreadable(reader, fleet.name, scores, infos)
        last = pairs(flat).get(directives.LAST.encode())
        reader.read(untrusted.integer, last, key, directives.LAST, default=0)
    now = int(time[0]) * 1000 + int(time[1]) // 1000
    return FleetState(
        now, fleet.stale, members.heartbeats(scores, infos), directives.read(flat or ())
    )


def _keep_unreadable(
    reader: ViewReader,
    fleet: str,
    scores: Sequence[bytes] | None,
    infos: Sequence[bytes] | None,
) -> None:
    for name, score in pairs(scores).items():
        key, member = reader.keys.members(fleet), untrusted.label(name)
        reader.read(untrusted.name, name, key, member)
        reader.read(untrusted.integer, score, key, member)
    for name, text in pairs(infos).items():
        key, field = reader.keys.info(fleet), untrusted.label(name)
        info = reader.read(untrusted.json_object, text, key, field)
        if info is not None:
            reader.read(members.parse_member, Heartbeat(field, 0, info), key)


def read_summaries(reader: ViewReader, fleet: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the summary of each instance, or {} if it is missing or unreadable."""
    return _summaries(reader, [reader.keys.instance(fleet, name) for name in names])


def read_duplicates(
    reader: ViewReader, fleet: str, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Map each instance that has a duplicate to the duplicate's summary.

    A duplicate is a second process that uses the name of the instance.
    """
    found = _summaries(reader, [reader.keys.duplicate(fleet, name) for name in names])
    return {name: known for name, known in zip(names, found, strict=True) if known}


def _summaries(reader: ViewReader, keys: Sequence[str]) -> list[dict[str, Any]]:
    replies = reader.ask([("GET", key) for key in keys])
    return [parse_summary(reader, raw, key) for raw, key in zip(replies, keys, strict=True)]


def parse_summary(reader: ViewReader, raw: bytes | None, key: str) -> dict[str, Any]:
    """Parse a summary. An invalid number in it is treated as missing."""
    found = reader.read(untrusted.json_object, raw, key, default={}) or {}
    for name in _WHOLE:
        if found.get(name) is not None and read_integer(found[name]) is None:
            reader.add(_invalid_error(key, name, found[name], "an integer"))
            found[name] = None
    assignments = found.get("assignments")
    if assignments is not None and not (
        isinstance(assignments, list)
        and all(isinstance(assignment, dict) for assignment in assignments)
    ):
        reader.add(_invalid_error(key, "assignments", assignments, "a list of JSON objects"))
    for assignment in assignments if isinstance(assignments, list) else ():
        for name, value in assignment.items() if isinstance(assignment, dict) else ():
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and read_number(value) is None
            ):
                reader.add(_invalid_error(key, f"assignments.{name}", value, "a number"))
                assignment[name] = None
    return found


def to_tables(value: Any) -> list[dict[str, Any]]:
    """Return the JSON objects in a list. Elements of other types are left out."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def read_number(value: Any) -> float | None:
    """Return a JSON number that is within bounds, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A JSON integer can be too large for `isfinite`, which converts it to a float.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return float(value) if -NUMBER_MAX <= value <= NUMBER_MAX else None


def read_integer(value: Any) -> int | None:
    """Return a JSON integer that is within bounds, or None for anything else."""
    found = read_number(value)
    return None if found is None else int(found)


def rate(assignment: dict[str, Any], name: str) -> float | None:
    """Return a published rate of an assignment per second, or None if it is unknown."""
    rates = assignment.get("rates")
    return read_number(rates.get(name)) if isinstance(rates, dict) else None


def _invalid_error(key: str, field: str, value: Any, wanted: str) -> InvalidValueError:
    return InvalidValueError(key, field, _format_value(value)[: untrusted.SHOWN_BYTES], wanted)


def _format_value(value: Any) -> str:
    # Nested values may be too deep, and numbers too long, to be converted to strings.
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) >= 10**untrusted.SHOWN_BYTES:
        return "an integer of many digits"
    return repr(value)
