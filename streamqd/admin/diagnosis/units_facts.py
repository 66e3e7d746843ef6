"""The units: who holds each, what its group has before it, and whether its keys agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.admin.diagnosis import delays_facts
from streamqd.admin.diagnosis.facts import Look, PartitionFacts, StandingDirective, UnitFacts
from streamqd.admin.diagnosis.partitions_facts import wrong_types
from streamqd.admin.diagnosis.reading import TolerantReader, named
from streamqd.admin.unreadable import BadValues, lease_view
from streamqd.model import Unit
from streamqd.store import groups, leases, statistics
from streamqd.store.fetch import CONSUMER
from streamqd.store.keys import Keys


def gather(
    reader: TolerantReader,
    keys: Keys,
    partitions: Sequence[PartitionFacts],
    standing: Mapping[tuple[str, int, str], StandingDirective],
) -> list[UnitFacts]:
    """Look at every group on every partition."""
    units = [
        Unit(each.topic, each.partition, group)
        for each in partitions
        for group in sorted(each.groups)
    ]
    types = wrong_types(reader, [_typed(keys, unit) for unit in units])
    figures = reader.measure([statistics.measure_unit(keys, unit) for unit in units])
    foreign = _foreign(reader, keys, units)
    looks = _looks(reader, keys, units)
    delays = delays_facts.gather(
        reader, [(keys.retry(*unit), keys.retry_items(*unit)) for unit in units]
    )
    return [
        UnitFacts(
            unit=unit,
            wrong_types=types[at],
            figures=_figures(figures[at]),
            foreign=foreign[at][0],
            unowned=foreign[at][1],
            looks=looks[at],
            delays=delays[at],
            standing=standing.get(unit),
        )
        for at, unit in enumerate(units)
    ]


def _typed(keys: Keys, unit: Unit) -> dict[str, str]:
    return {
        keys.retry_stream(*unit): "stream",
        keys.retry(*unit): "zset",
        keys.retry_items(*unit): "hash",
        keys.fence(*unit): "hash",
        keys.lease(*unit): "string",
        keys.attempts(*unit): "hash",
    }


def _figures(reply: Any) -> statistics.UnitFigures | None:
    return None if reply is None else BadValues().read(statistics.unit_figures, reply)


def _foreign(
    reader: TolerantReader, keys: Keys, units: Sequence[Unit]
) -> list[tuple[dict[str, int], int]]:
    """Consumers of other names that hold entries, and how many entries no consumer has.

    Of the partition and of the retry stream together.
    """
    asked = [
        command
        for unit in units
        for stream in (keys.source(*unit), keys.retry_stream(*unit))
        for command in (
            ("XINFO", "CONSUMERS", stream, unit.group),
            ("XPENDING", stream, unit.group),
        )
    ]
    replies = reader.ask(asked)
    found: list[tuple[dict[str, int], int]] = []
    for at in range(0, len(replies), 4):
        held: dict[str, int] = {}
        unowned = 0
        for consumers, pending in (replies[at : at + 2], replies[at + 2 : at + 4]):
            unowned += groups.unowned(consumers, pending) if consumers and pending else 0
            for raw in consumers or ():
                consumer = named(raw)
                name = consumer["name"].decode("utf-8", "replace")
                if name not in (CONSUMER, "") and consumer["pending"]:
                    held[name] = held.get(name, 0) + int(consumer["pending"])
        found.append((held, unowned))
    return found


def _looks(reader: TolerantReader, keys: Keys, units: Sequence[Unit]) -> list[list[Look]]:
    """Look at fence and lease; twice where they disagree.

    The commands of one look are not one instant: an owner may come or go between them.
    """
    looks = [[look] if look else [] for look in _look(reader, keys, units)]
    strange = [at for at, some in enumerate(looks) if some and _strange(some[0])]
    again = _look(reader, keys, [units[at] for at in strange])
    for at, look in zip(strange, again, strict=True):
        looks[at] += [look] if look else []
    return looks


def _strange(look: Look) -> bool:
    return bool(look.fence.token) != (look.fence.ttl is not None) or look.lease_matches is False


def _look(reader: TolerantReader, keys: Keys, units: Sequence[Unit]) -> list[Look | None]:
    asked: list[tuple[Any, ...]] = []
    for unit in units:
        asked += [*leases.view(keys, unit), ("GET", keys.lease(*unit))]
    replies = reader.ask(asked)
    found: list[Look | None] = []
    bad = BadValues()  # the check of values names them
    for number, unit in enumerate(units):
        fence, ttl, lease = replies[3 * number : 3 * number + 3]
        if fence is None or ttl is None:
            found.append(None)
            continue
        matches = None if lease is None else lease == fence[0]
        found.append(Look(lease_view(fence, ttl, keys.fence(*unit), bad), matches))
    return found
