"""Read and change the settings registered with a topic, in the configuration file's notation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamqd import config
from streamqd.admin.reading import Unreadable, ViewReader
from streamqd.config import overlay
from streamqd.config.checks import check
from streamqd.config.problems import Problems
from streamqd.config.reading import TableReader, format_number
from streamqd.config.setting import Setting, section_settings
from streamqd.errors import ConfigError, InvalidValueError, RequestRefusedError
from streamqd.store import topics, untrusted
from streamqd.store.store import Store

TRIES = 5  # attempts if other clients change the same settings at the same time


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The result of `topic settings`, with the three kinds of settings that `topic describe` shows.

    `topic describe` shows `registered` under the name `settings`. `changed` is True if this call
    changed the registered settings. `unreadable` lists registered settings that are invalid and
    therefore ignored.
    """

    topic: str
    registered: dict[str, Any]
    configured: dict[str, Any]
    effective: dict[str, Any]
    changed: bool
    unreadable: list[Unreadable]


def show(store: Store, topic: str, configured: config.Topic | None) -> TopicSettings:
    """Return the settings of a registered topic."""
    key, reader = store.keys.meta(topic), ViewReader(store)
    (raw,) = reader.ask([("HGET", key, "settings")])
    registered = valid_settings(reader, raw, key)
    return replace(
        _make_settings(topic, registered, configured, changed=False), unreadable=reader.rows
    )


def change(
    store: Store,
    topic: str,
    assignments: Sequence[str],
    configured: config.Topic | None,
) -> TopicSettings:
    """Change registered settings. Each is given as `NAME=VALUE`, such as `retention.max_age=24h`.

    They are checked in the same way as the configuration file. Raises ConfigError, which lists all
    problems, and RequestRefusedError.
    """
    for _ in range(TRIES):
        text = topics.read_settings(store, topic)
        before = _parse_settings(topic, text)
        after = _merge_settings(before, changed_topic(topic, before, assignments))
        reply = store.run(topics.configure_call(store.keys, topic, text, after))
        if reply.word == "MISSING":
            raise RequestRefusedError(
                f"topic {topic} was deleted by another client; to create it again, run"
                f" `streamqd topic create {topic}`"
            )
        if reply.word == "OK":
            return _make_settings(topic, after, configured, changed=after != before)
    raise RequestRefusedError(
        f"another client keeps changing the settings of {topic}, so nothing was changed; try again"
    )


def valid_settings(reader: ViewReader, raw: bytes | None, key: str) -> dict[str, Any]:
    """Return the valid registered settings. The reader records invalid ones."""
    found = reader.read(untrusted.json_object, raw or None, key, "settings", default={}) or {}
    holds = plain(config.effective(config.Topic(), found))
    bounds = found.get("retention")
    kept = {
        name: value for name, value in found.items() if name not in holds or name == "retention"
    }
    for name in holds.keys() & found.keys() - {"retention"}:
        if holds[name] == found[name]:
            kept[name] = found[name]
        else:
            reader.add(_invalid_error(raw, key))
    if not isinstance(bounds, dict | None):
        reader.add(_invalid_error(raw, key))
        del kept["retention"]
    elif bounds is not None:
        kept["retention"] = {
            name: value
            for name, value in bounds.items()
            if name not in holds["retention"] or holds["retention"][name] == value
        }
        if len(kept["retention"]) < len(bounds):
            reader.add(_invalid_error(raw, key))
    return kept


def _invalid_error(raw: bytes | None, key: str) -> InvalidValueError:
    wanted = "the settings of a topic, as `topic create` writes them"
    return InvalidValueError(key, "settings", untrusted.format_value(raw), wanted)


def changed_topic(
    topic: str, stored: Mapping[str, Any], assignments: Sequence[str]
) -> config.Topic:
    """Return the registered settings with changes such as `retention.max_age=24h` applied.

    Raises ConfigError.
    """
    problems = Problems()
    path = ("topics", topic)
    raw: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        parts = name.strip().split(".")
        if not (equals and all(parts)):
            problems.sentences.append(
                f"{text}: not a setting; pass NAME=VALUE, such as retention.max_age=24h"
            )
        elif parts == ["partitions"]:
            problems.sentences.append(
                f"partitions: cannot be changed here; run `streamqd topic grow {topic} N`"
            )
        else:
            overlay.set_value(raw, (*path, *parts), value)
    before = config.effective(config.Topic(), stored)
    stated = raw.get("topics", {}).get(topic, {})
    changed: config.Topic = TableReader(problems).table(before, stated, path)
    # Rules between settings are checked with the defaults for all other sections.
    among = Problems()
    check(config.Settings(topics={topic: changed}), among, {})
    own = [each for each in among.sentences if each.startswith("topics.")]
    if problems.sentences or own:
        raise ConfigError([*problems.sentences, *own])
    return changed


def settings_in_file(topic: config.Topic) -> dict[str, Any]:
    """Return a topic's settings in the file's notation, without the partition count."""
    whole = plain(topic)
    bounds = {name: whole["retention"][name] for name in sorted(topic.retention.explicit)}
    settings = {
        name: whole[name]
        for name in sorted(topic.explicit)
        if name in whole and name != "retention"
    }
    return {**settings, **({"retention": bounds} if bounds else {})}


def plain(topic: config.Topic) -> dict[str, Any]:
    """Return all settings of a topic in the form in which they are registered."""
    bounds = {name: getattr(topic.retention, name) for name in section_settings(config.Retention)}
    return {**config.registered_settings(topic), "retention": bounds}


def lines(settings: Mapping[str, Any]) -> list[str]:
    """Format settings as lines of TOML, such as `retention.max_age = "24h"`."""
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += [f"{name}.{line}" for line in _table_lines(value, config.Retention)]
        else:
            found += _table_lines({name: value}, config.Topic)
    return found


def _table_lines(table: Mapping[str, Any], section: type) -> list[str]:
    known = section_settings(section)
    return [f"{name} = {_text(known.get(name), value)}" for name, value in table.items()]


def _text(setting: Setting | None, value: Any) -> str:
    if value is None:
        return '"none"'
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return format_number(setting, value) if setting and number else json.dumps(value)


def _make_settings(
    topic: str, registered: dict[str, Any], configured: config.Topic | None, *, changed: bool
) -> TopicSettings:
    file = configured or config.Topic()
    return TopicSettings(
        topic=topic,
        registered=registered,
        configured=settings_in_file(file),
        effective=plain(config.effective(file, registered)),
        changed=changed,
        unreadable=[],
    )


def _parse_settings(topic: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestRefusedError(
            f"the settings of topic {topic} in Redis are not a JSON object ({text!r}); for the"
            " fix, run `streamqd doctor`"
        )
    return found


def _merge_settings(before: Mapping[str, Any], topic: config.Topic) -> dict[str, Any]:
    """Return the settings to store, including stored ones that only a later version supports."""
    new = config.registered_settings(topic)
    bounds = before.get("retention")
    later = {
        name: value
        for name, value in (bounds if isinstance(bounds, dict) else {}).items()
        if name not in section_settings(config.Retention)
    }
    known = {field.name for field in dataclasses.fields(config.Topic)}
    kept = {name: value for name, value in before.items() if name not in known}
    return {**kept, **new, "retention": {**later, **new["retention"]}}
