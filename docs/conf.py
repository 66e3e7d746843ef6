"""How the pages become a searchable site: `make docs` writes it to var/site.

The navigation is in the pages: each heading of docs/index.md becomes a part of the sidebar with the
pages that it links, and the index of the decisions holds the decisions, so there is one list to
keep. A page that no index links is a warning, and warnings are errors.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from streamqd.version import __version__

project = "streamqd"
version = release = __version__
extensions = ["myst_parser"]
exclude_patterns = ["README.*"]  # read where the repository is shown, not on the site
myst_heading_anchors = 4
highlight_language = "text"  # a block without a language may be a picture: it is not Python
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_title = f"streamqd {release}"
html_show_copyright = False
html_copy_source = False

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_PAGE = re.compile(r"\]\(([^):#]+)\.md\)")


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    if Path(page).name != "index":
        return
    first, *parts = _HEADING.split(source[0])
    if not parts:  # the index of the decisions: all its links
        source[0] += _toctree("", _PAGE.findall(first))
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        source[0] += _toctree(f":caption: {heading}", _PAGE.findall(body))
    if page == "index":
        found = sorted(Path(app.srcdir, "internals/transcripts").glob("*.md"))
        names = [f"internals/transcripts/{path.stem}" for path in found]
        source[0] += _toctree(":caption: Transcripts", names)


def _toctree(options: str, pages: list[str]) -> str:
    if not pages:
        return ""
    lines = ["", "", "```{toctree}", ":hidden:", options, "", *dict.fromkeys(pages), "```"]
    return "\n".join(lines)


def setup(app: Sphinx) -> None:
    """Sphinx calls this first."""
    app.connect("source-read", _add_navigation)
