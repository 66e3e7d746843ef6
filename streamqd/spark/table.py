"""Store the options of a Spark catalog table in the metadata of its columns.

Spark passes the options of CREATE TABLE to a Python source only once, when it asks for the columns.
Later, readers and writers of the table get only its schema. The options are therefore stored in the
metadata of the schema (decision 0027). This module does no I/O.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streamqd.config.secrets import has_password
from streamqd.spark import rows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_COLUMN = "topic"  # a column that every table has
_OPTIONS = "streamq"
# Spark treats columns with different lengths as different types. When Spark inserts rows, it casts
# them to the columns of the target table, and this metadata is removed. If the schema of a write
# still contains the key, it is therefore the schema of a table that was read.
_LENGTH = "__CHAR_VARCHAR_TYPE_STRING"
_DECLARED = "option."  # prefix of the options of CREATE TABLE. All others belong to the catalog.
_NONE = (
    "streamq: the options are missing; create a table with CREATE TABLE name USING streamq"
    " OPTIONS (topic 'orders'), without columns and without AS"
)
_NO_TARGET = (
    "streamq: the options are missing; set topic, add a column topic, or create a table with"
    " CREATE TABLE name USING streamq OPTIONS (topic 'orders'), without columns and without AS"
)


def creation_options(raw: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options of a CREATE TABLE, or None if the options belong to another operation.

    Raises ValueError if they contain a password, because the catalog would store and show it.
    """
    if "provider" not in raw:
        return None
    if any(has_password(value) for value in raw.values()):
        raise ValueError(
            "streamq: the url of a table cannot contain a password; set passwordFile, set"
            " $STREAMQ_URL, or remove url and use streamq.toml. Spark has already shown this"
            " password in its event log and on its SQL page, so change it"
        )
    given = {name.removeprefix(_DECLARED): raw[name] for name in raw if name.startswith(_DECLARED)}
    return given | {name: raw[name] for name in ("path",) if name in raw}


def schema(columns: Sequence[rows.Column], options: Mapping[str, str]) -> StructType:
    """Return the schema of a table. The metadata of its columns contains the table's options."""
    from pyspark.sql.pandas.types import from_arrow_schema

    made = from_arrow_schema(rows.arrow_schema(columns))
    text = json.dumps(dict(options), sort_keys=True)
    length = 1 + (zlib.crc32(text.encode()) >> 2)
    made[_COLUMN].metadata.update({_OPTIONS: text, _LENGTH: f"varchar({length})"})
    return made


def read_options(schema: StructType, given: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a read, including those of the table that it reads.

    If the read sets an address or topics itself, the table's options are not used. Raises
    ValueError if neither the read nor the table has options.
    """
    text = _text(schema)
    if text is None and not given:
        raise ValueError(_NONE)
    return _merge_options(text, given)


def write_options(schema: StructType, given: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a write, including those of the table that it writes to.

    If the write sets an address or a topic itself, the table's options are not used. Rows that were
    read from a table can be written to any target, so the options of the table that was read are
    never used.

    Raises ValueError if no option, column or table sets the target. Also raises it if rows from a
    table are inserted without a list of columns, because the target is then unknown.
    """
    text = _text(schema)
    if not given and _COLUMN not in schema.fieldNames():
        raise ValueError(_NO_TARGET)
    if text is not None and _LENGTH in schema[_COLUMN].metadata:
        if not given:
            raise ValueError(
                "streamq: Spark does not pass on the table of a row; name the columns, as in"
                " INSERT INTO name (key, value) SELECT key, value FROM …"
            )
        text = None
    return _merge_options(text, given)


def _text(schema: StructType) -> str | None:
    fields = (field for field in schema.fields if field.name == _COLUMN)
    return next((field.metadata.get(_OPTIONS) for field in fields), None)


def _merge_options(text: str | None, given: Mapping[str, str]) -> dict[str, str]:
    own = {name.lower() for name in given}
    if text is None or own & {"url", "topic", "subscribe", "subscribepattern", "assign"}:
        return dict(given)
    return {**json.loads(text), **given}
