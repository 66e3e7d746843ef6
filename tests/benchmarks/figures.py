"""What all plots of the pages have in common."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.rcParams |= {"svg.hashsalt": "streamqd", "font.family": "sans-serif", "font.size": 9}
OURS, REDIS = "#c2410c", "#475569"


def finish(axes: Axes, title: str) -> None:
    """Give it a logarithmic scale, a title, and no frame."""
    axes.set(xscale="log", title=title)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write it, the same bytes for the same figures."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
