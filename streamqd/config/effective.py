"""The effective settings of a topic, in which the file overrides settings registered in Redis.

Registered settings are JSON, as in `{"archive": …, "retention": {field: value}}`. Their names are
the fields of `Topic` and `Retention`. Durations are in seconds, and sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from streamqd.config.reading import read_value
from streamqd.config.setting import section_settings
from streamqd.config.topics import Retention, Topic

# These fields are stored differently from the other fields of `Topic`.
_NOT_INHERITED = frozenset({"partitions", "retention"})

Section = TypeVar("Section", Topic, Retention)


def registered_settings(topic: Topic) -> dict[str, Any]:
    """Return the settings that are stored in Redis when a topic is created.

    Settings of `retention` that have their default value are left out.
    """
    default = Retention()
    retention = {
        name: getattr(topic.retention, name)
        for name in section_settings(Retention)
        if getattr(topic.retention, name) != getattr(default, name)
    }
    rest = {
        name: getattr(topic, name)
        for name in section_settings(Topic)
        if name not in _NOT_INHERITED and getattr(topic, name) is not None
    }
    return {**rest, "retention": retention}


def effective(topic: Topic, stored: Mapping[str, Any]) -> Topic:
    """Return the topic, with registered values for the settings that the file does not set.

    Invalid registered settings are ignored, because a later version or a manual edit may have
    written them.
    """
    bounds = stored.get("retention")
    retention = _fill_section(topic.retention, bounds if isinstance(bounds, Mapping) else {})
    return dataclasses.replace(_fill_section(topic, stored), retention=retention)


def _fill_section(section: Section, stored: Mapping[str, Any]) -> Section:
    default = type(section)()
    found = {}
    for name, setting in section_settings(type(section)).items():
        # A section that was built in code has no names in `explicit`, so a value that is not the
        # default counts as set.
        stated = name in section.explicit or getattr(section, name) != getattr(default, name)
        if stated or name in _NOT_INHERITED or name not in stored:
            continue
        try:
            found[name] = read_value(setting, stored[name], Path())
        except ValueError:
            continue
    return dataclasses.replace(section, **found)
