"""Write the reference pages that are generated from code, two pictures, and etc/streamq.toml.

    python docs/generate.py            write them
    python docs/generate.py --check    only report outdated pages; exit code 1 if there are any

Run it after you change a setting, a metric, a script, a log event, a key, an error or a command. A
test fails if a page is outdated.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import click
import pictures
import public_api

from streamqd import config, errors
from streamqd.admin import diagnosis
from streamqd.cli import cli as command
from streamqd.logs import events
from streamqd.metrics import table
from streamqd.store import scripts
from streamqd.store.keys import Keys

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
INTERNALS = ROOT / "docs" / "internals"


def _page(title: str, source: str, *parts: str) -> str:
    note = f"<!-- Generated from {source} by docs/generate.py: do not edit. -->"
    return "\n\n".join([note, f"# {title}", *(part.strip("\n") for part in parts)]) + "\n"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


LONG_CELL = 20  # most words in a table cell; longer texts move below the table


def _table_and_details(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table, followed by a list of the sentences that do not fit in its last column.

    A long cell keeps only its first sentence, and `Required.` or `Default: VALUE.` at its end. If a
    text explains at least two values, these move to the list too, with a subitem for each of them.
    """
    short, details = [], []
    for *cells, text in rows:
        body, *end = re.split(r"( Required\.| Default: \S+\.)$", " ".join(text.split()))[:2]
        lead, values = public_api.split_values(body)
        first, _, rest = lead.partition(". ")
        if values or (len(text.split()) > LONG_CELL and rest):
            text = f"{first.removesuffix('.')}.{''.join(end)}"
            label = cells[0][: cells[0].rindex("`") + 1]
            details += [f"- {label}: {rest}".rstrip(), *values]
        short.append((*cells, text))
    return "\n\n".join([_table(header, short), *(["\n".join(details)] if details else [])])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# --- the pages ------------------------------------------------------------------------------------


def configuration() -> str:
    """All settings, each under its own heading."""
    parts = []
    for section in config.reference():
        parts += [f"## {section.name}", _values_as_code(section.text)]
        parts.append(f"```toml\n{section.header}\n```")
        for setting in section.settings:
            parts += [f"### `{setting.name}`", _setting_prose(setting)]
            if setting.keys:
                rows = (
                    (f"`{key.name}`", f"`{key.default}`", _choices_as_code(key))
                    for key in setting.keys
                )
                parts.append(_table_and_details(("Key", "Default", "Meaning"), rows))
            elif setting.default:
                parts.append(f"Default: `{setting.default}`")
    return _page(
        "Configuration",
        "streamqd/config",
        """
streamqd is configured with one TOML file. The command line overrides the environment, which
overrides the file, which overrides the defaults. For example, the environment variable
`STREAMQ_DAEMON__LEASE_TTL` overrides the setting `daemon.lease_ttl` in the file. A setting that
streamqd does not recognize is an error.

- A duration is a number of seconds, or a string such as `"1m30s"` or `"500ms"`.
- A size is a number of bytes, or a string such as `"64MiB"` (powers of 1024) or `"4MB"` (powers of
  1000).
- To disable an optional setting, set it to `"none"`.

To see the settings that are in effect, run `streamqd config show`. To find all problems of the
file, run `streamqd check`. Editors can complete and check the file with the JSON schema that
`streamqd config schema` prints. As a start, you can copy
[`etc/streamq.toml`](../../etc/streamq.toml), which contains every setting with its default as a
comment, and change only the settings that you need.
""",
        *parts,
    )


def _setting_prose(setting: config.SettingReference) -> str:
    """Return the description of a setting. Values that it explains become a list."""
    lead, *values = re.split(_choice_pattern(setting), setting.text)
    if len(values) < 2 * len(setting.choices) or not values:
        return _choices_as_code(setting)
    items = [
        f"- `{value}`: {_values_as_code(meaning.strip())}"
        for value, meaning in zip(values[::2], values[1::2], strict=True)
    ]
    return "\n\n".join([*([_values_as_code(lead.strip())] if lead else []), "\n".join(items)])


def _choices_as_code(setting: config.SettingReference) -> str:
    return _values_as_code(re.sub(_choice_pattern(setting), r"`\1`: ", setting.text))


def _choice_pattern(setting: config.SettingReference) -> str:
    words = "|".join(setting.choices) or "(?!)"
    return rf"(?:(?<=\. )|^)({words}): "


