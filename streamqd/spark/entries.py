"""Convert entries to columns of IDs, payloads, headers and other fields. This module does no I/O.

The speed of reads depends on this code, so it processes whole lists wherever possible instead of
single entries.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa
from pyarrow import compute

from streamqd.model import RawEntry

Headers = list[tuple[bytes, bytes]]  # pairs of name and value, in UTF-8

HEADERS = b"headers"
LONG_MAX = (1 << 63) - 1
_FIRST_UNIX_MS = -62_135_596_800_000  # the year 1, the first year of Spark's timestamps
_LAST_UNIX_MS = 253_402_300_799_999  # the end of the year 9999, the last year of Spark's timestamps
_ID_BYTES = 41  # length of the longest ID in bytes
_MS_DIGITS = 13  # digits of an ID's milliseconds in the years 2001 to 2286


class Entries:
    """The entries of one stream as columns, in the order of their IDs.

    Almost always, all entries have the same fields in the same order. The columns are then slices
    of one flat list, so no Python code runs for single entries.
    """

    def __init__(self, entries: Sequence[RawEntry]) -> None:
        self.ids: list[bytes] = [entry[0] for entry in entries]
        self._bodies: list[list[bytes]] = [entry[1] for entry in entries]
        self._columns: dict[bytes, Sequence[bytes]] | None = _even_columns(self._bodies)

    @cached_property
    def names(self) -> set[bytes]:
        """The names of all fields that occur in any entry."""
        if self._columns is not None:
            return set(self._columns)
        return {name for body in self._bodies for name in body[::2]}

    def values(self, name: bytes) -> Sequence[bytes | None] | None:
        """Return a field's value for each entry, or None if no entry has the field.

        In the returned sequence, the value is None for an entry without the field. If an entry
        repeats the field, its last value is used.
        """
        if self._columns is not None:
            return self._columns.get(name)
        if name not in self.names:
            return None
        return [each.get(name) for each in self._fields_by_name]

    @cached_property
    def _fields_by_name(self) -> list[dict[bytes, bytes]]:
        return [_pair_fields(body) for body in self._bodies]

    @cached_property
    def headers(self) -> Sequence[Headers | None]:
        """The headers of each entry, or None for an entry with no headers or invalid headers."""
        raw = self.values(HEADERS)
        if raw is None:
            return [None] * len(self.ids)
        return [_headers(each) for each in raw]

    @cached_property
    def _unreadable_headers(self) -> Sequence[bool]:
        """A mask that is True for entries with invalid headers."""
        raw = self.values(HEADERS)
        if raw is None:
            return [False] * len(self.ids)
        both = zip(raw, self.headers, strict=True)
        return [text is not None and found is None for text, found in both]

    @cached_property
    def _raw_ids(self) -> pa.Array:
        return pa.array(self.ids, pa.binary())

    @property
    def texts(self) -> pa.Array:
        """The IDs as strings."""
        return _as_text(self._raw_ids)

    @property
    def _has_current_times(self) -> bool:
        """True if the milliseconds of all IDs have 13 digits, so that they can be parsed together.

        The IDs are in order, so it is enough to check the first and the last one.
        """
        return all(
            each[_MS_DIGITS : _MS_DIGITS + 1] == b"-" for each in self.ids[:1] + self.ids[-1:]
        )

    @cached_property
    def halves(self) -> tuple[pa.Array, pa.Array]:
        """The milliseconds and the sequence numbers of the IDs.

        A number that needs more than 63 bits does not fit in Spark's type for long integers, so the
        largest 63-bit number is returned instead.
        """
        if self._has_current_times:
            low = compute.binary_slice(self._raw_ids, 0, _MS_DIGITS)
            high = compute.binary_slice(self._raw_ids, _MS_DIGITS + 1, _ID_BYTES)
            with contextlib.suppress(pa.ArrowInvalid):  # a sequence number of more than 63 bits
                return _as_text(low).cast(pa.int64()), _as_text(high).cast(pa.int64())
        split = [each.split(b"-") for each in self.ids]
        return (
            pa.array([min(int(half[0]), LONG_MAX) for half in split], pa.int64()),
            pa.array([min(int(half[1]), LONG_MAX) for half in split], pa.int64()),
        )

    def times(self, kind: pa.DataType) -> pa.Array:
        """Return the times of the IDs as timestamps of this type."""
        if self._has_current_times:
            return compute.multiply(self.halves[0], 1000).cast(kind)
        return times(self.halves[0], kind)

    def payloads(self, name: bytes, kind: pa.DataType) -> pa.Array:
        """Return the payloads. As in a handler, an entry without a payload has an empty one."""
        raw = self.values(name)
        if raw is None:
            return pa.repeat(pa.scalar(b"", kind), len(self.ids))
        return pa.array(raw if self._columns is not None else [each or b"" for each in raw], kind)

    def other_fields(self, taken: set[bytes], kind: pa.DataType) -> pa.Array:
        """Return each entry's fields that have no column, or null if it has no such fields.

        `taken` contains the names of fields that have a column of their own. Headers are included
        only if they are invalid and therefore missing from their column.
        """
        if self.names <= taken and not any(self._unreadable_headers):
            return pa.nulls(len(self.ids), kind)
        return pa.array(
            [
                _other_fields(body, taken, keep_headers=keep)
                for body, keep in zip(self._bodies, self._unreadable_headers, strict=True)
            ],
            kind,
        )


def _as_text(raw: pa.Array) -> pa.Array:
    """Return IDs as strings. They need no UTF-8 check, because the server writes IDs in ASCII."""
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), offset=raw.offset)


def _even_columns(bodies: Sequence[Sequence[bytes]]) -> dict[bytes, Sequence[bytes]] | None:
    """Return the values of each field, or None if entries have different fields or field orders."""
    count = len(bodies)
    width = len(bodies[0]) if bodies else 0
    if not count or list(map(len, bodies)).count(width) != count:
        return None
    flat = list(itertools.chain.from_iterable(bodies))
    columns: dict[bytes, Sequence[bytes]] = {}
    for at in range(0, width, 2):
        if flat[at::width].count(flat[at]) != count:
            return None
        columns[flat[at]] = flat[at + 1 :: width]
    return columns


def _pair_fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=False))


def times(unix_ms: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert Unix milliseconds to timestamps. Times outside Spark's calendar become null."""
    edges = compute.min_max(unix_ms)
    if (edges["max"].as_py() or 0) > _LAST_UNIX_MS or (edges["min"].as_py() or 0) < _FIRST_UNIX_MS:
        known = compute.and_(
            compute.less_equal(unix_ms, _LAST_UNIX_MS),
            compute.greater_equal(unix_ms, _FIRST_UNIX_MS),
        )
        unix_ms = compute.if_else(known, unix_ms, pa.scalar(None, pa.int64()))
    return compute.multiply(unix_ms, 1000).cast(kind)


