"""Find invalid values in Redis, with their effects and fixes.

Other checks read most values, and this module reads the remaining ones. A table contains the effect
and the fix for each kind of value. To keep replies small, hashes with more than PAGE fields are
skipped, and only the earliest and the latest messages with a due time are read.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from streamqd.admin import schedules
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import DiagnosisFacts, TopicFacts, UnreadableValue
from streamqd.admin.reading import BATCH, Unreadable, ViewReader, pairs
from streamqd.config.schedules import SCHEDULE_NAME
from streamqd.errors import InvalidValueError
from streamqd.model import DLQ_SUFFIX, Assignment
from streamqd.store import directives, retries, topics, untrusted
from streamqd.store.keys import Keys
from streamqd.store.messages import COUNT_MAX

PAGE = 10_000  # maximum number of fields of a hash that is read
BODIES_AT_ONCE = 32  # hashes read in one round trip
ITEMS = 64  # waiting retries examined for each group
ENDS = 100  # messages read at each end of the due times, where invalid ones are sorted to

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_PLACE = re.compile(r"[mr]:[0-9]{1,20}-[0-9]{1,20}")
_MOVE = re.compile(rb"([0-9]{1,16}) .+", re.DOTALL)
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")

Parse = Callable[[bytes, str, str], object]


class ValueRule(NamedTuple):
    """The effect of an invalid field in one kind of key, and the fix.

    `fields` is a regular expression that matches names of fields, or '' for keys without fields.
    The fix consists of `command` and `advice`. `command` is a redis-cli command with placeholders
    in braces, which `_placeholder_values` replaces. If no other check reads the value, `parse`
    reads it.
    """

    kind: str
    fields: str
    effect: str
    command: str
    advice: str = ""
    parse: Parse | None = None


def _group_count(raw: bytes, key: str, field: str) -> None:
    name = field.encode().removeprefix(b"group:").removesuffix(DLQ_SUFFIX.encode())
    untrusted.name(name, key, field)
    untrusted.integer(raw, key, field)


def _barriers(raw: bytes, key: str, field: str) -> None:
    for each in raw.split():
        untrusted.entry_id(each, key, field)


def _check_move(raw: bytes, key: str, field: str) -> None:
    if not _MOVE.fullmatch(raw):
        raise InvalidValueError(key, field, untrusted.format_value(raw), "a time and a destination")


def _due_of_place(raw: bytes, key: str, field: str) -> None:
    untrusted.number(raw, key, field)
    if not _PLACE.fullmatch(field):
        raise InvalidValueError(
            key, field, untrusted.format_value(field.encode()), "a place, such as m:1700000000000-0"
        )


_TO_MAX = partial(untrusted.integer, high=topics.PARTITIONS_MAX)
_TO_COUNT_MAX = partial(untrusted.integer, high=COUNT_MAX)
_DROP = "HDEL {key} {field}"
_DUE_NOW = "ZADD {key} XX 1 {field}"

_RULES = (
    ValueRule(
        "members", ".+", "it counts as silent, or as no instance at all", "ZREM {key} {field}"
    ),
    ValueRule(
        "info",
        ".+",
        "it counts as leaving and gets no partition, until a live instance replaces it",
        "HDEL {key} {member}",
    ),
    ValueRule(
        "directives", directives.LAST, "new directives look older than it, or are refused", _DROP
    ),
    ValueRule(
        "instance",
        ".*",
        "views show it as missing, until a live instance publishes it again",
        "DEL {key}",
    ),
    ValueRule("registry", "", "it names no topic", "SREM {key} {found}"),
    ValueRule(
        "meta",
        "partitionCount",
        "no client can write or read it",
        "HSET {key} partitionCount {size}",
        ", the number of its partitions",
    ),
    ValueRule("meta", "created|growSince", "views leave it out", _DROP, parse=untrusted.integer),
    ValueRule(
        "meta",
        "growFrom|growTo",
        "the growth does not continue",
        "HDEL {key} {growth}",
        parse=_TO_MAX,
    ),
    ValueRule(
        "meta",
        "growBarriers",
        "the growth does not continue",
        _DROP,
        ", then `streamqd topic grow {about} N` again",
        _barriers,
    ),
    ValueRule(
        "meta",
        "deleting",
        "the deletion does not continue",
        "HSET {key} deleting {size}",
        ", then `streamqd topic delete {about}`",
        _TO_MAX,
    ),
    ValueRule(
        "meta",
        "settings",
        "the defaults apply instead",
        _DROP,
        ", then `streamqd topic settings {about} NAME=VALUE`",
    ),
    ValueRule("meta", "group:.*", "no daemon created such a group", _DROP, parse=_group_count),
    ValueRule(
        "trim",
        "archived",
        "trimming, or its display, fails there. Without the value, all kept entries are archived"
        " again",
        _DROP,
        parse=untrusted.entry_id,
    ),
    ValueRule(
        "trim",
        "dead_archived",
        "dead letters stay where an archive is required. Without the value, the next run of the"
        " archive checks its files and writes it again",
        _DROP,
        parse=untrusted.entry_id,
    ),
    ValueRule(
        "trim",
        "first|shrink_from|shrink_next|floor:.*",
        "trimming, or its display, fails there",
        _DROP,
        parse=untrusted.entry_id,
    ),
    ValueRule(
        "trim",
        "removed|size|shrunk|dropped_.*",
        "trimming, or its display, fails there",
        _DROP,
        parse=untrusted.integer,
    ),
    ValueRule(
        "schedule_index",
        SCHEDULE_NAME.pattern,
        "the schedule is not declared, moved or listed",
        "",
        "`streamqd schedule remove {place} --yes` removes it, and an instance that declares it"
        " adds it again",
    ),
    ValueRule("schedule_index", ".*", "it is not a schedule", "HDEL {key} {field}"),
    ValueRule("moving", ".+", "its dead letter is not moved", _DROP, parse=_check_move),
    ValueRule(
        "stream",
        "group",
        "another client created it, and it prevents trimming, because no consumer here reads for"
        " it",
        "XGROUP DESTROY {key} {found}",
    ),
    ValueRule(
        "delayed_sends",
        ".+",
        "it is never due, or due immediately",
        _DUE_NOW,
        " makes it due now",
        untrusted.number,
    ),
    ValueRule("fence", "epoch|since", "no instance can take it over from its owner", _DROP),
    ValueRule("attempts", ".*:[cf]", "it counts as 0", _DROP, parse=_TO_COUNT_MAX),
    ValueRule("attempts", ".*:due", "it counts as 0", _DROP, parse=untrusted.integer),
    ValueRule(
        "retry",
        _PLACE.pattern,
        "it is never due, or due immediately",
        _DUE_NOW,
        " makes it due now",
        _due_of_place,
    ),
    # The function that reads the earliest due time does not get the member, so it reports the field
    # as `a due time`.
    ValueRule(
        "retry",
        "(?!a due time$).+",
        "it names no message",
        "ZREM {key} {field}",
        parse=_due_of_place,
    ),
    ValueRule(
        "retry_items",
        ".+: (retryCount|crashCount)",
        "it counts as 0",
        "",
        "`streamqd retry cancel {topic} {group} {partition}:{place} --yes` turns it into a dead"
        " letter",
    ),
)


def _rule(kind: str, field: str) -> ValueRule | None:
    for rule in _RULES:
        if rule.kind == kind and re.fullmatch(rule.fields, field, re.DOTALL):
            return rule
    return None


# --- values without other checks ------------------------------------------------------------------


def gather(
    reader: ViewReader,
    found: Sequence[TopicFacts],
    places: Sequence[tuple[str, int]],
    assignments: Sequence[Assignment],
) -> list[str]:
    """Read the values that no other check reads. Return the keys that were too long to read."""
    keys = reader.keys
    for topic in found:
        _read(reader, "meta", keys.meta(topic.name), topic.stored)
    hashes = {keys.trim(*place): "trim" for place in places}
    hashes |= {keys.moving(*place): "moving" for place in places}
    hashes |= {keys.attempts(*assignment): "attempts" for assignment in assignments}
    small, long = _sorted_by_length(reader, list(hashes))
    replies = reader.ask([("HGETALL", key) for key in small], batch=BODIES_AT_ONCE)
    for key, flat in zip(small, replies, strict=True):
        _read(reader, hashes[key], key, pairs(flat))
    delayed = {keys.delayed_sends(*place): "delayed_sends" for place in places}
    delayed |= {keys.retry(*assignment): "retry" for assignment in assignments}
    for key, scores in _due_times(reader, list(delayed)).items():
        _read(reader, delayed[key], key, scores)
    _items(reader, assignments)
    schedules.index(reader)
    return long


def _read(reader: ViewReader, kind: str, key: str, stored: Mapping[bytes, bytes]) -> None:
    for raw, value in stored.items():
        field = untrusted.label(raw)
        rule = _rule(kind, field)
        if rule is not None and rule.parse is not None:
            reader.read(rule.parse, value, key, field)


def _sorted_by_length(reader: ViewReader, keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the hashes that have few enough fields to be read, and the others."""
    sizes = dict(zip(keys, reader.ask([("HLEN", key) for key in keys]), strict=True))
    small = [key for key, size in sizes.items() if 0 < (size or 0) <= PAGE]
    return small, [key for key, size in sizes.items() if (size or 0) > PAGE]


