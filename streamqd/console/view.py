"""The building blocks of pages: views, acts, and a visit to one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from streamqd.console.access import Person, Role
from streamqd.console.backend import Resources
from streamqd.console.bodies import BodyReader
from streamqd.console.exports import ExportFile
from streamqd.console.overview import FleetNow
from streamqd.errors import InvalidRequestError

PAGE_ROWS = 50
PAGE_ROWS_MAX = 500
PARTITION_MAX = 1 << 20
_WHOLE_MAX = 2**63 - 1

# Values for the path parameters in URLs that the acceptance tests open.
_EXAMPLES = {
    "topic": "orders",
    "partition": "0",
    "group": "bill",
    "schedule": "tick",
    "instance": "one",
    **{name: name.upper() for name in ("dead_letter", "job")},
}

Context = dict[str, Any]
Row = TypeVar("Row")


def integer(text: str, name: str, *, least: int = 0, most: int = _WHOLE_MAX) -> int:
    """Parse an integer parameter.

    Raises InvalidRequestError, which contains the parameter's name.
    """
    if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= most:
        raise InvalidRequestError(f"{name} must be an integer from {least:,} to {most:,}")
    return int(text)


@dataclass(frozen=True, slots=True)
class RowPage(Generic[Row]):
    """A page of a list that is in memory.

    `start` is the index of the page's first row in the list.
    """

    rows: Sequence[Row]
    start: int
    total: int

    @property
    def following(self) -> int | None:
        """The index at which the next page starts, or None on the last page."""
        end = self.start + len(self.rows)
        return end if end < self.total else None


@dataclass(frozen=True, slots=True)
class FormField:
    """An input of an act. If it has `choices`, it is a list, and if it has `rows`, a text area.

    A `folded` field is hidden below the other fields until the person opens it.
    """

    name: str
    label: str
    value: str = ""
    hint: str = ""
    choices: Sequence[tuple[str, str]] = ()
    rows: int = 0
    folded: bool = False


@dataclass(frozen=True)
class Visit:
    """One request for a page.

    `path` contains the parameters of the route. `query` contains the parameters of the URL, or the
    values of a form that was sent. `typed` is the name that the person typed to confirm a change.
    """

    resources: Resources
    person: Person
    path: Mapping[str, str]
    query: Mapping[str, str]
    typed: str = ""

    @cached_property
    def now(self) -> FleetNow:
        """The shared snapshot of the fleet. It does not change during the visit.

        Raises RedisUnavailableError.
        """
        return self.resources.now

    @property
    def reader(self) -> BodyReader:
        """A reader that returns the parts of messages in the form that the person may see."""
        return BodyReader(self.person.bodies, self.resources.settings.console.masks)

    def text(self, name: str, default: str = "") -> str:
        """Return a value from `query`, without surrounding spaces."""
        return self.query.get(name, default).strip()

    @property
    def q(self) -> str:
        """The text in the search field, from the URL parameter `q`."""
        return self.text("q")

    def number(
        self, name: str, default: int, *, least: int = 0, most: int = _WHOLE_MAX, label: str = ""
    ) -> int:
        """Return an integer from `query`, or the default if it is missing.

        `label` is the label of the field, for use in errors. It defaults to the name with a capital
        letter. Raises InvalidRequestError.
        """
        text = self.text(name)
        quoted = f'"{label or name.replace("_", " ").capitalize()}"'
        return integer(text, quoted, least=least, most=most) if text else default

    def optional_number(
        self, name: str, *, least: int = 0, most: int = _WHOLE_MAX, label: str = ""
    ) -> int | None:
        """Return an integer from `query`, or None if it is missing. Raises InvalidRequestError."""
        if not self.text(name):
            return None
        return self.number(name, 0, least=least, most=most, label=label)

    @property
    def limit(self) -> int:
        """The number of rows on a page, from the URL parameter `limit`."""
        return self.number("limit", PAGE_ROWS, least=1, most=PAGE_ROWS_MAX)

    def field(
        self, name: str, label: str, hint: str = "", choices: Sequence[tuple[str, str]] = ()
    ) -> FormField:
        """Return an input whose value comes from the URL or the form."""
        return FormField(name, label, self.text(name), hint, choices)

    def trace_url(self, trace_id: str) -> str:
        """Return the URL of a trace in the tracing backend, or '' without a backend or trace ID."""
        url = self.resources.settings.console.trace_url if trace_id else None
        return url.replace("{trace_id}", trace_id) if url else ""

    def paginate(self, rows: Sequence[Row], size: int, name: str = "from") -> RowPage[Row]:
        """Return the page that starts at the index in this URL parameter, or the last page."""
        start = min(self.number(name, 0), max(0, len(rows) - 1) // size * size)
        return RowPage(rows[start : start + size], start, len(rows))


def path_topic(visit: Visit) -> str:
    """Return the name of the topic from the path."""
    return visit.path["topic"]


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A view or an act. Its name is unique, and templates link to it with `to(NAME, …)`.

    `query` contains the URL parameters with which the acceptance tests open it.
    """

    name: str
    path: str
    title: str
    query: str = field(default="", kw_only=True)

    @property
    def example(self) -> str:
        """The URL that the acceptance tests open."""
        return self.path.format_map(_EXAMPLES) + (f"?{self.query}" if self.query else "")


