"""Dead letters: the topics that have any, a topic's list and causes, details, and downloads."""

from __future__ import annotations

import contextlib

from streamqd.admin import dead_letters
from streamqd.admin.messages import MessageFilter
from streamqd.admin.trace import parse_trace_id
from streamqd.config.values import parse_duration, parse_instant
from streamqd.console.access import Role
from streamqd.console.exports import ExportFile
from streamqd.console.view import PARTITION_MAX, ConsoleView, Context, Download, Visit
from streamqd.errors import InvalidRequestError, RequestRefusedError

BUDGET = 10_000  # dead letters that a page examines at most, newest first
BUDGET_MAX = 100_000  # maximum for counting the causes if a person requests more
PAINT_SECONDS = 0.6  # seconds to count causes, so that the page loads within a second
SECONDS = 5.0  # seconds to count causes if a person requests more
CAUSES_SHOWN = 100
FILTERS = (
    *("group", "fingerprint", "error", "reason", "key", "header", "since", "until"),
    *("partition", "id"),
)


def read_choice(visit: Visit, now_unix_ms: int) -> MessageFilter:
    """Return the filter from the URL or the form.

    Raises InvalidRequestError, RequestRefusedError.
    """
    if visit.text("key") and visit.person.bodies != "show":
        raise RequestRefusedError("keys are hidden from your role, so you cannot filter by key")
    stated_header = visit.text("header")
    header, equals, value = map(str.strip, stated_header.partition("="))
    if stated_header and visit.person.bodies != "show":
        raise RequestRefusedError(
            "headers are hidden from your role, so you cannot filter by header"
        )
    if stated_header and not (header and equals):
        raise InvalidRequestError('"Header" must be NAME=VALUE, such as tenant=acme')
    return MessageFilter(
        ids=tuple(visit.text("id").split()),
        group=visit.text("group") or None,
        fingerprint=visit.text("fingerprint") or None,
        error_class=visit.text("error") or None,
        reason=visit.text("reason") or None,
        key=visit.text("key").encode() or None,
        headers=((header, value),) if stated_header else (),
        since_unix_ms=_instant(visit, "since", now_unix_ms),
        until_unix_ms=_instant(visit, "until", now_unix_ms),
        partition=visit.optional_number("partition", most=PARTITION_MAX),
    )


def _instant(visit: Visit, name: str, now_unix_ms: int) -> int | None:
    """Parse a time: an age (30m, 12h, 7d), an ISO 8601 time in UTC, or Unix ms.

    Return it in Unix ms.

    Returns None if the parameter is empty. Raises InvalidRequestError.
    """
    text = visit.text(name)
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text)
    with contextlib.suppress(ValueError):
        return max(0, now_unix_ms - round(parse_duration(text) * 1000))
    with contextlib.suppress(ValueError):
        return max(0, int(parse_instant(text) * 1000))
    raise InvalidRequestError(
        f"{name}: write an age such as 30m, 12h or 7d, or a time such as 2026-11-27T22:00 (UTC)"
    )


def read_filters(visit: Visit) -> dict[str, str]:
    """Return the filters as the person wrote them, for links and forms."""
    return {name: visit.text(name) for name in FILTERS if visit.text(name)}


def show_topics(visit: Visit) -> Context:
    """Return the topics that have dead letters.

    The topic with the newest dead letter comes first.
    """
    rows = dead_letters.overview(visit.resources.store)
    rows.sort(key=lambda row: -(row.newest_unix_ms or 0))
    return {
        "page": visit.paginate(rows, visit.limit),
        "jobs": visit.resources.backend.jobs.recent(),
    }


def show(visit: Visit) -> Context:
    """Return the causes of a topic's dead letters, and the page that the filter selects.

    The causes are counted only on the first page, among the newest dead letters. `examine` limits
    how many of them are read.
    """
    topic, store, now = visit.path["topic"], visit.resources.store, visit.now
    choice, cursor = read_choice(visit, now.now_unix_ms), visit.text("cursor")
    budget = visit.number("examine", BUDGET, least=1, most=BUDGET_MAX)
    causes = None
    if cursor:
        message_list = dead_letters.messages(store, topic)
        page = message_list.page(choice, limit=visit.limit, cursor=cursor, budget=BUDGET)
    else:
        seconds = SECONDS if visit.text("examine") else PAINT_SECONDS
        causes, page = dead_letters.survey(
            store,
            topic,
            choice,
            limit=visit.limit,
            budget=budget,
            stop=dead_letters.stop_after(seconds),
        )
    return {
        "filters": read_filters(visit),
        "page": page,
        "causes": causes,
        "shown": visit.paginate(causes.causes if causes else [], CAUSES_SHOWN, "causes_from"),
        "more": BUDGET_MAX if budget < BUDGET_MAX else 0,
        "examine": visit.text("examine"),
        "budget": causes.examined if causes else BUDGET,
        "jobs": visit.resources.backend.jobs.recent(topic)[:5],
    }


def show_dead_letter(visit: Visit) -> Context:
    """Return the details of one dead letter."""
    topic = visit.path["topic"]
    dead_letter = dead_letters.show(visit.resources.store, topic, visit.path["dead_letter"])
    reader = visit.reader
    headers = reader.headers(dead_letter.headers)
    trace_id = parse_trace_id(headers)
    return {
        "dead_letter": dead_letter,
        "body": reader.body(dead_letter.payload),
        "headers": headers,
        "run_url": visit.trace_url(dead_letter.trace_id),
        "trace_id": trace_id,
        "trace_url": visit.trace_url(trace_id),
    }


def export(visit: Visit) -> tuple[str, str, ExportFile]:
    """Return all dead letters that match the filter, as JSON lines.

    Raises RequestRefusedError if the person may not see payloads.
    """
    topic = visit.path["topic"]
    if visit.person.bodies != "show":
        raise RequestRefusedError("payloads are hidden from your role, so you cannot export them")
    choice = read_choice(visit, visit.now.now_unix_ms)
    file = ExportFile(visit.resources.backend, topic, choice, f"{visit.person.name} (console)")
    return f"{topic}-dead-letters.jsonl", "application/x-ndjson", file


def payload(visit: Visit) -> tuple[str, str, bytes]:
    """Return the payload of one dead letter as a file.

    Raises RequestRefusedError if the person may not see it.
    """
    if visit.person.bodies != "show":
        raise RequestRefusedError("payloads are hidden from your role")
    dead_letter = dead_letters.show(
        visit.resources.store, visit.path["topic"], visit.path["dead_letter"]
    )
    return (
        f"{dead_letter.id.replace(':', '-')}.bin",
        "application/octet-stream",
        dead_letter.payload,
    )


VIEWS = (
    ConsoleView("dead_topics", "/dead", "Dead letters", show_topics, label="Dead letters", key="l"),
    ConsoleView("dead", "/topics/{topic}/dead", "Dead letters", show),
    ConsoleView(
        "dead_letter", "/topics/{topic}/dead/{dead_letter}", "Dead letter", show_dead_letter
    ),
)
DOWNLOADS = (
    Download("dead_export", "/topics/{topic}/dead-export", Role.OPERATOR, export),
    Download("dead_payload", "/topics/{topic}/dead/{dead_letter}/payload", Role.VIEWER, payload),
)
