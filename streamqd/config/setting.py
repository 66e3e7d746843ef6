"""Describe settings next to their fields, with their meaning, notation, bounds and default.

The annotation of a field defines the notation of its setting. `Seconds` is a duration, `Bytes` is a
size, `JsonText` is any value, `tuple[str, ...]` is a list, and a dataclass is a table. A setting of
the type `X | None` can be disabled.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from streamqd.model import Backoff

# The maximum values of settings that do not define a maximum of their own.
COUNT_MAX = 10**12
DURATION_MAX = 3650 * 86_400.0
SIZE_MAX = 1 << 50


class Kind(enum.Enum):
    """The notation in which the value of a setting is written."""

    TEXT = "string"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "Boolean"
    DURATION = "duration"
    SIZE = "size"
    TEXTS = "list of strings"
    PATH = "path"
    TABLE = "table"
    JSON = "value"


Seconds = Annotated[float, Kind.DURATION]
Bytes = Annotated[int, Kind.SIZE]
JsonText = Annotated[str, Kind.JSON]  # a value of any type, stored as JSON

_KINDS: dict[Any, Kind] = {
    str: Kind.TEXT,
    int: Kind.INTEGER,
    float: Kind.NUMBER,
    bool: Kind.BOOLEAN,
    Seconds: Kind.DURATION,
    Bytes: Kind.SIZE,
    JsonText: Kind.JSON,
    tuple[str, ...]: Kind.TEXTS,
    Path: Kind.PATH,
}


class Shape(NamedTuple):
    """A pattern for strings, and a hint for strings that do not match it."""

    pattern: re.Pattern[str]
    hint: str


# A name can be part of a key or a path, so `.` and `..` must not be valid names.
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
NAME_HINT = "use 1 to 64 of A-Z a-z 0-9 . _ - and no dot first"
NAMED = Shape(NAME, NAME_HINT)
DOTTED_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"  # name of a module, a function or a class


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting.

    If `optional` is True, the value may be None, which is written as "none" or "".
    """

    doc: str
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    shape: Shape | None = None
    empty_is_default: bool = False  # "" means the default
    secret: bool = False  # the value may contain a password, so messages never quote it
    # The following values are derived from the annotation and the default of the field.
    kind: Kind = Kind.TEXT
    optional: bool = False
    required: bool = False
    table: type | None = None  # for Kind.TABLE, the dataclass that defines its keys


def describe(doc: str, **rest: Any) -> dict[str, Setting]:
    """Return the metadata that makes a dataclass field a setting."""
    return {"setting": Setting(doc, **rest)}


def setting(default: Any, doc: str, **rest: Any) -> Any:
    """Return a dataclass field that is a setting. `rest` sets further fields of its `Setting`."""
    return field(default=default, metadata=describe(doc, **rest))


_DELAY_MAX = 30 * 86_400.0
# Backoff is defined in streamqd.model, which does not depend on the configuration. Its settings are
# therefore described here.
_BACKOFF: dict[str, Setting] = {
    "kind": Setting(
        "The way in which the delay grows from one failure to the next. fixed: the delay is always"
        " `base`. linear: it grows by `base` each time. exponential: it doubles each time.",
        choices=("fixed", "linear", "exponential"),
    ),
    "base": Setting("The first delay.", min=0, max=_DELAY_MAX, kind=Kind.DURATION),
    "max": Setting("The longest delay.", min=0, max=_DELAY_MAX, kind=Kind.DURATION),
    "jitter": Setting(
        "The randomness of the delay. full: the delay is a random part of the calculated one, so"
        " that messages do not return together. none: the delay is not random.",
        choices=("full", "none"),
    ),
}


def section_settings(section: type) -> dict[str, Setting]:
    """Return the settings of a section by name, in the order in which its dataclass has them."""
    return _described_by(section)


@functools.cache
def _described_by(section: type) -> dict[str, Setting]:
    if section is Backoff:
        return _BACKOFF
    hints = get_type_hints(section, include_extras=True)
    return {
        each.name: _complete_setting(each, hints[each.name])
        for each in dataclasses.fields(section)
        if "setting" in each.metadata
    }


def _complete_setting(of: dataclasses.Field[Any], hint: Any) -> Setting:
    """Return a field's setting with the values that follow from its annotation and default."""
    union = get_origin(hint) is not Annotated and NoneType in get_args(hint)
    if union:
        (hint,) = set(get_args(hint)) - {NoneType}
    kind = _KINDS.get(hint, Kind.TABLE)
    described_as: Setting = of.metadata["setting"]
    return dataclasses.replace(
        described_as,
        kind=kind,
        optional=union,
        required=of.default is of.default_factory,  # equal only if both are missing
        table=hint if kind is Kind.TABLE else None,
    )