def _headers(raw: bytes | None) -> Headers | None:
    """Return headers as pairs of name and value, as in Kafka, or None if none are valid."""
    if raw is None:
        return None
    try:
        found = json.loads(raw)
        if not isinstance(found, dict):
            return None
        return [(_header(name), _header(value)) for name, value in found.items()]
    except (ValueError, RecursionError):
        return None


def header_lists(found: Sequence[Headers | None], kind: pa.DataType) -> pa.Array:
    """Return the headers as an Arrow array, with null for entries without headers."""
    if found.count(None) == len(found):
        return pa.nulls(len(found), kind)
    flat = [pair for each in found if each for pair in each]
    pairs = pa.StructArray.from_arrays(
        [
            pa.array([name for name, _ in flat], pa.string()),
            pa.array([value for _, value in flat], pa.binary()),
        ],
        fields=list(kind.value_type),
    )
    # In Arrow, a list whose start is null becomes null.
    ends = itertools.accumulate((len(each or ()) for each in found), initial=0)
    starts = [None if each is None else end for each, end in zip(found, ends, strict=False)]
    offsets_ = pa.array([*starts, len(flat)], pa.int32())
    return pa.ListArray.from_arrays(offsets_, pairs, type=kind)


def _header(value: object) -> bytes:
    """Encode a name or a value. Lone surrogates, which JSON allows but UTF-8 does not, become `?`.

    A value that is not a string is encoded as JSON.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace")


def _other_fields(
    flat: Sequence[bytes], taken: set[bytes], *, keep_headers: bool
) -> list[tuple[str, bytes]] | None:
    found = {
        name.decode("utf-8", "replace"): value
        for name, value in _pair_fields(flat).items()
        if name not in taken or (keep_headers and name == HEADERS)
    }
    return list(found.items()) or None
