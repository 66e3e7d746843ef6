"""Traces by OpenTelemetry, and reports to Sentry. Both are off by default.

`sending` makes the spans of producers, and `runs` those of a worker. `provider` connects them to
OpenTelemetry. A worker keeps its running spans in a `run_file` too. If the process is killed,
`killed` exports them from the housekeeper. `sentry` reports errors and transactions.
`messages` reads what both need of a message.

Only this module and `killed` are for other packages. They import OpenTelemetry and Sentry only if
the settings ask for them. No thread exists before the fork of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from streamqd import extras
from streamqd.config import Consumer, Settings
from streamqd.model import Assignment
from streamqd.telemetry.sending import SendSpans

if TYPE_CHECKING:
    from streamqd.handlers import Loaded
    from streamqd.message import Message
    from streamqd.telemetry.runs import RunSpans
    from streamqd.telemetry.sending import ToolSpan
    from streamqd.telemetry.sentry import SentryReports

Ids = tuple[str | None, str | None]  # trace ID and span ID


class TelemetryUnavailableError(Exception):
    """OpenTelemetry or Sentry cannot be used. The text is one sentence with the remedy."""


class FailedRun(NamedTuple):
    """A run that failed, with its verdict and the words about its error that may be stored.

    `place` is that of the entry. `verdict` is `retry`, `dead` or `release`. If it `stays`, the
    message runs again in its place. `error_class`, `text`, `traceback` and `fingerprint` are '' as
    far as `dlq_error` and `redact_error` forbid them, or if they are not known. `asked`: the
    handler asked for this verdict.
    """

    place: bytes
    message: Message
    verdict: str
    stays: bool
    error: BaseException
    asked: bool = True
    error_class: str = ""
    text: str = ""
    traceback: str = ""
    fingerprint: str = ""


class RunTelemetry:
    """Observes the runs of one worker: a wrapper of the handler, and a listener for failed runs."""

    def __init__(self, spans: RunSpans | None, reports: SentryReports | None) -> None:
        self._spans = spans
        self._reports = reports
        self.reports_errors = reports is not None

    @property
    def ids(self) -> Callable[[], Ids] | None:
        """The function that returns the IDs of the current trace and span, None without traces."""
        return None if self._spans is None else self._spans.ids

    def wrap_handler(self, loaded: Loaded) -> Loaded:
        """Return the handler with a span around each call."""
        for each in (self._reports, self._spans):  # the last one is the outer one
            if each is not None:
                loaded = each.wrap_handler(loaded)
        return loaded

    def report(self, run: FailedRun) -> None:
        """Report the error of a failed run. Calls the error's own code, which may hang."""
        if self._reports is not None:
            self._reports.note_failure(run)

    def note_failure(self, run: FailedRun) -> str:
        """Note a failed run. Return its span in the form of a `traceparent`, '' without one."""
        return "" if self._spans is None else self._spans.note_failure(run)

    def stop(self) -> None:
        """Export the remaining reports and spans, for at most 1 s each."""
        for each in (self._reports, self._spans):
            if each is not None:
                each.stop()


def send_spans(settings: Settings, asked: bool | None) -> SendSpans | None:
    """Return the spans of a producer, or None if they are off.

    `asked` is the producer's option `traces`. None means the settings `telemetry.traces` and
    `telemetry.sentry`, True the former at least, and False neither. Raises
    TelemetryUnavailableError.
    """
    makers: list[Callable[[str, str], ToolSpan]] = []
    if asked or (asked is None and settings.telemetry.traces):
        try:
            from streamqd.telemetry.provider import server_attributes
            from streamqd.telemetry.sending_otel import OtelSpan
        except ImportError as error:
            raise _missing("traces of a producer need OpenTelemetry", error, "otel") from error
        makers.append(partial(OtelSpan, server_attributes(settings)))
    if asked is not False and settings.telemetry.sentry:
        try:
            from streamqd.telemetry.sending_sentry import SentrySpan
        except ImportError as error:
            raise _missing("telemetry.sentry needs Sentry's SDK", error, "sentry") from error
        makers.append(SentrySpan)
    return SendSpans(makers) if makers else None


def run_telemetry(
    settings: Settings, consumer: Consumer, assignment: Assignment
) -> RunTelemetry | None:
    """Return the observer of this worker process, or None if all telemetry is off.

    It starts the threads of exporters, so call it after the fork. Raises TelemetryUnavailableError.
    """
    wanted = settings.telemetry
    spans: RunSpans | None = None
    reports: SentryReports | None = None
    if wanted.traces:
        try:
            from streamqd.telemetry.runs import RunSpans
        except ImportError as error:
            raise _missing("telemetry.traces needs OpenTelemetry", error, "otel") from error
        spans = RunSpans(settings, consumer, assignment)
    if wanted.sentry:
        try:
            from streamqd.telemetry.sentry import SentryReports
        except ImportError as error:
            raise _missing("telemetry.sentry needs Sentry's SDK", error, "sentry") from error
        reports = SentryReports(consumer, assignment)
    return RunTelemetry(spans, reports) if spans or reports else None


def _missing(subject: str, error: ImportError, extra: str) -> TelemetryUnavailableError:
    return TelemetryUnavailableError(
        f"{subject}, which cannot be imported ({error}); {extras.hint(extra)}"
    )
