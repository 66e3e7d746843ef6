"""Rows that a producer wrote, and the rows that tables and topics contain.

Of streamqd, this module uses only the documented key names and entry fields. It writes and reads
rows with the package redis, and tables with the package deltalake.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import redis
from deltalake import DeltaTable

PAGE = 5_000
REPLAY_OF = "x-replay-of"
SCHEMA = "number long, text string"  # of the JSON payloads
_SHOWN = 3


class Row(NamedTuple):
    """An entry: its place, and a digest of its whole content."""

    partition: int
    id: str
    content: str


class Parsed(NamedTuple):
    """An entry and the number in its payload, None if the payload is not JSON."""

    partition: int
    id: str
    number: int | None


def stream(topic: str, partition: int) -> str:
    """Return the key of a partition."""
    return f"stream:topic:{{{topic}:p:{partition}}}"


def digest(
    value: bytes, key: bytes | None, headers: Mapping[str, bytes], fields: Mapping[str, bytes]
) -> str:
    """Return a digest of a row's content. No headers equal an empty header object."""
    whole = (value, key, sorted(headers.items()), sorted(fields.items()))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


class Producer:
    """Writes rows of a topic, and records each row that Redis confirmed in a file.

    Some rows have no key, some have headers, and some have an extra field of the sender. One in ten
    repeats an earlier row, and one in twenty is not JSON.
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
                    content = _of_entry({name.encode(): part for name, part in entry.items()})[0]
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
    """Split the rows of a ledger into those that match SCHEMA and those that do not."""
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


def in_table(folder: str) -> Counter[Row]:
    """Return the rows in a topic's Delta table, empty if there is no table."""
    found: Counter[Row] = Counter()
    for row in _rows(folder, "partition", "id", "value", "key", "headers", "fields"):
        headers = {each["key"]: each["value"] for each in row["headers"] or ()}
        content = digest(row["value"], row["key"], headers, dict(row["fields"] or ()))
        found[Row(row["partition"], row["id"], content)] += 1
    return found


def in_parsed(folder: str) -> Counter[Parsed]:
    """Return the rows in the parsed table of a topic."""
    names = ("entry_partition", "entry_id", "number")
    return Counter(Parsed(*(row[name] for name in names)) for row in _rows(folder, *names))


def in_quarantine(folder: str) -> Counter[Parsed]:
    """Return the rows in the quarantine of a topic."""
    names = ("partition", "id", "value")
    return Counter(
        Parsed(row["partition"], row["id"], _number(row["value"])) for row in _rows(folder, *names)
    )


def _rows(folder: str, *names: str) -> Iterator[dict[str, Any]]:
    if DeltaTable.is_deltatable(folder):
        for batch in DeltaTable(folder).to_pyarrow_dataset().to_batches(columns=[*names]):
            yield from batch.to_pylist()


def in_stream(client: redis.Redis, topic: str, partitions: int) -> Counter[Row]:
    """Return the rows of a topic in Redis."""
    return Counter(
        Row(partition, name, _of_entry(entry)[0])
        for partition in range(partitions)
        for name, entry in _entries(client, stream(topic, partition))
    )


def replayed(client: redis.Redis, topic: str, partitions: int) -> Counter[tuple[str, str]]:
    """Return the original entry ids named by the messages of a topic, with their content."""
    found: Counter[tuple[str, str]] = Counter()
    for partition in range(partitions):
        for _, entry in _entries(client, stream(topic, partition)):
            content, origin = _of_entry(entry)
            found[origin, content] += 1
    return found


def told(client: redis.Redis, topic: str, partition: int) -> str:
    """Return the id up to which the partition is archived, "0-0" at first. Source: trim hash."""
    found = client.hget(f"streaming:mq:trim:{{{topic}:p:{partition}}}", "archived")
    return found.decode() if isinstance(found, bytes) else "0-0"


def order(name: str) -> tuple[int, int]:
    """Return the sort key of an entry id."""
    ms, _, seq = name.partition("-")
    return int(ms), int(seq)


def _entries(client: redis.Redis, key: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    start = "-"
    while found := _page(client, key, start):
        for name, entry in found:
            yield name.decode(), entry
        start = f"({found[-1][0].decode()}"


def _page(client: redis.Redis, key: str, start: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    found: Any = client.xrange(key, start, "+", count=PAGE)
    return list(found)


def _of_entry(entry: Mapping[bytes, bytes]) -> tuple[str, str]:
    """Return the digest of an entry, and the id of the entry that it replays, or ''."""
    fields = {name.decode(): part for name, part in entry.items()}
    value, key = fields.pop("payload", b""), fields.pop("key", None)
    headers = {
        name: text.encode() for name, text in json.loads(fields.pop("headers", b"{}")).items()
    }
    origin = headers.pop(REPLAY_OF, b"").decode()
    return digest(value, key, headers, fields), origin


# --- faults ---------------------------------------------------------------------------------------


def faults(what: str, found: Counter[Any], wanted: Counter[Any], *, whole: bool) -> list[str]:
    """Return a line for each excess in `found` and, with `whole`, for each loss."""
    extra = found - wanted
    twice = Counter({row: count for row, count in extra.items() if row in wanted})
    lines = [
        _line(what, "more often than written", twice),
        _line(what, "never written", extra - twice),
        _line(what, "lost", wanted - found if whole else Counter()),
    ]
    return [line for line in lines if line]


def _line(what: str, wrong: str, rows: Counter[Any]) -> str:
    shown = ", ".join(map(repr, _first(rows, str)))
    return f"{what}: {rows.total()} {wrong}, as {shown}" if rows else ""


def _first(rows: Iterable[Any], by: Callable[[Any], Any]) -> list[Any]:
    return sorted(rows, key=by)[:_SHOWN]
