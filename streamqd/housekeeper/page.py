"""The status page, which shows the state of one instance and links to its other endpoints.

It loads no other resources. The figures of partitions are in `/status`, and the web console shows
the whole fleet.
"""

from __future__ import annotations

import time
from html import escape
from typing import Any

from streamqd.words import age, plural

_STYLE = """
:root{color-scheme:light dark}
body{font:1rem/1.5 system-ui,sans-serif;margin:3rem auto;max-width:40rem;padding:0 1rem}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}.bad{color:#c33;font-weight:600}
li{margin:.25rem 0}
"""
_LINKS = (  # relative links, so that they work under the path of a proxy
    ("status", "the partitions of this instance, as JSON"),
    ("metrics", "metrics for Prometheus"),
    ("livez", "liveness, even without Redis"),
    ("readyz", "readiness, with Redis"),
    ("startupz", "startup complete or not"),
)


def render(summary: dict[str, Any], reasons: list[str]) -> str:
    """Return the page as HTML. `reasons` lists why the instance is not ready."""
    name, state = escape(summary["instance"]), escape(summary["state"])
    now = summary["at_unix_ms"] or time.time() * 1000
    owned = sum(each["owned"] for each in summary["assignments"])
    facts = (
        f"owns {plural(owned, 'partition')}",
        f"Redis {'answers' if summary['redis_up'] else 'does not answer'}",
        f"fleet {summary['fleet']}",
        f"host {summary['host']}",
        f"pid {summary['pid']}",
        f"version {summary['version']}",
        f"up {age(now - summary['started_unix_ms'])}",
    )
    problems = "".join(f'<p class="bad">Not ready: {escape(reason)}.</p>' for reason in reasons)
    links = "".join(f'<li><a href="{path}">/{path}</a>: {text}</li>' for path, text in _LINKS)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="refresh" content="5">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>streamqd {name}: {state}</title><style>{_STYLE}</style>"
        f"<h1>streamqd {name}: {state}</h1><p>{escape(' · '.join(facts))}</p>{problems}"
        "<p>To see and control the whole fleet in a browser, run <code>streamqd console</code> and"
        f" open the link that it prints.</p><ul>{links}</ul></html>\n"
    )