def _due_times(reader: ViewReader, keys: Sequence[str]) -> dict[str, dict[bytes, bytes]]:
    """Return the members with the first and the last due times in each key."""
    ends = ((0, ENDS - 1), (-ENDS, -1))
    asked = [("ZRANGE", key, *end, "WITHSCORES") for key in keys for end in ends]
    replies = reader.ask(asked, batch=BATCH)
    return {key: pairs(replies[2 * n]) | pairs(replies[2 * n + 1]) for n, key in enumerate(keys)}


def _items(reader: ViewReader, assignments: Sequence[Assignment]) -> None:
    """Read the counters of each group's first retries, so that `reader` records invalid ones."""
    calls = [retries.page(reader.keys, assignment, (0, ""), ITEMS) for assignment in assignments]
    for assignment, reply in zip(assignments, reader.measure(calls), strict=True):
        for row in reply.values[0] if reply else ():
            one = ViewReader(reader.store).read(retries.row, row)
            if one is None:
                continue  # its due time is invalid, which `reader.measure` has recorded
            for name in ("retryCount", "crashCount"):
                raw, field = one.fields.get(name.encode()), f"{one.place}: {name}"
                key = reader.keys.retry_items(*assignment)
                reader.read(untrusted.integer, raw, key, field, default=0)


