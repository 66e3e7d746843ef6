"""Check that a payload is one JSON object that Spark may convert.

Spark's JSON reader is lenient: it reads only the first of two documents, takes the last of two
equal names, and replaces bytes that are not UTF-8. It also takes hours to round a number such as
1e500000000. Each payload is therefore checked before Spark reads it. A fast reader accepts most
valid payloads. An exact reader checks all others, and finds the reasons why they are invalid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from streamqd.spark.pipelines.schemas import UNITS, out_of_range, time_format, type_mismatch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

# For a larger number of seconds, Spark's multiplication overflows and returns a wrong time.
SECONDS_MAX = (1 << 63) // 1_000_000 - 1
_DIGITS_MAX = 1000
_HUGE = 10**_DIGITS_MAX
# Exponents of more than three digits. Spark ignores commas in a number and accepts digits of all
# scripts, so the pattern matches these as well.
_EXPONENT = re.compile(r"[eE][-+,]*\d[-+,\d]{3}")


# Limits of Spark's JSON reader. If a part of a payload exceeds a limit, Spark rejects the payload.
_NAME_MAX = 50_000
_DEPTH_MAX = 900  # Python's recursion limit is 1,000
_LONG_NUMBER = b"0" * 1000
_AS_ZEROS = bytes.maketrans(b"123456789.eE+-", b"0" * 14)


class _DuplicateFieldError(ValueError):
    """A name occurs twice in one object."""


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise _DuplicateFieldError(f"the name {ascii(name)[:100]} occurs twice")
            names.add(name)
    return found


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are not JSON


# A float is kept as its text, because its digits and its exponent show whether Spark can round it.
# The text is stored as bytes, so that it differs from a string.
Number = bytes
_number = str.encode
_decoder = json.JSONDecoder(
    object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant, parse_float=_number
)

_Check = Callable[[Any], bool]
_Fields = Sequence[tuple[str, _Check]]
_Checks = Sequence[tuple[str, str, _Check]]  # name of a column, reason, check for bad values


def faults(value: Column, kind: StructType) -> Column:
    """Return the reason why each payload is invalid, as in `find_fault`, or null if it is valid."""
    import pyarrow as pa
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]

    checks = forbidden_checks(kind)

    def find_faults(payloads: pa.Array) -> pa.Array:
        return pa.array([find_fault(each, checks) for each in payloads.to_pylist()], pa.string())

    # Spark evaluates the annotations of this function, but cannot resolve names that are imported
    # inside the function around it. They are therefore set as objects.
    find_faults.__annotations__ = {"payloads": pa.Array, "return": pa.Array}
    function: Any = arrow_udf(find_faults, "string")
    found: Column = function(value)
    return found


def forbidden_checks(kind: StructType) -> _Checks:
    """Return the checks that `find_fault` applies to the columns of this schema."""
    from pyspark.sql.types import DecimalType, TimestampType

    found: list[tuple[str, str, _Check]] = []
    for field in kind.fields:
        if form := time_format(field):  # Spark reads units as decimals, and patterns as strings
            if form in UNITS:
                found.append((field.name, type_mismatch(field), is_huge))
            continue
        if check := _check_leaves(field.dataType, DecimalType, is_huge):
            found.append((field.name, type_mismatch(field), check))
        if check := _check_leaves(field.dataType, TimestampType, _is_beyond):
            found.append((field.name, out_of_range(field), check))
    return found


def _check_leaves(kind: DataType, leaf: type[DataType], check: _Check) -> _Check | None:
    """Return a function that applies `check` to each value of type `leaf` in a JSON value.

    Returns None if values of type `kind` contain no values of type `leaf`.
    """
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, leaf):
        return check
    if isinstance(kind, StructType):
        fields = [
            (each.name, inner)
            for each in kind.fields
            if (inner := _check_leaves(each.dataType, leaf, check))
        ]
        return partial(_any_field, fields) if fields else None
    if isinstance(kind, ArrayType):
        item = _check_leaves(kind.elementType, leaf, check)
        return item and partial(_any_item, item)
    if isinstance(kind, MapType):
        item = _check_leaves(kind.valueType, leaf, check)
        return item and partial(_any_value, item)
    return None


def _any_field(fields: _Fields, value: Any) -> bool:
    return isinstance(value, dict) and any(check(value.get(name)) for name, check in fields)


def _any_item(check: _Check, value: Any) -> bool:
    return isinstance(value, list) and any(map(check, value))


def _any_value(check: _Check, value: Any) -> bool:
    return isinstance(value, dict) and any(map(check, value.values()))


def is_huge(value: Any) -> bool:
    """Return True if a number or a string is so large that Spark would take hours to convert it."""
    if isinstance(value, Number):
        value = value.decode()
    if isinstance(value, str):
        return len(value) > _DIGITS_MAX or _EXPONENT.search(value) is not None
    return isinstance(value, int) and abs(value) >= _HUGE


def _is_beyond(value: Any) -> bool:
    """Return True if Spark would convert this number of seconds to a wrong time."""
    return isinstance(value, int) and abs(value) > SECONDS_MAX


def find_fault(payload: bytes | None, checks: _Checks = ()) -> str | None:
    """Return why a payload is not a JSON object or fails a check, or None if it is valid."""
    found, why = decode(payload)
    if why is not None:
        return why
    said = [why for name, why, check in checks if name in found and check(found[name])]
    return "; ".join(said) or None


def decode(payload: bytes | None) -> tuple[dict[str, Any], str | None]:
    """Decode a payload. Return its object, and the reason why it is not a valid object, or None.

    Floats are returned as `Number`.
    """
    if not payload:
        return {}, "it has no payload"
    found = decode_strict(payload)
    return _exact(payload) if found is None else (found, None)


def is_ordinary(payload: bytes, found: dict[str, Any]) -> bool:
    """Return True if an object is certain to be within the limits of Spark's JSON reader."""
    if len(payload) <= len(_LONG_NUMBER):
        return True
    if len(payload) > _NAME_MAX or _LONG_NUMBER in payload.translate(_AS_ZEROS):
        return False
    return payload.count(b"[") + payload.count(b"{") <= _DEPTH_MAX or _depth(found) <= _DEPTH_MAX


