"""Delayed retries of a group on a partition, as the administration looks at and changes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streamqd.errors import ContractError
from streamqd.model import Unit
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.messages import ITEMS_MAX
from streamqd.store.scripts import Call, Reply


class Delayed(NamedTuple):
    """A delayed retry. `payload_bytes` is -1 when its item cannot be read.

    `fields` are those of the message without payload and headers.
    """

    place: str
    due_unix_ms: int
    payload_bytes: int
    fields: dict[bytes, bytes]


def page(keys: Keys, unit: Unit, after: tuple[int, str], count: int) -> Call:
    """Ask for the next retries by due time behind `after` (due, place); (0, '') = from the begin.

    Such a pair need not exist any more.
    """
    due, place = after
    return scripts.on(
        "retry_page", keys, unit, after_due=due, after_place=place, count=bounded(count)
    )


def rows(reply: Reply) -> tuple[list[Delayed], bool]:
    """Read the answer to `page`: the rows, fewer when they are large, and whether more may come."""
    found = [
        Delayed(
            untrusted.label(place),
            untrusted.integer(due, "a due time", low=-untrusted.INTEGER_MAX),
            size,
            dict(zip(_texts(fields[::2]), _texts(fields[1::2]), strict=True)),
        )
        for place, due, size, fields in reply.rest[0]
    ]
    return found, bool(reply.rest[1])


def _texts(parts: Sequence[bytes | int]) -> list[bytes]:
    # Whoever packs an item by other means may write a number as a number.
    return [part if isinstance(part, bytes) else b"%d" % part for part in parts]


def hasten(keys: Keys, unit: Unit, places: Sequence[str]) -> Call:
    """Let retries be due now. Answers how many are due, and how many are not delayed any more."""
    bounded(len(places))
    return scripts.on("retry_hasten", keys, unit, places=places)


def cancel(
    keys: Keys,
    unit: Unit,
    items: Sequence[tuple[str, Mapping[bytes, bytes]]],
    *,
    drop: bool,
) -> Call:
    """Make dead letters of retries, (place, changed fields) each; with `drop`, nothing of them."""
    bounded(len(items))
    flat: list[object] = []
    for place, fields in items:
        flat += (place, 2 * len(fields))
        for pair in fields.items():
            flat += pair
    return scripts.on("retry_cancel", keys, unit, drop=drop, entries=flat)


def bounded(count: int) -> int:
    if not 1 <= count <= ITEMS_MAX:
        raise ContractError(f"{count} retries in one call, not 1 to {ITEMS_MAX}")
    return count
