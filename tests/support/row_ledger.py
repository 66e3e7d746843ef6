"""Rows that a producer wrote, and the rows that tables and topics contain.

This module relies on nothing of streamqd but the documented key names and entry fields. It writes
and reads rows with the package redis, and tables with the package deltalake.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import redis
from deltalake import DeltaTable

PAGE = 5_000
REPLAY_OF = "x-replay-of"
SCHEMA = "number long, text string"  # the schema of the JSON payloads
_SHOWN = 3


class Row(NamedTuple):
    """An entry: its place, and a digest of all its content."""

    partition: int
    id: str
    content: str


class Parsed(NamedTuple):
    """An entry and the number in its payload, which is None if the payload is not JSON."""

    partition: int
    id: str
    number: int | None


def stream(topic: str, partition: int) -> str:
    """Return the key of a partition's stream."""
    return f"stream:topic:{{{topic}:p:{partition}}}"


def digest(
    value: bytes, key: bytes | None, headers: Mapping[str, bytes], fields: Mapping[str, bytes]
) -> str:
    """Return a digest of a row's content. Missing headers equal an empty header object."""
    whole = (value, key, sorted(headers.items()), sorted(fields.items()))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


class Producer:
    """Writes rows to a topic, and records each row that Redis has confirmed in a file.

    Some rows have no key, some have headers, and some have an extra field of the sender. One row in
    ten repeats an earlier one, and one in twenty is not JSON.
    """

    def __init__(
        self, client: redis.Redis, topic: str, partitions: int, file: Path, seed: int
    ) -> None:
        self._client = client
        self.topic = topic
        self.partitions = partitions
        self._file = file
        self._chance = random.Random(f"{seed} {topic}")
        self.written = 0
        self._number = 0
        self._before: list[dict[str, bytes]] = []
        file.touch()

    def write(self, count: int) -> None:
        """Write `count` rows to random partitions."""
        with self._file.open("a", encoding="utf-8") as ledger:
            while count > 0:
                some = [self._entry() for _ in range(min(count, PAGE))]
                places = [self._chance.randrange(self.partitions) for _ in some]
                asked = self._client.pipeline(transaction=False)
                for place, entry in zip(places, some, strict=True):
                    asked.xadd(stream(self.topic, place), entry)  # type: ignore[arg-type]
                for place, entry, name in zip(places, some, asked.execute(), strict=True):
                    content = _sent_message({name.encode(): part for name, part in entry.items()})[
                        0
                    ]
                    line = [place, name.decode(), content, _number(entry["payload"])]
                    ledger.write(json.dumps(line) + "\n")
                self.written += len(some)
                count -= len(some)

    def _entry(self) -> dict[str, bytes]:
        chance = self._chance
        if self._before and chance.random() < 0.1:
            return chance.choice(self._before)
        self._number += 1
        value = b'{"number": %d, "text": "' % self._number + b"x" * chance.randrange(300) + b'"}'
        entry = {"payload": value if chance.random() < 0.95 else value[:-2]}
        if chance.random() < 0.8:
            entry["key"] = b"key %d" % chance.randrange(100)
        if chance.random() < 0.3:
            entry["headers"] = json.dumps({"number": str(self._number)}).encode()
        if chance.random() < 0.3:
            entry["sentAt"] = b"%d" % self._number
        self._before = [*self._before[-99:], entry]
        return entry


def read_ledger(file: Path) -> Counter[Row]:
    """Return all confirmed rows."""
    return Counter(Row(*line[:3]) for line in _lines(file))


def read_parsed(file: Path) -> tuple[Counter[Parsed], Counter[Parsed]]:
    """Split a ledger's rows into those that match SCHEMA and those that do not."""
    every = [Parsed(line[0], line[1], line[3]) for line in _lines(file)]
    good = Counter(each for each in every if each.number is not None)
    return good, Counter(each for each in every if each.number is None)


def _lines(file: Path) -> list[Any]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _number(payload: bytes) -> int | None:
    try:
        return int(json.loads(payload)["number"])
    except ValueError:
        return None


# --- tables and topics ----------------------------------------------------------------------------


class Sent(NamedTuple):
    """A message of a topic: a digest of its content, and the entry that it replays, or ''."""

    content: str
    origin: str


@dataclass
class ReadCache:
    """The rows of files and the entries that have been read before, since neither ever changes.

    They are not decoded again. However, the list of a table's files, the rows in each of them, and
    the number of entries are read every time. A new instance makes everything be read again.
    """

    files: dict[str, dict[str, Counter[Any]]] = field(default_factory=dict)  # by table
    entries: dict[str, dict[str, Sent]] = field(default_factory=dict)  # by stream and id


def read_table_rows(folder: str, known: ReadCache | None = None) -> Counter[Row]:
    """Return the rows in a topic's Delta table, or no rows if there is no table."""
    names = ("partition", "id", "value", "key", "headers", "fields")
    return _rows(folder, names, _table_row, known or ReadCache())


def _table_row(row: Mapping[str, Any]) -> Row:
    headers = {each["key"]: each["value"] for each in row["headers"] or ()}
    content = digest(row["value"], row["key"], headers, dict(row["fields"] or ()))
    return Row(row["partition"], row["id"], content)


def read_parsed_rows(folder: str, known: ReadCache | None = None) -> Counter[Parsed]:
    """Return the rows in a topic's parsed table."""
    names = ("entry_partition", "entry_id", "number")
    return _rows(folder, names, _parsed_row, known or ReadCache())


