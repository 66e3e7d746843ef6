"""The entries of one call: their limits, and their format as arguments of scripts.

The messages of one call usually fail in the same way, so shared changes are sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

# Bytes of bodies that one call copies in the server, so that other clients do not wait long. A
# single body may be larger. lua/_byte_limit.lua has the same number.
BYTES_MAX = 512 << 10

Fields = Mapping[bytes, bytes]
T = TypeVar("T")


def portions(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Split items into lists of at most `most` items and BYTES_MAX bytes, or one larger item."""
    part: list[T] = []
    taken = 0
    for item in items:
        more = size(item)
        if part and (len(part) == most or taken + more > BYTES_MAX):
            yield part
            part, taken = [], 0
        part.append(item)
        taken += more
    if part:
        yield part


def flatten_items(entries: Sequence[tuple[tuple[Any, ...], Fields]]) -> list[Any]:
    """Return the arguments for lua/_settle_items.lua: shared changes, then each entry's own.

    An entry consists of its leading arguments (place, and possibly a delay) and its changed fields.
    Fields that all entries have are shared, with the values of the first entry.
    """
    shared = _shared_fields([fields for _, fields in entries])
    flat: list[Any] = [2 * len(shared)]
    for pair in shared.items():
        flat += pair
    for head, fields in entries:
        own = [
            part
            for name, value in fields.items()
            if shared.get(name) != value
            for part in (name, value)
        ]
        flat += (*head, len(own), *own)
    return flat


def _shared_fields(every: list[Fields]) -> dict[bytes, bytes]:
    if not every:
        return {}
    names = set(every[0]).intersection(*every[1:])
    return {name: value for name, value in every[0].items() if name in names}
