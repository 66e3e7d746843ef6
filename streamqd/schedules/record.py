"""Convert schedules to and from the JSON in which they are stored, and build their messages."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import MISSING, fields
from pathlib import Path

from streamqd.config.problems import Problems
from streamqd.config.reading import TableReader
from streamqd.config.reference import plain
from streamqd.config.schedules import Schedule, check_schedule
from streamqd.config.setting import section_settings
from streamqd.policy.partitioning import crc32_partition
from streamqd.schedules.ticks import format_tick


def serialize(schedule: Schedule) -> str:
    """Return the specification of a schedule as JSON. Equal schedules have equal specifications."""
    settings = section_settings(Schedule)
    stated = {name: plain(setting, getattr(schedule, name)) for name, setting in settings.items()}
    return json.dumps(stated, ensure_ascii=False, separators=(",", ":"))


def hash_specification(text: str) -> str:
    """Return the hash of a specification, by which specifications are compared."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(text: str) -> Schedule:
    """Parse a specification, which any client may have written. Raises ValueError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if isinstance(found, dict):
        # Default values are valid, so leave them out. Checking them would take most of the time.
        default = _defaults()
        found = {
            name: value
            for name, value in found.items()
            if name not in default or value != default[name]
        }
    return build(found)


@functools.cache
def _defaults() -> dict[str, object]:
    """Return the default values of the optional settings in the form that `serialize` writes."""
    some = Schedule("", "")
    named = {each.name for each in fields(Schedule) if each.default is not MISSING}
    return {
        name: plain(setting, getattr(some, name))
        for name, setting in section_settings(Schedule).items()
        if name in named
    }


def build(given: object) -> Schedule:
    """Create a schedule from settings in the format of the configuration file.

    Raises ValueError, which contains all problems, if the settings are invalid.
    """
    problems = Problems()
    known = TableReader(problems, Path()).settings(Schedule, given, ("schedule",))
    if not problems.sentences and not {"name", "topic"} <= known.keys():
        problems.add(("schedule",), "lacks its name or its topic")
    if not problems.sentences:
        schedule = Schedule(**known)
        check_schedule(schedule, ("schedule",), problems)
    if problems.sentences:
        raise ValueError("; ".join(problems.sentences))
    return schedule


def choose_partition(schedule: Schedule, count: int) -> int:
    """Return the partition to which a schedule sends, in a topic of `count` partitions.

    If the result is `count` or more, the configured partition does not exist.
    """
    if schedule.partition is not None:
        return schedule.partition
    return crc32_partition(message_key(schedule), count)


def message_key(schedule: Schedule) -> bytes:
    """Return the key of the schedule's messages, which is its name by default."""
    return (schedule.key or schedule.name).encode()


def message_fields(schedule: Schedule, tick: int) -> list[str | bytes]:
    """Return the fields of the message for one tick, as alternating names and values."""
    payload = schedule.payload
    if payload.lstrip().startswith('"'):  # a JSON string is sent without its quotes
        payload = json.loads(payload)
    # Neither the name nor the time contains characters that must be escaped in JSON.
    headers = f'{{"x-schedule":"{schedule.name}","x-scheduled-for":"{format_tick(tick)}"}}'
    fields: list[str | bytes] = ["payload", payload.encode()]
    if schedule.partition is None:
        fields += ("key", message_key(schedule))
    return [*fields, "headers", headers]
