"""Markdown tables for the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], rule: str = "--:") -> str:
    """Return a Markdown table. `rule` aligns all columns but the first; figures go to the right."""
    lines = [heads, ["---", *[rule] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
