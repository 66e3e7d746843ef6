"""Every value that streamqd reads, read in the same way: those that cannot be read, and their cure.

Hashes of more than PAGE fields are left out, as nothing is scanned; of delayed messages the first
and the last ones are looked at.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ParamSpec

from streamqd.admin import published
from streamqd.admin.diagnosis.check import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import (
    DiagnosisFacts,
    TopicFacts,
    UnitFacts,
    Value,
    wrong_types,
)
from streamqd.admin.reading import BATCH, BadValues, Unreadable, ask, measure_each, pairs
from streamqd.admin.topics_settings import readable
from streamqd.errors import BadValue
from streamqd.model import LETTERS, Unit
from streamqd.store import directives, members, retries, topics, untrusted
from streamqd.store.messages import COUNT_MAX
from streamqd.store.scripts import Reply
from streamqd.store.store import Store

PAGE = 10_000  # fields of one hash that is read
BODIES_AT_ONCE = 32  # hashes of one exchange
ITEMS = 64  # delayed messages of one group that are looked into

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_PLACE = re.compile(r"[mr]:[0-9]{1,20}-[0-9]{1,20}")
_MOVE = re.compile(rb"([0-9]{1,16}) .+", re.DOTALL)

P = ParamSpec("P")


def gather(
    store: Store,
    bad: BadValues,
    fleet: str,
    found: Sequence[TopicFacts],
    places: Sequence[tuple[str, int]],
    units: Sequence[UnitFacts],
) -> tuple[list[Value], list[str]]:
    """Read everything once more, each value for itself; and which keys were too long for that."""
    look = _Look(store, bad)
    look.fleet(fleet)
    look.registry()
    for topic in found:
        look.topic(topic.name)
    look.partitions(places)
    look.units([each.unit for each in units])
    return look.values, look.long


class _Look:
    def __init__(self, store: Store, bad: BadValues) -> None:
        self._store, self._bad, self.keys = store, bad, store.keys
        self.values: list[Value] = []
        self.long: list[str] = []  # hashes that are too long to be read

    def keep(self, bad: BadValues, about: str, harm: str, cure: str) -> None:
        """Keep what could not be read."""
        self.values += [Value(row, about, harm, cure) for row in bad.rows]

    def read(
        self,
        about: str,
        harm: str,
        cure: str,
        parse: Callable[P, object],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """Read one value by `parse`."""
        bad = BadValues()
        bad.read(parse, *args, **named)
        self.keep(bad, about, harm, cure)

    # --- the fleet ---

    def fleet(self, name: str) -> None:
        """Members, what they say of themselves, the latest time of all orders."""
        key, info, orders = (
            self.keys.members(name),
            self.keys.info(name),
            self.keys.orders(name),
        )
        scores, told, ordered = self._ask([*members.stored(self.keys, name), ("HGETALL", orders)])
        self._typed({key: "zset", info: "hash", orders: "hash"}, name)
        for member, score in pairs(scores).items():
            about = untrusted.label(member)
            cure = _cli("ZREM", key, member)
            self.read(about, "it is no instance", cure, untrusted.name, member, key, about)
            self.read(about, "it counts as silent", cure, untrusted.integer, score, key, about)
            self._summary(name, about)
        for member, text in pairs(told).items():
            about = untrusted.label(member)
            self.read(
                about,
                "it counts as leaving, and gets no partition; a living instance says it again",
                _cli("HDEL", info, member),
                _described,
                text,
                info,
                about,
            )
        last = pairs(ordered).get(directives.LAST.encode())
        self.read(
            name,
            "orders of now look older than it, or are refused",
            _cli("HDEL", orders, directives.LAST),
            untrusted.integer,
            last,
            orders,
            directives.LAST,
            default=0,
        )

    def _summary(self, fleet: str, instance: str) -> None:
        key, bad = self.keys.instance(fleet, instance), BadValues()
        (raw,) = self._ask([("GET", key)])
        self._typed({key: "string"}, instance)
        published.summary(raw, key, bad)
        harm = "views show it as missing; a living instance publishes it again"
        self.keep(bad, instance, harm, _cli("DEL", key))

    # --- topics ---

    def registry(self) -> None:
        """The names of all topics."""
        key = self.keys.registry()
        (names,) = self._ask([("SMEMBERS", key)])
        self._typed({key: "set"}, "")
        for raw in sorted(names or ()):
            self.read(
                untrusted.shown(raw),
                "it names no topic",
                _cli("SREM", key, raw),
                untrusted.name,
                raw,
                key,
            )

    def topic(self, name: str) -> None:
        """What is registered of a topic."""
        key = self.keys.meta(name)
        flat, size = self._ask([("HGETALL", key), ("SCARD", self.keys.partitions(name))])
        self._typed({key: "hash"}, name)
        stored = pairs(flat)
        there = f"HSET {key} partitionCount {size}" if size else f"HSET {key} partitionCount N"
        self._field(
            name,
            stored,
            "partitionCount",
            "no client can write or read it",
            f"`redis-cli {there}`, the number of its partitions",
            lambda raw: topics.count_of(name, raw, key),
        )
        whole = {"created": 1 << 53, "growSince": 1 << 53, "growFrom": 0, "growTo": 0}
        for field in ("created", "growSince", "growFrom", "growTo", "deleting"):
            high = topics.PARTITIONS_MAX if not whole.get(field) else untrusted.INTEGER_MAX
            fields = [field] if whole.get(field) else _growth(stored)
            cure = _cli("HDEL", key, *fields)
            if field == "deleting":
                again = f"redis-cli HSET {key} deleting {size or 'N'}"
                cure = f"`{again}`, then `streamqd topic delete {name}`"
            self._field(
                name,
                stored,
                field,
                "views leave it out"
                if whole.get(field)
                else "the growth, or deletion, stands still",
                cure,
                partial(untrusted.integer, key=key, field=field, high=high),
            )
        self._field(
            name,
            stored,
            "growBarriers",
            "the growth stands still",
            f"{_cli('HDEL', key, 'growBarriers')}, then `streamqd topic grow {name} N` again",
            lambda raw: _barriers(raw, key),
        )
        self._field(
            name,
            stored,
            "settings",
            "the defaults hold instead",
            f"{_cli('HDEL', key, 'settings')}, then `streamqd topic settings {name} NAME=VALUE`",
            lambda raw: _settings(raw, key),
        )
        for raw, count in stored.items():
            if raw.startswith(b"group:"):
                group, field = raw.removeprefix(b"group:"), untrusted.label(raw)
                cure = _cli("HDEL", key, raw)
                name_of = group.removesuffix(LETTERS.encode())
                harm = "no daemon has made such a group"
                self.read(name, harm, cure, untrusted.name, name_of, key, field)
                self.read(name, harm, cure, untrusted.integer, count, key, field)

    def _field(
        self,
        about: str,
        stored: dict[bytes, bytes],
        field: str,
        harm: str,
        cure: str,
        parse: Callable[[bytes], object],
    ) -> None:
        raw = stored.get(field.encode())
        if raw is not None:
            self.read(about, harm, cure, parse, raw)

    # --- partitions ---

    def partitions(self, places: Sequence[tuple[str, int]]) -> None:
        """The records of trimming, scheduled sends, letters on their way, names of groups."""
        keys = self.keys
        hashes = self._hashes([key(*place) for place in places for key in (keys.trim, keys.moving)])
        replies = self._asked(
            [
                (
                    ("XINFO", "GROUPS", keys.stream(*place)),
                    ("XINFO", "GROUPS", keys.dlq(*place)),
                    *_extremes(keys.scheduled(*place)),
                )
                for place in places
            ]
        )
        for place, (groups, letters, *scores) in zip(places, replies, strict=True):
            about = f"{place[0]}/{place[1]}"
            self._trim(about, keys.trim(*place), hashes[keys.trim(*place)])
            for raw, value in hashes[keys.moving(*place)].items():
                key, field = keys.moving(*place), untrusted.label(raw)
                self.read(
                    about,
                    "its dead letter is not moved on",
                    _cli("HDEL", key, raw),
                    _moved,
                    value,
                    key,
                    field,
                )
            for stream, reply in ((keys.stream(*place), groups), (keys.dlq(*place), letters)):
                self._groups(about, stream, reply)
            self._scores(about, keys.scheduled(*place), scores, places_only=False)

    def _trim(self, about: str, key: str, stored: Mapping[bytes, bytes]) -> None:
        for raw, value in stored.items():
            field = untrusted.label(raw)
            parse: Callable[[bytes, str, str], object] | None = None
            if field in ("removed", "size", "shrunk") or field.startswith("dropped_"):
                parse = untrusted.integer
            elif field in ("first", "archived", "shrink_from", "shrink_next") or field.startswith(
                "floor:"
            ):
                parse = untrusted.entry_id
            if parse is not None:
                harm = "trimming, or what shows it, fails there"
                if field == "archived":
                    harm += "; without it everything that is kept is archived once more"
                cure = _cli("HDEL", key, raw)
                self.read(about, harm, cure, parse, value, key, field)

    def _groups(self, about: str, stream: str, reply: Sequence[Any] | None) -> None:
        for flat in reply or ():
            name = pairs(flat)[b"name"]
            self.read(
                about,
                "another client made it; it holds up trimming, and no consumer here reads for it",
                _cli("XGROUP", "DESTROY", stream, name),
                untrusted.text,
                name,
                stream,
                "group",
            )

    # --- units ---

    def units(self, units: Sequence[Unit]) -> None:
        """Fences, counters, delayed retries."""
        keys = self.keys
        hashes = self._hashes([keys.attempts(*unit) for unit in units])
        replies = self._asked(
            [
                (
                    ("HMGET", keys.fence(*unit), "epoch", "since"),
                    *_extremes(keys.retry(*unit)),
                )
                for unit in units
            ]
        )
        for unit, (fence, *scores) in zip(units, replies, strict=True):
            about, key = str(unit), keys.fence(*unit)
            for field, raw in zip(("epoch", "since"), fence or (), strict=False):
                self.read(
                    about,
                    "no instance can take it over from its owner",
                    _cli("HDEL", key, field),
                    untrusted.integer,
                    raw,
                    key,
                    field,
                    default=0,
                )
            for raw, value in hashes[keys.attempts(*unit)].items():
                field, key = untrusted.label(raw), keys.attempts(*unit)
                most = {"c": COUNT_MAX, "f": COUNT_MAX, "due": untrusted.INTEGER_MAX}.get(
                    field.rpartition(":")[2]
                )
                if most is not None:
                    self.read(
                        about,
                        "it counts as 0",
                        _cli("HDEL", key, raw),
                        untrusted.integer,
                        value,
                        key,
                        field,
                        high=most,
                    )
            self._scores(about, keys.retry(*unit), scores, places_only=True)
        self._items([unit for unit, reply in zip(units, replies, strict=True) if reply[1]])

    def _items(self, units: Sequence[Unit]) -> None:
        """What is kept of delayed retries, of the first ones of each group."""
        calls = [retries.page(self.keys, unit, (0, ""), ITEMS) for unit in units]
        for unit, reply in zip(units, measure_each(self._store, calls, self._bad), strict=True):
            for row in reply.rest[0] if reply else ():
                try:
                    ((one,), _) = retries.rows(Reply("OK", [[row], False]))
                except BadValue:
                    continue  # its due time, which is told already
                name = f"{unit.partition}:{one.place}"
                cancel = f"streamqd retry cancel {unit.topic} {unit.group} {name}"
                for field in (b"retryCount", b"crashCount"):
                    raw, key = one.fields.get(field), self.keys.retry_items(*unit)
                    self.read(
                        str(unit),
                        "it counts as 0",
                        f"`{cancel} --yes` makes a dead letter of it",
                        untrusted.integer,
                        raw,
                        key,
                        f"{one.place}: {field.decode()}",
                        default=0,
                    )

    def _scores(
        self, about: str, key: str, pages: Sequence[Sequence[bytes] | None], *, places_only: bool
    ) -> None:
        told = {member: score for page in pages for member, score in pairs(page).items()}
        for member, score in told.items():
            field = untrusted.label(member)
            due = f"{_cli('ZADD', key, 'XX', '1', member)} lets it be due now"
            self.read(about, "it is never due, or at once", due, _due, score, key, field)
            if places_only:
                cure = _cli("ZREM", key, member)
                self.read(about, "it names no message", cure, _place, member, key, field)

    # --- both ---

    def _ask(self, commands: Sequence[tuple[Any, ...]], batch: int = BATCH) -> list[Any]:
        return ask(self._store, commands, self._bad, batch=batch)

    def _asked(self, rows: Sequence[Sequence[tuple[Any, ...]]]) -> list[list[Any]]:
        replies = self._ask([command for row in rows for command in row])
        size = len(rows[0]) if rows else 1
        return [replies[at : at + size] for at in range(0, len(replies), size)]

    def _hashes(self, names: Sequence[str]) -> dict[str, dict[bytes, bytes]]:
        """Hashes that are not long."""
        sizes = self._ask([("HLEN", name) for name in names])
        small = [name for name, size in zip(names, sizes, strict=True) if 0 < (size or 0) <= PAGE]
        self.long += [name for name, size in zip(names, sizes, strict=True) if (size or 0) > PAGE]
        told = self._ask([("HGETALL", name) for name in small], BODIES_AT_ONCE)
        read = dict(zip(small, map(pairs, told), strict=True))
        return {name: read.get(name, {}) for name in names}

    def _typed(self, wanted: Mapping[str, str], about: str) -> None:
        """Keys of another type than streamqd gives them; those of partitions have a check."""
        (wrong,) = wrong_types(self._store, self._bad, [wanted])
        for key, kind in wrong.items():
            row = Unreadable(key, "", f"a {kind}", f"a {wanted[key]}")
            cure = f"see who writes it, then `redis-cli RENAME {_quoted(key)} ELSEWHERE`"
            self.values.append(Value(row, about, "what needs it fails", cure))


def _described(text: bytes, key: str, instance: str) -> None:
    members.described(
        members.Heartbeat(instance, 0, untrusted.json_object(text, key, instance)), key
    )


def _settings(raw: bytes, key: str) -> None:
    bad = BadValues()
    readable(raw, key, bad)
    for row in bad.rows:
        raise BadValue(row.key, row.field, row.found, row.wanted)


def _barriers(raw: bytes, key: str) -> None:
    for each in raw.split():
        untrusted.entry_id(each, key, "growBarriers")


def _growth(stored: dict[bytes, bytes]) -> list[str]:
    return sorted(name.decode() for name in stored if re.fullmatch(rb"grow[A-Z][a-z]+", name))


def _moved(value: bytes, key: str, field: str) -> None:
    if not _MOVE.fullmatch(value):
        raise BadValue(key, field, untrusted.shown(value), "a time and a destination")


def _place(member: bytes, key: str, field: str) -> None:
    if not _PLACE.fullmatch(field):
        raise BadValue(key, field, untrusted.shown(member), "a place, as m:1700000000000-0")


def _due(score: bytes, key: str, field: str) -> float:
    # A due time has no fraction, but the server may write a large one with an exponent.
    return untrusted.number(score, key, field)


def _extremes(key: str) -> list[tuple[Any, ...]]:
    """The first and the last ones: a score that is no time is at an end."""
    return [
        ("ZRANGE", key, 0, 99, "WITHSCORES"),
        ("ZRANGE", key, -100, -1, "WITHSCORES"),
    ]


def _cli(*words: str | bytes) -> str:
    """An exact command, as a shell takes it."""
    return f"`redis-cli {' '.join(map(_quoted, words))}`"


def _quoted(word: str | bytes) -> str:
    text = word.decode("utf-8", "replace") if isinstance(word, bytes) else word
    if _PLAIN.fullmatch(text) and text == text.encode().decode():
        return text
    raw = word if isinstance(word, bytes) else word.encode()
    if text.isprintable() and "`" not in text and text.encode() == raw:
        return shlex.quote(text)
    return "$'" + "".join(f"\\x{byte:02x}" for byte in raw) + "'"


@check("values.unreadable", Severity.PROBLEM, Need.FLEET, Need.UNITS, Need.VALUES)
def _unreadable(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A value of a key is not what streamqd writes there."""
    for each in facts.values:
        row = each.bad
        where = f"{row.field} of {row.key}" if row.field else row.key
        yield CheckResult(
            f"{where} is {row.found} and not {row.wanted}: {each.harm}",
            each.cure,
            about=each.about,
            evidence=asdict(row),
        )
