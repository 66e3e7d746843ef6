"""Render templates to HTML, and build the links between pages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

import jinja2

from streamqd import config
from streamqd.console.access import Person
from streamqd.console.formats import FILTERS, prose
from streamqd.console.view import Act, ConsoleView, Download
from streamqd.version import __version__

THEMES = ("light", "dark")
_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}


# Commands that appear in advice, each with the view in which a person can do the same.
_COMMANDS = (
    (
        re.compile(
            r"streamqd dlq \w+ (?P<topic>[^\s-]\S*)(?: --group (?P<group>\S+))?(?: --dry-run)?"
        ),
        "dead",
    ),
    (re.compile(r"streamqd pause (?P<topic>[^\s/-][^\s/]*)/(?P<group>[^\s/]+)"), "topic"),
    (re.compile(r"streamqd retry list (?P<topic>[^\s-]\S*) (?P<group>[^\s-]\S*)"), "retries"),
    (re.compile(r"streamqd doctor.*"), "doctor"),
    (re.compile(r"streamqd group start (?P<topic>[^\s-]\S*) (?P<group>[^\s-]\S*)"), "topic"),
    (
        re.compile(
            r"streamqd stack (?P<topic>[^\s/-][^\s/]*)/(?P<partition>\d+)/(?P<group>[^\s/]+)"
        ),
        "assignment",
    ),
    (re.compile(r"streamqd (?:resume|drain|rebalance|control)(?: .*)?"), "fleet"),
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file that browsers may cache forever, because its URL contains its hash."""

    content: bytes
    content_type: str
    digest: str


def static_files() -> dict[str, StaticFile]:
    """Return the style sheet, the scripts and the icons by name."""
    found = {}
    for each in resources.files("streamqd.console").joinpath("static").iterdir():
        kind = each.name.rpartition(".")[2]
        if kind in _TYPES:
            content = each.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:12]
            found[each.name] = StaticFile(content, _TYPES[kind], digest)
    return found


class Pages:
    """The templates, views and acts of one console. All threads share it."""

    def __init__(
        self,
        settings: config.Settings,
        views: Sequence[ConsoleView],
        acts: Sequence[Act],
        downloads: Sequence[Download],
    ) -> None:
        self.static = static_files()
        self._root = settings.console.prefix.rstrip("/")
        self._read_only = settings.console.read_only
        entries: list[ConsoleView | Act | Download] = [*views, *acts, *downloads]
        self._paths = {each.name: each.path for each in entries}
        self._roles = {each.name: each.role for each in entries}
        self._navigation = [each for each in views if each.label]
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("streamqd.console"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= FILTERS | {
            "advice": lambda text: prose(text, self.url_for_command)
        }
        self._environment.globals |= {
            "to": self.to,
            "url": self.url,
            "asset": self._asset,
            "version": __version__,
            "read_only": self._read_only,
            "fleet_name": settings.daemon.fleet,
        }

    # --- links ---

    def url(self, path: str, **query: object) -> str:
        """Return the URL of a path in the console. Parameters that are None or '' are left out."""
        kept = {name: each for name, each in query.items() if each is not None and each != ""}
        return f"{self._root}{path}{'?' if kept else ''}{urlencode(kept)}"

    def to(self, name: str, **parameters: object) -> str:
        """Return the URL of a view or an act, or '' if there is none with this name.

        Parameters that occur in the path of the view are inserted there. All others become the
        query.
        """
        path = self._paths.get(name)
        if path is None:
            return ""
        for parameter in list(parameters):
            place = f"{{{parameter}}}"
            if place in path:
                path = path.replace(place, quote(str(parameters.pop(parameter)), safe=""))
        return "" if "{" in path else self.url(path, **parameters)

    def url_for_command(self, command: str) -> str:
        """Return the URL of the view that does the same as a command, or '' if there is none."""
        for pattern, name in _COMMANDS:
            if match := pattern.fullmatch(command):
                return self.to(name, **match.groupdict())
        return ""

    def _asset(self, name: str) -> str:
        return self.url(f"/static/{name}", v=self.static[name].digest)

    # --- pages ---

    def page(self, template: str, person: Person | None, here: str, **context: Any) -> str:
        """Return a whole page. `here` is its path with the query, without the prefix."""
        values = self._common(person, here) | context
        return self._environment.get_template(template).render(values)

    def live(self, view: ConsoleView, person: Person, here: str, context: Mapping[str, Any]) -> str:
        """Return the live part of a page. It depends on the person's role, but not on the name."""
        values = {"view": view, "title": view.title, "only_live": True, **context}
        return self.page(f"{view.name}.html", person, here, **values).strip()

    def _common(self, person: Person | None, here: str) -> dict[str, Any]:
        return {
            "person": person,
            "may": self._may(person),
            "here": here,
            "navigation": self._navigation if person else [],
            "view": None,
            "live_url": "",
            "theme": "",
            "done": "",
            "away": False,
            "only_live": False,
            "title": "streamqd",
        }

    def _may(self, person: Person | None) -> Callable[[str], bool]:
        def may(name: str) -> bool:
            """Return True if the person may open the view or act."""
            return person is not None and name in self._roles and person.may(self._roles[name])

        return may
