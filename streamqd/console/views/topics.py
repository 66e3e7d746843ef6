"""Topics: the list, one topic as a map of its partitions, its data, and a single assignment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamqd import config
from streamqd.admin import audit, owners, retention, stacks, topics, topics_settings, why
from streamqd.admin.assignments import AssignmentRow
from streamqd.admin.audit import AuditEntry
from streamqd.admin.condition import describe_condition
from streamqd.admin.reading import ViewReader
from streamqd.admin.topics import TopicDetail
from streamqd.console.overview import LEVELS
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.console.views.steering import find_wider_pause, path_assignment
from streamqd.errors import InvalidRequestError
from streamqd.model import Assignment
from streamqd.store.directives import Scope
from streamqd.store.stacks import KEPT_SECONDS

AUDIT_READ, MOVES_SHOWN = 100, 5  # audit entries read for an assignment, and moves shown
CELLS_MAX = 1_024  # partitions of one group that a map shows at most
HEAT_STEPS = 5
RANGES = {"1h": (60, 1), "6h": (360, 5), "24h": (1_440, 20)}  # length and step, in minutes


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One partition in a map.

    `heat` is 0 (nothing waits) to 5 (more waits than elsewhere on the page).
    """

    row: AssignmentRow
    heat: int
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class HeatRow:
    """A group and its partitions. `left_out` is the number of partitions that are not shown."""

    group: str
    cells: list[HeatCell]
    left_out: int


def show_topics(visit: Visit) -> Context:
    """Return a page of the topics whose name contains `q`, sorted by name."""
    wanted = visit.q.lower()
    rows = [
        each for each in topics.list_topics(visit.resources.store) if wanted in each.topic.lower()
    ]
    page = visit.paginate(rows, visit.limit)
    # The lag summed over all groups, or None if it is unknown, and a lower bound of it.
    lags: dict[str, tuple[int | None, int]] = {}
    for group in visit.now.groups:
        known, least = lags.get(group.topic, (0, 0))
        exact = None if known is None or group.lag is None else known + group.lag
        lags[group.topic] = exact, least + group.least_lag
    return {
        "page": page,
        "lags": lags,
        "busiest": max((lags.get(each.topic, (0, 0))[1] for each in page.rows), default=0),
    }


def show_topic(visit: Visit) -> Context:
    """Return the map of a topic, with a row for each group and a cell for each partition."""
    name, now = visit.path["topic"], visit.now
    assignments = [each for each in now.snapshot.assignments if each.topic == name]
    if not assignments:
        topics.partition_count(
            visit.resources.store, name
        )  # raises TopicNotFoundError if the topic is unknown
    groups = [each for each in now.groups if each.topic == name]
    charted = visit.text("group") or (groups[0].group if groups else "")
    most = max((_min_lag(each) for each in assignments), default=0)
    levels = now.levels
    return {
        "wider_pauses": {
            each.group: find_wider_pause(visit, Scope(name, None, each.group)) for each in groups
        },
        "stopped": stopped_groups(visit, name, [each.group for each in groups]),
        "chosen": visit.text("group"),
        "groups": groups,
        "rows": [_heat_row(group.group, assignments, most, levels) for group in groups],
        "busiest": max((each.least_lag for each in groups), default=0),
        "issues": [each for each in now.issues if each.topic == name],
        "charted": charted,
        **_charts(visit, name, charted, sum(each.group == charted for each in assignments)),
    }


