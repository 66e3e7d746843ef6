"""The flow of messages: from the topics to the groups that read them, with rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamqd.console.formats import rate
from streamqd.console.overview import GroupNow
from streamqd.console.view import ConsoleView, Context, Visit

TOPICS_MAX = 60
BOX, GAP, TOP = 44, 12, 24  # pixels
LEFT, RIGHT, WIDTH = 16, 560, 280


@dataclass(frozen=True, slots=True)
class FlowBox:
    """A box of the picture: a topic or a group."""

    x: int
    y: int
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


def show(visit: Visit) -> Context:
    """Return the picture, and the same figures as a table."""
    now, wanted = visit.now, visit.text("q").lower()
    by_topic: dict[str, list[GroupNow]] = {}
    for group in now.groups:
        if wanted in f"{group.topic}/{group.group}".lower():
            by_topic.setdefault(group.topic, []).append(group)
    shown = dict(sorted(by_topic.items())[:TOPICS_MAX])
    boxes: list[FlowBox] = []
    lines: list[FlowLine] = []
    y = TOP
    for topic, groups in shown.items():
        height = len(groups) * (BOX + GAP) - GAP
        middle = y + height // 2
        known = [each.arriving for each in groups if each.arriving is not None]
        arriving = _per_second(max(known, default=None), " in")
        boxes.append(FlowBox(LEFT, middle - BOX // 2, topic, arriving, "", topic))
        for each in groups:
            out = each.acked or 0.0
            unread = f"{_unread(each)} unread" if each.lag != 0 else ""
            figure = ", ".join(part for part in (_per_second(each.acked), unread) if part)
            boxes.append(FlowBox(RIGHT, y, each.group, figure, each.level, topic, each.group))
            lines.append(_line(LEFT + WIDTH, middle, RIGHT, y + BOX // 2, out))
            y += BOX + GAP
        y += GAP
    return {
        "now": now,
        "q": visit.text("q"),
        "boxes": boxes,
        "lines": lines,
        "height": max(y, TOP + BOX),
        "width": RIGHT + WIDTH + LEFT,
        "box": (WIDTH, BOX),
        "topics": shown,
        "left_out": len(by_topic) - len(shown),
    }


def _per_second(value: float | None, direction: str = "") -> str:
    """Return a rate as the table shows it, '' if it is unknown."""
    return "" if value is None else f"{rate(value)}/s{direction}"


def _unread(group: GroupNow) -> str:
    return f"≥ {group.least_lag:,}" if group.lag is None else f"{group.lag:,}"


def _line(x: int, y: int, to_x: int, to_y: int, rate: float) -> FlowLine:
    half = (x + to_x) // 2
    path = f"M{x} {y}C{half} {y} {half} {to_y} {to_x} {to_y}"
    return FlowLine(path, round(1 + min(9.0, 2 * math.log10(1 + rate)), 1), rate <= 0)


VIEWS = (ConsoleView("flow", "/flow", "Flow", show, label="Flow", key="w", live=True),)
