"""The document of a report, for programs and for the page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.spark.pipelines import report_figures as figures
from streamqd.spark.pipelines.report_tables import FORMAT, TABLES, Rows, by_topic

# What each latency is, from where to where. All ids and times are of Redis's clock.
MEASURES = {
    "dead at once": "from the first write of a message to its death, for those that died in their"
    " first run, by group",
    "dead after retries": "the same, for those with more than one failed run or crash",
    "dead after a replay": "the same, for those that had been brought back by an operator; the time"
    " that they lay dead before counts",
    "scheduled": "from sending a message with a delay to its being written to the partition; the"
    " delay that was asked for counts",
    "forwarded": "from the first write of a message to that of the message made of it, told by the"
    " header uid, by the topic that it came from",
    "replayed": "from an entry to its copy, told by the header x-replay-of",
    "returned": "from the first write of a message to its being brought back for all groups",
}


def document(
    made: Mapping[str, Any],
    found: Mapping[str, Rows],
    truncated: Sequence[str],
) -> dict[str, Any]:
    """The report as JSON has it. `made` says how it was made, `found` are the tables."""
    parts = {name: by_topic(rows) for name, rows in found.items()}

    def rows_of(name: str, topic: str) -> list[dict[str, Any]]:
        return [_readable(row, name) for row in parts[name].get(topic, ())]

    topics = []
    for row in found["topics"]:
        topic = row["topic"]
        body = {name: rows_of(name, topic) for name in TABLES if name != "topics"}
        topics.append({**_readable(row, "topics"), "topic": topic, **body})
    return {
        "format": FORMAT,
        **made,
        "measures": MEASURES,
        "truncated": list(truncated),
        "topics": topics,
    }


def _readable(row: Mapping[str, Any], table: str) -> dict[str, Any]:
    """A row as JSON has it: times as text, keys as text and, where they are none, as hex too."""
    shown: dict[str, Any] = {}
    for name, kind in TABLES[table].items():
        value = row[name]
        if kind == "timestamp":
            value = figures.iso(value)
        elif kind == "binary":
            shown[f"{name}_hex"] = value.hex()
            value = figures.safe_text(value)
        shown[name] = value
    del shown["topic"]
    return shown