def _charts(visit: Visit, topic: str, group: str, partitions: int) -> Context:
    """Return a group's history over the range in the URL, as points and as columns.

    Raises InvalidRequestError if the range is not in RANGES.
    """
    chosen = visit.text("range", "1h")
    if chosen not in RANGES:
        raise InvalidRequestError(f"range must be one of {', '.join(RANGES)}")
    minutes, step = RANGES[chosen]
    resources, now = visit.resources, visit.now
    points = resources.backend.history.points(
        resources.store,
        now.snapshot.fleet,
        now.now_unix_ms,
        (topic, group),
        minutes,
        step,
        partitions,
    )
    columns: dict[str, list[float | None]] = {"at": [each.at_unix_ms // 1000 for each in points]}
    for figure in ("arriving", "acked", "failed", "lag", "p95"):
        columns[figure] = [getattr(each, figure) for each in points]
    return {
        "shown_range": chosen,
        "ranges": list(RANGES),
        "step": step,
        "points": points,
        "columns": json.dumps(columns),
        "charted_before": any(each.acked is not None for each in points),
        "gaps": any(each.lag is None for each in points if each.acked is not None),
    }


def _heat_row(
    group: str, assignments: Iterable[AssignmentRow], most: int, levels: Mapping[Assignment, str]
) -> HeatRow:
    own = sorted(
        (each for each in assignments if each.group == group), key=lambda each: each.partition
    )
    cells = [_cell(each, most, levels.get(each.assignment, "")) for each in own[:CELLS_MAX]]
    return HeatRow(group, cells, len(own[CELLS_MAX:]))


def _cell(row: AssignmentRow, most: int, level: str) -> HeatCell:
    lag = _min_lag(row)
    heat = 0 if not lag else 1 + round((HEAT_STEPS - 1) * math.log1p(lag) / math.log1p(most))
    unread = f"{'at least ' if row.lag is None else ''}{lag:,} unread"
    owner = f"owned by {row.owner}" if row.owner else "no owner"
    text = f"{row.name}: {unread}, {owner}, {describe_condition(row.condition)}"
    return HeatCell(row, min(heat, HEAT_STEPS), level, text)


def _min_lag(row: AssignmentRow) -> int:
    return max(row.lag or 0, row.lag_at_least)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting of a topic. `origin` is "file", "registered" or "default".

    `registered` is the registered value if the file overrides it, and '' otherwise.
    """

    name: str
    value: str
    origin: str
    registered: str


def show_data(visit: Visit) -> Context:
    """Return a topic's settings, its groups, and the contents of one page of its partitions."""
    name, resources = visit.path["topic"], visit.resources
    configured = resources.settings.topics.get(name, config.Topic())
    detail = topics.describe(resources.store, name, configured)
    page = visit.paginate(detail.partitions, visit.limit)
    reader, shown = ViewReader(resources.store), [each.partition for each in page.rows]
    archive = detail.effective.get("archive") == "required"
    floors = retention.floors(reader, name, shown, archive=archive)
    return {
        "detail": detail,
        "page": page,
        "floors": {each.partition: each for each in floors},
        "archive": retention.ARCHIVE,
        "unreadable": [*detail.unreadable, *reader.rows],
        "stopped": stopped_groups(visit, name, detail.groups),
        "settings": sorted(_settings(detail), key=lambda row: row.name),
    }


def stopped_groups(visit: Visit, topic: str, groups: Iterable[str]) -> set[str]:
    """Return the groups of a topic that a directive has stopped."""
    control = visit.now.snapshot.state.control
    return {each for each in groups if control.find_stop(Assignment(topic, 0, each)) is not None}


def _settings(detail: TopicDetail) -> Iterator[SettingRow]:
    """Yield each setting that is not "none", in the notation of the configuration file."""
    file, stored = _format_settings(detail.configured), _format_settings(detail.settings)
    for name, value in _format_settings(detail.effective).items():
        if value == '"none"':
            continue
        origin = "file" if name in file else "registered" if name in stored else "default"
        other = stored.get(name, "") if name in file else ""
        yield SettingRow(name, value, origin, "" if other == value else other)


def _format_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    lines = (line.partition(" = ") for line in topics_settings.lines(settings))
    return {name: value for name, _, value in lines}


def show_assignment(visit: Visit) -> Context:
    """Return the answer of `streamqd why` for an assignment, and its worker's run and stack."""
    place, seen = path_assignment(visit), visit.now.snapshot
    names = [each.name for each in visit.resources.settings.outboxes]
    [found] = why.answer(
        visit.resources.fleet, place.topic, place.partition, place.group, names, with_owners=True
    )
    row = next((each for each in seen.assignments if each.assignment == place), None)
    return {
        **show_stack(visit),
        "answer": found,
        "level": LEVELS[why.grade(found.row, found.causes[0].word)],
        "condition": describe_condition(row.condition) if row else "",
        "wider_pause": find_wider_pause(visit, Scope(*place)),
        "stopped": seen.state.control.find_stop(place),
        "move": seen.state.control.moves.get(place),
        "moves": _list_moves(visit, place),
        "ends": owners.IN_WORDS,
        "running": _longest_running_uid(row),
        "instance": next(
            (each for each in seen.instances if each.instance == found.row.owner), None
        ),
    }


def show_stack(visit: Visit) -> Context:
    """Return the stack of an assignment's worker, if one was requested."""
    place, now = path_assignment(visit), visit.now
    reader = ViewReader(visit.resources.store)
    return {
        "row": next((each for each in now.snapshot.assignments if each.assignment == place), None),
        "stack": stacks.read(reader, now.snapshot.state, place, now.now_unix_ms),
        "unreadable_stack": reader.rows,
        "answer_seconds": round(stacks.ANSWER_SECONDS),
        "kept_minutes": KEPT_SECONDS // 60,
    }


def _list_moves(visit: Visit, place: Assignment) -> list[AuditEntry]:
    """Return the latest moves of an assignment that were made through the console.

    They are taken from the newest audit entries. `streamqd move` does not write any.
    """
    entries = audit.page(visit.resources.store, place.topic, limit=AUDIT_READ).entries
    moves = [each for each in entries if each.command == "move"]
    return [each for each in moves if each.arguments.get("scope") == str(place)][:MOVES_SHOWN]


def _longest_running_uid(row: AssignmentRow | None) -> str:
    """Return the uid of the longest-running message, or '' if there is none or it is a retry."""
    if row is None or not row.running.startswith("m:"):
        return ""
    return f"{row.topic}/{row.partition}/{row.running[2:]}"


VIEWS = (
    ConsoleView("topics", "/topics", "Topics", show_topics, label="Topics", key="t"),
    ConsoleView("topic", "/topics/{topic}", "Topic", show_topic, live=True),
    ConsoleView("topic_data", "/topics/{topic}/data", "Topic", show_data),
    ConsoleView(
        "assignment",
        "/topics/{topic}/partitions/{partition}/{group}",
        "Assignment",
        show_assignment,
        live=True,
        live_context=show_stack,
    ),
)
