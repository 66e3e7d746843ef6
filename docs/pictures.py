"""Draw the two pictures of the README as SVG: the processes, and the path of a message.

`docs/generate.py` writes them. Each picture is drawn on its own card and follows the reader's light
or dark scheme, so that it can be read on any page. The text next to the pictures in the README
describes the same facts.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """\
  .card { fill: #ffffff; stroke: #d0d7de }
  .zone { fill: #f6f8fa; stroke: #d0d7de }
  .box { fill: #ddf4ff; stroke: #54aeff }
  .store { fill: #fff8c5; stroke: #d4a72c }
  .dead { fill: #ffebe9; stroke: #ff8182 }
  .good { fill: #dafbe1; stroke: #4ac26b }
  text { fill: #1f2328; font: 13px system-ui, -apple-system, "Segoe UI", sans-serif }
  .small { fill: #59636e; font-size: 11.5px }
  .head { font-weight: 600 }
  .way { fill: none; stroke: #59636e; stroke-width: 1.5; marker-end: url(#tip) }
  .thin { stroke-dasharray: 4 3 }
  .tip { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    .zone { fill: #151b23; stroke: #3d444d }
    .box { fill: #0c2d6b; stroke: #388bfd }
    .store { fill: #3b2300; stroke: #9e6a03 }
    .dead { fill: #490202; stroke: #da3633 }
    .good { fill: #04260f; stroke: #238636 }
    text { fill: #f0f6fc }
    .small { fill: #9198a1 }
    .way { stroke: #9198a1 }
    .tip { fill: #9198a1 }
  }"""


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a complete SVG, drawn on a card."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title">'
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0L8 4L0 8z"/></marker>'
    )
    card = f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>'
    begin = [head, f'<title id="title">{escape(title)}</title>', f"<style>\n{STYLE}\n</style>"]
    return "\n".join([*begin, f"<defs>{tip}</defs>", card, *parts, "</svg>"]) + "\n"


def box(kind: str, x: int, y: int, width: int, height: int, *lines: str) -> str:
    """Return a box with centered lines. The first line is bold, and the others are small."""
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    top = y + height / 2 - (len(lines) - 1) * 8 + 4.5
    for number, line in enumerate(lines):
        look = "small" if number else "head"
        parts.append(label(x + width / 2, top + number * 16, line, look, "middle"))
    return "\n".join(parts)


def label(x: float, y: float, line: str, look: str = "small", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{look}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(line)}</text>'


def zone(x: int, y: int, width: int, height: int, name: str) -> str:
    """Return an area around boxes, with its name at the top."""
    field = f'<rect class="zone" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'
    return f"{field}\n{label(x + 12, y + 19, name, 'head')}"


def way(path: str, kind: str = "") -> str:
    """Return an arrow along a path."""
    look = f"way {kind}" if kind else "way"
    return f'<path class="{look}" d="{path}"/>'


def processes() -> str:
    """Draw the producers, one Redis, and two instances with their processes."""
    parts = [
        box("box", 20, 96, 120, 62, "producers", "Producer, XADD,", "any language"),
        zone(196, 20, 190, 330, "Redis or Valkey"),
    ]
    parts += [
        box("store", 212, 50 + 44 * number, 158, 36, f"partition {number} of access")
        for number in range(4)
    ]
    parts += [
        box("store", 212, 236, 158, 44, "retries, dead letters", "of each group"),
        box("store", 212, 292, 158, 44, "leases, fences", "who owns what"),
        way("M140 127C170 127 174 68 209 68"),
        way("M140 127C170 127 174 112 209 112"),
        way("M140 127C170 127 174 156 209 156"),
        way("M140 127C170 127 174 200 209 200"),
    ]
    for instance, top, first in (("web-1", 20, 0), ("web-2", 190, 2)):
        parts += [
            zone(446, top, 354, 160, f"instance {instance}"),
            box("box", 462, top + 32, 150, 48, f"worker access/{first}", "fetch, handle, settle"),
            box("box", 462, top + 96, 150, 48, f"worker access/{first + 1}", "one at a time"),
            box("good", 640, top + 32, 146, 48, "supervisor", "forks, renews, judges"),
            box("good", 640, top + 96, 146, 48, "housekeeper", "due retries, metrics"),
            way(f"M640 {top + 56}H615", "thin"),
            way(f"M640 {top + 60}C626 {top + 62} 628 {top + 118} 615 {top + 120}", "thin"),
            way(f"M713 {top + 80}V{top + 93}", "thin"),
        ]
        for number in (first, first + 1):
            begin, end = 68 + 44 * number, top + 56 + 64 * (number - first)
            parts.append(way(f"M370 {begin}C412 {begin} 416 {end} 459 {end}"))
    parts.append(label(20, 334, "each partition has one owner;"))
    parts.append(label(20, 350, "it moves when it must"))
    return picture(820, 370, "The processes of two instances around one Redis", parts)


def message() -> str:
    """Draw the path of a message from its producer to its final place."""
    parts = [
        box("box", 20, 104, 100, 40, "producer"),
        box("store", 164, 104, 140, 40, "partition", "a stream, in order"),
        box("box", 350, 94, 140, 60, "handler", "in a worker process", "pending until it ends"),
        box("good", 586, 20, 210, 40, "acknowledged", "trimmed when no group needs it"),
        box("store", 586, 104, 210, 40, "waits for its next attempt", "back-off with jitter"),
        box("dead", 586, 188, 210, 40, "dead letter", "with the reason and the traceback"),
        box("store", 350, 252, 140, 40, "retry stream", "of this group alone"),
        way("M120 124H161"),
        way("M304 124H347"),
        way("M490 112C540 112 530 40 583 40"),
        way("M490 124H583"),
        way("M490 136C540 136 530 208 583 208"),
        way("M796 124C816 124 816 272 796 272H493"),
        way("M691 228V262C691 270 687 272 680 272H493"),
        way("M420 252V157"),
        way("M364 94C352 58 406 58 394 91", "thin"),
        label(536, 52, "returns", anchor="end"),
        label(540, 118, "raises", anchor="middle"),
        label(536, 204, "gives up", anchor="end"),
        label(379, 44, "its process dies: charged, run again", anchor="middle"),
        label(560, 288, "when it is due, or replayed", anchor="start"),
        label(20, 200, "gives up: it raised Dead,"),
        label(20, 216, "its attempts are spent, or it has"),
        label(20, 232, "killed its process max_crashes times"),
    ]
    return picture(820, 312, "The way of a message", parts)
