"""The status page: one read-only HTML document without anything from elsewhere."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from streamqd.words import age

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--bad:#c33;--dim:#888}
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem}
h1{font-size:1.25rem;margin:0}p{margin:.25rem 0 1.5rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{font-weight:600;color:var(--dim)}td:first-child,th:first-child,.word{text-align:left}
.bad{color:var(--bad);font-weight:600}.dim{color:var(--dim)}
"""

_COLUMNS = (
    "partition",
    "state",
    "owned for",
    "lag",
    "pending",
    "in flight",
    "delayed",
    "oldest",
    "acked/s",
    "failed/s",
    "dead letters",
    "crashes",
    "epoch",
)


def render(summary: dict[str, Any], reasons: list[str]) -> str:
    """Return the page for a summary and the reasons why the instance is not ready."""
    name = escape(summary["instance"])
    state = escape(summary["state"])
    trouble = "".join(f'<p class="bad">Not ready: {escape(reason)}.</p>' for reason in reasons)
    head = "".join(
        f'<th class="word">{column}</th>' if column == "state" else f"<th>{column}</th>"
        for column in _COLUMNS
    )
    now = summary["at_unix_ms"] or time.time() * 1000
    rows = "".join(_row(unit, now) for unit in summary["assignments"])
    if not rows:
        rows = f'<tr><td colspan="{len(_COLUMNS)}" class="dim">No partition is owned.</td></tr>'
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="refresh" content="5">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>streamqd {name}: {state}</title><style>{_STYLE}</style>"
        f"<h1>streamqd {name}: {state}</h1>"
        f'<p class="dim">fleet {escape(summary["fleet"])} · host {escape(summary["host"])} · '
        f"pid {summary['pid']} · version {escape(summary['version'])} · "
        f"up {age(now - summary['started_unix_ms'])} · "
        f"Redis {'answers' if summary['redis_up'] else 'does not answer'}</p>"
        f"{trouble}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></html>\n"
    )


_BAD = ("broken", "failed", "gone")


def _row(unit: dict[str, Any], now_unix_ms: float) -> str:
    counters, rates = unit["counters"], unit["rates"]
    since, oldest = unit["since_unix_ms"], unit["oldest_seconds"]
    state = escape(unit["state"])
    cells = [
        f"<td>{escape(unit['topic'])}/{unit['partition']}/{escape(unit['group'])}</td>",
        f'<td class="word{" bad" if unit["state"] in _BAD else ""}">{state}</td>',
        _cell(age(now_unix_ms - since) if since else None),
        _cell(unit["lag"]),
        _cell(unit["pending"]),
        _cell(unit["in_flight"]),
        _cell(unit["delayed"]),
        _cell(None if oldest is None else age(oldest * 1000)),
        _cell(f"{rates['acked']:,.1f}"),
        _cell(f"{rates['failed']:,.1f}", bad=rates["failed"] >= 0.05),  # else it reads 0.0
        _cell(unit["dead_letters"], bad=bool(unit["dead_letters"])),
        _cell(counters["crashes"], bad=bool(counters["crashes"])),
        _cell(str(unit["epoch"])),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: object, *, bad: bool = False) -> str:
    if value is None:
        return '<td class="dim">&ndash;</td>'
    text = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<td class="bad">{text}</td>' if bad else f"<td>{text}</td>"
