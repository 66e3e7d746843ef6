"""How one setting is described: its meaning, form, bounds and default, kept beside the field."""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass
from typing import Any

from streamqd.model import Backoff

# Everything has a limit. These hold where a setting names no maximum of its own.
COUNT_MAX = 10**12
DURATION_MAX = 3650 * 86_400.0
SIZE_MAX = 1 << 50

# A name becomes a part of keys and of paths: `.` and `..` must never be one.
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
NAME_HINT = "use 1 to 64 of A-Z a-z 0-9 . _ - and no dot first"


class Kind(enum.Enum):
    """How a setting is written and read."""

    TEXT = "text"
    INTEGER = "whole number"
    NUMBER = "number"
    BOOLEAN = "true or false"
    DURATION = "duration"
    SIZE = "size"
    TEXTS = "list of texts"
    PATH = "path"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one setting. `optional` settings may be None: written "none", or ""."""

    doc: str
    kind: Kind = Kind.TEXT
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    pattern_hint: str = ""
    optional: bool = False
    required: bool = False
    empty_is_default: bool = False  # writing "" is the same as writing nothing
    secret: bool = False  # the value may hold a password and is never repeated in a message
    table: type | None = None  # Kind.TABLE: the dataclass of its keys


def described(doc: str, kind: Kind = Kind.TEXT, **rest: Any) -> dict[str, Setting]:
    """Metadata of a dataclass field that is a setting."""
    return {"setting": Setting(doc, kind, **rest)}


# Backoff belongs to the vocabulary (streamqd.model), which knows nothing of configuration.
_BACKOFF: dict[str, Setting] = {
    "kind": Setting(
        "fixed: always base. linear: base, twice base ... exponential: doubled each time.",
        choices=("fixed", "linear", "exponential"),
    ),
    "base": Setting("The first delay.", Kind.DURATION, min=0, max=30 * 86_400.0),
    "max": Setting("The longest delay.", Kind.DURATION, min=0, max=30 * 86_400.0),
    "jitter": Setting(
        "full: a random part of the delay, so that failures do not return in step.",
        choices=("full", "none"),
    ),
}


def settings_of(section: type) -> dict[str, Setting]:
    """Settings of a section's dataclass, in the order of its fields."""
    if section is Backoff:
        return _BACKOFF
    return {
        each.name: each.metadata["setting"]
        for each in dataclasses.fields(section)
        if "setting" in each.metadata
    }
