"""The partitions: their keys, their figures, who reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.admin.diagnosis import delays_facts
from streamqd.admin.diagnosis.facts import Delays, PartitionFacts, StandingDirective, TopicFacts
from streamqd.admin.diagnosis.reading import TolerantReader, named
from streamqd.admin.pages import read_id
from streamqd.admin.unreadable import BadValues, group_names
from streamqd.model import LETTERS
from streamqd.store import retention, statistics, untrusted
from streamqd.store.keys import Keys
from streamqd.store.retention import Stand
from streamqd.store.scripts import Reply

PARTITIONS_MAX = 4_096  # of all topics together
BODIES_MAX = 64  # partitions of which a message is looked at
BODIES_AT_ONCE = 8  # bodies of one exchange

Place = tuple[TopicFacts, int]


def places_of(topics: Sequence[TopicFacts]) -> tuple[list[Place], int]:
    """The partitions to look at, and how many there are: a share of each topic when too many."""
    counted = [(topic, topic.partitions or 0) for topic in topics]
    total = sum(count for _, count in counted)
    share = PARTITIONS_MAX if total <= PARTITIONS_MAX else PARTITIONS_MAX // max(1, len(counted))
    return [(topic, n) for topic, count in counted for n in range(min(count, share))], total


def gather(
    reader: TolerantReader, keys: Keys, places: Sequence[Place], *, bodies: bool
) -> tuple[list[PartitionFacts], dict[tuple[str, int, str], StandingDirective]]:
    """Look at partitions; of each group on them, see where it stands."""
    names = [(topic.name, number) for topic, number in places]
    types = wrong_types(reader, [_typed(keys, *name) for name in names])
    groups = _groups(reader, keys, names)
    figures = reader.measure([statistics.measure_partition(keys, *name) for name in names])
    stands = reader.measure([retention.measure(keys, *name) for name in names])
    scheduled = delays_facts.gather(
        reader, [(keys.scheduled(*name), keys.scheduled_items(*name)) for name in names]
    )
    archived = reader.ask([("HGET", keys.trim(*name), "archived") for name in names])
    exists = reader.ask([("EXISTS", keys.stream(*name)) for name in names])
    aged = [name for topic, name in zip(places, names, strict=True) if topic[0].holds.dlq_retention]
    letters = _oldest_letters(reader, keys, aged)
    large = _large(reader, keys, names[:BODIES_MAX] if bodies else [])
    found: list[PartitionFacts] = []
    standing: dict[tuple[str, int, str], StandingDirective] = {}
    for at, name in enumerate(names):
        stand = _stand(stands[at])
        standing |= {(*name, group): each for group, each in _standings(stand).items()}
        found.append(
            PartitionFacts(
                *name,
                exists=bool(exists[at]),
                wrong_types=types[at],
                groups=groups[at],
                figures=_figures(figures[at]),
                scheduled=scheduled[at] if not types[at] else Delays(),
                archived_unix_ms=_id_ms(archived[at]),
                unarchived_unix_ms=_id_ms(stand.unarchived.encode() if stand else None),
                oldest_letter_unix_ms=letters.get(name),
                large_bytes=large.get(name),
            )
        )
    return found, standing


# --- types ----------------------------------------------------------------------------------------


def _typed(keys: Keys, topic: str, partition: int) -> dict[str, str]:
    return {
        keys.stream(topic, partition): "stream",
        keys.dlq(topic, partition): "stream",
        keys.trim(topic, partition): "hash",
        keys.scheduled(topic, partition): "zset",
        keys.scheduled_items(topic, partition): "hash",
        keys.moving(topic, partition): "hash",
    }


def wrong_types(
    reader: TolerantReader, wanted: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Of each mapping key -> type, the keys that hold something of another type, and that."""
    flat = [(key, kind) for some in wanted for key, kind in some.items()]
    replies = iter(reader.ask([("TYPE", key) for key, _ in flat]))
    found = []
    for some in wanted:
        told = {key: next(replies) for key in some}
        found.append(
            {
                key: raw.decode()
                for key, raw in told.items()
                if raw is not None and raw.decode() not in ("none", some[key])
            }
        )
    return found


# --- groups ---------------------------------------------------------------------------------------


def _groups(
    reader: TolerantReader, keys: Keys, names: Sequence[tuple[str, int]]
) -> list[frozenset[str]]:
    """The groups of each partition, and of its dead letters; strangers on the other are left out.

    That a group that reads messages is on the dead letters is somebody else's business.
    """
    asked = [
        ("XINFO", "GROUPS", stream)
        for name in names
        for stream in (keys.stream(*name), keys.dlq(*name))
    ]
    replies = reader.ask(asked)
    return [
        frozenset(
            {each for each in _names(replies[2 * at]) if not each.endswith(LETTERS)}
            | {each for each in _names(replies[2 * at + 1]) if each.endswith(LETTERS)}
        )
        for at in range(len(names))
    ]


def _names(groups: Sequence[Any] | None) -> list[str]:
    # A name that is not UTF-8 is somebody else's; the check of values names it.
    return [each["name"] for each in group_names(groups, "", BadValues())]


def _standings(stand: Stand | None) -> dict[str, StandingDirective]:
    if stand is None:
        return {}
    return {
        group.name: StandingDirective(
            _id_ms(group.needs.encode()),
            None if group.idle_ms is None else group.idle_ms / 1000,
        )
        for group in stand.groups
    }


# --- messages -------------------------------------------------------------------------------------


def _oldest_letters(
    reader: TolerantReader, keys: Keys, names: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    asked = [("XRANGE", keys.dlq(*name), "-", "+", "COUNT", 1) for name in names]
    replies = reader.ask(asked, BODIES_AT_ONCE)
    return {name: read_id(page[0][0]).ms for name, page in zip(names, replies, strict=True) if page}


def _large(
    reader: TolerantReader, keys: Keys, names: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """The size of the larger payload of the first and the last entry of each partition."""
    asked: list[tuple[Any, ...]] = []
    for name in names:
        stream = keys.stream(*name)
        asked.append(("XRANGE", stream, "-", "+", "COUNT", 1))
        asked.append(("XREVRANGE", stream, "+", "-", "COUNT", 1))
    replies = reader.ask(asked, BODIES_AT_ONCE)
    return {
        name: max(map(_payload_bytes, replies[2 * at : 2 * at + 2]))
        for at, name in enumerate(names)
    }


def _payload_bytes(page: Sequence[Any] | None) -> int:
    return len(named(page[0][1]).get("payload", b"")) if page else 0


# --- reading replies ------------------------------------------------------------------------------


def _figures(reply: Reply | None) -> statistics.PartitionFigures | None:
    return None if reply is None else BadValues().read(statistics.partition_figures, reply)


def _stand(reply: Reply | None) -> Stand | None:
    return None if reply is None else BadValues().read(Stand.parse, reply)


def _id_ms(raw: bytes | None) -> int | None:
    found = BadValues().read(untrusted.entry_id, raw, "", default="")
    return read_id(found).ms if found else None