def _parsed_row(row: Mapping[str, Any]) -> Parsed:
    return Parsed(row["entry_partition"], row["entry_id"], row["number"])


def read_quarantine_rows(folder: str, known: ReadCache | None = None) -> Counter[Parsed]:
    """Return the rows in a topic's quarantine."""
    names = ("partition", "id", "value")
    return _rows(folder, names, _quarantine_row, known or ReadCache())


def _quarantine_row(row: Mapping[str, Any]) -> Parsed:
    return Parsed(row["partition"], row["id"], _number(row["value"]))


def _rows(
    folder: str, names: Iterable[str], made: Callable[[Mapping[str, Any]], Any], known: ReadCache
) -> Counter[Any]:
    found: Counter[Any] = Counter()
    if not DeltaTable.is_deltatable(folder):
        return found
    before, now = known.files.get(folder, {}), dict[str, Counter[Any]]()
    data = DeltaTable(folder).to_pyarrow_dataset()
    for file in data.get_fragments():
        rows = before.get(file.path)
        if rows is None or rows.total() != file.count_rows():
            batches = file.to_batches(schema=data.schema, columns=[*names])
            rows = Counter(made(row) for batch in batches for row in batch.to_pylist())
        now[file.path] = rows
        found.update(rows)
    known.files[folder] = now
    return found


def read_stream_rows(
    client: redis.Redis, topic: str, partitions: int, known: ReadCache | None = None
) -> Counter[Row]:
    """Return a topic's rows in Redis."""
    known = known or ReadCache()
    return Counter(
        Row(partition, name, sent.content)
        for partition in range(partitions)
        for name, sent in _read_messages(client, stream(topic, partition), known).items()
    )


def read_replayed_rows(
    client: redis.Redis, topic: str, partitions: int, known: ReadCache | None = None
) -> Counter[tuple[str, str]]:
    """Return the content of a topic's messages by the original entry ids that they name."""
    known = known or ReadCache()
    return Counter(
        (sent.origin, sent.content)
        for partition in range(partitions)
        for sent in _read_messages(client, stream(topic, partition), known).values()
    )


def _read_messages(client: redis.Redis, key: str, known: ReadCache) -> dict[str, Sent]:
    """Return a stream's messages by their ids. It may be trimmed, or get new entries."""
    first = next(iter(_page(client, key, "-", 1)), None)
    start = (0, 0) if first is None else entry_id_key(first[0].decode())
    kept = {
        name: sent
        for name, sent in known.entries.get(key, {}).items()
        if entry_id_key(name) >= start
    }
    for begin in (f"({next(reversed(kept))}" if kept else "-", "-"):
        kept |= {name: _sent_message(entry) for name, entry in _entries(client, key, begin)}
        if len(kept) == client.xlen(key):
            break
        kept = {}  # entries were deleted
    known.entries[key] = kept
    return kept


def archived_position(client: redis.Redis, topic: str, partition: int) -> str:
    """Return the id up to which a partition is archived, at first "0-0". Source: trim hash."""
    found = client.hget(f"streaming:mq:trim:{{{topic}:p:{partition}}}", "archived")
    return found.decode() if isinstance(found, bytes) else "0-0"


def entry_id_key(name: str) -> tuple[int, int]:
    """Return the key by which an entry id is sorted."""
    ms, _, seq = name.partition("-")
    return int(ms), int(seq)


def _entries(client: redis.Redis, key: str, start: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    while found := _page(client, key, start, PAGE):
        for name, entry in found:
            yield name.decode(), entry
        start = f"({found[-1][0].decode()}"


def _page(
    client: redis.Redis, key: str, start: str, most: int
) -> list[tuple[bytes, dict[bytes, bytes]]]:
    found: Any = client.xrange(key, start, "+", count=most)
    return list(found)


def _sent_message(entry: Mapping[bytes, bytes]) -> Sent:
    """Return the digest of an entry, and the id of the entry that it replays, or ''."""
    fields = {name.decode(): part for name, part in entry.items()}
    value, key = fields.pop("payload", b""), fields.pop("key", None)
    headers = {
        name: text.encode() for name, text in json.loads(fields.pop("headers", b"{}")).items()
    }
    origin = headers.pop(REPLAY_OF, b"").decode()
    return Sent(digest(value, key, headers, fields), origin)


# --- faults ---------------------------------------------------------------------------------------


def find_faults(what: str, found: Counter[Any], wanted: Counter[Any], *, whole: bool) -> list[str]:
    """Return a line for each excess in `found` and, if `whole` is True, for each loss."""
    extra = found - wanted
    twice = Counter({row: count for row, count in extra.items() if row in wanted})
    lines = [
        _line(what, "more often than written", twice),
        _line(what, "never written", extra - twice),
        _line(what, "lost", wanted - found if whole else Counter()),
    ]
    return [line for line in lines if line]


def _line(what: str, wrong: str, rows: Counter[Any]) -> str:
    shown = ", ".join(map(repr, _first_rows(rows, str)))
    return f"{what}: {rows.total()} {wrong}, as {shown}" if rows else ""


def _first_rows(rows: Iterable[Any], by: Callable[[Any], Any]) -> list[Any]:
    return sorted(rows, key=by)[:_SHOWN]
