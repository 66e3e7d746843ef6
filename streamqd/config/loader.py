"""Load Settings from a TOML file, the environment and the command line.

All problems are reported together.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli

from streamqd.config import problems as wording
from streamqd.config.checks import check, check_consumer
from streamqd.config.consumers import Consumer
from streamqd.config.outboxes import OutboxSettings
from streamqd.config.overlay import CONFIG_NAME, overlay
from streamqd.config.problems import Problems
from streamqd.config.reading import TableReader, unknown_clause
from streamqd.config.schedules import Schedule, check_schedules
from streamqd.config.schema import NAMED_SECTIONS, SECTIONS, Settings
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.config.topics import Topic
from streamqd.errors import ConfigError

FILE_BYTES_MAX = 4 << 20
_HEADER = re.compile(r"""[ \t]*\[\[[ \t]*(?:consumers|"consumers"|'consumers')[ \t]*\]\]""")
DEFAULT_FILE = Path("streamq.toml")  # used if it exists and no other file is named


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file in $STREAMQ_CONFIG, or ./streamq.toml if it exists, or None.

    The command line and `Producer()` both use this function, so that they connect to the same
    Redis.
    """
    named = environ.get(CONFIG_NAME)
    if named:
        return Path(named)
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def load(
    path: str | Path | None,
    overrides: Mapping[str, str] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Load the settings from the file, the environment and `overrides`.

    If `path` is None, $STREAMQ_CONFIG names the file. If that is not set either, no file is read.
    `overrides` maps dotted TOML paths, such as "daemon.lease_ttl", to strings from the command
    line. Overrides take precedence over the environment, which takes precedence over the file.

    Raises ConfigError with every problem. Each is one sentence that starts with the TOML path.
    """
    file = path or environ.get(CONFIG_NAME) or None
    source = str(file) if file else "defaults"
    raw, lines = _read(Path(file)) if file else ({}, [])
    base_dir = Path(file).absolute().parent if file else Path.cwd()
    return _load(raw, lines, source, base_dir, overrides, environ)


def load_given(
    given: object,
    name: str,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Load the settings that a web framework passes to streamqd.

    `name` is the name of the framework's setting, and `given` its value. A string or a Path is a
    configuration file. A mapping contains the sections, such as `{"redis": {"url": ...}}`. None
    means the default file, as returned by `find`. In all cases, the environment overrides the
    settings.

    Raises ConfigError in the same cases as `load`.
    """
    if given is None or isinstance(given, str | Path):
        return load(given or find(environ), environ=environ)
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise ConfigError([f"{name} must be a path or a dictionary of sections, not {kind}"])
    return _load(_copy_table(given), [], name, Path.cwd(), {}, environ)


def _copy_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a table, because the settings of the environment are added to it."""
    return {
        name: _copy_table(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
    }


def _load(
    raw: dict[str, Any],
    lines: Sequence[int],
    source: str,
    base_dir: Path,
    overrides: Mapping[str, str],
    environ: Mapping[str, str],
) -> Settings:
    problems = Problems()
    overlay(raw, overrides, environ, problems)
    settings = _build(raw, source, TableReader(problems, base_dir), lines)
    check(settings, problems, environ)
    problems.raise_if_any(settings)
    return settings


def _read(file: Path) -> tuple[dict[str, Any], list[int]]:
    """Return the document, and the line numbers of lines that look like `[[consumers]]` headers."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError([f"{file}: file not found; pass another with --config"]) from None
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read ({error.strerror})"]) from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError([f"{file}: larger than {FILE_BYTES_MAX} bytes"])
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise ConfigError(
            [f"{file}: any user may write this file, which names code to run; run chmod o-w {file}"]
        )
    try:
        text = content.decode()
        return tomli.loads(text), _headers(text)
    except RecursionError:
        raise ConfigError([f"{file}: arrays or tables are nested too deeply"]) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{file}:{line}: not UTF-8 text; save the file as UTF-8"]) from None
    except tomli.TOMLDecodeError as error:
        place, what = f"{error.lineno}:{error.colno}", error.msg.rstrip(".")
        raise ConfigError([f"{file}:{place}: not valid TOML: {what}"]) from None
    except ValueError:
        raise ConfigError([f"{file}: contains a number with thousands of digits"]) from None


def _headers(text: str) -> list[int]:
    return [number for number, line in enumerate(text.split("\n"), 1) if _HEADER.match(line)]


def _build(
    raw: Mapping[str, Any], source: str, reader: TableReader, lines: Sequence[int]
) -> Settings:
    known = [*SECTIONS, *NAMED_SECTIONS, "consumers", "schedules", "outboxes"]
    for name in raw:
        if name not in known:
            reader.problems.add((name,), unknown_clause(name, known))
    base_dir = reader.base_dir
    sections: dict[str, Any] = {
        name: reader.table(cls(), raw.get(name, {}), (name,)) for name, cls in SECTIONS.items()
    }
    daemon = sections["daemon"]
    sections["daemon"] = dataclasses.replace(daemon, state_dir=base_dir / daemon.state_dir)
    sections["http"] = _with_absolute_socket(sections["http"], base_dir)
    named = {
        name: _read_named(name, cls, raw.get(name, {}), reader)
        for name, cls in NAMED_SECTIONS.items()
    }
    consumers = _consumers(raw.get("consumers", []), reader, source, lines)
    return Settings(
        **sections,
        topics=_with_named_topics(named["topics"], consumers),
        pipelines=named["pipelines"],
        consumers=consumers,
        schedules=_schedules(raw.get("schedules", []), reader),
        outboxes=_outboxes(raw.get("outboxes", []), reader),
        base_dir=base_dir,
        source=source,
        read_unix_ms=time.time_ns() // 1_000_000,
    )


def _with_absolute_socket(http: Any, base_dir: Path) -> Any:
    if not http.bind.startswith("unix:") or http.bind == "unix:":
        return http
    return dataclasses.replace(http, bind=f"unix:{base_dir / http.bind.removeprefix('unix:')}")


def _read_named(section: str, cls: type, raw: object, reader: TableReader) -> dict[str, Any]:
    """Return the tables of a section that has one table for each topic."""
    if not isinstance(raw, Mapping):
        clause = f"must be a table [{section}.NAME] for each topic"
        reader.problems.add((section,), clause)
        return {}
    found: dict[str, Any] = {}
    for name, table in raw.items():
        path = (section, name)
        if NAME.fullmatch(name):
            found[name] = reader.table(cls(), table, path)
        else:
            reader.problems.add(
                path, f"{wording.quote(name)} is not a valid topic name ({NAME_HINT})"
            )
    return found


def _with_named_topics(
    topics: Mapping[str, Topic], consumers: Sequence[Consumer]
) -> dict[str, Topic]:
    """Return the topics, with a default Topic for each topic that is named only by a consumer."""
    named = {each.topic: Topic() for each in consumers if each.topic not in topics}
    return {**topics, **named}


def _consumers(
    raw: object, reader: TableReader, source: str, lines: Sequence[int]
) -> tuple[Consumer, ...]:
    if not isinstance(raw, list):
        clause = "must be written as [[consumers]], with two brackets"
        reader.problems.add(("consumers",), clause)
        return ()
    # Lines in a multi-line string may look like headers. Therefore, no line numbers are reported if
    # the counts differ.
    clear = len(lines) == len(raw)
    found = []
    for index, table in enumerate(raw):
        path, place = ("consumers", index), f"{source}:{lines[index]}" if clear else source
        named = Consumer(*_names(table), place=place)
        reader.problems.places[path] = named.place_named
        # An invalid consumer is kept in the list, so that later problems have the right index.
        consumer = _consumer(table, path, reader) or Consumer(topic="", group="")
        found.append(dataclasses.replace(consumer, place=place))
    return tuple(found)


def _names(raw: object) -> tuple[str, str]:
    """Return the topic and the group of a raw table, or two empty strings if one is invalid."""
    if isinstance(raw, Mapping):
        names = raw.get("topic"), raw.get("group")
        topic, group = (each if isinstance(each, str) else "" for each in names)
        if NAME.fullmatch(topic) and NAME.fullmatch(group):
            return topic, group
    return "", ""


def _consumer(raw: object, path: wording.Path, reader: TableReader) -> Consumer | None:
    given = reader.settings(Consumer, raw, path)
    if not isinstance(raw, Mapping):
        return None
    for name in ("topic", "group"):
        if name not in raw:
            clause = "is missing, but every consumer needs it"
            reader.problems.add((*path, name), clause)
    if "topic" not in given or "group" not in given:
        return None
    return Consumer(**given, explicit=frozenset(given))


def _schedules(raw: object, reader: TableReader) -> tuple[Schedule, ...]:
    if not isinstance(raw, list):
        clause = "must be written as [[schedules]], with two brackets"
        reader.problems.add(("schedules",), clause)
        return ()
    # An invalid schedule is kept in the list, so that later problems have the right index.
    return tuple(
        _schedule(table, ("schedules", at), reader) or Schedule("", "")
        for at, table in enumerate(raw)
    )


def _schedule(raw: object, path: wording.Path, reader: TableReader) -> Schedule | None:
    """Read one table of a schedule.

    If it is not a table, or if its name or topic is invalid, record the problems and return None.
    """
    if isinstance(raw, Mapping) and isinstance(raw.get("at"), datetime):
        raw = {**raw, "at": raw["at"].isoformat()}  # TOML allows a date-time without quotes
    given = reader.settings(Schedule, raw, path)
    if not isinstance(raw, Mapping):
        return None
    for name in ("name", "topic"):
        if name not in raw:
            clause = "is missing, but every schedule needs it"
            reader.problems.add((*path, name), clause)
    if "name" not in given or "topic" not in given:
        reader.problems.bad(path)
        return None
    return Schedule(**given)


def _outboxes(raw: object, reader: TableReader) -> tuple[OutboxSettings, ...]:
    if not isinstance(raw, list):
        clause = "must be written as [[outboxes]], with two brackets"
        reader.problems.add(("outboxes",), clause)
        return ()
    return tuple(_outbox(table, ("outboxes", at), reader) for at, table in enumerate(raw))


def _outbox(raw: object, path: wording.Path, reader: TableReader) -> OutboxSettings:
    """Read one table of an outbox.

    If its name or database is missing or invalid, record the problems and return an empty outbox.
    """
    given = reader.settings(OutboxSettings, raw, path)
    for name in ("name", "database"):
        if isinstance(raw, Mapping) and name not in raw:
            clause = "is missing, but every outbox needs it"
            reader.problems.add((*path, name), clause)
    if "name" not in given or "database" not in given:
        reader.problems.bad(path)
        return OutboxSettings("", "")
    return OutboxSettings(**given, base_dir=reader.base_dir)


def declare_consumers(
    settings: Settings, declared: Sequence[Mapping[str, Any]], *, whole: bool = True
) -> Settings:
    """Add the declarations of `@handler` to the settings. The file overrides them.

    Each item of `declared` maps the settings of one consumer to values as written in code, such as
    "30s" or 30. None means that a setting is not declared. If `whole` is True, `declared` contains
    the declarations of all modules, so a consumer in the file that has no handler is a problem.

    Raises ConfigError with every problem.
    """
    problems = Problems()
    reader = TableReader(problems, settings.base_dir)
    found: dict[str, Consumer] = {}
    timed: list[tuple[wording.Path, Schedule]] = []
    for raw in declared:
        stated = {
            name: value for name, value in raw.items() if value is not None and name != "schedules"
        }
        timed += _declared_schedules(raw, reader)
        name = f"@handler({raw.get('topic')}/{raw.get('group')})"
        consumer = _consumer(stated, (name,), reader)
        if consumer is None:
            continue
        other = found.setdefault(consumer.name, consumer)
        if other.handler != consumer.handler:
            problems.add(
                (name,),
                f"{other.handler} and {consumer.handler} declare the same consumer; use another"
                " group for one of them",
            )
    consumers = []
    for index, consumer in enumerate(settings.consumers):
        merged = _merge_consumer(consumer, found.pop(consumer.name, None))
        consumers.append(merged)
        problems.places["consumers", index] = consumer.place_named
        check_consumer(merged, ("consumers", index), problems)
        if not merged.handler and whole:
            problems.add(
                ("consumers", index, "handler"),
                f"is missing, and no module declares one for {merged.name}; write handler ="
                ' "module:function", or add the module to daemon.handlers',
            )
    for consumer in found.values():
        check_consumer(consumer, (f"@handler({consumer.name})",), problems)
    merged_all = (*consumers, *found.values())
    schedules = _with_declared(settings.schedules, timed, problems)
    completed = dataclasses.replace(
        settings,
        consumers=merged_all,
        schedules=schedules,
        topics=_with_named_topics(settings.topics, merged_all),
    )
    problems.raise_if_any(completed)
    return completed


def _declared_schedules(
    raw: Mapping[str, Any], reader: TableReader
) -> list[tuple[wording.Path, Schedule]]:
    """Return the @schedule declarations of one handler, each with the path used in problems."""
    found: list[tuple[wording.Path, Schedule]] = []
    for table in raw.get("schedules") or ():
        path = (f"@schedule({table.get('name')})",)
        schedule = _schedule(table, path, reader)
        if schedule is not None:
            found.append((path, schedule))
    return found


def _with_declared(
    stated: tuple[Schedule, ...],
    declared: Sequence[tuple[wording.Path, Schedule]],
    problems: Problems,
) -> tuple[Schedule, ...]:
    """Return the file's schedules, and those that are declared in code under other names."""
    named = {each.name for each in stated}
    added = [(path, each) for path, each in declared if each.name not in named]
    check_schedules(tuple(each for _, each in added), [path for path, _ in added], problems)
    return (*stated, *(each for _, each in added))


def _merge_consumer(consumer: Consumer, declared: Consumer | None) -> Consumer:
    if declared is None:
        return consumer
    under = {name: getattr(declared, name) for name in declared.explicit - consumer.explicit}
    return dataclasses.replace(consumer, **under)
