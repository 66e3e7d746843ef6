"""The plots of `make bench NAME=growth`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tests.benchmarks.figures import OURS, REDIS, finish, save

COLORS = (OURS, "#0369a1", "#15803d", "#7c3aed")
RATE = "ms of CPU in each second"
MESSAGE = "µs of CPU for each message"

Row = dict[str, Any]


def assignments(curves: dict[str, list[Row]], path: Path) -> None:
    """Draw the cost at rest and the cost per message, by the number of assignments."""
    figure, (rest, work) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for (what, rows), style in zip(curves.items(), ("-", "--"), strict=False):
        numbers = [row["units"] for row in rows]
        for axes, part, names in (
            (rest, "rest", ("ours, ms/s", "redis, ms/s")),
            (work, "work", ("workers, us/message", "redis, us/message")),
        ):
            for name, color in zip(names, (OURS, REDIS), strict=True):
                label = f"{name.partition(',')[0]}, more {what}"
                values = [row[part][name] for row in rows]
                axes.plot(numbers, values, style, marker="o", ms=3, color=color, label=label)
    ticks = sorted({row["units"] for rows in curves.values() for row in rows})
    for axes, title, of in ((rest, "at rest", RATE), (work, "at work", MESSAGE)):
        _labelled(axes, title, "units", of)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    save(figure, path)


def amounts(kinds: dict[str, list[Row]], path: Path) -> None:
    """Draw the cost at rest by stored amount. The logarithmic scale has no room for zero."""
    figure, both = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axes, name, title in zip(
        both, ("ours, ms/s", "redis, ms/s"), ("ours, at rest", "Redis, at rest"), strict=True
    ):
        for (kind, rows), color in zip(kinds.items(), COLORS, strict=True):
            some = [row for row in rows if row["amount"]]
            numbers, values = [row["amount"] for row in some], [row[name] for row in some]
            axes.plot(numbers, values, marker="o", ms=3, color=color, label=kind)
        _labelled(axes, title, "amount", RATE)
    save(figure, path)


def _labelled(axes: Axes, title: str, by: str, of: str) -> None:
    finish(axes, title)
    axes.set(xlabel=by, ylabel=of)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
