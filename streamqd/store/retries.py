"""Delayed retries of a group on a partition, as the administration shows and changes them."""

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
    """A delayed retry. `payload_bytes` is -1 if its item cannot be read.

    `fields` are the fields of the message without payload and headers.
    """

    place: str
    due_unix_ms: int
    payload_bytes: int
    fields: dict[bytes, bytes]


def page(keys: Keys, unit: Unit, after: tuple[int, str], count: int) -> Call:
    """Build the call for the next retries by due time after (due, place), from (0, '').

    That pair need not exist any longer.
    """
    due, place = after
    return scripts.on(
        "retry_page", keys, unit, after_due=due, after_place=place, count=bounded(count)
    )


def rows(reply: Reply) -> tuple[list[Delayed], bool]:
    """Read the reply to `page`: rows (fewer if they are large), and True if there may be more."""
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
    # Another client may pack a number as a number.
    return [part if isinstance(part, bytes) else b"%d" % part for part in parts]


def hasten(keys: Keys, unit: Unit, places: Sequence[str]) -> Call:
    """Make retries due now. The reply counts those now due, and those no longer delayed."""
    bounded(len(places))
    return scripts.on("retry_hasten", keys, unit, places=places)


def cancel(
    keys: Keys,
    unit: Unit,
    items: Sequence[tuple[str, Mapping[bytes, bytes]]],
    *,
    drop: bool,
) -> Call:
    """Turn retries, each (place, changed fields), into dead letters, or `drop` them."""
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
