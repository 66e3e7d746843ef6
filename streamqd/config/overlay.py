"""Override the settings of the file with values from the environment and the command line.

`STREAMQ_DAEMON__LEASE_TTL=20s` sets `daemon.lease_ttl`. For a topic in the file, use a variable
such as `STREAMQ_TOPICS__ACCESS__PARTITIONS`. In the name of the topic, replace each character that
is not a letter or digit with `_`. Consumers are a list, so only the file and @handler can set them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tomli

from streamqd.config import problems as wording
from streamqd.config.problems import Problems
from streamqd.config.schema import NAMED_SECTIONS, SECTIONS
from streamqd.config.setting import Kind, Setting, section_settings

PREFIX = "STREAMQ_"
CONFIG_NAME = "STREAMQ_CONFIG"

_ONLY_IN_FILE = "consumers can be configured only in the file or with @handler"


def overlay(
    raw: dict[str, Any],
    overrides: Mapping[str, str],
    environ: Mapping[str, str],
    problems: Problems,
) -> None:
    """Override the raw tables, first with the environment and then with the command line."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name != CONFIG_NAME:
            path = _path_of_variable(name, raw, problems)
            if path:
                set_value(raw, path, environ[name])
                problems.origins[path] = name
    for key, text in overrides.items():
        over = _path_of_key(key)
        if over is None:
            problems.sentences.append(f"{key}: not a setting of the form SECTION.NAME")
        elif over[0] == "consumers":
            problems.sentences.append(f"{key} (command line): {_ONLY_IN_FILE}")
        else:
            set_value(raw, over, text)
            problems.origins[over] = "command line"


def _path_of_variable(
    name: str, raw: Mapping[str, Any], problems: Problems
) -> tuple[str, ...] | None:
    parts = name.removeprefix(PREFIX).lower().split("__")
    if parts[0] == "consumers":
        problems.sentences.append(f"{name}: {_ONLY_IN_FILE}")
        return None
    if parts[0] in NAMED_SECTIONS and len(parts) > 2:
        tables = raw.get(parts[0], {})
        for own in tables if isinstance(tables, Mapping) else ():
            if variable_part(own).lower() == parts[1]:
                path = (parts[0], own, *parts[2:])
                if setting_at(path):
                    return path
        of = "topic" if parts[0] == "topics" else "pipeline"
        problems.sentences.append(
            f"{name}: the file defines no such {of} or setting; add the {of} to the file, or unset"
            " this variable"
        )
        return None
    if setting_at(tuple(parts)):
        return tuple(parts)
    meant = wording.nearest_word(name.lower(), [each.lower() for each in variables()])
    hint = f"did you mean {meant.upper()}?" if meant else "names are STREAMQ_SECTION__SETTING"
    problems.sentences.append(f"{name}: unknown setting ({hint})")
    return None


def variables() -> dict[str, tuple[str, str]]:
    """Return the section and the setting for each environment variable.

    Variables for named tables, such as topics, are not included.
    """
    return {
        f"{PREFIX}{section.upper()}__{name.upper()}": (section, name)
        for section, cls in SECTIONS.items()
        for name in section_settings(cls)
    }


def variable_part(name: str) -> str:
    """Return the name of a topic as it appears in the name of a variable."""
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def setting_at(path: tuple[str, ...]) -> Setting | None:
    """Return the setting at a TOML path, or None if there is none.

    Settings of consumers, schedules and outboxes are not included.
    """
    if path[0] in NAMED_SECTIONS:
        section: type | None = NAMED_SECTIONS[path[0]] if len(path) > 2 else None
        names = path[2:]
    else:
        section = SECTIONS.get(path[0])
        names = path[1:]
    setting = None
    for name in names:
        setting = section_settings(section).get(name) if section else None
        if setting is None:
            return None
        section = setting.table
    return setting


def _path_of_key(key: str) -> tuple[str, ...] | None:
    """Return the parts of a dotted TOML key, or None if the key is invalid. Parts may be quoted."""
    try:
        table: Any = tomli.loads(f"{key} = 0") if "\n" not in key else 0
    except (ValueError, RecursionError):  # invalid TOML, nested too deeply, or too long a number
        return None
    parts: list[str] = []
    while isinstance(table, dict):
        if len(table) != 1:
            return None
        ((part, table),) = table.items()
        parts.append(part)
    return tuple(parts) if len(parts) > 1 else None


def set_value(raw: dict[str, Any], path: tuple[str, ...], text: str) -> None:
    """Set a value in the raw tables at a TOML path. `text` is a string from outside the file."""
    table = raw
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return  # the file has another value instead of a table, which the reader reports
    setting = setting_at(path)
    table[path[-1]] = _parse_value(text, setting.kind if setting else Kind.TEXT)


def _parse_value(text: str, kind: Kind) -> Any:
    """Convert a string from outside the file to a value.

    The string is parsed as TOML, or used unchanged, depending on the kind of the setting.
    """
    bare = text.strip()
    quoted = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "\"'"
    if kind in (Kind.TEXT, Kind.PATH) and not quoted:
        # Keep the string, because an instance may be named 42, and a password may contain any
        # characters.
        return text
    if kind is Kind.TEXTS and not bare.startswith("["):
        return [part.strip() for part in bare.split(",") if part.strip()]
    try:
        document = tomli.loads(f"value = {bare}")
    except (ValueError, RecursionError):  # invalid TOML, nested too deeply, or too long a number
        return text
    return document["value"] if set(document) == {"value"} else text
