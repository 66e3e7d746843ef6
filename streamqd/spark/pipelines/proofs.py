"""Validate payloads without Spark where the result is certain to be the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import compute

from streamqd.spark.pipelines import schemas
from streamqd.spark.pipelines.conversion import by_name, convert, convert_unit, leave_to_spark
from streamqd.spark.pipelines.packed import Reader, json_texts
from streamqd.spark.pipelines.reasons import CheckedRows, Reasons, last_day, to_days
from streamqd.spark.pipelines.strict import decode, is_ordinary

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SAMPLED = 64  # one in this number of payloads is searched for names that differ in case
# Maximum number of dates in a batch. With more dates, all rows are left to Spark, which sorts them,
# so that each date still gets only one file.
DATES_MAX = 16


class Prover:
    """Validates rows of a raw table without Spark. Each task gets a copy of the instance.

    Each payload is decoded, and the values are then converted column by column. If only Spark can
    convert a value, the row is left undecided, so that Spark checks it.
    """

    def __init__(
        self, kind: StructType, event_time: str, now_us: int, read: Reader = json_texts
    ) -> None:
        self._kind = kind
        self._read = read
        self._event_time = event_time
        self._last_day = last_day(now_us)
        self._reasons = Reasons(kind, event_time, now_us, read)
        self._columns = list(schemas.table_columns(kind))
        self._forms = {
            each.name: form for each in kind.fields if (form := schemas.time_format(each))
        }

    def __call__(self, batch: pa.RecordBatch) -> CheckedRows:
        """Validate a batch, and return its rows with the verdicts."""
        objects, faults, undecided = _objects(*self._read(batch["value"].to_pylist()))
        fields = self._columns
        columns: dict[str, pa.Array] = {}
        wrong: dict[str, set[int]] = {}
        for field, values in zip(fields, by_name(objects, self._kind.names), strict=True):
            form = self._forms.get(field.name)
            if form is None:
                found = convert(field.type, values)
            elif form in schemas.UNITS:
                found = convert_unit(field.type, values, schemas.UNITS[form])
            else:
                found = leave_to_spark(field.type, values)
            columns[field.name] = found.column
            wrong[field.name] = found.wrong
            undecided |= found.undecided
        reasons = self._reasons.find_reasons(
            pa.array(faults, pa.string()), columns.__getitem__, wrong
        )
        dates = self._dates(columns, batch["date"])
        if len(dates.filter(reasons.is_null()).unique()) > DATES_MAX:
            undecided.update(range(len(batch)))
        row = pa.StructArray.from_arrays(list(columns.values()), fields=fields)
        rows = batch.append_column("event_date", dates).append_column("row", row)
        return CheckedRows(rows, reasons, sorted(undecided), self._find_case_variants(objects))

    def _find_case_variants(self, objects: Sequence[dict[str, Any]]) -> frozenset[tuple[str, str]]:
        """Return names that differ from a column only in case, each together with the column.

        Only a sample of the objects is searched. At most one name per column is returned, because
        payloads can contain thousands of such names.
        """
        names = set[str]().union(*objects[::_SAMPLED]).difference(self._kind.names)
        columns = {each.lower(): each for each in self._kind.names}
        found = {columns[each.lower()]: each for each in names if each.lower() in columns}
        return frozenset((name, column) for column, name in found.items())

    def _dates(self, columns: dict[str, pa.Array], dates: pa.Array) -> pa.Array:
        """Return, for each row, the date under which it is stored if it fits the schema."""
        if not self._event_time:
            return dates
        found = to_days(self._kind[self._event_time].dataType, columns[self._event_time])
        possible = compute.and_(
            compute.greater_equal(found, 0), compute.less_equal(found, self._last_day)
        )
        return compute.if_else(possible, found, None).cast(pa.int32()).cast(pa.date32())


def _objects(
    texts: Sequence[bytes | None], unread: Sequence[str | None]
) -> tuple[list[dict[str, Any]], list[str | None], set[int]]:
    """Decode JSON texts. Return an object and a fault for each, and the rows that are undecided.

    The fault is None if the text is valid. A payload that could not be converted to JSON already
    has a fault, which is passed in `unread`.
    """
    objects: list[dict[str, Any]] = []
    faults: list[str | None] = []
    undecided: set[int] = set()
    for at, (text, unreadable) in enumerate(zip(texts, unread, strict=True)):
        found, why = ({}, unreadable) if unreadable else decode(text)
        if text and why is None and not is_ordinary(text, found):
            undecided.add(at)
            found = {}
        objects.append(found)
        faults.append(why)
    return objects, faults, undecided