_CODE = re.compile(
    r"(?P<already>`[^`]*`)"
    r'|\b[a-z_]+ = (?:"[^"]*"|[\w@-]+)|"[^"`\s]+"|@handler'
    r"|(?<![\w-])--[a-z]+(?:-[a-z]+)*|(?:\./)?\b[a-z_]+(?:\.[A-Za-z][A-Za-z_]+)+\b"
    r"|\b(?:[a-z]+_)+(?:[a-z]+\b|\*)|\$?\b(?:[A-Z]+_+)+(?:[A-Z]+\b|\*)"
)


def _values_as_code(text: str) -> str:
    """Return the text with quoted values, options, settings and variables formatted as code."""
    return _CODE.sub(lambda found: found["already"] or f"`{found[0]}`", text)


def metrics() -> str:
    """All metrics, grouped by section, followed by the health endpoints."""
    parts = []
    for title, section in table.SECTIONS.items():
        shared = _shared(metric.labels for metric in section)
        rows = (
            (
                f"`{metric.name}`",
                metric.kind,
                _as_code(label for label in metric.labels if label not in shared),
                _values_as_code(metric.help),
            )
            for metric in section
        )
        parts.append(f"## {title}")
        parts += _shared_sentence("metric", "label", shared)
        header = ("Metric", "Kind", "Other labels" if shared else "Labels", "Meaning")
        parts.append(_table_without_empty_column(header, rows, 2, _table_and_details))
    return _page(
        "Metrics and health",
        "streamqd/metrics",
        """
In each instance, the housekeeper process serves these HTTP endpoints at the address `http.bind`
(default `127.0.0.1:9464`):

| Path | Response |
| --- | --- |
| `/metrics` | The metrics below, for Prometheus. |
| `/livez` | 200 if the supervisor and the housekeeper make progress, even without Redis. |
| `/startupz` | 200 once startup is complete. |
| `/readyz` | 200 if the instance works or is on standby, and Redis answers. |
| `/status` | The partitions of this instance and their state, as JSON. |
| `/` | A short page with the state of this instance and links to these paths. |

The three health endpoints, `/livez`, `/startupz` and `/readyz`, return 200 or 503, with the reasons
as JSON. `/readyz` stays ready for an instance that `streamqd drain` has drained, because such an
instance is on standby.

The `streamqd_instance` label contains the name of the instance. Most metrics without this label
describe data in Redis. Every instance that reads the data reports the same value, so aggregate
these metrics with `max`, such as `max by (topic, partition)`. There is one exception: if *this
instance* occurs in the meaning of a counter, each instance counts only its own work, so aggregate
this counter with `sum`.

When a supervisor restarts, the counters of its instance start again at 0. A crash of a worker does
not reset them.
""",
        *parts,
    )


def log_events() -> str:
    """All log events, grouped by section."""
    parts = []
    for title, section in events.SECTIONS.items():
        shared = _shared(event.fields for event in section.values())
        if not {*events.ASSIGNMENT} <= {*shared}:
            shared = tuple(name for name in shared if name not in events.ASSIGNMENT)
        rows = (
            (
                f"`{name}`",
                event.level,
                event.meaning,
                _fields(field for field in event.fields if field not in shared),
            )
            for name, event in section.items()
        )
        parts.append(f"## {title}")
        parts += _shared_sentence("event", "field", shared)
        header = ("Event", "Level", "Meaning", "Other fields" if shared else "Fields")
        parts.append(_table_without_empty_column(header, rows, 3, _table))
    return _page(
        "Log events",
        "streamqd/logs/events.py",
        """
The daemon writes to standard error: text on a terminal, JSON lines otherwise (`log.format`). Each
line starts with an event from this list (in JSON, the `event` field). The names of events and
fields are [documented interfaces](stability.md#documented-interfaces). The daemon logs changes of
state, but neither repeated steps nor payloads. [Logging](../how-to/logging.md) describes the
records that your handlers log.

Events at the levels `error` and `critical` require an operator to act. Events at the level
`warning` usually mean that messages are delayed, handled again or dead-lettered. `log.level` sets
the lowest level that is logged.

Every JSON line has the fields `event`, `ts`, `level`, `pid` and `role`, and after an exception also
`traceback`. The tables list the other fields, but a line omits fields without a value. If the
meaning of an event contains a field in parentheses, such as (`error`), this field contains the
details. Some field names have the same meaning in all events:

- *assignment* stands for the three fields `topic`, `partition` and `group`.
- `child` is the PID of a process.
- `seconds` and `failures` are, in events about the end of an outage, its duration and the number of
  failed attempts.
- `suppressed` and `more` are the number of similar lines that were not written.
""",
        *parts,
    )