def _depth(found: dict[str, Any]) -> int:
    depth = 0
    level: list[Any] = [found]
    while level:
        depth += 1
        inner = [each.values() if type(each) is dict else each for each in level]
        level = [value for each in inner for value in each if type(value) in (dict, list)]
    return depth


def rescue_fields(payload: bytes, known: Collection[str]) -> str | None:
    """Return the unknown fields of a valid payload as JSON, or None if all fields are known.

    The values are not changed. If the payload is nested too deeply to separate its fields, the
    whole payload is returned.
    """
    try:
        fields: dict[str, bytes] = _raw()(payload)
    # The recursion limit includes the frames of callers, of which there may be more here than in
    # `faults`.
    except RecursionError:
        return payload.decode()
    found = [
        f"{json.dumps(name, ensure_ascii=False)}: {bytes(value).decode()}"
        for name, value in fields.items()
        if name not in known
    ]
    return f"{{{', '.join(found)}}}" if found else None


@cache
def _raw() -> Callable[[bytes], Any]:
    import msgspec

    return msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


# --- the fast reader ------------------------------------------------------------------------------

_SPACE = b" \t\r\n"


@cache
def _fast() -> Callable[[bytes], Any]:
    import msgspec

    return msgspec.json.Decoder(float_hook=_number).decode  # same floats as in the exact reader


def decode_strict(payload: bytes) -> dict[str, Any] | None:
    """Decode a payload that is certain to be strict JSON. Return None for any other payload.

    The reader is strict except for repeated names, of which it silently keeps the last value. To
    detect them, the names in the payload are counted: a quote and a colon follow each name. If
    there are more of these than names in the decoded object, a name may be repeated.
    """
    try:
        found = _fast()(payload)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    if type(found) is not dict or b"\\ud" in payload or b"\\uD" in payload:
        return None
    names = len(found) if payload.count(b"{") == 1 else _names(found)
    if names == payload.count(b":") or names == payload.translate(None, _SPACE).count(b'":'):
        return found
    return None


def _names(found: dict[str, Any]) -> int:
    """Return the number of names in an object and in all objects inside it."""
    names = 0
    held: list[Any] = [found]
    while held:
        each = held.pop()
        if type(each) is dict:
            names += len(each)
            each = each.values()
        kinds = set(map(type, each))
        if dict in kinds or list in kinds:
            held += [value for value in each if type(value) is dict or type(value) is list]
    return names


def _exact(payload: bytes) -> tuple[dict[str, Any], str | None]:
    """Decode a payload exactly. Return its object, and the reason why it is not valid, or None."""
    try:
        found = _decoder.decode(payload.decode())
        if b"\\ud" in payload or b"\\uD" in payload:
            json.dumps(found, ensure_ascii=False, default=repr).encode()
    except UnicodeDecodeError:
        return {}, "it is not UTF-8"
    except UnicodeEncodeError:
        return {}, "it contains half of a surrogate pair, such as \\ud800"
    except _DuplicateFieldError as error:
        return {}, str(error)
    except (ValueError, RecursionError):
        return {}, "it is not JSON"
    if not isinstance(found, dict):
        return {}, "it is JSON, but not an object"
    return found, None
