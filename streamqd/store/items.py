"""The entries of one call: how many there may be, and how the scripts that settle read them.

Messages that fail in a crowd fail alike: what changes in all of them is sent, and read, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

# Bodies that one call copies within the server, so that nobody else waits long. One body alone may
# be larger. lua/_bytes.lua has the same number.
BYTES_MAX = 512 << 10

Fields = Mapping[bytes, bytes]
T = TypeVar("T")


def portions(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Cut items into lists of at most `most`, whose bodies take BYTES_MAX or are but one."""
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


def listed(entries: Sequence[tuple[tuple[Any, ...], Fields]]) -> list[Any]:
    """Return what lua/_items.lua reads: what all entries share, then each with what is its own.

    An entry is what comes first of it (its place, and perhaps a delay), and the changed fields.
    Names that all have are shared, with the values of the first entry.
    """
    shared = _shared([fields for _, fields in entries])
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


def _shared(every: list[Fields]) -> dict[bytes, bytes]:
    if not every:
        return {}
    names = set(every[0]).intersection(*every[1:])
    return {name: value for name, value in every[0].items() if name in names}
