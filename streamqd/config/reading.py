"""One raw value, or one raw table, becomes what its Setting says; each fault becomes a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from streamqd.config import problems as wording
from streamqd.config.consumers import Consumer
from streamqd.config.problems import Problems
from streamqd.config.schema import SECTIONS
from streamqd.config.setting import COUNT_MAX, DURATION_MAX, SIZE_MAX, Kind, Setting, settings_of
from streamqd.config.topics import Retention, Topic
from streamqd.config.values import format_duration, format_size, parse_duration, parse_size
from streamqd.model import Backoff


def read_table(
    default: Any, raw: object, path: wording.Path, problems: Problems, base_dir: Path
) -> Any:
    """A copy of `default` with what the table states; its class tells which settings there are."""
    given = read_settings(type(default), raw, path, problems, base_dir, default=default)
    return dataclasses.replace(default, **given)


def read_settings(
    section: type,
    raw: object,
    path: wording.Path,
    problems: Problems,
    base_dir: Path,
    *,
    default: Any = None,
) -> dict[str, Any]:
    """The valid settings that the table states, by name."""
    if not isinstance(raw, Mapping):
        problems.add(path, f"{wording.shown(raw)} is not a table: write [{wording.dotted(path)}]")
        return {}
    known = settings_of(section)
    given: dict[str, Any] = {}
    for name, value in raw.items():
        here = (*path, str(name))
        setting = known.get(name)
        if setting is None:
            problems.add(here, unknown(str(name), known, section, path))
            continue
        if setting.table is not None:
            start = getattr(default, name, None) or setting.table()
            if isinstance(value, Backoff):  # given in code
                value = dataclasses.asdict(value)
            given[name] = read_table(start, value, here, problems, base_dir)
            continue
        if setting.empty_is_default and value == "":
            continue
        try:
            given[name] = read_value(setting, value, base_dir)
        except ValueError as error:
            problems.add(here, f"{wording.shown(value, secret=setting.secret)} {error}")
    return given


def unknown(
    name: str, known: Collection[str], section: type | None = None, path: wording.Path = ()
) -> str:
    """The clause for a name that is not a setting: what was meant, or where it belongs."""
    meant = wording.nearest(name, known)
    if meant:
        return f"there is no such setting; did you mean {wording.dotted((*path, meant))}?"
    plain = name.lower().replace("-", "_")
    homes = {f"[{title}]": cls for title, cls in SECTIONS.items()}
    homes |= {"[[consumers]]": Consumer, "[topics.NAME]": Topic, "retention of a topic": Retention}
    for home, cls in homes.items():
        if cls is not section and plain in settings_of(cls):
            return f"there is no such setting here; {plain} belongs to {home}"
    return f"there is no such setting; there are {', '.join(known)}"


def read_value(setting: Setting, value: object, base_dir: Path) -> Any:
    """The value that was meant. ValueError: a clause that completes "<value> ..."."""
    if setting.optional and (value is None or _means_none(setting, value)):
        return None
    match setting.kind:
        case Kind.DURATION:
            return _bounded(setting, parse_duration(value))
        case Kind.SIZE:
            return _bounded(setting, parse_size(value))
        case Kind.INTEGER | Kind.NUMBER:
            return _number(setting, value)
        case Kind.BOOLEAN:
            if not isinstance(value, bool):
                raise ValueError("is not a truth value: write true or false, without quotes")
            return value
        case Kind.TEXTS:
            return _texts(setting, value)
        case Kind.PATH:
            if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
                raise ValueError('is not a path: write it in quotes, such as "./var"')
            return base_dir / value
        case _:
            return _text(setting, value)


def _means_none(setting: Setting, value: object) -> bool:
    return value == ("" if setting.kind in (Kind.TEXT, Kind.PATH) else "none")


def _number(setting: Setting, value: object) -> float:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if setting.kind is Kind.NUMBER and real:
        return float(_bounded(setting, value))
    if isinstance(value, bool) or not isinstance(value, int):
        what, example = ("number", 0.5) if setting.kind is Kind.NUMBER else ("whole number", 4)
        raise ValueError(f"is not a {what}: write digits without quotes, such as {example}")
    return int(_bounded(setting, value))


def _text(setting: Setting, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is not a text: write it in quotes")
    if setting.choices and value not in setting.choices:
        meant = wording.nearest(value, setting.choices)
        choices = ", ".join(f'"{each}"' for each in setting.choices)
        hint = f'; did you mean "{meant}"?' if meant else ""
        raise ValueError(f"is not one of {choices}{hint}")
    if setting.pattern and not setting.pattern.fullmatch(value):
        raise ValueError(f"cannot be used: {setting.pattern_hint}")
    if not value.isprintable():
        raise ValueError("holds control characters: remove them")
    return value


def _texts(setting: Setting, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError('is not a list: write it in brackets, such as ["weblog"]')
    texts: list[str] = []
    for item in value:
        text = _class_name(item) if isinstance(item, type) else item
        if not isinstance(text, str) or not (setting.pattern and setting.pattern.fullmatch(text)):
            raise ValueError(f"holds {wording.shown(text)}: {setting.pattern_hint}")
        if text not in texts:
            texts.append(text)
    return tuple(texts)


def _class_name(cls: type) -> str:
    """The name by which policies know a class that was given in code."""
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


_LIMITS = {Kind.DURATION: DURATION_MAX, Kind.SIZE: SIZE_MAX}


def bounds(setting: Setting) -> tuple[float, float]:
    """Least and greatest value of a number, a duration (s) or a size (bytes)."""
    limit = _LIMITS.get(setting.kind, COUNT_MAX)
    return setting.min or 0, limit if setting.max is None else setting.max


def written(setting: Setting, number: float) -> str:
    """A number of this setting as TOML writes it."""
    if setting.kind is Kind.DURATION:
        return f'"{format_duration(number)}"'
    if setting.kind is Kind.SIZE:
        return f'"{format_size(int(number))}"'
    if setting.kind is Kind.NUMBER:
        return f"{number:g}"
    return str(int(number))


def _bounded(setting: Setting, number: Any) -> Any:
    low, high = bounds(setting)
    if number < low:
        raise ValueError(f"is too small: the least is {written(setting, low)}")
    if number > high:
        raise ValueError(f"is too large: the most is {written(setting, high)}")
    return number
