"""Find the reasons why converted rows do not fit their schema, as one sentence per wrong column.

Whole columns are checked at a time, so rows that fit take almost no time. Spark returns null for a
value that does not fit its type. To tell such a value from a real null, the payload of a wrong row
is decoded again: a value that is null only in the column did not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from streamqd.spark.pipelines.packed import Reader, json_texts
from streamqd.spark.pipelines.schemas import BAD, misaligns_columns, out_of_range, type_mismatch
from streamqd.spark.pipelines.strict import decode

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructField, StructType

DAY_US = 86_400_000_000
FIRST_DAY, LAST_DAY = -719_162, 2_932_896  # first day of the year 1, last day of 9999, since 1970
_NUMBER_MAX = 1000
_LONG_NUMBER = re.compile(rb"[:,\[\s]-?\d[\d.eE+-]{1000}")
_OTHER = "it does not fit the schema"


def last_day(now_us: int) -> int:
    """Return the last day that an event time may have, which is tomorrow (days since 1970, UTC)."""
    return now_us // DAY_US + 1


class CheckedRows(NamedTuple):
    """Rows of a raw table with their verdicts.

    - `rows` contains the columns of the quarantine, `event_date`, and `row`, a struct with the
      columns of the schema.
    - `reasons` contains the reason why each row does not fit, or null if it fits.
    - `undecided` contains the indexes of rows that only Spark can decide.
    - `case_variants` contains pairs of a name in payloads and the column from which it differs only
      in case, at most one for each column.
    """

    rows: pa.RecordBatch
    reasons: pa.Array
    undecided: Sequence[int] = ()
    case_variants: frozenset[tuple[str, str]] = frozenset()


class Reasons:
    """Finds the reasons why rows from `fitting.check_rows` do not fit. Each task gets a copy."""

    def __init__(
        self, kind: StructType, event_time: str, now_us: int, read: Reader = json_texts
    ) -> None:
        self._kind = kind
        self._read = read
        self._event_time = event_time
        self._last_day = last_day(now_us)
        self._misaligned = [each.name for each in kind.fields if misaligns_columns(each.dataType)]

    def __call__(self, batch: pa.RecordBatch) -> CheckedRows:
        """Check a batch, and return its rows with the reasons."""
        columns, wrong = partial(_field, batch["row"]), _true(batch["wrong"])
        return CheckedRows(
            batch, self.find_reasons(batch["fault"], columns, self._find_unfit(batch), wrong)
        )

    def find_reasons(
        self,
        faults: pa.Array,
        columns: Callable[[str], pa.Array],
        unfit: Mapping[str, set[int]],
        wrong_rows: Sequence[int] = (),
    ) -> pa.Array:
        """Return the reason why each row does not fit, or null for a row that fits.

        `unfit` maps each column to the rows in which its value has the wrong type. The rows in
        `wrong_rows` do not fit even if no other reason is found, and then get a general reason.
        """
        import pyarrow as pa

        said: dict[int, list[str]] = {}
        for field in self._kind.fields:
            wrong = unfit.get(field.name, set())
            told = dict.fromkeys(wrong, type_mismatch(field))
            for at, why in self._values(field, columns(field.name)):
                told.setdefault(at, why)
            for at, why in told.items():
                said.setdefault(at, []).append(why)
        if not said and not wrong_rows and faults.null_count == len(faults):
            return pa.nulls(len(faults), pa.string())
        found = faults.to_pylist()
        for at in {*wrong_rows, *said}:
            if found[at] is None:
                found[at] = "; ".join(said.get(at, ())) or _OTHER
        return pa.array(found, pa.string())

    def _find_unfit(self, batch: pa.RecordBatch) -> dict[str, set[int]]:
        """Map each column to the rows in which its value has the wrong type."""
        import pyarrow as pa
        from pyarrow import compute

        rows = _true(compute.and_(batch["wrong"], batch["fault"].is_null()))
        if not rows:
            return {}
        picked = pa.array(rows, pa.int64())
        payloads, _ = self._read(batch["value"].take(picked).to_pylist())
        objects = [decode(each)[0] for each in payloads]
        row, alone = batch["row"].take(picked), None
        if self._misaligned:
            alone = batch["alone"].take(picked)
            row = _field(alone, 0)
        unread = {at for at, each in enumerate(payloads) if each and _has_long_number(each)}
        found: dict[str, set[int]] = {}
        for field in self._kind.fields:
            if field.name in self._misaligned:
                assert alone is not None
                part = _field(alone, 1 + self._misaligned.index(field.name))
                lost = set(_true(_field(part, BAD).is_valid()))
            else:
                values = _Values(objects, field.name)
                lost = _find_lost(field.dataType, _field(row, field.name), values)
            if lost or unread:
                found[field.name] = {rows[at] for at in lost | unread}
        return found

    def _values(self, field: StructField, column: pa.Array) -> Iterable[tuple[int, str]]:
        """Yield rows in which the value has the right type but is invalid, each with the reason."""
        from pyarrow import compute

        timed = field.name == self._event_time
        if (timed or not field.nullable) and column.null_count:
            for at in _true(column.is_null()):
                yield at, f"{field.name} is missing"
        for at in _outside(field.dataType, column):
            yield at, out_of_range(field)
        if timed:
            days = to_days(field.dataType, column)
            for at in _true(compute.less(days, 0)):
                yield at, f"{field.name} is before 1970"
            for at in _true(compute.greater(days, self._last_day)):
                yield at, f"{field.name} is in the future"


def _has_long_number(payload: bytes) -> bool:
    """Return True if a payload contains a number of over 1,000 characters, which Spark rejects.

    A string of digits also matches. Call this only for wrong rows, in which that is unlikely to
    matter.
    """
    return len(payload) > _NUMBER_MAX and _LONG_NUMBER.search(payload) is not None


class _Values(Sequence[Any]):
    """The values of one name in a list of JSON objects, which are looked up on demand."""

    def __init__(self, objects: Sequence[Any], name: str) -> None:
        self._objects, self._name = objects, name

    def __getitem__(self, at: Any) -> Any:
        found = self._objects[at]
        return found.get(self._name) if isinstance(found, dict) else None

    def __len__(self) -> int:
        return len(self._objects)


def _field(column: pa.Array, name: str | int) -> pa.Array:
    """Return a field of a column of structs, with null where the struct is null."""
    from pyarrow import compute

    field = column.field(name)
    if not column.null_count:
        return field
    return compute.if_else(column.is_valid(), field, None)


def _true(mask: pa.Array) -> list[int]:
    """Return the indexes at which a mask is True."""
    from pyarrow import compute

    found: list[int] = compute.indices_nonzero(mask).to_pylist()
    return found


def _find_lost(kind: DataType, column: pa.Array, values: Sequence[Any]) -> set[int]:
    """Return the rows in which the conversion has lost the JSON value or a part of it.

    Do not call this for types for which `misaligns_columns` returns True.
    """
    from pyspark.sql.types import ArrayType, StructType

    found: set[int] = set()
    if column.null_count:
        found.update(at for at in _true(column.is_null()) if values[at] is not None)
    if isinstance(kind, StructType):
        for field in kind.fields:
            inner = _Values(values, field.name)
            found |= _find_lost(field.dataType, _field(column, field.name), inner)
    elif isinstance(kind, ArrayType):
        parents: list[int] = []
        items: list[Any] = []
        lengths = column.value_lengths().to_pylist()
        for at, length in enumerate(lengths):
            value = values[at]
            if length is None:
                continue
            if not isinstance(value, list) or len(value) != length:
                found.add(at)
                value = [None] * length
            parents += [at] * length
            items += value
        inside = _find_lost(kind.elementType, column.flatten(), items)
        found.update(parents[at] for at in inside)
    return found


def _outside(kind: DataType, column: pa.Array) -> set[int]:
    """Return the rows that contain, at any depth, an infinity or a time out of range.

    JSON has no form for an infinity, and some readers of the table cannot represent such times.
    """
    from pyarrow import compute
    from pyspark.sql.types import (
        ArrayType,
        DateType,
        DoubleType,
        FloatType,
        MapType,
        StructType,
        TimestampType,
    )

    if isinstance(kind, DateType | TimestampType):
        days = to_days(kind, column)
        bounds = compute.min_max(days)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        if low is None or (low >= FIRST_DAY and high <= LAST_DAY):
            return set()
        beyond = compute.or_(compute.less(days, FIRST_DAY), compute.greater(days, LAST_DAY))
        return set(_true(beyond))
    if isinstance(kind, FloatType | DoubleType):
        infinite = compute.is_inf(column)
        return set(_true(infinite)) if infinite.true_count else set()
    if isinstance(kind, StructType):
        found: set[int] = set()
        for each in kind.fields:
            found |= _outside(each.dataType, _field(column, each.name))
        return found
    if isinstance(kind, ArrayType):
        return _rows_containing(column, _outside(kind.elementType, column.flatten()))
    if isinstance(kind, MapType):
        entries = column.cast(_as_list(column.type))
        values = entries.flatten().field(1)
        return _rows_containing(entries, _outside(kind.valueType, values))
    return set()


def _as_list(kind: pa.MapType) -> pa.ListType:
    import pyarrow as pa

    return pa.list_(pa.struct([kind.key_field, kind.item_field]))


def _rows_containing(lists: pa.Array, inside: set[int]) -> set[int]:
    """Return the rows whose lists contain these items, given as indexes of the flattened column."""
    from pyarrow import compute

    if not inside:
        return set()
    of = compute.list_parent_indices(lists).to_pylist()
    return {of[at] for at in inside}


def to_days(kind: DataType, column: pa.Array) -> pa.Array:
    """Return the days of dates or timestamps (days since 1970, UTC)."""
    import pyarrow as pa
    from pyarrow import compute

    if kind.typeName() == "date":
        return column.cast(pa.int32()).cast(pa.int64())
    us = column.cast(pa.int64())
    # Integer division rounds toward zero, so one day is subtracted for times before 1970.
    whole = compute.divide(us, DAY_US)
    below = compute.less(us, compute.multiply(whole, DAY_US))
    return compute.subtract(whole, below.cast(pa.int64()))
