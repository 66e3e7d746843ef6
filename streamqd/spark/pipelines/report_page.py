"""A report as one page that needs nothing else: no network, no script, plots inside. Pure.

Whatever comes from a message is a stranger's text: the template escapes every value by itself, and
`_shown` makes text of it that can do no harm on a screen either.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from streamqd.admin.condition import in_words
from streamqd.words import age, harmless, memory

TEXT_MAX = 300  # characters that are shown of one value
_PLOT = {
    "width": 480,
    "height": 170,
    "margin": 4,
    "margin_right": 24,
    "spacing": 6,
    "show_legend": False,
    "include_x_axis": True,
    "x_labels_major_count": 3,
    "y_labels_major_count": 3,
    "show_minor_x_labels": False,
    "show_minor_y_labels": False,
    "truncate_label": -1,
    "disable_xml_declaration": True,
}


def page(document: Mapping[str, Any]) -> str:
    """The page of a document, as `report` makes it."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"age": age, "in_words": in_words, "memory": memory}
    environment.filters |= {"plot": _plot, "time": _time}
    template = resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(template).render(document)


def _shown(value: Any) -> Any:
    """A value as people read it. Of text, what turns or hides other text is escaped."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    text = str(value)
    return harmless(text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…")


def _time(unix_ms: int | None) -> str | None:
    """`2025-11-20 10:00:05` of a time in unix ms; None for one that no calendar has."""
    if unix_ms is None:
        return None
    try:
        return f"{dt.datetime.fromtimestamp(unix_ms // 1000, dt.UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return None


def _plot(topic: Mapping[str, Any], of: str) -> Markup:
    """Entries or letters over time as SVG, in the page's colours. It holds numbers and times only.

    '' of a topic without times, or with times that no calendar has.
    """
    import pygal

    # What pygal adds there, for plugins of its own, breaks imports where warnings are errors.
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "pygal"]
    found = {row["at_unix_ms"]: row[of] for row in topic["timeline"]}
    marks = range(min(found), max(found) + 1, topic["width_ms"]) if found else ()
    chart = pygal.Bar(**_PLOT)
    chart.x_labels = [(_time(at) or "")[5:16] for at in marks]
    counted = ((_time(at), found.get(at, 0)) for at in marks)
    chart.add(of, [{"value": rows, "tooltip": f"{at}: {rows:,}"} for at, rows in counted])
    chart.add_xml_filter(lambda root: _bare(root, of))
    return Markup(chart.render(is_unicode=True))  # noqa: S704


def _bare(root: Any, of: str) -> Any:
    """The drawing without pygal's own style, script, links and texts for scripts."""
    for each in list(root):
        if each.tag in ("defs", "title") or not isinstance(each.tag, str):
            root.remove(each)
    for node in list(root.iter()):
        for each in node.findall("desc"):
            node.remove(each)
    root.attrib.update({"class": f"plot {of}", "role": "img", "aria-label": f"{of} over time"})
    return root
