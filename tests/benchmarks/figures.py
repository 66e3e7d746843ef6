"""The style that all plots of the pages have in common."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.rcParams |= {"svg.hashsalt": "streamqd", "font.family": "sans-serif", "font.size": 9}
OURS, REDIS = "#c2410c", "#475569"


def finish(axes: Axes, title: str) -> None:
    """Set a logarithmic scale and a title, and remove the frame."""
    axes.set(xscale="log", title=title)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file. The same data always gives the same bytes."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
