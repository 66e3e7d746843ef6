"""The plots of the comparison."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt


def bars(
    values: dict[str, float], title: str, path: Path, form: str, *, rising: bool = False
) -> None:
    """Draw one bar for each system, the best on top, on a logarithmic scale."""
    mpl.rcParams |= {"svg.hashsalt": "streamqd", "font.family": "sans-serif", "font.size": 9}
    ranked = sorted(values.items(), key=lambda each: each[1], reverse=rising)
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(ranked) + 0.9), layout="constrained")
    colors = ["#c2410c" if each.startswith("streamqd") else "#94a3b8" for each, _ in ranked]
    bars = axes.barh([each for each, _ in ranked], [value for _, value in ranked], color=colors)
    axes.bar_label(bars, labels=[form.format(value) for _, value in ranked], padding=3)
    axes.set(xscale="log", title=title)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
