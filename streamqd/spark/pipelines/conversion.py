"""Convert JSON values to Arrow columns without Spark, where the result is certain to be the same.

Spark accepts many more formats than this module, such as a hundred formats of a time. A row with a
value in another format is left undecided, which means that Spark will convert it. This module may
leave any row undecided, but it must never contradict Spark: its values are equal to Spark's, and it
rejects a row only if Spark would, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import compute

from streamqd.spark.pipelines.strict import SECONDS_MAX, Number, is_huge

_US = 1_000_000
BEYOND_US = 253_402_300_800 * _US  # start of the year 10,000. Most readers reject later times.
_EMPTY: dict[str, Any] = {}
_DAY = (
    "(?:[1-9][0-9]{3}-(?:"
    "(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31"
    ")|[1-9][0-9](?:0[48]|[2468][048]|[13579][26])-02-29)"
)
_MOMENT = _DAY + r"[T ](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = "(?:Z|[+-](?:0[0-9]|1[0-7]):[0-5][0-9])"
_DATE, _LOCAL, _ZONED = f"^{_DAY}$", f"^{_MOMENT}$", f"^{_MOMENT}{_ZONE}$"
_NANOSECONDS = r"(:[0-9]{2}\.[0-9]{6})[0-9]{1,3}(Z|[+-][0-9:]{5})?$"  # Spark drops these digits
_LOW_BITS, _MIDPOINT = (1 << 29) - 1, 1 << 28  # bits of a double between two floats
_FLOAT_MIN, _FLOAT_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class Converted(NamedTuple):
    """A converted column, with the rows whose values are wrong or undecided.

    For these rows, ignore the values in `column`.
    """

    column: pa.Array
    wrong: set[int]
    undecided: set[int]


def convert(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    """Convert JSON values to a column of this Arrow type.

    The values must have the Python types that `strict.decode` returns.
    """
    for applies, converter in _CONVERTERS:
        if applies(kind):
            return converter(kind, values)
    return leave_to_spark(kind, values)  # maps and binary columns


def _rows_with_value(values: Sequence[Any]) -> list[int]:
    return [at for at, value in enumerate(values) if value is not None]


def _kinds(values: Iterable[Any]) -> set[type]:
    return set(map(type, values)) - {type(None)}


def _find_other_types(values: Sequence[Any], *kinds: type) -> dict[int, Any]:
    """Return the values, by row, that are not null and have none of these types."""
    return {
        at: value
        for at, value in enumerate(values)
        if value is not None and type(value) not in kinds
    }


def _with_nulls(values: Sequence[Any], rows: Iterable[int]) -> Sequence[Any]:
    """Return a copy of the values, with null in these rows."""
    kept = list(values)
    for at in rows:
        kept[at] = None
    return kept


def _begins_with_letter(text: Any) -> bool:
    """Return True if a value is a string that, by its first letter, cannot be a date or a time.

    `T` is possible, because a time may be `T10:00`. So is `GMT`, because Spark removes it from
    dates and times, even at the start.
    """
    return (
        type(text) is str
        and text[:1].isascii()
        and text[:1].isalpha()
        and text[0] not in "tT"
        and not text.startswith("GMT")
    )


def _is_no_number(text: Any) -> bool:
    """Return True if a value is a string that Spark cannot read as a number."""
    return _begins_with_letter(text) and not is_huge(text)


# --- columns of single values ---------------------------------------------------------------------


def _integers(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    wrong: set[int] = set()
    if _kinds(values) - {int}:
        wrong = set(_find_other_types(values, int))
        values = _with_nulls(values, wrong)
    try:
        return Converted(pa.array(values, kind), wrong, set())
    except (OverflowError, pa.ArrowInvalid):
        above = 1 << (kind.bit_width - 1)
        beyond = {at for at, value in enumerate(values) if value and not -above <= value < above}
        return Converted(pa.array(_with_nulls(values, beyond), kind), wrong | beyond, set())


def _booleans(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    wrong = set(_find_other_types(values, bool)) if _kinds(values) - {bool} else set()
    return Converted(pa.array(_with_nulls(values, wrong), kind), wrong, set())


def _doubles(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    wrong: set[int] = set()
    undecided: set[int] = set()
    if _kinds(values) - {Number, int}:
        others = _find_other_types(values, Number, int)
        # Strings such as `NaN` and `+INF` are undecided, and so is the empty string.
        undecided = {at for at, each in others.items() if type(each) is str and each[:1] in "NI+-"}
        wrong = others.keys() - undecided
        values = _with_nulls(values, others)
    try:
        numbers = [None if value is None else float(value) for value in values]
    except OverflowError:  # a huge integer
        huge = {at for at, each in enumerate(values) if type(each) is int and abs(each) >> 1000}
        undecided |= huge
        numbers = [None if value is None else float(value) for value in _with_nulls(values, huge)]
    return Converted(pa.array(numbers, kind), wrong, undecided)


def _floats(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    """Convert values to doubles first, and then to floats.

    Values that are halfway between two floats, or outside the range of normal floats, are
    undecided.
    """
    doubles, wrong, undecided = _doubles(pa.float64(), values)
    size = compute.abs(doubles)
    between = compute.equal(compute.bit_wise_and(doubles.view(pa.int64()), _LOW_BITS), _MIDPOINT)
    small = compute.and_(compute.less(size, _FLOAT_MIN), compute.not_equal(size, 0.0))
    doubtful = compute.or_(between, compute.or_(small, compute.greater(size, _FLOAT_MAX)))
    rows = compute.indices_nonzero(compute.fill_null(doubtful, False)).to_pylist()
    return Converted(doubles.cast(kind, safe=False), wrong, undecided | set(rows))


def _strings(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    if _kinds(values) <= {str}:
        return Converted(pa.array(values, kind), set(), set())
    # An integer 0 is undecided, because it may have been written as -0. Floats, arrays and objects
    # are undecided, because only Spark can convert them to its own strings.
    undecided = {
        at for at, value in _find_other_types(values, str, bool).items() if not _is_plain(value)
    }
    texts = [_text(value) for value in _with_nulls(values, undecided)]
    return Converted(pa.array(texts, kind), set(), undecided)


def _is_plain(value: Any) -> bool:
    return type(value) is int and value != 0 and value.bit_length() < 64


def _text(value: Any) -> str | None:
    """Convert a string, an integer or a Boolean to the string that Spark would return."""
    if value is None or type(value) is str:
        return value
    return str(value).lower() if type(value) is bool else str(value)


def _decimals(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    kinds, others = _kinds(values), dict[int, Any]()
    if kinds - {str, Number, int}:
        others = _find_other_types(values, str, Number, int)
        values = _with_nulls(values, others)
    if int in kinds:
        values = [str(value) if type(value) is int else value for value in values]
    texts = pa.array(values, pa.string())
    whole = kind.precision - kind.scale
    fraction = rf"(?:\.[0-9]{{1,{kind.scale}}})?" if kind.scale else ""
    # Numbers that do not match have too many digits, or must be rounded, so they are left to Spark.
    pattern = rf"^-?[0-9]{{1,{whole}}}{fraction}$" if whole else "^-?0$"
    certain, open_rows = _filter_matching(texts, pattern)
    wrong = {at for at in open_rows if _is_no_number(values[at])}
    return Converted(certain.cast(kind), wrong | others.keys(), open_rows - wrong)


def _filter_matching(texts: pa.Array, pattern: str) -> tuple[pa.Array, set[int]]:
    """Replace strings that do not match with null. Return the result and the replaced rows."""
    matches = compute.match_substring_regex(texts, pattern)
    if not matches.false_count:
        return texts, set()
    rows = compute.indices_nonzero(compute.invert(matches)).to_pylist()
    return compute.if_else(matches, texts, None), set(rows)


def _dates(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    others = _find_other_types(values, str)
    texts = pa.array(_with_nulls(values, others), pa.string())
    certain, open_rows = _filter_matching(texts, _DATE)
    wrong = {at for at in open_rows if _begins_with_letter(values[at])}
    return Converted(certain.cast(kind), wrong | others.keys(), open_rows - wrong)


def _timestamps(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    if _kinds(values) <= {str}:
        column, open_rows = _moments(kind, pa.array(values, pa.string()))
        wrong = {at for at in open_rows if _begins_with_letter(values[at])}
        return Converted(column, wrong, open_rows - wrong)
    numbers, others = _find_other_types(values, str), dict[int, Any]()
    found = _timestamps(kind, _with_nulls(values, numbers))
    seconds: list[int | None] = [None] * len(values)
    undecided = set(found.undecided)
    for at, value in numbers.items():
        if type(value) is int and abs(value) <= SECONDS_MAX:
            seconds[at] = value * _US
        elif type(value) is int or (type(value) is Number and value.lstrip(b"-").isdigit()):
            undecided.add(at)
        else:
            others[at] = value
    micros = pa.array(seconds, pa.int64()).cast(kind)
    return Converted(compute.coalesce(found.column, micros), found.wrong | others.keys(), undecided)


_OF_UNIT = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,9})?")


def convert_unit(kind: pa.DataType, values: Sequence[Any], factor: int) -> Converted:
    """Convert numbers, or strings that contain numbers, to times.

    A number counts units of `factor` microseconds.
    """
    limit = BEYOND_US // factor
    micros: list[int | None] = [None] * len(values)
    wrong: set[int] = set()
    undecided: set[int] = set()
    for at, value in enumerate(values):
        if type(value) is int and -limit < value < limit:
            micros[at] = value * factor
        elif type(value) in (str, Number, int):
            text = value.decode() if type(value) is Number else str(value)
            found = Decimal(text) if _OF_UNIT.fullmatch(text) else None
            if found is not None and -limit < found < limit:
                micros[at] = int(found * factor)
            elif _is_no_number(value):
                wrong.add(at)
            else:
                undecided.add(at)
        elif value is not None:
            wrong.add(at)
    return Converted(pa.array(micros, pa.int64()).cast(kind), wrong, undecided)


def leave_to_spark(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    """Return a column in which each row with a value is undecided, so that Spark converts it."""
    return Converted(pa.nulls(len(values), kind), set(), set(_rows_with_value(values)))


def _moments(kind: pa.DataType, texts: pa.Array) -> tuple[pa.Array, set[int]]:
    """Convert strings to times. Return the times, and the rows of strings in any other format.

    Times without a time zone are in UTC.
    """
    zoned, rest = _filter_matching(texts, _ZONED)
    if rest:
        texts = compute.replace_substring_regex(texts, _NANOSECONDS, r"\1\2")
        zoned, rest = _filter_matching(texts, _ZONED)
    column = zoned.cast(kind)
    if not rest:
        return column, rest
    local, other = _filter_matching(texts, _LOCAL)
    local = local.cast(pa.timestamp("us")).cast(pa.int64()).cast(kind)
    return compute.coalesce(column, local), rest & other


# --- columns of several values --------------------------------------------------------------------


def _structs(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    wrong: set[int] = set()
    if _kinds(values) - {dict}:
        wrong = set(_find_other_types(values, dict))
        values = _with_nulls(values, wrong)
    mask = None
    if None in values:
        mask = pa.array([value is None for value in values], pa.bool_())
        values = [_EMPTY if value is None else value for value in values]
    undecided: set[int] = set()
    fields = [kind.field(at) for at in range(kind.num_fields)]
    columns = []
    for field, inner in zip(fields, by_name(values, [each.name for each in fields]), strict=True):
        found = convert(field.type, inner)
        columns.append(found.column)
        wrong |= found.wrong
        undecided |= found.undecided
    column = pa.StructArray.from_arrays(columns, fields=fields, mask=mask)
    return Converted(column, wrong, undecided)


def by_name(objects: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[Sequence[Any]]:
    """Yield, for each name, its values in the JSON objects.

    The value is None where the name is missing.
    """
    if len(names) > 1 and objects:
        try:
            yield from zip(*map(itemgetter(*names), objects), strict=True)
            return
        except KeyError:
            pass
    for name in names:
        yield [each.get(name) for each in objects]


def _lists(kind: pa.DataType, values: Sequence[Any]) -> Converted:
    wrong: set[int] = set()
    if _kinds(values) - {list}:
        wrong = set(_find_other_types(values, list))
        values = _with_nulls(values, wrong)
    starts: list[int | None] = []
    rows: list[int] = []
    items: list[Any] = []
    for at, value in enumerate(values):
        starts.append(None if value is None else len(items))
        if value:
            rows += [at] * len(value)
            items += value
    found = convert(kind.value_type, items)
    starts.append(len(items))
    column = pa.ListArray.from_arrays(pa.array(starts, pa.int32()), found.column).cast(kind)
    wrong |= {rows[at] for at in found.wrong}
    return Converted(column, wrong, {rows[at] for at in found.undecided})


_Converter = Callable[[pa.DataType, Sequence[Any]], Converted]
_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], _Converter], ...] = (
    (pa.types.is_string, _strings),
    (pa.types.is_integer, _integers),
    (pa.types.is_float64, _doubles),
    (pa.types.is_timestamp, _timestamps),
    (pa.types.is_decimal, _decimals),
    (pa.types.is_boolean, _booleans),
    (pa.types.is_date32, _dates),
    (pa.types.is_float32, _floats),
    (pa.types.is_struct, _structs),
    (pa.types.is_list, _lists),
)
