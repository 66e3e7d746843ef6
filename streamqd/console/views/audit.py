"""The audit log of one topic or of all topics."""

from __future__ import annotations

from streamqd.admin import audit
from streamqd.admin.audit import AuditEntry
from streamqd.console.formats import instant
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.store import topics

TOPICS_MAX = 500  # topics whose logs one page reads at most
_BODY = frozenset({"key", "headers"})


def show(visit: Visit) -> Context:
    """Return a page of entries, latest first. `before` is the ID before which the page starts."""
    store, topic, before = visit.resources.store, visit.text("topic"), visit.text("before")
    names = [topic] if topic else sorted(topics.read_registry(store)[0])
    rows: list[tuple[str, AuditEntry]] = []
    more = False
    for name in names[:TOPICS_MAX]:
        found = audit.page(store, name, limit=visit.limit, cursor=before)
        rows += [(name, each) for each in found.entries]
        more = more or bool(found.cursor)
    rows.sort(key=lambda row: row[1].at_unix_ms, reverse=True)
    page = rows[: visit.limit]
    more = more or len(rows) > len(page)
    return {
        "rows": [(name, each, _arguments(visit, each)) for name, each in page],
        "topic": topic,
        "before": page[-1][1].id if more and page else "",
        "later": before,
        "left_out": max(0, len(names) - TOPICS_MAX),
    }


def _arguments(visit: Visit, entry: AuditEntry) -> dict[str, object]:
    """Return the arguments of a command for display.

    Filters may contain keys and headers of messages. These are masked as in messages.
    """
    shown: dict[str, object] = {}
    for name, value in entry.arguments.items():
        time = name.removesuffix("_unix_ms")
        if time != name and isinstance(value, int):
            shown[time] = instant(value)
        else:
            shown[name] = visit.reader.text(str(value)) if name in _BODY else value
    return shown


VIEWS = (ConsoleView("audit", "/audit", "Audit log", show, label="Audit", key="a"),)
