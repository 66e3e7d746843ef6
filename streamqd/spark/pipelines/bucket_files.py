"""Read tables in an object store with Spark, whose tasks read the Parquet files with pyarrow.

Spark's own reader cannot be used, because it needs a Hadoop file system for each kind of store, and
no Python package contains one. The source uses filters to skip files and row groups, and Spark
applies the same filters to each row.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from streamqd.spark import register_once
from streamqd.spark.location import BucketFolder, source_name
from streamqd.spark.pipelines.parts import WrittenFile
from streamqd.spark.pipelines.storage import RAW, ArchiveTable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FORMAT = "streamq_table"
_FILES = "files"  # name of the option that contains the files to read, as JSON
_TASK_BYTES = 64 << 20  # target bytes of the files that one task reads
_ROWS = 8192  # maximum rows in a batch
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SIGNS = {
    EqualTo: "=",
    In: "in",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_COMPARE = {
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
# Types whose values Spark and pyarrow compare in the same way. Floats are left out, for example,
# because Spark and pyarrow compare NaN differently.
_COMPARED = ("byte", "short", "integer", "long", "string", "binary", "date", "timestamp")


class Condition(NamedTuple):
    """A condition on a column, such as (`date`, `>=`, a date).

    For the sign `in`, the value is a tuple.
    """

    column: str
    sign: str
    value: Any


class ListedFile(NamedTuple):
    """A file of a table.

    In a raw table, its IDs have times from `first_ms` to `last_ms` (Unix ms).
    """

    path: str
    date: str
    partition: int
    size: int
    first_ms: int
    last_ms: int


class FilesPartition(InputPartition):
    """The input of one task: the files to read."""

    def __init__(self, files: Sequence[ListedFile]) -> None:
        super().__init__([each.path for each in files])
        self.files = tuple(files)


def read(
    spark: SparkSession, table: ArchiveTable, files: Sequence[WrittenFile], schema: StructType
) -> DataFrame:
    """Return the rows of these files with all columns of the table."""
    folder = table.folder
    assert isinstance(folder, BucketFolder)
    name = source_name(FORMAT, folder)
    register_once(spark, _source(folder, name, table.partitioned))
    listed = [
        (each.path, each.date, each.partition, each.size, each.first[0], each.last[0])
        for each in files
    ]
    return spark.read.format(name).schema(schema).option(_FILES, json.dumps(listed)).load()


def _source(folder: BucketFolder, name: str, partitioned: tuple[str, ...]) -> type[DataSource]:
    """Return a data source for one table.

    The directory of the table is stored in the class and not in an option, because it may contain
    credentials, and Spark shows options in plans and event logs.
    """

    class BucketTableSource(DataSource):
        """A data source for the files of one table."""

        @classmethod
        def name(cls) -> str:
            return name

        def reader(self, schema: StructType) -> DataSourceReader:
            listed = [ListedFile(*each) for each in json.loads(self.options[_FILES])]
            return BucketTableReader(folder, schema, partitioned, listed)

    return BucketTableSource


class BucketTableReader(DataSourceReader):
    """Reads the files of a table, except those without a row that matches all conditions."""

    def __init__(
        self,
        folder: BucketFolder,
        schema: StructType,
        partitioned: tuple[str, ...],
        files: Sequence[ListedFile],
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._partitioned = partitioned
        self._files = files
        self._conditions: list[Condition] = []

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        for each in filters:
            condition = self._translate_filter(each)
            if condition is not None:
                self._conditions.append(condition)
            yield each

    def _translate_filter(self, given: Filter) -> Condition | None:
        sign = _SIGNS.get(type(given))
        path: tuple[str, ...] = getattr(given, "attribute", ())
        value = getattr(given, "value", None)
        if sign is None or len(path) != 1 or value is None or path[0] not in self._schema.names:
            return None
        if self._schema[path[0]].dataType.typeName() not in _COMPARED:
            return None
        if sign == "in":
            value = tuple(each for each in value if each is not None)
        return Condition(path[0], sign, value)

    def partitions(self) -> Sequence[InputPartition]:
        tasks: list[list[ListedFile]] = []
        size = _TASK_BYTES
        for file in self._files:
            if all(_may_hold(self._bounds(file, each.column), each) for each in self._conditions):
                if size + file.size > _TASK_BYTES:
                    tasks.append([])
                    size = 0
                tasks[-1].append(file)
                size += file.size
        return [FilesPartition(each) for each in tasks] or [FilesPartition(())]

    def _bounds(self, file: ListedFile, column: str) -> tuple[Any, Any] | None:
        """Return the minimum and maximum of a column in a file, or None if they are unknown."""
        if column in self._partitioned:
            value = self._partition_values(file)[column]
            return value, value
        if self._partitioned != RAW.partitioned:
            return None  # other tables may have columns of their own with these names
        if column == "id_ms":
            return file.first_ms, file.last_ms
        if column == "timestamp":
            return _moment(file.first_ms, 0), _moment(file.last_ms, 1)
        return None

    def _partition_values(self, file: ListedFile) -> dict[str, Any]:
        """Return the values that the table's partition columns have in a file."""
        values = (dt.date.fromisoformat(file.date) if file.date else None, file.partition)
        return dict(zip(self._partitioned, values, strict=False))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the files that match all conditions.

        Raises OSError if a file is unreadable.
        """
        from pyarrow import dataset
        from pyspark.sql.pandas.types import to_arrow_schema

        assert isinstance(partition, FilesPartition)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        kind = dataset.ParquetFileFormat()
        system = self._folder.system
        wanted = _conjunction(_expression(each, schema) for each in self._conditions)
        for file in partition.files:
            values = _conjunction(
                _expression(Condition(name, "=", value), schema)
                for name, value in self._partition_values(file).items()
            )
            made = kind.make_fragment(file.path, system, values)
            whole = dataset.FileSystemDataset([made], schema, kind, system)
            with self._folder.masked_errors():
                for batch in whole.to_batches(
                    filter=wanted, batch_size=_ROWS, batch_readahead=2, use_threads=False
                ):
                    if batch.num_rows:
                        yield _cast(schema, batch)


def _moment(unix_ms: int, more_ms: int) -> dt.datetime:
    """Return the sum as a time.

    If it is after the year 9999, return the last time that Python supports.
    """
    try:
        return _EPOCH + dt.timedelta(milliseconds=unix_ms + more_ms)
    except OverflowError:
        return dt.datetime.max.replace(tzinfo=dt.UTC)


def _may_hold(bounds: tuple[Any, Any] | None, condition: Condition) -> bool:
    """Return False if no value within the bounds can match a condition."""
    if bounds is None:
        return True
    low, high = bounds
    _, sign, value = condition
    if sign in ("=", "in"):
        return any(low <= each <= high for each in (value if sign == "in" else (value,)))
    return bool(_COMPARE[sign](high if sign in (">", ">=") else low, value))


def _conjunction(expressions: Iterable[Any]) -> Any:
    """Combine pyarrow expressions with `and`. Return None if there are none."""
    found = list(expressions)
    return functools.reduce(operator.and_, found) if found else None


def _expression(condition: Condition, schema: pa.Schema) -> Any:
    """Convert a condition to a pyarrow expression."""
    import pyarrow as pa
    from pyarrow import dataset

    column, kind = dataset.field(condition.column), schema.field(condition.column).type
    if condition.sign == "in":
        return column.isin(pa.array(condition.value, kind))
    return _COMPARE[condition.sign](column, pa.scalar(condition.value, kind))


def _cast(schema: pa.Schema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert a batch to exactly the types that Spark expects."""
    import pyarrow as pa

    columns = [batch.column(each.name) for each in schema]
    cast = [
        each if each.type == field.type else each.cast(field.type)
        for each, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(cast, schema=schema)