# --- effects and fixes ----------------------------------------------------------------------------


class KeySubject(NamedTuple):
    """The subject of a key: an instance, a topic, a partition or an assignment."""

    kind: str
    about: str
    values: Mapping[str, Any] = {}


def find_unreadable(
    reader: ViewReader,
    facts: DiagnosisFacts,
    places: Sequence[tuple[str, int]],
) -> list[UnreadableValue]:
    """Return every invalid value, with its effect and its fix."""
    subjects = _subjects_of_keys(reader.keys, facts, places)
    found = list(_find_mistyped(reader, subjects))
    for row in reader.rows:
        subject = subjects.get(row.key)
        rule = _rule(subject.kind, row.field) if subject else None
        if subject is not None and rule is not None and not row.found.startswith("WRONGTYPE"):
            found.append(_value(row, subject, rule))
    return found


def _subjects_of_keys(
    keys: Keys, facts: DiagnosisFacts, places: Sequence[tuple[str, int]]
) -> dict[str, KeySubject]:
    fleet, state = facts.settings.daemon.fleet, facts.fleet.state
    names = {heartbeat.instance for heartbeat in state.heartbeats}
    subjects = {
        keys.registry(): KeySubject("registry", ""),
        keys.members(fleet): KeySubject("members", ""),
        keys.info(fleet): KeySubject("info", "", {"members": names | state.infos.keys()}),
        keys.directives(fleet): KeySubject("directives", fleet),
        keys.schedule_index(): KeySubject("schedule_index", ""),
        **{keys.instance(fleet, name): KeySubject("instance", name) for name in names},
    }
    for topic in facts.topics:
        growth = [each for each in sorted(topic.stored) if re.fullmatch(rb"grow[A-Z][a-z]+", each)]
        more = {"size": len(topic.members) or "N", "growth": growth}
        subjects[keys.meta(topic.name)] = KeySubject("meta", topic.name, more)
    for place in places:
        about = f"{place[0]}/{place[1]}"
        for kind in ("trim", "moving", "delayed_sends", "stream"):
            subjects[getattr(keys, kind)(*place)] = KeySubject(kind, about)
        subjects[keys.dlq(*place)] = KeySubject("stream", about)
    for each in facts.assignments:
        for kind in ("fence", "attempts", "retry", "retry_items"):
            subjects[getattr(keys, kind)(*each.assignment)] = KeySubject(
                kind, str(each.assignment), each.assignment._asdict()
            )
    return subjects


