"""The settings of a topic's Spark pipelines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamqd.config.setting import Shape, setting

_TIME = Shape(
    re.compile(r"\w[\w-]*\s+\S.*"),
    'write a column and a unit or a pattern, such as "at milliseconds" or "at dd/MM/yyyy HH:mm"',
)
_EXTRA = Shape(
    re.compile("entry_key|entry_headers|_rescued"),
    'write "entry_key", "entry_headers" or "_rescued"',
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Settings of `streamqd pipeline` for one topic. The daemon ignores them."""

    schema: str | None = setting(
        None,
        "Columns of the topic's payloads, written as in Spark SQL's CREATE TABLE, such as"
        ' "id long, amount decimal(10,2), at timestamp". With a schema, `pipeline archive` also'
        " writes a parsed table, and `pipeline report` describes its columns. If empty, payloads"
        " stay bytes.",
    )
    event_time: str | None = setting(
        None,
        "Timestamp or date column by which the parsed table is partitioned, by UTC date."
        " Empty means the time of the entry.",
    )
    times: tuple[str, ...] = setting(
        (),
        'Formats of timestamp and date columns, each as "COLUMN FORMAT", such as'
        ' ["at milliseconds", "day dd/MM/yyyy"]. FORMAT is seconds, milliseconds or microseconds'
        " (since 1970), or a Spark pattern. Without a format, a column is read as ISO 8601 or"
        " seconds.",
        shape=_TIME,
    )
    extra: tuple[str, ...] = setting(
        (),
        "Additional columns of the parsed table. entry_key: the key of the entry. entry_headers:"
        " its headers. _rescued: payload fields without a column, as JSON.",
        shape=_EXTRA,
    )
    codec: str = setting(
        "json",
        "Encoding of the payloads that the parsed table and `pipeline report` read.",
        choices=("json", "msgpack"),
    )
