"""Describe the settings for the reference file, the documentation, editors and `config show`."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from streamqd.config.consumers import Consumer
from streamqd.config.outboxes import OutboxSettings
from streamqd.config.reading import bounds, format_number
from streamqd.config.schedules import Schedule
from streamqd.config.schema import NAMED_SECTIONS, SECTIONS, Settings
from streamqd.config.secrets import mask_url
from streamqd.config.setting import NAME, Kind, Setting, section_settings
from streamqd.config.values import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
)

_COLUMNS = 100
_HEAD = """\
streamq.toml: every setting of streamqd with its default. This file is generated from the code. Your
file needs only the settings that you change.

Lines with # and a space are comments. Lines with # and no space are settings at their default. To
change such a setting, remove the #.

A duration is a number of seconds, or a string such as "1m30s" or "500ms". A size is a number of
bytes, or a string such as "64MiB" (powers of 1024) or "4MB" (powers of 1000). To disable an
optional setting, set it to "none", or to 0 or "" if its comment mentions that value.

The command line overrides the environment, which overrides the file. For example, the variable
STREAMQ_DAEMON__LEASE_TTL overrides daemon.lease_ttl. A name that streamqd does not recognize is an
error."""
_TOPIC, _GROUP = "access", "hits"
_SCHEDULE = Schedule("nightly", _TOPIC, cron="0 3 * * *")
_UNSET = Schedule("nightly", _TOPIC)  # cron is not set, so that its default is shown
_OUTBOX = OutboxSettings("shop", "${DATABASE_URL}")


@dataclass(frozen=True)
class SettingReference:
    """A setting as a page describes it, with its full dotted name, meaning, limits and default."""

    name: str
    text: str
    default: str  #: default in TOML, or "" for a required setting or a table
    keys: tuple[SettingReference, ...] = ()  #: keys of a table
    choices: tuple[str, ...] = ()  #: all valid values, if the setting has only a few


@dataclass(frozen=True)
class SectionReference:
    """A table of the file, with its header in TOML, its meaning, and its settings."""

    name: str
    header: str
    text: str
    settings: tuple[SettingReference, ...]


def reference() -> list[SectionReference]:
    """Return all settings, grouped by section and in the order of the file."""
    return [
        SectionReference(
            name,
            header.removeprefix("#"),
            _section_doc(type(values)),
            tuple(
                _references(
                    f"{name}.NAME." if name in NAMED_SECTIONS else f"{name}.",
                    _UNSET if values is _SCHEDULE else values,
                )
            ),
        )
        for name, header, values in _sections()
    ]


def _references(prefix: str, values: Any) -> Iterator[SettingReference]:
    for name, setting in section_settings(type(values)).items():
        value = getattr(values, name)
        keys = tuple(_references("", value)) if setting.table else ()
        default = "" if setting.required or keys else _toml(setting, value)
        yield SettingReference(
            prefix + name,
            setting.doc + _describe_allowed(setting),
            default,
            keys,
            setting.choices,
        )


def _sections() -> Iterator[tuple[str, str, Any]]:
    """Yield the name of each section, its header line in the file, and its values."""
    for name, section in SECTIONS.items():
        yield name, f"[{name}]", section()
    for name, section in NAMED_SECTIONS.items():
        yield name, f"#[{name}.{_TOPIC}]", section()
    yield "consumers", "#[[consumers]]", Consumer(topic=_TOPIC, group=_GROUP)
    yield "schedules", "#[[schedules]]", _SCHEDULE
    yield "outboxes", "#[[outboxes]]", _OUTBOX


def reference_toml() -> str:
    """Return the text of etc/streamq.toml.

    The file sets nothing, so loading it results in the default settings.
    """
    lines = [*_comment(_HEAD)]
    for _, header, values in _sections():
        lines += ["", "", *_comment(_section_doc(type(values))), header, *_settings_lines(values)]
    return "\n".join(lines) + "\n"


def _settings_lines(section: Any) -> list[str]:
    lines: list[str] = []
    for name, setting in section_settings(type(section)).items():
        value = getattr(section, name)
        lines += ["", *_comment(_describe(setting)), *_setting_lines(name, setting, value)]
    return lines


def _setting_lines(name: str, setting: Setting, value: Any) -> list[str]:
    """Return the lines of a setting in the file. A table that is too wide gets one line per key."""
    line = f"#{name} = {_toml(setting, value)}"
    if setting.table is None or len(line) <= _COLUMNS:
        return [line]
    inner = section_settings(setting.table)
    return [f"#{name}.{key} = {_toml(inner[key], getattr(value, key))}" for key in inner]


def _describe(setting: Setting) -> str:
    """Return the meaning and the valid values of a setting, and of the keys if it is a table."""
    lines = [setting.doc + _describe_allowed(setting)]
    if setting.table is not None:
        for name, inner in section_settings(setting.table).items():
            lines.append(f"  {name}: {inner.doc}{_describe_allowed(inner)}")
    return "\n".join(lines)


def _describe_allowed(setting: Setting) -> str:
    if setting.choices and not all(f"{choice}: " in setting.doc for choice in setting.choices):
        return " One of " + ", ".join(f'"{choice}"' for choice in setting.choices) + "."
    if setting.kind in (Kind.DURATION, Kind.SIZE, Kind.INTEGER, Kind.NUMBER):
        low, high = (_bound(setting, number) for number in bounds(setting))
        kind = f" {'An' if setting.kind is Kind.INTEGER else 'A'} {setting.kind.value}"
        if setting.max is not None:
            return f"{kind} from {low} to {high}."
        return f"{kind} of at least {low}." if setting.min else f"{kind}."
    return " Required." if setting.required else ""


def _bound(setting: Setting, number: float) -> str:
    if number == 0:
        return "0"
    return f"{number:,}" if setting.kind is Kind.INTEGER else format_number(setting, number)


def _section_doc(section: type) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _comment(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.splitlines():
        indent = " " * (len(paragraph) - len(paragraph.lstrip()))
        wrapped = textwrap.wrap(
            paragraph.strip(),
            _COLUMNS - 2 - len(indent),
            subsequent_indent="  " if indent else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [f"# {indent}{line}" for line in wrapped] or ["#"]
    return lines


def plain(setting: Setting, value: Any) -> Any:
    """Return a value as plain data for a TOML or JSON document, with passwords masked."""
    if value is None:
        return "" if setting.kind in (Kind.TEXT, Kind.PATH) else "none"
    match setting.kind:
        case Kind.DURATION:
            return format_duration(value)
        case Kind.SIZE:
            return format_size(value)
        case Kind.PATH:
            return str(value) if Path(value).is_absolute() else f"./{value}"
        case Kind.TEXTS:
            return list(value)
        case Kind.JSON:
            found = json.loads(value)
            return dict.fromkeys(found, "***") if setting.secret and found else found
        case Kind.TABLE:
            return _plain_table(value)
        case _:
            return mask_url(value) if setting.secret else value


def _plain_table(section: Any) -> dict[str, Any]:
    return {
        name: plain(setting, getattr(section, name))
        for name, setting in section_settings(type(section)).items()
    }


def _toml(setting: Setting, value: Any) -> str:
    if setting.table is not None:
        inner = section_settings(setting.table)
        pairs = ", ".join(f"{key} = {_toml(inner[key], getattr(value, key))}" for key in inner)
        return f"{{ {pairs} }}"
    if setting.empty_is_default:  # the real default, such as the host name, differs between hosts
        return '""'
    return json.dumps(plain(setting, value), ensure_ascii=False)


def as_document(settings: Settings) -> dict[str, Any]:
    """Return the effective settings as plain data for `config show`, with passwords masked."""
    document: dict[str, Any] = {name: _plain_table(getattr(settings, name)) for name in SECTIONS}
    for title in NAMED_SECTIONS:
        named = getattr(settings, title).items()
        document[title] = {name: _plain_table(table) for name, table in named}
    for title in ("consumers", "schedules", "outboxes"):
        document[title] = [_plain_table(table) for table in getattr(settings, title)]
    return document


def json_schema() -> dict[str, Any]:
    """Return the file's JSON schema (2020-12), which lets editors complete and check the TOML."""
    properties = {name: _table_schema(cls(), _section_doc(cls)) for name, cls in SECTIONS.items()}
    for name, cls in NAMED_SECTIONS.items():
        properties[name] = {
            "type": "object",
            "description": _section_doc(cls),
            "propertyNames": {"pattern": f"^{NAME.pattern}$"},
            "additionalProperties": _table_schema(cls(), _section_doc(cls)),
        }
    consumer = _table_schema(Consumer(topic="", group=""), _section_doc(Consumer))
    properties["consumers"] = {
        "type": "array",
        "description": _section_doc(Consumer),
        "items": {**consumer, "required": ["topic", "group"]},
    }
    schedule = _table_schema(Schedule("", ""), _section_doc(Schedule))
    properties["schedules"] = {
        "type": "array",
        "description": _section_doc(Schedule),
        "items": {**schedule, "required": ["name", "topic"]},
    }
    outbox = _table_schema(_OUTBOX, _section_doc(OutboxSettings))
    properties["outboxes"] = {
        "type": "array",
        "description": _section_doc(OutboxSettings),
        "items": {**outbox, "required": ["name", "database"]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "streamq.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _table_schema(section: Any, doc: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": doc,
        "additionalProperties": False,
        "properties": {
            name: _value_schema(setting, getattr(section, name))
            for name, setting in section_settings(type(section)).items()
        },
    }


def _value_schema(setting: Setting, default: Any) -> dict[str, Any]:
    if is_dataclass(default):
        return _table_schema(default, setting.doc)
    schema: dict[str, Any] = {"description": setting.doc}
    low, high = bounds(setting)
    limits = {"minimum": low, "maximum": high}
    match setting.kind:
        case Kind.INTEGER:
            form: dict[str, Any] = {"type": "integer", **limits}
        case Kind.NUMBER:
            form = {"type": "number", **limits}
        case Kind.DURATION:
            form = {
                "anyOf": [
                    {"type": "number", **limits},
                    {"type": "string", "pattern": DURATION_PATTERN},
                ]
            }
        case Kind.SIZE:
            form = {
                "anyOf": [
                    {"type": "integer", **limits},
                    {"type": "string", "pattern": SIZE_PATTERN},
                ]
            }
        case Kind.BOOLEAN:
            form = {"type": "boolean"}
        case Kind.JSON:
            form = {}
        case Kind.TEXTS:
            form = {"type": "array", "items": _text_schema(setting)}
        case _ if setting.choices:
            form = {"enum": list(setting.choices)}
        case _:
            form = _text_schema(setting)
    if setting.optional and setting.kind not in (Kind.TEXT, Kind.PATH):
        form = {"anyOf": [*form.pop("anyOf", [form] if form else []), {"const": "none"}]}
    if not (setting.required or setting.empty_is_default):
        schema["default"] = plain(setting, default)
    return schema | form


def _text_schema(setting: Setting) -> dict[str, Any]:
    if setting.shape is None:
        return {"type": "string"}
    empty = "|" if setting.empty_is_default or setting.optional else ""
    return {"type": "string", "pattern": f"^(?:{setting.shape.pattern.pattern}{empty})$"}