_TYPES = {
    **dict.fromkeys(("directives", "info", "meta", "schedule_index"), "hash"),
    "members": "zset",
    "registry": "set",
    "instance": "string",
}


def _find_mistyped(
    reader: ViewReader, subjects: Mapping[str, KeySubject]
) -> Iterator[UnreadableValue]:
    """Yield the keys that have an unexpected type. Another check reads the keys of partitions."""
    wanted = {
        key: _TYPES[subject.kind] for key, subject in subjects.items() if subject.kind in _TYPES
    }
    for key, kind in reader.wrong_types([wanted])[0].items():
        row = Unreadable(key, "", f"a {kind}", f"a {wanted[key]}")
        fix = f"see who writes it, then `redis-cli RENAME {_quote(key)} ELSEWHERE`"
        yield UnreadableValue(row, subjects[key].about, "commands on it fail", fix)


def _value(row: Unreadable, subject: KeySubject, rule: ValueRule) -> UnreadableValue:
    values = _placeholder_values(row, subject)
    about = subject.about
    if subject.kind in ("members", "info", "registry"):
        about = untrusted.label(b"".join(values["member"]))
    fix = rule.advice.format(
        **subject.values, about=subject.about, place=row.field.partition(": ")[0]
    )
    if rule.command:
        parts = [
            part
            for word in rule.command.split()
            for part in values.get(word[1:-1], [word.encode()])
        ]
        fix = f"`redis-cli {' '.join(map(_quote, parts))}`{fix}"
    return UnreadableValue(row, about, rule.effect, fix)


def _placeholder_values(row: Unreadable, subject: KeySubject) -> dict[str, list[bytes]]:
    """Return the words that replace the names in braces in the table's commands."""
    field = _ESCAPED.sub(lambda byte: bytes([int(byte[1], 16)]), row.field.encode())
    found = ast.literal_eval(f"b{row.found}") if row.found[-1:] in "'\"" else b"NAME"
    # A problem in a field of a member is named `member.field`. Both parts may contain dots, so the
    # longest member that fits is used.
    members = [
        each for each in subject.values.get("members", ()) if f"{row.field}.".startswith(f"{each}.")
    ]
    member = max(members, key=len).encode() if members else field or found
    return {
        "key": [row.key.encode()],
        "field": [field],
        "found": [found],
        "member": [member],
        "size": [str(subject.values.get("size", "")).encode()],
        "growth": subject.values.get("growth", []),
    }


def _quote(word: str | bytes) -> str:
    """Return a word quoted for a shell."""
    text = word.decode("utf-8", "replace") if isinstance(word, bytes) else word
    if _PLAIN.fullmatch(text) and text == text.encode().decode():
        return text
    raw = word if isinstance(word, bytes) else word.encode()
    if text.isprintable() and "`" not in text and text.encode() == raw:
        return shlex.quote(text)
    return "$'" + "".join(f"\\x{byte:02x}" for byte in raw) + "'"


@check("values.unreadable", Severity.PROBLEM, Need.FLEET, Need.ASSIGNMENTS, Need.VALUES)
def _unreadable(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A stored value is not valid."""
    for each in facts.values:
        row = each.row
        where = f"{row.field} of {row.key}" if row.field else row.key
        yield CheckResult(
            f"{where} is {row.found} and not {row.wanted}: {each.effect}",
            each.fix,
            about=each.about,
            evidence=asdict(row),
        )