def _shared(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that all groups have in common, in the order of the first group.

    Return no names if there is only one group.
    """
    first, *others = groups
    return (
        () if not others else tuple(name for name in first if all(name in each for each in others))
    )


def _shared_sentence(kind: str, what: str, shared: tuple[str, ...]) -> list[str]:
    """Return a list with a sentence that names the shared labels or fields.

    The list is empty if there are none.
    """
    if not shared:
        return []
    *most, last = (f"`{name}`" for name in shared)
    names = f"{', '.join(most)} and {last}" if most else last
    return [f"Every {kind} in this section has the {what}{'s' * bool(most)} {names}."]


def _table_without_empty_column(
    header: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    column: int,
    table_of: Callable[[tuple[str, ...], Iterable[tuple[str, ...]]], str],
) -> str:
    """Return a table. Leave out the given column if it is empty in every row."""
    kept = [*rows]
    if not any(row[column] for row in kept):
        header, *kept = ((*row[:column], *row[column + 1 :]) for row in (header, *kept))
    return table_of(header, kept)


def _as_code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _fields(names: Iterable[str]) -> str:
    """Return the field names as code. Replace the three fields of an assignment by `assignment`."""
    left = [*names]
    if not {*events.ASSIGNMENT} <= {*left}:
        return _as_code(left)
    rest = _as_code(name for name in left if name not in events.ASSIGNMENT)
    return f"*assignment*, {rest}" if rest else "*assignment*"


def lua() -> str:
    """All scripts, described by their contract headers."""
    parts = []
    for script in scripts.load().values():
        keys = [
            (f"`{key.name}`{' (optional)' * key.optional}", key.type, *_key_cells(key.pattern))
            for key in script.keys
        ]
        columns = 4 if any(remark for *_, remark in keys) else 3
        parts.append(f"## {script.name}")
        if script.summary != "any -> any":
            parts.append(_transition(script.summary))
        parts.append(_reply_words_as_code(script, script.prose))
        head = ("Key", "Type", "Name", "Contents or condition")[:columns]
        parts.append(_table(head, (row[:columns] for row in keys)))
        if script.args:
            arguments = [
                f"- `{each.name}` ({each.type}): {_header_text(script, each.meaning)}"
                for each in script.args
            ]
            parts.append("\n".join(["Arguments:", "", *arguments]))
        parts.append("\n".join(["Replies:", "", *_replies(script, script.returns)]))
        if script.entry_returns:
            words = _replies(script, script.entry_returns)
            parts.append("\n".join(["Words for each entry:", "", *words]))
        cost, repeat = (_header_text(script, text) for text in (script.cost, script.repeat))
        parts.append(f"**Cost:** {cost}  \n**Repeat:** {repeat}")
    return _page(
        "Lua scripts",
        "the headers of lua/*.lua",
        """
streamqd changes the state of messages, leases, groups and topics with Lua scripts that Redis
executes. While a script runs, the server serves no other client. A script can therefore check that
its call is still valid and write the change in one step, without another client acting in between.
This page describes the contract of each script, and is generated from the headers of the scripts.
The [terms of the code](../explanation/design.md#terms-of-the-code) and the
[glossary](../reference/glossary.md) define the terms.

## How to read a contract

**Transition** names the states before and after the call. The addition *epoch + 1 or later* means
that the call also raises the epoch.

**Keys.** [Redis keys](../reference/keys.md) describes the contents of each key. In key names, the
letter `p` is literal, and so are the prefixes, which you can change with settings. The other parts
stand for values: `T` is a topic, `i` a partition, `G` a group, `F` a fleet, `N` the name of an
outbox or a pipeline, `Q` a Spark query, `A` an attempt to write a batch, and `<id>` a deduplication
ID. For example, the tag `{T:p:i}` becomes `{orders:p:0}` for partition 0 of the topic `orders`. If
the caller omits an optional key, the first key is passed in its place.

**Arguments.** The word in parentheses is the type of the argument. A `flag` is 1 or 0, an `id` is
the ID of an entry, and a `token` is a string that must not be empty. A `list` consists of all
remaining arguments. `str` and `bytes` are other strings, and `int` is an integer.

**Replies.** A reply consists of a word, which is the first element, and of values. The first value
is the second element of the reply, and is therefore listed as `[2]`. A script either completes the
transition, or it writes nothing and returns a word for the reason. Three of these reasons have the
same meaning in many scripts:

- `FENCED`: the fence does not contain the token that the caller passed. The caller has lost the
  assignment to another owner, or was never its owner.
- `SESSION`: the owner has opened a newer connection, and this call comes from an earlier one.
- `MOVED`: the messages were routed by a partition count that the topic no longer has.

**Errors.** Instead of returning a reply, a script can raise one of these errors:

- `WRONGTYPE`: a key has an unexpected type. A script reads every key that it will write to before
  it writes for the first time, so nothing was written.
- `BADVALUE`: the script cannot work without a stored value that it cannot read. The error names the
  key and the field, and nothing was written.
- `ERR not a place`: an argument should be a place, but is not. Nothing was written.
- `NOGROUP`: the group does not exist on a stream that the script reads or settles.
- `OOM`: the server has no memory left for the write. Redis checks this only until the script has
  written for the first time. *The script works when memory is full* means that its first write is a
  command that Redis accepts even then, so that Redis accepts the other writes too.

**Cost** is the time that the script takes inside the server. The *body* of an entry consists of all
its fields.

**Repeat** describes the effect of a second call with the same arguments, for example after the
reply to the first call was lost. A *late copy* is a call that Redis executes after the caller has
given up waiting for the reply.

**Changes.** A script with a new meaning gets a new name, so that old and new daemons can run at the
same time.
""",
        *parts,
    )


def _transition(summary: str) -> str:
    if summary == "read-only":
        return "Read-only: the script changes nothing."
    return f"**Transition:** {summary.replace('->', '→')}"


_KEY_NAME = re.compile(r"(?:streaming:mq|stream:topic):\S*[^\s,]")
_POSITION = re.compile(r"\s*\[(\d+(?:\.\.)?)\] ")


def _key_cells(pattern: str) -> tuple[str, str]:
    """Return the possible names of a key, and the remark that follows them."""
    names = _KEY_NAME.findall(pattern)
    if not names:
        return pattern, ""
    remark = pattern.rpartition(names[-1])[2].strip()
    return " or ".join(f"`{name}`" for name in names), remark


def _replies(script: scripts.Script, meanings: Mapping[str, str]) -> Iterator[str]:
    """Yield list items: each word with its meaning, and the values of the reply below it."""
    for word, text in meanings.items():
        meaning, *values = _POSITION.split(text)
        yield f"- `{word}`: {_header_text(script, meaning)}" if meaning else f"- `{word}`:"
        for position, value in zip(values[::2], values[1::2], strict=True):
            yield f"    - `[{position}]`: {_header_text(script, value.rstrip(';'))}"


def _header_text(script: scripts.Script, text: str) -> str:
    """Return the text of a header field, with a final period if it has several sentences."""
    text = re.sub(r"(?<!`)''(?!`)", "`''`", _reply_words_as_code(script, text))
    return f"{text}." if ". " in text and not text.endswith(".") else text


def _reply_words_as_code(script: scripts.Script, text: str) -> str:
    words = "|".join([*script.returns, *script.entry_returns])
    return re.sub(rf"(?<![`\w])({words})(?![`\w])", r"`\1`", text)


def keys() -> str:
    """All keys, described by the docstrings of `Keys`."""
    samples = {
        "topic": "access",
        "partition": 3,
        "group": "hits",
        "fleet": "default",
        "instance": "web-1",
        "dedup_id": "order-7",
        "name": "archive:7f3a",
        "outbox": "shop",
        "run": "9c41",
        "query": "4f5a",
        "attempt": "1d7e",
    }
    rows = []
    for name, method in inspect.getmembers(Keys, inspect.isfunction):
        if name.startswith("_") or name == "source":  # it returns `stream` or `dlq`
            continue
        wanted = [each for each in inspect.signature(method).parameters if each != "self"]
        example = getattr(Keys(), name)(*(samples[each] for each in wanted))
        kind, _, text = (inspect.getdoc(method) or "").partition(": ")
        rows.append((example, kind, text[:1].upper() + text[1:]))
    return _page(
        "Redis keys",
        "streamqd/store/keys.py",
        """
streamqd stores its state in the keys below. You can read them with any Redis client, for example to
find out why a message is waiting. Most of the keys are written by the
[Lua scripts](../internals/lua.md), which are documented separately.

Every key starts with one of two prefixes, `stream:topic` and `streaming:mq`. You can change both
with the settings in `[keys]`. All keys of a partition have the same hash tag, such as
`{access:p:3}`, because on a Redis Cluster, a script can use several keys only if they share a hash
tag. The examples show the topic `access`, its partition `3`, the group `hits`, the fleet `default`
and the outbox `shop`.

The table uses these terms:

- *TTL* marks a key that expires.
- A *place* identifies an entry of a group: `m:ID` is an entry of the partition stream, and `r:ID`
  is an entry of the group's retry stream.
- *Packed fields* are all fields of an entry, encoded as one MessagePack string.

All times are Unix milliseconds by the Redis clock. Descriptions that do
not fit in a cell, such as the fields of a hash, continue in the list after the table.
""",
        _table_and_details(
            ("Key", "Type", "Contents"), ((f"`{key}`", *rest) for key, *rest in sorted(rows))
        ),
    )


def error_tree() -> str:
    """All errors, described by their docstrings."""
    classes = [
        each
        for each in vars(errors).values()
        if inspect.isclass(each)
        and each.__module__ == errors.__name__
        and issubclass(each, Exception)
    ]
    rows = (
        (f"`{each.__name__}`", f"`{each.__bases__[0].__name__}`", inspect.getdoc(each) or "")
        for each in classes
    )
    return _page(
        "Errors",
        "streamqd/errors.py",
        """
You can import these exceptions from `streamqd.errors`. To catch several related exceptions
together, catch their common base class. The list after the table describes the attributes of some
exceptions, and how to react to them.
""",
        _table_and_details(("Error", "Base class", "Meaning"), rows),
        """
Other modules define further exceptions. To catch those, you can use their base class:

- `SparkError`, for the exceptions of Spark jobs: `DataLossError`, `ArchiveError`,
  `ArchiveDamagedError`, `PipelineError`, `NotPublishedError`, `JavaMissingError` and
  `SparkMissingError`
- `RequestRefusedError`, for the `AlreadyRunningError` of a daemon with an embedded server

`Retry`, `Dead` and `Release` are not errors. Handlers raise them to choose the outcome of a
message: see [Write a handler](../how-to/write-a-handler.md#acknowledge-retry-or-reject).
""",
    )


def checks() -> str:
    """All checks of the doctor, with their declarations."""
    parts = []
    for area in dict.fromkeys(check.area for check in diagnosis.CHECKS):
        rows = (
            (
                f"`{check.id}`",
                str(check.severity),
                _values_as_code(check.title),
                ", ".join(need.name.lower() for need in check.needs),
            )
            for check in diagnosis.CHECKS
            if check.area == area
        )
        parts.append(f"## {area.capitalize()}")
        parts.append(_table(("Check", "Severity", "Finding", "Reads"), rows))
    needs = ((need.name.lower(), need.value) for need in diagnosis.Need)
    return _page(
        "Doctor checks",
        "streamqd/admin/diagnosis",
        """
`streamqd doctor` runs the checks below, which [Diagnose a deployment](../how-to/diagnose.md)
explains. The IDs of the checks are [documented interfaces](stability.md#documented-interfaces).

A finding has one of three severities:

- **problem**: messages are lost, blocked or at risk. The command exits with code 1.
- **warning**: something can turn into a problem, or uses more resources than necessary. The command
  exits with code 1.
- **note**: a fact that you should be aware of. It does not change the exit code.

The last column of each table shows the kinds of data that the check reads. [Cost](#cost) lists the
number of commands that are needed to read them.
""",
        *parts,
        "## Cost",
        """
The command reads each kind of data once for all checks, in pipelines of at most 256 commands. With
`--only`, it reads only the data that the selected checks need.
""",
        _table(("Reads", "Cost"), needs),
    )


def cli() -> str:
    """All commands, as they declare themselves."""
    return _page(
        "Command line",
        "streamqd/cli",
        """
Write global options before the command, except for `--config`, which can also follow it. Every
command accepts `--help`, and every command that prints a result accepts `--json`. A short option
has the same meaning in every command: `-n` is `--limit`, `-p` is `--partition`, `-g` is `--group`,
and `-k` is `--key`. [Exit codes](exit-codes.md) lists the meaning of each exit code.

On a terminal, the output has colors. To disable them, pass `--no-color`, or set `NO_COLOR` or
`TERM=dumb`. If you pass `--color`, `NO_COLOR` is ignored. Output to a pipe and JSON never have
colors.

With [shell completion](../how-to/install.md#shell-completion), your shell completes commands,
options, and the names of topics, groups and instances. It reads these names from the Redis server
in your configuration, and offers none if the server does not answer within a second.
""",
        *_command_parts(command, ["streamqd"]),
    )


def _command_parts(each: click.Command, path: list[str]) -> Iterator[str]:
    yield f"## {' '.join(path)}"
    pieces = each.collect_usage_pieces(click.Context(each))
    yield f"```text\n{' '.join([*path, *pieces])}\n```"
    yield _help_text(inspect.cleandoc(each.help or "").partition("\f")[0])
    options = [one for one in each.params if isinstance(one, click.Option) and not one.hidden]
    if options:
        rows = ((_option_names(one), _option_meaning(one)) for one in options)
        yield _table_and_details(("Option", "Meaning"), rows)
    if isinstance(each, click.Group):
        context = click.Context(each)
        for name in each.list_commands(context):
            child = each.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _command_parts(child, [*path, name])


def _help_text(text: str) -> str:
    """Return the help of a command. Indented lines outside lists become blocks of commands."""
    lines: list[str] = []
    inside = item = False
    for line in text.replace("\b", "").rstrip().splitlines():
        item = line.startswith("- ") or (item and line.startswith("  "))
        if (line.startswith("  ") and not item) != inside:
            inside = not inside
            lines += ["", "```sh"] if inside else ["```", ""]
        lines.append(line[2:] if inside else _values_as_code(line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, *["```"] * inside]))


def _option_names(option: click.Option) -> str:
    names = _as_code((*option.opts, *option.secondary_opts))
    if option.is_flag:
        return names
    if isinstance(option.type, click.Choice):
        return f"{names} {'|'.join(option.type.choices)}"
    kind = "N" if isinstance(option.type, click.IntRange) else option.type.name.upper()
    return f"{names} {option.metavar or kind}"


def _option_meaning(option: click.Option) -> str:
    text = _values_as_code(option.help or "")
    if option.required:
        text += " Required."
    if option.show_default and option.secondary_opts:
        chosen = option.opts if option.default else option.secondary_opts
        text += f" Default: `{chosen[0]}`."
    elif option.show_default and option.default is not None:
        text += f" Default: {option.default}."
    return text


def python() -> str:
    """All public names, with their signatures and docstrings."""
    return _page(
        "Python API",
        "streamqd/__init__.py",
        """
Unless noted otherwise, you can import the names on this page with `from streamqd import ...`. All
other names of the package may change between releases. The package has type annotations
(`py.typed`). To learn how to use the API, see [Write a handler](../how-to/write-a-handler.md) and
[Produce messages](../how-to/produce-messages.md).
""",
        *public_api.parts(),
    )


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "etc" / "streamq.toml": config.reference_toml,
    ROOT / "docs" / "images" / "message.svg": pictures.message,
    ROOT / "docs" / "images" / "processes.svg": pictures.processes,
    REFERENCE / "checks.md": checks,
    REFERENCE / "cli.md": cli,
    REFERENCE / "configuration.md": configuration,
    REFERENCE / "errors.md": error_tree,
    REFERENCE / "keys.md": keys,
    REFERENCE / "log-events.md": log_events,
    INTERNALS / "lua.md": lua,
    REFERENCE / "metrics.md": metrics,
    REFERENCE / "python.md": python,
}


def main(arguments: list[str]) -> int:
    """Write or check all pages, and return the exit code."""
    stale = 0
    for path, make in PAGES.items():
        wanted = make()
        found = path.read_text() if path.exists() else ""
        if wanted == found:
            continue
        stale += 1
        name = str(path.relative_to(ROOT))
        if "--check" in arguments:
            print(f"{name} is not current: run `make docs`")
            lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), "found", "wanted")
            print("\n".join(list(lines)[:20]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted)
            print(f"wrote {name}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
