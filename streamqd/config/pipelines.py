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
    """The settings of `streamqd pipeline` for one topic. The daemon ignores them."""

    schema: str | None = setting(
        None,
        "The columns of the topic's payloads, written as in Spark SQL's `CREATE TABLE`, such as"
        ' `"id long, amount decimal(10,2), at timestamp"`. With a schema, `pipeline archive` also'
        " writes a parsed table, and `pipeline report` describes its columns. Without one,"
        " payloads stay bytes.",
    )
    event_time: str | None = setting(
        None,
        "The timestamp or date column by which the parsed table is partitioned, by UTC date. If"
        " this setting is empty, the time of the entry is used.",
    )
    times: tuple[str, ...] = setting(
        (),
        'The formats of timestamp and date columns, each written as `"COLUMN FORMAT"`, such as'
        ' `["at milliseconds", "day dd/MM/yyyy"]`. FORMAT is seconds, milliseconds or microseconds'
        " (since 1970), or a Spark pattern. The values of a column without a format are read as"
        " ISO 8601 or as seconds.",
        shape=_TIME,
    )
    extra: tuple[str, ...] = setting(
        (),
        'Additional columns of the parsed table: "entry_key" for the key of the entry,'
        ' "entry_headers" for its headers, and "_rescued" for the payload fields that have no'
        " column, as JSON.",
        shape=_EXTRA,
    )
    codec: str = setting(
        "json",
        "The encoding of the payloads that the parsed table and `pipeline report` read.",
        choices=("json", "msgpack"),
    )
