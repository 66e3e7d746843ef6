"""The tables of a report: their columns, and their rows made of what was counted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.spark.pipelines import report_figures as figures

Row = Mapping[str, Any]
Rows = Sequence[Row]

FAMILY = "streamqd-report/"
FORMAT = FAMILY + "1"

_SEEN = "first timestamp, last timestamp"
# The columns of the tables with their Arrow types; what is `timestamp` holds unix ms until then.
TABLES: dict[str, dict[str, str]] = {
    name: dict(part.split() for part in text.split(", "))
    for name, text in {
        "topics": f"topic string, partition_count int64, rows int64, bytes int64, {_SEEN},"
        " letters int64, keyed_rows int64, keys_about int64, hottest_key_share double,"
        " rows_max_over_mean double, bytes_max_over_mean double, recommendation string",
        "partitions": f"topic string, partition int64, rows int64, bytes int64, {_SEEN}",
        "keys": "topic string, rank int64, key binary, rows int64, bytes int64, share double",
        "throughput": "topic string, at timestamp, width_seconds double, rows int64, bytes int64",
        "latency": "topic string, measure string, of string, count int64, p50_ms int64,"
        " p90_ms int64, p99_ms int64, max_ms int64, skipped int64",
        "dead_by_fingerprint": f"topic string, fingerprint string, letters int64, {_SEEN},"
        " newest string, error_class string, place string, handler string, group string,"
        " reason string, error_message string",
        "dead_by_class": f"topic string, error_class string, letters int64, {_SEEN}, newest string",
        "dead_by_handler": "topic string, group string, handler string, letters int64,"
        f" {_SEEN}, newest string",
        "dead_by_hour": "topic string, at timestamp, letters int64",
    }.items()
}


@dataclass
class Counts:
    """What was counted, as `report_queries` gives it. `sizes`: how many partitions a topic has."""

    sizes: Mapping[str, int]
    places: Rows = ()
    keys: Rows = ()
    throughput: Rows = ()
    latency: Rows = ()
    deaths: Rows = ()
    truncated: list[str] = field(default_factory=list)

    @property
    def partitions(self) -> dict[str, list[Row]]:
        """The rows about partitions, by topic."""
        return by_topic([row for row in self.places if row["partition"] is not None])

    @property
    def wholes(self) -> dict[str, Row]:
        """The rows about whole topics."""
        return {row["topic"]: row for row in self.places if row["partition"] is None}


def widths(counts: Counts) -> dict[str, int]:
    """The width of the throughput's buckets of each topic, in ms, by the time that it spans."""
    return {
        topic: figures.bucket_ms(row["first_ms"], row["last_ms"])
        for topic, row in counts.wholes.items()
    }


def tables(counts: Counts) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table, with the columns of TABLES."""
    partitions, wholes = _partitions(counts), counts.wholes
    causes = [row for row in counts.deaths if row["at"] is None]
    hours = [row for row in counts.deaths if row["at"] is not None]
    made: dict[str, Rows] = {
        "topics": _topics(counts, by_topic(partitions), by_topic(hours)),
        "partitions": partitions,
        "keys": [
            {**row, "share": row["rows"] / wholes[row["topic"]]["rows"]} for row in counts.keys
        ],
        "throughput": _throughput(counts),
        "latency": counts.latency,
        "dead_by_fingerprint": summed(causes, "fingerprint"),
        "dead_by_class": summed(causes, "error_class"),
        "dead_by_handler": summed(causes, "group", "handler"),
        "dead_by_hour": sorted(hours, key=lambda row: (row["topic"], row["at"])),
    }
    return {
        name: [{column: row[column] for column in TABLES[name]} for row in rows]
        for name, rows in made.items()
    }


def summed(causes: Rows, *names: str) -> list[dict[str, Any]]:
    """Causes of death put together where topic and these columns agree, the most frequent first.

    What else a row says is what its newest letter says.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in causes:
        held = found.setdefault(
            (row["topic"], *(row[name] for name in names)), {**row, "letters": 0}
        )
        newer = row if row["last_ms"] > held["last_ms"] else held
        held.update(
            {**newer, "letters": held["letters"] + row["letters"]},
            first_ms=min(held["first_ms"], row["first_ms"]),
        )
    ordered = sorted(found.values(), key=lambda row: (row["topic"], -row["letters"]))
    return [_timed(row) for row in ordered]


# --- parts ----------------------------------------------------------------------------------------


def _partitions(counts: Counts) -> list[dict[str, Any]]:
    """A row for each partition of each topic, those without entries too."""
    made = []
    for topic, size in counts.sizes.items():
        held = {row["partition"]: row for row in counts.partitions.get(topic, ())}
        # An archive may know partitions of a topic that Redis has forgotten.
        for number in range(max(size, 1, *(each + 1 for each in held))):
            nothing = {"topic": topic, "partition": number, "rows": 0, "bytes": 0}
            made.append(_timed(held.get(number, nothing)))
    return made


def _topics(
    counts: Counts, partitions: Mapping[str, Rows], hours: Mapping[str, Rows]
) -> list[dict[str, Any]]:
    keys, wholes = by_topic(counts.keys), counts.wholes
    made = []
    for topic, places in partitions.items():
        rows = [row["rows"] for row in places]
        heavy = [(row["key"], row["rows"]) for row in keys.get(topic, ())]
        even = figures.balance(rows, [row["bytes"] for row in places])
        whole = wholes.get(topic, {"rows": 0, "bytes": 0, "keyed": 0, "keys": 0})
        made.append(
            {
                **_timed(whole),
                "topic": topic,
                "partition_count": len(places),
                "letters": sum(row["letters"] for row in hours.get(topic, ())),
                "keyed_rows": whole["keyed"],
                "keys_about": whole["keys"],
                "hottest_key_share": heavy[0][1] / whole["rows"] if heavy else None,
                "rows_max_over_mean": even.rows,
                "bytes_max_over_mean": even.size,
                "recommendation": figures.advice(rows, heavy, whole["keys"]),
            }
        )
    return made


def _throughput(counts: Counts) -> list[dict[str, Any]]:
    width, wholes = widths(counts), counts.wholes
    made = []
    for topic, rows in by_topic(counts.throughput).items():
        marks = {row["at"]: (row["rows"], row["bytes"]) for row in rows}
        whole, seconds = wholes[topic], width[topic] / 1000
        every = figures.filled(marks, width[topic], whole["first_ms"], whole["last_ms"])
        made += [
            {"topic": topic, "at": at, "width_seconds": seconds, "rows": number, "bytes": size}
            for at, number, size in every
        ]
    return made


def _timed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its times named as the tables name them."""
    return {**row, "first": row.get("first_ms"), "last": row.get("last_ms")}


def by_topic(rows: Rows) -> dict[str, list[Row]]:
    """The rows of each topic."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["topic"], []).append(row)
    return found
