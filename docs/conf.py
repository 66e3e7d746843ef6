"""Build the pages into a searchable site. `make docs` writes it to var/site.

The navigation comes from the pages: docs/index.md links the section pages, and each section page
lists its own pages, so there is only one list to maintain. A page that no section lists causes a
warning, and warnings are treated as errors.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from streamqd.version import __version__

project = "streamqd"
version = release = __version__
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["README.*"]  # GitHub shows them next to the files; the site leaves them out
myst_enable_extensions = ["alert"]  # `> [!NOTE]`, in the syntax of GitHub
myst_heading_anchors = 4
highlight_language = "text"  # a block without a language may be a diagram
copybutton_selector = "div:not(.output) > div.highlight > pre"
html_theme = "furo"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#b3261e",
        "color-brand-content": "#a3231c",
        "color-brand-visited": "#7d3a6b",
    },
    "dark_css_variables": {
        "color-brand-primary": "#ff8a80",
        "color-brand-content": "#ff9e94",
        "color-brand-visited": "#d9a3c8",
    },
}
html_static_path = html_css_files = ["site.css"]
html_title = f"streamqd {release}"
html_show_copyright = False
html_copy_source = False

_SECTION = re.compile(r"^### \[[^]]+\]\(([^)]+)\.md\)$", re.MULTILINE)
_ENTRY = re.compile(r"^(?:- |\| \d+ \| )\[[^]]+\]\(([^):#]+)\.md\)", re.MULTILINE)
_FENCE = re.compile(r"^```(\w+)[ ]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"\b(?:file|excerpt)=\"?([^\"\s]+)")
_SECTIONS = set(_SECTION.findall(Path(__file__).with_name("index.md").read_text()))
_TYPED_AT = {"first": "Terminal 1", "second": "Terminal 2"}  # how tutorials name two terminals


def _add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    if page == "index":
        source[0] += _toctree(_SECTION.findall(source[0]))
    elif page in _SECTIONS or Path(page).name == "index":
        source[0] += _toctree(_ENTRY.findall(source[0]))


def _toctree(pages: list[str]) -> str:
    return "\n".join(["", "", "```{toctree}", ":hidden:", "", *dict.fromkeys(pages), "```"])


def _caption_blocks(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Add captions with file names and terminals to code blocks, and mark blocks that show output.

    The words after the language of a block name its file or terminal.
    """
    two = re.search(r"^```sh second", source[0], re.MULTILINE)
    source[0] = _FENCE.sub(lambda found: _captioned(found, bool(two)), source[0])


def _captioned(found: re.Match[str], two: bool) -> str:
    language, words, text = found.groups()
    file = _FILE.search(words)
    names = [name for word, name in _TYPED_AT.items() if word in words.split()]
    caption = ""
    if file:
        caption = file[1]
    elif language == "sh" and two and "setup" not in words:
        caption = names[0] if names else _TYPED_AT["first"]
    elif language == "text" and words.startswith("first"):
        caption = f"{_TYPED_AT['first']}, output"
    options = [f":caption: {caption}"] if caption else []
    options += [":class: output"] if language == "text" else []
    if not options:
        return found[0]
    return "\n".join([f"```{{code-block}} {language}", *options, "", text + "```"])


def setup(app: Sphinx) -> None:
    """Connect the two functions that change the source of a page."""
    app.connect("source-read", _add_navigation)
    app.connect("source-read", _caption_blocks)
