"""Plots as inline SVG, without text in them: what they say stands beside them, in readable size.

Pure. They stretch to the width they are given; titles appear under the pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_HEIGHT = 100  # of the drawing's own units
_STEP = 10  # units from one column to the next
_GAP = 2


def columns(values: Sequence[float], titles: Sequence[str], label: str, kind: str = "") -> str:
    """Columns from left to right, the highest in full height. `kind` is a class of the page."""
    most = max(values, default=0) or 1
    width = max(1, len(values)) * _STEP
    shapes = [
        f'<path class="grid" d="M0 {at}H{width}"/>' for at in (0, _HEIGHT / 4, _HEIGHT / 2, 75)
    ]
    for number, (value, title) in enumerate(zip(values, titles, strict=True)):
        if value <= 0:
            continue
        # What is there must be seen, however little it is.
        tall = max(1.0, _HEIGHT * value / most)
        shapes.append(
            f'<rect x="{number * _STEP + _GAP / 2:g}" y="{_HEIGHT - tall:.2f}"'
            f' width="{_STEP - _GAP}" height="{tall:.2f}"><title>{escape(title)}</title></rect>'
        )
    return _svg("columns", kind, width, _HEIGHT, label, shapes)


def bar(share: float, label: str, kind: str = "") -> str:
    """One horizontal bar; `share` from 0 to 1 of the full width."""
    long = 100 * min(1.0, max(0.0, share))
    shapes = ['<rect class="track" width="100" height="10"/>']
    if long > 0:
        shapes.append(f'<rect width="{max(0.5, long):.2f}" height="10"/>')
    return _svg("bar", kind, 100, 10, label, shapes)


def _svg(name: str, kind: str, width: int, height: int, label: str, shapes: Sequence[str]) -> str:
    classes = f"{name} {kind}".strip()
    return (
        f'<svg class="{escape(classes)}" viewBox="0 0 {width} {height}" role="img"'
        f' preserveAspectRatio="none" aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )
