"""The flow of messages: from the topics to the groups that read them, with rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamqd.console.formats import rate
from streamqd.console.overview import GroupNow
from streamqd.console.view import ConsoleView, Context, Visit

TOPICS_MAX = 60
BOX, GAP, TOP = 44, 12, 24  # pixels


@dataclass(frozen=True, slots=True)
class FlowLayout:
    """Where the boxes of a picture are, in pixels.

    In the wide one, a topic is beside its groups. In the narrow one, it is above them.
    """

    name: str
    left: int
    topic_width: int
    right: int
    group_width: int

    @property
    def stacked(self) -> bool:
        """True if a topic is above its groups."""
        return self.right < self.left + self.topic_width

    @property
    def width(self) -> int:
        """The width of the picture."""
        return self.left + self.right + self.group_width


WIDE = FlowLayout("wide", 16, 280, 560, 280)
NARROW = FlowLayout("narrow", 2, 300, 44, 280)


@dataclass(frozen=True, slots=True)
class FlowBox:
    """A box of the picture: a topic or a group."""

    x: int
    y: int
    width: int
    text: str
    figure: str
    level: str
    topic: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class FlowLine:
    """A line from a topic to a group. `width` grows with the rate. `still`: nothing flows."""

    path: str
    width: float
    still: bool


@dataclass(frozen=True, slots=True)
class FlowPicture:
    """The boxes and lines of a layout."""

    layout: FlowLayout
    boxes: list[FlowBox]
    lines: list[FlowLine]
    height: int


def show(visit: Visit) -> Context:
    """Return the picture in both layouts, and the same figures as a table."""
    now, wanted = visit.now, visit.text("q").lower()
    by_topic: dict[str, list[GroupNow]] = {}
    for group in now.groups:
        if wanted in f"{group.topic}/{group.group}".lower():
            by_topic.setdefault(group.topic, []).append(group)
    shown = dict(sorted(by_topic.items())[:TOPICS_MAX])
    return {
        "now": now,
        "q": visit.text("q"),
        "pictures": [_picture(layout, shown) for layout in (WIDE, NARROW)],
        "box": BOX,
        "topics": shown,
        "left_out": len(by_topic) - len(shown),
    }


def _picture(layout: FlowLayout, topics: Mapping[str, Sequence[GroupNow]]) -> FlowPicture:
    boxes: list[FlowBox] = []
    lines: list[FlowLine] = []
    y = TOP if not layout.stacked else 2
    for topic, groups in topics.items():
        known = [each.arriving for each in groups if each.arriving is not None]
        arriving = _per_second(max(known, default=None), " in")
        height = len(groups) * (BOX + GAP) - GAP
        at = y if layout.stacked else y + height // 2 - BOX // 2
        boxes.append(FlowBox(layout.left, at, layout.topic_width, topic, arriving, "", topic))
        y += BOX + GAP if layout.stacked else 0
        for each in groups:
            unread = f"{_unread(each)} unread" if each.lag != 0 else ""
            figure = ", ".join(part for part in (_per_second(each.acked), unread) if part)
            boxes.append(
                FlowBox(
                    *(layout.right, y, layout.group_width, each.group, figure, each.level),
                    *(topic, each.group),
                )
            )
            lines.append(_line(layout, at, y, each.acked or 0.0))
            y += BOX + GAP
        y += GAP
    return FlowPicture(layout, boxes, lines, max(y, TOP + BOX))


def _per_second(value: float | None, direction: str = "") -> str:
    """Return a rate as the table shows it, '' if it is unknown."""
    return "" if value is None else f"{rate(value)}/s{direction}"


def _unread(group: GroupNow) -> str:
    return f"≥ {group.least_lag:,}" if group.lag is None else f"{group.lag:,}"


def _line(layout: FlowLayout, topic_y: int, group_y: int, rate: float) -> FlowLine:
    to_x, to_y = layout.right, group_y + BOX // 2
    if layout.stacked:
        x, y = layout.left + (layout.right - layout.left) // 2, topic_y + BOX
        path = f"M{x} {y}V{to_y - 8}Q{x} {to_y} {x + 8} {to_y}H{to_x}"
    else:
        x, y = layout.left + layout.topic_width, topic_y + BOX // 2
        half = (x + to_x) // 2
        path = f"M{x} {y}C{half} {y} {half} {to_y} {to_x} {to_y}"
    return FlowLine(path, round(1 + min(9.0, 2 * math.log10(1 + rate)), 1), rate <= 0)


VIEWS = (ConsoleView("flow", "/flow", "Flow", show, label="Flow", key="w", live=True),)