@dataclass(frozen=True, slots=True)
class ConsoleView(PageEntry):
    """A page that shows something and changes nothing. Its template is `NAME.html`.

    `context` runs in a thread of the backend, and returns the variables for the template. The
    template also gets the path parameters and the `visit`. If the view has a `label`, it is in the
    navigation, and `key` is its shortcut after `g`. If `live` is True, the template's `live` block
    is rendered again after each snapshot, once for all pages with the same URL and role. If that
    block needs less data than the whole page, `live_context` returns its variables.
    """

    context: Callable[[Visit], Context]
    label: str = ""
    key: str = ""
    live: bool = False
    role: Role = Role.VIEWER
    live_context: Callable[[Visit], Context] | None = None

    def variables(self, visit: Visit, *, live: bool = False) -> Context:
        """Return all variables of a visit, for the whole template or only for its live block."""
        context = self.live_context if live and self.live_context else self.context
        return {**visit.path, "visit": visit, **context(visit)}


@dataclass(frozen=True, slots=True)
class Download:
    """A file to download.

    `content` returns the name of the file, its media type, and its bytes or an export.
    """

    name: str
    path: str
    role: Role
    content: Callable[[Visit], tuple[str, str, bytes | ExportFile]]


@dataclass(frozen=True, slots=True)
class Preview:
    """The dry run of an act: sentences about the effect that the act would have.

    `refusal` is the reason why the act is not possible, or ''. `warnings` contains reasons not to
    run it. `rows` is a table below the sentences: its head and its rows. If `typed` is set, a
    person must type this name to confirm the act, for the reason in `typed_reason`, and `run`
    checks the name. `stated` contains values that the form passes on to the act, such as the time
    of the dry run. Their names start with `forms.DRY_RUN_PREFIX`.
    """

    sentences: Sequence[str]
    refusal: str = ""
    warnings: Sequence[str] = ()
    stated: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Sequence[str], Sequence[Sequence[object]]] | None = None
    typed: str = ""
    typed_reason: str = ""


@dataclass(frozen=True, slots=True)
class AuditNote:
    """An entry for the audit logs of `topics`.

    `command` is the command that has the same effect.
    """

    topics: Sequence[str]
    command: str
    arguments: Mapping[str, object]
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActResult:
    """The result of an act: a sentence, and the view to which the browser is redirected.

    If that view shows the result itself, the sentence is ''. `note` is written to the audit logs
    with the person's name. It is None if nothing changed, or if a job writes its own note. `view`
    defaults to `Act.back`, and `parameters` to the path parameters of the act.
    """

    text: str
    note: AuditNote | None = None
    view: str = ""
    parameters: Mapping[str, object] | None = None

    @classmethod
    def for_job(cls, job: str, note: AuditNote | None = None) -> ActResult:
        """Return the result of an act that started a job, whose page shows the progress."""
        return cls("", note, "job", {"job": job})


@dataclass(frozen=True, slots=True)
class Act(PageEntry):
    """A change: a form at `path`, its dry run, and the function that changes something.

    GET shows the fields, filled in from the URL, and a dry run of their values. POST checks the
    role, the origin, the typed name and the request ID, and then calls `run` once. `run` uses the
    functions of `streamqd.admin` and returns the note for the audit log.

    `submit` is the label of the button. `fields` and `preview` get the values in the URL, and `run`
    gets those in the form. `typed` returns the name that a person must type to confirm a
    destructive act, or '' for other acts. It must not read from Redis. `back` is the view to which
    "Back" leads, with the path parameters of the act.
    """

    submit: str
    role: Role
    preview: Callable[[Visit], Preview]
    run: Callable[[Visit], ActResult]
    fields: Callable[[Visit], Sequence[FormField]] = lambda _visit: ()
    typed: Callable[[Visit], str] = lambda _visit: ""
    back: str = "overview"
