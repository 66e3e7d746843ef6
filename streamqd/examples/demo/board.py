"""The output of the demonstration: progress bars on a terminal, and tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

BAR_CELLS = 28
STEPS = 10  # number of progress lines if the output is not a terminal

Row = tuple[str, int, int, str]  # name, done, total, remark


class Board:
    """Progress bars on a terminal, which are redrawn in place.

    Elsewhere, one plain line per 10%.
    """

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._drawn = 0
        self._step = -1

    def show(self, rows: Sequence[Row], seconds: float, *, last: bool = False) -> None:
        """Draw the state after `seconds`. The last state is always drawn."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            up = f"\x1b[{self._drawn}A" if self._drawn else ""
            lines = (f"\x1b[2K{self._bar(*row)[:width]}" for row in rows)
            print(up + "\n".join(lines), flush=True)
            self._drawn = len(rows)
            return
        step = STEPS * sum(row[1] for row in rows) // max(1, sum(row[2] for row in rows))
        if last or step > self._step:
            parts = (f"{name} {number(done)} {remark}".strip() for name, done, _, remark in rows)
            print(f"  {seconds:4.1f} s  " + ", ".join(parts), flush=True)
            self._step = step

    @staticmethod
    def _bar(name: str, done: int, of: int, remark: str) -> str:
        filled = BAR_CELLS * done // of if of else 0
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        return f"  {name:<8} {bar} {number(done):>7}  {remark}"


def number(count: float) -> str:
    """Return a number with thousands separators and without decimals."""
    return f"{count:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Return a table as text, with numbers aligned right and strings aligned left."""
    shown = [[number(cell) if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in (list(header), *shown)) for at in range(len(header))]
    right = [bool(rows) and isinstance(rows[0][at], int) for at in range(len(header))]
    lines = []
    for row in (list(header), *shown):
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def shorten(text: str, width: int) -> str:
    """Return the text, shortened to `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"
