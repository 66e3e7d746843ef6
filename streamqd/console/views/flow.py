"""The flow of messages, with rates: from known sources to topics, and from topics to groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamqd.console.formats import ago, rate
from streamqd.console.overview import ALARM, NOTE, WARN, GroupNow
from streamqd.console.sources import SCHEDULE, TopicSource
from streamqd.console.view import ConsoleView, Context, Visit
from streamqd.console.views.schedules import LEVELS

TOPICS_MAX = 60
SOURCES_MAX = 4  # limit of source boxes per topic
ROWS_MAX = 200  # limit of rows in the table of sources
BOX, GAP = 44, 12  # pixels
CHARACTER = 9.4  # width of a wide character in pixels


@dataclass(frozen=True, slots=True)
class FlowLayout:
    """The positions of the boxes in a picture: their left edges and widths in pixels.

    In the wide layout, a topic is to the right of its sources and to the left of its groups. In the
    narrow layout, it is below its sources and above its groups.
    """

    name: str
    source_x: int
    source_width: int
    topic_x: int
    topic_width: int
    group_x: int
    group_width: int

    @property
    def stacked(self) -> bool:
        """True if a topic is above its groups."""
        return self.group_x < self.topic_x + self.topic_width

    @property
    def width(self) -> int:
        """The width of the picture in pixels."""
        return max(self.group_x + self.group_width, self.topic_x + self.topic_width) + 2


WIDE = FlowLayout("wide", 0, 0, 2, 280, 560, 280)
WIDE_WITH_SOURCES = FlowLayout("wide", 2, 220, 312, 240, 640, 240)
NARROW = FlowLayout("narrow", 44, 280, 2, 300, 44, 280)


@dataclass(frozen=True, slots=True)
class FlowBox:
    """A box in the picture: a source, a topic or a group. `view` is the page that it links to."""

    x: int
    y: int
    width: int
    text: str
    figure: str
    level: str
    view: str
    parameters: Mapping[str, str]

    @property
    def characters(self) -> int:
        """The number of characters that fit into the box."""
        return int((self.width - 24) / CHARACTER)


@dataclass(frozen=True, slots=True)
class FlowLine:
    """A line between two boxes. `width` grows with the rate.

    `kind` is `still` if nothing flows, `fed` if the rate is unknown, and '' otherwise.
    """

    path: str
    width: float
    kind: str


@dataclass(frozen=True, slots=True)
class FlowPicture:
    """The boxes and lines of one layout."""

    layout: FlowLayout
    boxes: list[FlowBox]
    lines: list[FlowLine]
    height: int


@dataclass(frozen=True, slots=True)
class FlowTopic:
    """A topic, its known sources, and its groups."""

    name: str
    sources: Sequence[TopicSource]
    groups: Sequence[GroupNow]


def show(visit: Visit) -> Context:
    """Return the picture in both layouts, and the same figures as tables."""
    now, wanted = visit.now, visit.q.lower()
    found = now.slow.sources
    groups: dict[str, list[GroupNow]] = {}
    for each in now.groups:
        groups.setdefault(each.topic, []).append(each)
    every = []
    for name in sorted(groups.keys() | (found.by_topic.keys() & now.snapshot.topics.keys())):
        topic = FlowTopic(name, found.by_topic.get(name, []), groups.get(name, []))
        texts = [name, *(f"{name}/{each.group}" for each in topic.groups)]
        if any(wanted in text.lower() for text in (*texts, *(s.name for s in topic.sources))):
            every.append(topic)
    shown = every[:TOPICS_MAX]
    sources = [each for topic in shown for each in topic.sources]
    wide = WIDE_WITH_SOURCES if sources else WIDE
    return {
        "pictures": [_picture(layout, shown, now.now_unix_ms) for layout in (wide, NARROW)],
        "box": BOX,
        "topics": shown,
        "sources": sources[:ROWS_MAX],
        "more_sources": len(sources[ROWS_MAX:]),
        "sources_left_out": found.left_out,
        "left_out": len(every) - len(shown),
    }


def _picture(layout: FlowLayout, topics: Sequence[FlowTopic], now_unix_ms: int) -> FlowPicture:
    boxes: list[FlowBox] = []
    lines: list[FlowLine] = []
    y = 2
    for topic in topics:
        sources, groups = _source_boxes(topic, now_unix_ms), _group_boxes(topic)
        if layout.stacked:
            at, first = y + _height(sources), y
            below, y = at + BOX + GAP, at + BOX + GAP + _height(groups)
        else:
            tallest = max(_height(sources), _height(groups), BOX + GAP)
            at, first = _center(y, tallest, BOX + GAP), _center(y, tallest, _height(sources))
            below, y = _center(y, tallest, _height(groups)), y + tallest
        known = [each.arriving for each in topic.groups if each.arriving is not None]
        arriving = _per_second(max(known, default=None), " in")
        width, name = layout.topic_width, topic.name
        boxes.append(
            FlowBox(layout.topic_x, at, width, name, arriving, "", "topic", {"topic": name})
        )
        for row, (text, figure, level, view, parameters) in enumerate(sources):
            top = first + row * (BOX + GAP)
            place = (layout.source_x, top, layout.source_width)
            boxes.append(FlowBox(*place, text, figure, level, view, parameters))
            lines.append(FlowLine(_path_to_topic(layout, top, at), 1.5, "fed"))
        for row, (each, figure) in enumerate(groups):
            top, target = below + row * (BOX + GAP), {"topic": name, "group": each.group}
            place = (layout.group_x, top, layout.group_width)
            boxes.append(FlowBox(*place, each.group, figure, each.level, "topic", target))
            speed = each.acked or 0.0
            lines.append(
                FlowLine(
                    _path_to_group(layout, at, top), _stroke(speed), "still" if speed <= 0 else ""
                )
            )
        y += GAP
    return FlowPicture(layout, boxes, lines, max(y, BOX))


_SourceText = tuple[str, str, str, str, Mapping[str, str]]


def _source_boxes(topic: FlowTopic, now_unix_ms: int) -> list[_SourceText]:
    """Return the two lines of each source's box, its level and its link.

    All schedules of a topic share one box.
    """
    found: list[_SourceText] = []
    schedules = [each for each in topic.sources if each.kind == SCHEDULE]
    others = [each for each in topic.sources if each.kind != SCHEDULE]
    if schedules:
        sent = sum(each.sent for each in schedules)
        dues = [each.due_unix_ms for each in schedules if each.due_unix_ms is not None]
        due = f", next {ago(min(dues), now_unix_ms)}" if dues else ""
        levels = {LEVELS.get(each.state, "") for each in schedules}
        level = next((each for each in (ALARM, WARN, NOTE) if each in levels), "")
        [text] = [schedules[0].name] if len(schedules) == 1 else [f"{len(schedules):,} schedules"]
        found.append((text, f"{sent:,} sent{due}", level, "schedules", {"topic": topic.name}))
    room = SOURCES_MAX - len(found)
    for each in others[:room]:
        figure = f"outbox, {each.sent:,} rows sent"
        level = "" if each.state == "relayed" else "warn"
        found.append((each.name, figure, level, "doctor", {"area": "outboxes"}))
    if len(others) > room:
        text = f"{len(others) - room + 1:,} more outboxes"
        found[-1] = (text, "in the table below", "", "doctor", {"area": "outboxes"})
    return found


def _group_boxes(topic: FlowTopic) -> list[tuple[GroupNow, str]]:
    """Return each group with the second line of its box: its rate and its unread messages."""
    found = []
    for each in topic.groups:
        unread = f"{_format_unread(each)} unread" if each.lag != 0 else ""
        figure = ", ".join(part for part in (_per_second(each.acked), unread) if part)
        found.append((each, figure))
    return found


def _height(boxes: Sequence[object]) -> int:
    return len(boxes) * (BOX + GAP)


def _center(y: int, room: int, height: int) -> int:
    return y + (room - height) // 2


def _per_second(value: float | None, direction: str = "") -> str:
    """Return a rate for the table, or '' if it is unknown."""
    return "" if value is None else f"{rate(value)}/s{direction}"


def _format_unread(group: GroupNow) -> str:
    return f"≥ {group.least_lag:,}" if group.lag is None else f"{group.lag:,}"


def _stroke(rate: float) -> float:
    return round(1 + min(9.0, 2 * math.log10(1 + rate)), 1)


def _path_to_topic(layout: FlowLayout, source_y: int, topic_y: int) -> str:
    """Return the SVG path from a source to its topic."""
    if not layout.stacked:
        x = layout.source_x + layout.source_width
        return _curve(x, source_y, layout.topic_x, topic_y)
    x, y = _rail(layout), source_y + BOX // 2
    return f"M{layout.source_x} {y}H{x + 8}Q{x} {y} {x} {y + 8}V{topic_y}"


def _path_to_group(layout: FlowLayout, topic_y: int, group_y: int) -> str:
    """Return the SVG path from a topic to its group."""
    if not layout.stacked:
        return _curve(layout.topic_x + layout.topic_width, topic_y, layout.group_x, group_y)
    x, y = _rail(layout), group_y + BOX // 2
    return f"M{x} {topic_y + BOX}V{y - 8}Q{x} {y} {x + 8} {y}H{layout.group_x}"


def _rail(layout: FlowLayout) -> int:
    return (layout.topic_x + layout.group_x) // 2


def _curve(from_x: int, from_y: int, to_x: int, to_y: int) -> str:
    y, end, half = from_y + BOX // 2, to_y + BOX // 2, (from_x + to_x) // 2
    return f"M{from_x} {y}C{half} {y} {half} {end} {to_x} {end}"


VIEWS = (ConsoleView("flow", "/flow", "Flow", show, label="Flow", key="w", live=True),)
