"""A report as one page that needs nothing else: no network, no scripts, plots inside. Pure.

Whatever comes from a message is a stranger's text. All of it goes through `_text`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from streamqd.spark.pipelines import report_figures as figures
from streamqd.spark.pipelines import report_plots as plots
from streamqd.spark.pipelines.report_style import STYLE

Row = Mapping[str, Any]
# A heading, the class of its cells, and the cell as HTML.
Column = tuple[str, str, Callable[[Row], str]]

_KEYS_SHOWN = 10
_LETTERS_SHOWN = 20
_PARTITIONS_SHOWN = 12


def page(document: Mapping[str, Any]) -> str:
    """The page of a document, as `report_document.document` makes it."""
    topics = document["topics"]
    sections = [_section(topic, at) for at, topic in enumerate(topics)]
    body = "\n".join((_head(document), _overview(topics), *sections, _meaning(document)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>streamqd report</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


# --- the whole ------------------------------------------------------------------------------------


def _head(document: Mapping[str, Any]) -> str:
    window = document["window"]
    span = (
        "all entries"
        if window["from"] is None and window["to"] is None
        else f"entries from {_time(window['from']) or 'the first'} to"
        f" {_time(window['to']) or 'the last'}"
    )
    where = "Redis" if document["archive"] is None else f"Redis and {_text(document['archive'])}"
    cut = ""
    if document["truncated"]:
        names = ", ".join(document["truncated"])
        cut = f"<p>Too long, so only their first rows were kept: {_text(names)}.</p>"
    return (
        f"<h1>streamqd report</h1>\n<p class=soft>Made {_time(document['made'])} of {span} in"
        f" {where}. All times are UTC. Bytes are those of the payloads.</p>{cut}"
    )


def _overview(topics: Sequence[Row]) -> str:
    if not topics:
        return "<p>There are no topics.</p>"
    numbers = {id(topic): at for at, topic in enumerate(topics)}
    return (
        "<nav>"
        + _table(
            topics,
            (
                ("Topic", "", lambda r: f'<a href="#t{numbers[id(r)]}">{_text(r["topic"])}</a>'),
                ("Entries", "n", lambda r: f"{r['rows']:,}"),
                ("Bytes", "n", lambda r: figures.size(r["bytes"])),
                ("Dead letters", "n", lambda r: f"{r['letters']:,}"),
                ("Fullest / mean", "n", lambda r: _ratio(r["rows_max_over_mean"])),
                ("Hottest key", "n", lambda r: _share(r["hottest_key_share"])),
            ),
        )
        + "</nav>"
    )


def _section(topic: Row, at: int) -> str:
    parts = [f'<section>\n<h2 id="t{at}">{_text(topic["topic"])}</h2>', _facts(topic)]
    parts.append(f"<p class=advice>{_text(topic['recommendation'], most=500)}</p>")
    parts += [_throughput(topic), _partitions(topic), _keys(topic), _latency(topic), _dead(topic)]
    return "\n".join(parts) + "\n</section>"


def _facts(topic: Row) -> str:
    facts = (
        ("Entries", f"{topic['rows']:,}"),
        ("Bytes", figures.size(topic["bytes"])),
        ("Partitions", f"{topic['partition_count']:,}"),
        ("Dead letters", f"{topic['letters']:,}"),
        ("First entry", _time(topic["first"]) or "no data"),
        ("Last entry", _time(topic["last"]) or "no data"),
    )
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f"<dl>{cells}</dl>"


def _meaning(document: Mapping[str, Any]) -> str:
    listed = "".join(
        f"<p><b>{_text(name)}</b>: {_text(meaning, most=500)}.</p>"
        for name, meaning in document["measures"].items()
    )
    return (
        f"<section>\n<h2>What the latencies are</h2>\n{listed}\n<p class=soft>Ids and times are of"
        " Redis's clock, so entries written with ids of somebody's own choice tell nothing. Times"
        " below zero are left out and counted. What was handled without failing leaves no time"
        " behind: see the metrics of the daemon. A percentile is the time of a message, of whose"
        " rank it is sure to one part in 10,000.</p>\n</section>"
    )


# --- parts of a topic -----------------------------------------------------------------------------


def _throughput(topic: Row) -> str:
    buckets = topic["throughput"]
    if not buckets:
        return "<h3>Throughput</h3>\n<p>No data.</p>"
    width = figures.duration(buckets[0]["width_seconds"] * 1000)
    marks = [_time(each["at"]) for each in buckets]
    plotted = []
    for name, title, kind, shown in (
        ("rows", "Entries", "", lambda n: f"{n:,}"),
        ("bytes", "Bytes", "bytes", figures.size),
    ):
        values = [each[name] for each in buckets]
        titles = [f"{at}: {shown(value)}" for at, value in zip(marks, values, strict=True)]
        most = values.index(max(values))
        caption = f"{title} per {width}; most {shown(values[most])}, at {marks[most]}"
        plotted.append(_figure(caption, values, titles, kind, (marks[0], marks[-1])))
    return "<h3>Throughput</h3>\n" + "\n".join(plotted)


def _partitions(topic: Row) -> str:
    rows = topic["partitions"]
    total, most = topic["rows"], max((row["rows"] for row in rows), default=0)
    if not total:
        return ""
    text = (
        f"<h3>Partitions</h3>\n<p class=soft>The fullest over the mean:"
        f" {_ratio(topic['rows_max_over_mean'])} by entries,"
        f" {_ratio(topic['bytes_max_over_mean'])} by bytes.</p>"
    )
    shown = rows
    if len(rows) > _PARTITIONS_SHOWN:
        titles = [f"{row['partition']}: {row['rows']:,}" for row in rows]
        ends = ("partition 0", f"partition {rows[-1]['partition']}")
        text += _figure("Entries of each", [row["rows"] for row in rows], titles, "", ends)
        shown = sorted(rows, key=lambda row: -row["rows"])[:_PARTITIONS_SHOWN]
        text += f"<p class=soft>The {_PARTITIONS_SHOWN} fullest:</p>"
    return text + _table(
        shown,
        (
            ("Partition", "", lambda r: str(r["partition"])),
            ("Entries", "n", lambda r: f"{r['rows']:,}"),
            ("Share", "n", lambda r: _share(r["rows"] / total)),
            ("", "b", lambda r: plots.bar(r["rows"] / most, f"{r['rows']:,} entries")),
            ("Bytes", "n", lambda r: figures.size(r["bytes"])),
        ),
    )


def _keys(topic: Row) -> str:
    total, rows = topic["rows"], topic["keys"]
    if not total:
        return ""
    if not rows:
        return "<h3>Keys</h3>\n<p>No entry has a key.</p>"
    least = total - topic["keyed_rows"]
    without = f" {least:,} entries ({_share(least / total)}) have none." if least else ""
    most = rows[0]["share"]
    text = (
        f"<h3>Keys</h3>\n<p class=soft>About {topic['keys_about']:,} different keys.{without}</p>"
    )
    return text + _table(
        rows[:_KEYS_SHOWN],
        (
            ("Key", "k", lambda r: _code(r["key"], most=60)),
            ("Entries", "n", lambda r: f"{r['rows']:,}"),
            ("Share", "n", lambda r: _share(r["share"])),
            ("", "b", lambda r: plots.bar(r["share"] / most, _share(r["share"]))),
            ("Bytes", "n", lambda r: figures.size(r["bytes"])),
        ),
    )


def _latency(topic: Row) -> str:
    rows = topic["latency"]
    if not rows:
        return "<h3>Latency</h3>\n<p>No data: nothing here tells when it began.</p>"
    times = (("p50", "p50_ms"), ("p90", "p90_ms"), ("p99", "p99_ms"), ("Longest", "max_ms"))
    return "<h3>Latency</h3>\n" + _table(
        rows,
        (
            ("What", "t", lambda r: _text(r["measure"])),
            ("Of", "", lambda r: _text(r["of"])),
            ("Messages", "n", lambda r: f"{r['count']:,}"),
            *((title, "n", _duration_of(name)) for title, name in times),
            ("Left out", "n", lambda r: f"{r['skipped']:,}"),
        ),
    )


def _duration_of(name: str) -> Callable[[Row], str]:
    return lambda row: figures.duration(row[name])


def _dead(topic: Row) -> str:
    if not topic["letters"]:
        return "<h3>Dead letters</h3>\n<p>None.</p>"
    total = topic["letters"]
    often = (
        ("Letters", "n", lambda r: f"{r['letters']:,}"),
        ("", "b", lambda r: plots.bar(r["letters"] / total, _share(r["letters"] / total), "dead")),
        ("Last", "t", lambda r: _time(r["last"])),
    )
    first = (
        ("Letters", "n", lambda r: f"{r['letters']:,}"),
        ("Error", "w", _error),
        ("Where", "", lambda r: _code(r["place"])),
        ("Handler", "", lambda r: _code(r["handler"])),
        ("Last", "t", lambda r: _time(r["last"])),
        ("Newest", "t", lambda r: f"<code>{_text(r['newest'])}</code>"),
        ("Fingerprint", "t", lambda r: f"<code>{_text(r['fingerprint'])}</code>"),
    )
    error = ("Class", "", lambda r: _code(r["error_class"]))
    handler = ("Handler", "", lambda r: _code(r["handler"]))
    group = ("Group", "", lambda r: _text(r["group"]))
    return "\n".join(
        (
            "<h3>Dead letters by cause</h3>",
            _table(topic["dead_by_fingerprint"][:_LETTERS_SHOWN], first),
            "<h3>Dead letters by class of error</h3>",
            _table(topic["dead_by_class"][:_LETTERS_SHOWN], (error, *often)),
            "<h3>Dead letters by handler</h3>",
            _table(topic["dead_by_handler"][:_LETTERS_SHOWN], (handler, group, *often)),
            "<h3>Dead letters over time</h3>",
            _hours(topic["dead_by_hour"]),
        )
    )


def _error(row: Row) -> str:
    name = _code(row["error_class"] or row["reason"])
    return f"<b>{name}</b><br>{_text(row['error_message'])}"


def _hours(rows: Sequence[Row]) -> str:
    known = [(figures.unix_ms(row["at"]), row["letters"]) for row in rows if row["at"]]
    if not known:
        return "<p>No data.</p>"
    width, counts = figures.hours(known)
    marks = [_time(figures.iso(at)) for at, _ in counts]
    values = [number for _, number in counts]
    titles = [f"{at}: {number:,}" for at, number in zip(marks, values, strict=True)]
    most = values.index(max(values))
    caption = f"Letters per {figures.duration(width)}; most {values[most]:,}, at {marks[most]}"
    return _figure(caption, values, titles, "dead", (marks[0], marks[-1]))


# --- pieces ---------------------------------------------------------------------------------------


def _figure(
    caption: str, values: Sequence[float], titles: Sequence[str], kind: str, ends: tuple[str, str]
) -> str:
    if len(values) == 1:
        return f"<p class=soft>{escape(caption)}</p>"
    # Few columns over the full width would be slabs.
    narrow = f' style="max-width:{3 * len(values) + 12}rem"' if len(values) < 16 else ""
    axis = f"<span>{escape(ends[0])}</span><span>{escape(ends[1])}</span>"
    return (
        f"<figure{narrow}><figcaption>{escape(caption)}</figcaption>"
        f"{plots.columns(values, titles, caption, kind)}<div class=axis>{axis}</div></figure>"
    )


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    head = "".join(f'<th class="{kind}">{title}</th>' for title, kind, _ in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{cell(row)}</td>' for _, kind, cell in columns)
        + "</tr>"
        for row in rows
    )
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<div class=scroll><table>{inside}</table></div>"


def _text(value: Any, most: int = figures.TEXT_MAX) -> str:
    return escape(figures.safe_text(value, most))


def _code(value: Any, most: int = figures.TEXT_MAX) -> str:
    """A name in fixed width, `-` for none. It may be broken behind its signs."""
    parts = re.split(r"(?<=[.:/])(?=[^.:/])", figures.safe_text(value, most))
    shown = "<wbr>".join(escape(part) for part in parts)
    return f"<code>{shown}</code>" if shown else "-"


def _time(stamp: str | None) -> str:
    """`2025-11-20 10:00:05` of a time of the document."""
    return "" if stamp is None else escape(stamp[:19].replace("T", " "))


def _ratio(value: float | None) -> str:
    return "no data" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "no data" if value is None else figures.percent(value)
