"""Convert raw values and tables as their Setting requires, and collect problems."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamqd.config import problems as wording
from streamqd.config.consumers import Consumer
from streamqd.config.outboxes import OutboxSettings
from streamqd.config.problems import Problems
from streamqd.config.schedules import Schedule
from streamqd.config.schema import NAMED_SECTIONS, SECTIONS
from streamqd.config.setting import (
    COUNT_MAX,
    DURATION_MAX,
    SIZE_MAX,
    Kind,
    Setting,
    section_settings,
)
from streamqd.config.topics import Retention
from streamqd.config.values import format_duration, format_size, parse_duration, parse_size
from streamqd.model import Backoff


@dataclass(frozen=True, slots=True)
class TableReader:
    """Reads raw tables, and adds the errors that it finds to `problems`.

    Relative paths in settings are relative to `base_dir`.
    """

    problems: Problems
    base_dir: Path = Path()

    def table(self, default: Any, raw: object, path: wording.Path) -> Any:
        """Return a copy of the dataclass `default`, updated with the valid settings of the table.

        If the class has a field `explicit`, it contains the names of these settings.
        """
        given = self.settings(type(default), raw, path, default=default)
        if hasattr(default, "explicit"):
            given["explicit"] = frozenset(given)
        return dataclasses.replace(default, **given)

    def settings(
        self, section: type, raw: object, path: wording.Path, *, default: object = None
    ) -> dict[str, Any]:
        """Return the valid settings of a table as a dict from name to value."""
        if not isinstance(raw, Mapping):
            clause = f"{wording.quote(raw)} is not a table [{wording.format_path(path)}]"
            self.problems.add(path, clause)
            return {}
        known = section_settings(section)
        given: dict[str, Any] = {}
        for name, value in raw.items():
            here = (*path, str(name))
            setting = known.get(name)
            if setting is None:
                self.problems.add(here, unknown_clause(str(name), known, section, path))
            elif setting.table is not None:
                start = getattr(default, name, None) or setting.table()
                if isinstance(value, Backoff):  # declared in code
                    value = dataclasses.asdict(value)
                given[name] = self.table(start, value, here)
            elif not (setting.empty_is_default and value == ""):
                try:
                    given[name] = read_value(setting, value, self.base_dir)
                except ValueError as error:
                    shown = wording.quote(value, secret=setting.secret)
                    self.problems.add(here, f"{shown} {error}")
        return given


def unknown_clause(
    name: str, known: Collection[str], section: type | None = None, path: wording.Path = ()
) -> str:
    """Return a clause for an unknown setting.

    The clause suggests a similar name, or names the table to which the setting belongs.
    """
    meant = wording.nearest_word(name, known)
    if meant:
        return f"unknown setting; did you mean {wording.format_path((*path, meant))}?"
    plain = name.lower().replace("-", "_")
    homes = {f"[{title}]": cls for title, cls in SECTIONS.items()}
    homes |= {f"[{title}.NAME]": cls for title, cls in NAMED_SECTIONS.items()}
    homes |= {"[[consumers]]": Consumer, "[[schedules]]": Schedule}
    homes |= {"[[outboxes]]": OutboxSettings}
    homes |= {"retention of a topic": Retention}
    for home, cls in homes.items():
        if cls is not section and plain in section_settings(cls):
            return f"unknown setting here; {plain} belongs to {home}"
    return f"unknown setting; the settings here are {', '.join(known)}"


def read_value(setting: Setting, value: object, base_dir: Path) -> Any:
    """Return the converted value of a setting.

    Raises ValueError with a clause that completes a sentence starting with the value.
    """
    if setting.optional and (value is None or _means_none(setting, value)):
        return None
    match setting.kind:
        case Kind.DURATION:
            return _check_bounds(setting, parse_duration(value))
        case Kind.SIZE:
            return _check_bounds(setting, parse_size(value))
        case Kind.INTEGER | Kind.NUMBER:
            return _number(setting, value)
        case Kind.BOOLEAN:
            if not isinstance(value, bool):
                raise ValueError("must be true or false, without quotes")
            return value
        case Kind.TEXTS:
            return _texts(setting, value)
        case Kind.JSON:
            return _json(value)
        case Kind.PATH:
            if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
                raise ValueError('must be a path in quotes, such as "./var"')
            return base_dir / value
        case _:
            return _text(setting, value)


def _json(value: object) -> str:
    """Return a value as JSON, with its keys in the original order."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()  # rejects a lone surrogate
        return text
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            "cannot be converted to JSON; use strings, numbers, Booleans, lists and tables"
        ) from None


def _means_none(setting: Setting, value: object) -> bool:
    return value == ("" if setting.kind in (Kind.TEXT, Kind.PATH) else "none")


def _number(setting: Setting, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        fits = False
    else:
        fits = setting.kind is Kind.NUMBER or isinstance(value, int)
    if not fits:
        kind, example = ("a number", 0.5) if setting.kind is Kind.NUMBER else ("an integer", 4)
        raise ValueError(f"must be {kind} without quotes, such as {example}")
    number = _check_bounds(setting, value)
    return float(number) if setting.kind is Kind.NUMBER else number


def _text(setting: Setting, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string in quotes")
    if setting.choices and value not in setting.choices:
        meant = wording.nearest_word(value, setting.choices)
        choices = ", ".join(f'"{each}"' for each in setting.choices)
        hint = f'; did you mean "{meant}"?' if meant else ""
        raise ValueError(f"is not one of {choices}{hint}")
    if setting.shape and not setting.shape.pattern.fullmatch(value):
        raise ValueError(f"is not valid ({setting.shape.hint})")
    if not value.isprintable():
        raise ValueError("must not contain control characters")
    return value


def _texts(setting: Setting, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError('must be a list in brackets, such as ["weblog"]')
    assert setting.shape is not None, "a list of strings has a shape for its strings"
    texts = [_class_name(item) if isinstance(item, type) else item for item in value]
    for text in texts:
        if not isinstance(text, str) or not setting.shape.pattern.fullmatch(text):
            raise ValueError(f"contains {wording.quote(text)} ({setting.shape.hint})")
    return tuple(dict.fromkeys(texts))


def _class_name(cls: type) -> str:
    """Return the name that policies use for a class that was passed in code."""
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


_LIMITS = {Kind.DURATION: DURATION_MAX, Kind.SIZE: SIZE_MAX}


def bounds(setting: Setting) -> tuple[float, float]:
    """Return the minimum and the maximum of a number, a duration (seconds) or a size (bytes)."""
    limit = _LIMITS.get(setting.kind, COUNT_MAX)
    return setting.min or 0, limit if setting.max is None else setting.max


def format_number(setting: Setting, number: float) -> str:
    """Return a number in the notation that this setting has in TOML."""
    if setting.kind is Kind.DURATION:
        return f'"{format_duration(number)}"'
    if setting.kind is Kind.SIZE:
        return f'"{format_size(int(number))}"'
    if setting.kind is Kind.NUMBER:
        return f"{number:g}"
    return str(int(number))


def _check_bounds(setting: Setting, number: Any) -> Any:
    low, high = bounds(setting)
    if number < low:
        raise ValueError(f"is too small (minimum: {format_number(setting, low)})")
    if number > high:
        raise ValueError(f"is too large (maximum: {format_number(setting, high)})")
    return number
