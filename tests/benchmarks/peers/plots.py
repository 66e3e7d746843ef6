"""The plots of the comparison."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from tests.benchmarks.figures import OURS, finish, save


def bars(
    figures: dict[str, dict[str, float]],
    title: str,
    path: Path,
    form: str,
    *,
    rising: bool = False,
) -> None:
    """Draw one bar for each system on a logarithmic scale, with the best system on top.

    A figure has a median, a min and a max. The whisker extends from the min to the max.
    """
    ranked = sorted(figures.items(), key=lambda each: each[1]["median"], reverse=rising)
    values = [each["median"] for _, each in ranked]
    spread = [
        [each["median"] - each["min"] for _, each in ranked],
        [each["max"] - each["median"] for _, each in ranked],
    ]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(ranked) + 0.9), layout="constrained")
    colors = [OURS if each.startswith("streamqd") else "#94a3b8" for each, _ in ranked]
    whiskers = {"ecolor": "#475569", "elinewidth": 0.8, "capsize": 2}
    names = [name for name, _ in ranked]
    bars = axes.barh(names, values, color=colors, xerr=spread, error_kw=whiskers)
    axes.bar_label(bars, labels=[form.format(value) for value in values], padding=3)
    axes.margins(x=0.15)
    finish(axes, title)
    save(figure, path)
