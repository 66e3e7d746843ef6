"""The settings of a topic that hold: what the file states, over what is registered with the topic.

What is registered is JSON in Redis, `{"archive": …, "retention": {field: value}}`, with the names
of the fields of `Topic` and `Retention`, durations in seconds, sizes in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from streamqd.config.reading import read_value
from streamqd.config.setting import settings_of
from streamqd.config.topics import Retention, Topic

# The number of partitions has a place of its own.
_APART = frozenset({"partitions", "retention"})

Section = TypeVar("Section", Topic, Retention)


def registered(topic: Topic) -> dict[str, Any]:
    """What is stored of a topic when it is created: of `retention` what is not the default."""
    default = Retention()
    retention = {
        name: getattr(topic.retention, name)
        for name in settings_of(Retention)
        if getattr(topic.retention, name) != getattr(default, name)
    }
    rest = {
        name: getattr(topic, name)
        for name in settings_of(Topic)
        if name not in _APART and getattr(topic, name) is not None
    }
    return {**rest, "retention": retention}


def effective(topic: Topic, stored: Mapping[str, Any]) -> Topic:
    """The topic with registered settings where the file says nothing.

    What cannot be read is passed over: somebody wrote it by hand, or a later version did.
    """
    bounds = stored.get("retention")
    retention = _filled(topic.retention, bounds if isinstance(bounds, Mapping) else {})
    return dataclasses.replace(_filled(topic, stored), retention=retention)


def _filled(section: Section, stored: Mapping[str, Any]) -> Section:
    default = type(section)()
    found = {}
    for name, setting in settings_of(type(section)).items():
        # What code builds states nothing by name: there a value that is not the default counts.
        said = name in section.stated or getattr(section, name) != getattr(default, name)
        if said or name in _APART or name not in stored:
            continue
        try:
            found[name] = read_value(setting, stored[name], Path())
        except ValueError:
            continue
    return dataclasses.replace(section, **found)
