"""The settings of a topic's Spark pipelines."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.config.setting import setting


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Settings of `streamqd pipeline` for a topic, named by its table. The daemon ignores them."""

    schema: str | None = setting(
        None,
        "Columns of the topic's JSON, written as in Spark SQL's CREATE TABLE:"
        ' "id long, amount decimal(10,2), at timestamp". `pipeline archive` then also writes a'
        " parsed table, and `pipeline report` describes its columns. Empty: payloads stay bytes.",
    )
    event_time: str | None = setting(
        None,
        "Column of the schema, a timestamp or a date, by whose date (UTC) that table is divided."
        " Empty: the time of the entry.",
    )
