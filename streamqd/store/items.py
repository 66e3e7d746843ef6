"""Split entries into calls of a limited size, and format them as arguments of scripts.

The messages of one call have usually failed in the same way, so most of their fields change to the
same values. To save bandwidth, such shared changes are sent only once per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

# Maximum size of the bodies that one call copies inside the server, in bytes, so that other clients
# do not have to wait long. A single body may be larger. lua/_byte_limit.lua has the same number.
BYTES_MAX = 512 << 10

Fields = Mapping[bytes, bytes]
T = TypeVar("T")


def portions(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Split items into lists that are small enough for one call.

    Each list has up to `most` items of BYTES_MAX bytes in total. An item that is larger than this
    gets a list of its own. `size` returns the size of an item in bytes.
    """
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
    """Return the arguments that lua/_settle_items.lua expects for these entries.

    Each entry is a pair of its leading arguments (the place, and possibly a delay) and the fields
    to change. The result starts with the fields that all entries change, with their values in the
    first entry. Each entry then lists only the fields whose values differ from these.
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
