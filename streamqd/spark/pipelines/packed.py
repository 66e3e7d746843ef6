"""Convert msgpack payloads to JSON text, so that the same validation works for both encodings.

A fast reader handles most payloads. It would silently accept a name that occurs twice. Its result
is therefore encoded again, and is used only if the bytes are the same as in the payload. An exact
reader handles all other payloads, and finds the reasons why they are invalid.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from streamqd.spark.pipelines.schemas import type_mismatch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

DEPTH_MAX = 200  # levels of maps and arrays; each takes 3 of the 1,000 frames that Python allows
_LEAVES = frozenset({str, int, float, bool, type(None), datetime, bytes})
_INFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")  # a double that is NaN or infinite
_NANOSECONDS = 1_000_000_000
_TIMESTAMP = -1  # number of the extension type for timestamps
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # first and last second of the years 1 to 9999
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_BROKEN = "it is not msgpack"
_DEEP = f"it is nested more than {DEPTH_MAX} levels deep"


class JsonTexts(NamedTuple):
    """The payloads as JSON texts, and the reason for each payload that has no JSON text."""

    texts: Sequence[bytes | None]
    faults: Sequence[str | None]


Reader = Callable[[Sequence[bytes | None]], JsonTexts]


def json_texts(payloads: Sequence[bytes | None]) -> JsonTexts:
    """Return the payloads unchanged, because they are already JSON."""
    return JsonTexts(payloads, [None] * len(payloads))


class MsgpackTexts:
    """Converts msgpack payloads to JSON texts. Each task gets a copy of the instance."""

    def __init__(self, kind: StructType) -> None:
        self._kind = kind

    def __call__(self, payloads: Sequence[bytes | None]) -> JsonTexts:
        """Convert payloads to JSON texts."""
        found = [self._text(each) for each in payloads]
        return JsonTexts([text for text, _ in found], [why for _, why in found])

    def _text(self, payload: bytes | None) -> tuple[bytes | None, str | None]:
        if not payload:
            return None, "it has no payload"
        try:
            found, binary = _read(payload)
            if binary and (misplaced := _find_misplaced(self._kind, found)):
                return None, misplaced
            return _encode(found), None
        except _UnreadableError as error:
            return None, str(error)
        except RecursionError:  # possible within DEPTH_MAX, because the callers' frames also count
            return None, _DEEP


def reader(codec: str, kind: StructType) -> Reader:
    """Return the function that converts payloads in this codec (json or msgpack) to JSON texts."""
    return MsgpackTexts(kind) if codec == "msgpack" else json_texts


def texts(value: Column, read: Reader) -> Column:
    """Return a column of structs, each with a payload's `text` and its `fault`.

    One of the two is always null.
    """
    import pyarrow as pa
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]

    def to_texts(payloads: pa.Array) -> pa.Array:
        found = read(payloads.to_pylist())
        columns = [pa.array(found.texts, pa.binary()), pa.array(found.faults, pa.string())]
        return pa.StructArray.from_arrays(columns, ["text", "fault"])

    # Spark evaluates the annotations of this function, but cannot resolve names that are imported
    # inside the function around it. They are therefore set as objects.
    to_texts.__annotations__ = {"payloads": pa.Array, "return": pa.Array}
    function: Any = arrow_udf(to_texts, "text binary, fault string")
    found: Column = function(value)
    return found


class _UnreadableError(ValueError):
    """A payload cannot be converted to JSON. The message of the error is the reason."""


def _encode(found: dict[str, Any]) -> bytes:
    import msgspec

    return msgspec.json.encode(found)  # binary becomes base64, timestamps ISO 8601 in UTC


def _read(payload: bytes) -> tuple[dict[str, Any], bool]:
    """Return the map in a payload, and True if it contains binary values.

    Raises _UnreadableError if the payload cannot be converted to JSON.
    """
    unpack, pack = _fast()
    try:
        found = unpack(payload)
        if type(found) is dict and pack(found) == payload and not _INFINITE.search(payload):
            kinds = _kinds(found)
            if kinds is not None:
                return found, bytes in kinds
    except (ValueError, TypeError, RecursionError):  # msgspec's errors are ValueErrors
        pass
    exact = _ExactReader(payload)
    return exact.document(), exact.binary


@cache
def _fast() -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
    import msgspec

    return msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode


def _kinds(found: dict[str, Any]) -> set[type] | None:
    """Return the types of all values, or None if one has no JSON form or is nested too deeply."""
    kinds: set[type] = set()
    level: list[Any] = [found]
    for _ in range(DEPTH_MAX):
        inner: list[Any] = []
        for each in level:
            values = each
            if type(each) is dict:
                if set(map(type, each)) - {str}:
                    return None
                values = each.values()
            own = set(map(type, values))
            kinds |= own
            if dict in own or list in own:
                inner += [value for value in values if type(value) in (dict, list)]
        if not inner:
            return kinds if kinds <= _LEAVES | {dict, list} else None
        level = inner
    return None


def _find_misplaced(kind: StructType, found: dict[str, Any]) -> str:
    """Return the reasons to reject binary values in columns whose types do not allow them.

    Returns "" if there are no such values.
    """
    wrong = [field for field in kind.fields if _is_misplaced(field.dataType, found.get(field.name))]
    return "; ".join(map(type_mismatch, wrong))


def _is_misplaced(kind: DataType, value: Any) -> bool:
    """Return True if a value is binary, or contains binary, where its type does not allow it.

    An array or a map in a string column is always accepted, because such a column accepts any JSON
    value.
    """
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

    if isinstance(value, bytes):
        return not isinstance(kind, BinaryType)
    if isinstance(kind, StructType) and isinstance(value, dict):
        return any(_is_misplaced(each.dataType, value.get(each.name)) for each in kind.fields)
    if isinstance(kind, ArrayType) and isinstance(value, list):
        return any(_is_misplaced(kind.elementType, each) for each in value)
    if isinstance(kind, MapType) and isinstance(value, dict):
        return any(_is_misplaced(kind.valueType, each) for each in value.values())
    return False


# --- the exact reader -----------------------------------------------------------------------------

_NUMBERS = {
    0xCA: struct.Struct(">f"), 0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"), 0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"), 0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"), 0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"), 0xD3: struct.Struct(">q"),
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # size of the length in bytes
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}  # size of the value in bytes


class _ExactReader:
    """Reads one payload, value by value, as msgpack's specification defines it."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0
        self.binary = False  # True after a binary value was read

    def document(self) -> dict[str, Any]:
        """Return the map in the payload.

        Raises _UnreadableError if the payload is anything but one map.
        """
        found = self._value(0)
        if self._at != len(self._payload):
            raise _UnreadableError(_BROKEN)
        if not isinstance(found, dict):
            raise _UnreadableError("it is msgpack, but not a map")
        return found

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._payload):
            raise _UnreadableError(_BROKEN)
        return self._payload[start : self._at]

    def _integer(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _value(self, depth: int) -> Any:
        (mark,) = self._take(1)
        if mark in _CONSTANTS:
            return _CONSTANTS[mark]
        if mark < 0x80 or mark >= 0xE0:
            return mark if mark < 0x80 else mark - 256
        if mark in _NUMBERS:
            return self._number(_NUMBERS[mark])
        if 0xA0 <= mark < 0xC0 or mark in _STRINGS:
            return self._string(self._integer(_STRINGS[mark]) if mark in _STRINGS else mark & 0x1F)
        if mark in _BINARY:
            self.binary = True
            return self._take(self._integer(_BINARY[mark]))
        if mark in _EXTENSIONS or mark in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS.get(mark) or self._integer(_EXTENSIONS[mark]))
        return self._read_container(mark, depth + 1)

    def _read_container(self, mark: int, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise _UnreadableError(_DEEP)
        if mark < 0x90 or mark in _MAPS:
            return self._map(self._integer(_MAPS[mark]) if mark in _MAPS else mark & 0x0F, depth)
        if mark < 0xA0 or mark in _ARRAYS:
            size = self._integer(_ARRAYS[mark]) if mark in _ARRAYS else mark & 0x0F
            return [self._value(depth) for _ in range(size)]
        raise _UnreadableError(_BROKEN)  # msgpack never uses 0xc1

    def _map(self, size: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(size):
            name = self._value(depth)
            if not isinstance(name, str):
                raise _UnreadableError("it contains a map with a key that is not a string")
            if name in found:
                raise _UnreadableError(f"the name {ascii(name)[:100]} occurs twice")
            found[name] = self._value(depth)
        return found

    def _number(self, form: struct.Struct) -> int | float:
        number: int | float = form.unpack(self._take(form.size))[0]
        if isinstance(number, float) and number - number != 0:
            raise _UnreadableError("it contains NaN or an infinity")
        return number

    def _string(self, size: int) -> str:
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise _UnreadableError("it contains a string that is not UTF-8") from None

    def _extension(self, size: int) -> str:
        (kind,) = struct.unpack(">b", self._take(1))
        value = self._take(size)
        if kind != _TIMESTAMP:
            raise _UnreadableError(f"it contains a value of the extension type {kind}")
        return _time(value)


def _time(value: bytes) -> str:
    """Return a timestamp as ISO 8601, with nine decimals or, for a whole second, none.

    Raises _UnreadableError if the timestamp is invalid or outside the years 1 to 9999.
    """
    seconds, nanoseconds = 0, 0
    if len(value) == 4:
        (seconds,) = struct.unpack(">I", value)
    elif len(value) == 8:
        both = int.from_bytes(value, "big")
        nanoseconds, seconds = both >> 34, both & ((1 << 34) - 1)
    elif len(value) == 12:
        nanoseconds, seconds = struct.unpack(">Iq", value)
    else:
        raise _UnreadableError(_BROKEN)
    if nanoseconds >= _NANOSECONDS:
        raise _UnreadableError(_BROKEN)
    if not _FIRST <= seconds <= _LAST:
        raise _UnreadableError("it contains a timestamp outside the years 1 to 9999")
    text = (_EPOCH + timedelta(seconds=seconds)).isoformat().removesuffix("+00:00")
    return f"{text}.{nanoseconds:09}Z" if nanoseconds else f"{text}Z"
